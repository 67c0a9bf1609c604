// Plays what a kernel did in Triton's interpreter, step by step. site/step_drawing.py drew every cell: this sets their
// classes and texts, and nothing moves.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const COLOURS = 8; // of programs, as in the style
  const [KIND, TENSOR, CELLS, MASKED, OUTSIDE, STORED] = [0, 1, 2, 3, 4, 5]; // of an access

  const make = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  // Text between backticks is code
  const worded = (text) => text.split("`").map((part, n) => (n % 2 ? make("code", {}, part) : part));

  const player = (root, data) => {
    const $ = (selector) => root.querySelector(selector);
    const grids = (key) => {
      const all = [];
      for (const group of root.querySelectorAll(`[data-${key}]`))
        all[group.dataset[key]] = {
          group,
          rects: [...group.querySelectorAll("rect")],
          texts: [...group.querySelectorAll("text")],
        };
      return all;
    };
    const tensors = grids("t");
    const registers = grids("r");
    const lines = new Map([...root.querySelectorAll(".ln")].map((line) => [Number(line.dataset.n), line]));
    const isPad = tensors.map(({ rects }) => rects.map((rect) => rect.classList.contains("pad")));
    const programs = data.steps.map((steps, program) =>
      steps.map(([line, sentence, numbers = [], values = []]) => {
        const [first, last] = data.lines[line];
        const accesses = numbers.map((number) => Object.assign([, , []], data.accesses[number])); // all may be masked off
        return { program, first, last, sentence: data.sentences[sentence], accesses, values };
      }),
    );

    // All programs at once: in waves, each with its accesses to memory side by side
    const waves = [];
    for (let from = 0; from < programs.length; from += data.atOnce) {
      const wave = programs.slice(from, from + data.atOnce).map((steps) => steps.filter((step) => step.accesses.length));
      for (let k = 0; k < Math.max(...wave.map((steps) => steps.length)); k++)
        waves.push({ from, steps: wave.flatMap((steps) => steps[k] ?? []) });
    }

    let [program, at] = data.start; // program -1: all
    let timer = 0;
    const length = () => (program < 0 ? waves.length : programs[program].length);

    const paint = (grid, cell, name, text, isPad = false) => {
      grid.rects[cell].setAttribute("class", `${isPad ? "pad " : ""}${name}`);
      if (text !== undefined) grid.texts[cell].textContent = text;
    };
    // What was there before the launch: the page shows that of tensors that no program stores to
    const before = tensors.map(({ texts }, t) =>
      texts.map((text, cell) => (data.tensors[t][3] ? (data.tensors[t][3][cell] ?? "") : text.textContent)),
    );

    const clear = () => {
      root.querySelectorAll(".strip").forEach((strip) => strip.remove());
      tensors.forEach((grid, t) => grid.rects.forEach((_, c) => paint(grid, c, "", before[t][c], isPad[t][c])));
      registers.forEach((grid) => grid.rects.forEach((_, c) => paint(grid, c, "", "")));
      lines.forEach((line) => line.classList.remove("now"));
    };
    const mark = (step) => {
      for (let n = step.first; n <= step.last; n++) lines.get(n)?.classList.add("now");
    };

    const box = (rect) => ["x", "y", "width", "height"].map((key) => rect[key].baseVal.value);
    const strip = (t, [x, y, width, height], name, next) => {
      const rect = document.createElementNS(SVG, "rect");
      for (const [key, value] of Object.entries({ x, y, width, height, class: `strip ${name}` })) rect.setAttribute(key, value);
      tensors[t].group.insertBefore(rect, next);
    };
    // One outline around the cells that a program writes at some time, where these are a block
    const outline = (access) => {
      const boxes = access[CELLS].map((cell) => box(tensors[access[TENSOR]].rects[cell]));
      if (!boxes.length) return;
      const x = Math.min(...boxes.map((b) => b[0]));
      const y = Math.min(...boxes.map((b) => b[1]));
      const width = Math.max(...boxes.map((b) => b[0] + b[2])) - x;
      const height = Math.max(...boxes.map((b) => b[1] + b[3])) - y;
      if (width * height === boxes.length * boxes[0][2] * boxes[0][3]) strip(access[TENSOR], [x, y, width, height], "own", null);
    };

    const drawOne = () => {
      const steps = programs[program];
      // In a race the programs that run at a time see nothing of each other
      const finished = data.isRace ? program - (program % data.atOnce) : program;
      for (const { accesses } of programs.slice(0, finished).flat())
        for (const access of accesses)
          if (access[KIND] === "st") access[CELLS].forEach((c, i) => paint(tensors[access[TENSOR]], c, "old", access[STORED][i]));
      const latest = new Map(steps.slice(0, at + 1).map((step, k) => [step.first, k])); // turn of each line
      steps.slice(0, at + 1).forEach((step, k) => {
        const isNow = k === at;
        for (const access of step.accesses) {
          const grid = tensors[access[TENSOR]];
          const past = access[KIND] === "st" ? "done" : latest.get(step.first) === k ? "held" : "seen";
          access[CELLS].forEach((c, i) => paint(grid, c, isNow ? access[KIND] : past, access[STORED]?.[i]));
          if (!isNow) continue;
          for (const c of access[MASKED] ?? []) paint(grid, c, "off", undefined, isPad[access[TENSOR]][c]);
          for (const c of access[OUTSIDE] ?? []) paint(grid, c, "out", undefined, isPad[access[TENSOR]][c]);
        }
        for (const [r, ...values] of step.values) values.forEach((value, c) => paint(registers[r], c, isNow ? "new" : "", value));
      });
      for (const { accesses } of steps) accesses.filter((access) => access[KIND] === "st").forEach(outline);
      mark(steps[at]);
      const name = programs.length > 1 ? `Program ${data.programs[program]}. ` : "";
      $(".sentence").replaceChildren(make("b", {}, name), ...worded(steps[at].sentence));
    };

    const drawAll = () => {
      const touched = new Map(); // cell: who touched it last
      waves.slice(0, at + 1).forEach((wave, k) => {
        const isNow = k === at;
        for (const step of wave.steps)
          for (const access of step.accesses) {
            const t = access[TENSOR];
            // What is kept of loads is what this wave has loaded; stores stay
            if (access[KIND] === "ld" && wave.from !== waves[at].from) continue;
            for (const c of access[CELLS]) {
              const key = `${t} ${c}`;
              const known = touched.get(key);
              if (known?.k === k) known.by.push(step.program);
              else if (isNow || access[KIND] === "st" || !known) touched.set(key, { t, c, k, isNow, by: [step.program] });
            }
            if (!isNow) continue;
            for (const c of access[MASKED] ?? []) paint(tensors[t], c, "off", undefined, isPad[t][c]);
            for (const c of access[OUTSIDE] ?? []) paint(tensors[t], c, "out", undefined, isPad[t][c]);
          }
        if (isNow) wave.steps.forEach(mark);
      });
      for (const { t, c, isNow, by } of touched.values()) {
        const rect = tensors[t].rects[c];
        const who = [...new Set(by)];
        const names = who.map((p) => data.programs[p].replace(/[() ]/g, ""));
        const fits = names.join(" ").length * 6.7 <= box(rect)[2];
        const text = fits ? names.join(" ") : who.length > 1 ? `×${who.length}` : "";
        const past = isNow ? "" : " past";
        paint(tensors[t], c, `pg${who[0] % COLOURS}${past}`, text);
        rect.dataset.by = who.map((p) => data.programs[p]).join(" and "); // for who points at it: a name may not fit
        const [x, y, width, height] = box(rect);
        const each = width / who.length;
        who.slice(1).forEach((p, i) => strip(t, [x + each * (i + 1), y, each, height], `pg${p % COLOURS}${past}`, tensors[t].texts[c]));
      }
      const acts = (access) => access[CELLS].length || access[OUTSIDE]?.length; // not all masked off
      const steps = waves[at].steps.filter(({ accesses }) => accesses.some(acts));
      const did = new Set(
        steps.flatMap(({ accesses }) => accesses.map((access) => `${access[KIND] === "ld" ? "load" : "store to"} \`${data.tensors[access[TENSOR]][0]}\``)),
      );
      const names = steps.map((step) => data.programs[step.program]).join(", ");
      const one = steps.length === 1;
      const words = one ? [...did].map((text) => text.replace(/^(load|store)/, "$1s")) : [...did];
      $(".sentence").replaceChildren(
        make("b", {}, steps.length ? `Program${one ? "" : "s"} ${names} ` : "All programs are masked off"),
        ...worded(`${words.join(" and ")}. A cell has the colour of the program that touches it, and its number where there is room. This is a model, not a measurement.`),
      );
    };

    const draw = () => {
      clear();
      if (program < 0) drawAll();
      else drawOne();
      $(".registers").hidden = $(".key").hidden = program < 0;
      const range = $("input");
      range.max = length() - 1;
      range.value = at;
      range.setAttribute("aria-valuetext", `step ${at + 1} of ${length()}`); // the sentence is a status
      $(".at").value = `${at + 1} of ${length()}`;
      const now = $(".ln.now");
      if (!now) return;
      const pre = $("pre"); // whole lines, so that none is cut
      const line = now.offsetHeight;
      pre.scrollTop = Math.round((now.offsetTop - (pre.clientHeight - line) / 2) / line) * line;
    };

    const ticks = () => {
      const steps = program < 0 ? waves.map((wave) => wave.steps[0]) : programs[program];
      $(".ticks").replaceChildren(
        ...steps.flatMap(({ accesses }, k) => {
          if (!accesses.length) return [];
          const tick = make("i", { className: accesses[0][KIND] });
          tick.style.left = `${(100 * k) / Math.max(1, length() - 1)}%`;
          return [tick];
        }),
      );
    };

    const go = (to) => {
      at = Math.max(0, Math.min(length() - 1, to));
      draw();
    };
    const play = (on) => {
      clearTimeout(timer);
      timer = 0;
      $(".play").textContent = on ? "❚❚ Pause" : "▶ Play";
      $(".play").setAttribute("aria-pressed", on);
      $(".sentence").setAttribute("role", on ? "none" : "status"); // a reader of the screen is not flooded
      if (!on) return;
      if (at >= length() - 1) go(0);
      const next = () => {
        if (at >= length() - 1) return play(false);
        go(at + 1);
        const step = program < 0 ? waves[at].steps[0] : programs[program][at];
        timer = setTimeout(next, step.accesses.length || step.values.length ? 1200 : 500);
      };
      timer = setTimeout(next, 500);
    };
    const stop = (then) => {
      play(false);
      then();
    };

    const choices = $(".programs");
    const choose = (p) => {
      const keeps = p >= 0 && program >= 0; // the step, from one program to another
      program = p;
      choices?.classList.toggle("all", p < 0);
      for (const button of choices?.querySelectorAll("button") ?? []) button.setAttribute("aria-pressed", Number(button.value) === p);
      ticks();
      go(keeps ? at : 0);
      if (p < 0) return;
      $("summary span").textContent = programs.length > 1 ? `program ${data.programs[p]}` : "the program";
      $("details ol").replaceChildren(...programs[p].map((step) => make("li", {}, ...worded(step.sentence))));
    };
    choices?.addEventListener("click", ({ target }) => target.value && stop(() => choose(Number(target.value))));
    $(".previous").addEventListener("click", () => stop(() => go(at - 1)));
    $(".next").addEventListener("click", () => stop(() => go(at + 1)));
    $(".play").addEventListener("click", () => play(!timer));
    $("input").addEventListener("input", ({ target }) => stop(() => go(Number(target.value))));
    $(".bar").addEventListener("keydown", (event) => {
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: length() - 1 }[event.key];
      if (to === undefined || event.target.type === "range") return;
      event.preventDefault();
      stop(() => go(to));
    });
    $("pre").addEventListener("click", ({ target }) => {
      const n = Number(target.closest(".ln")?.dataset.n);
      if (!n || program < 0) return;
      const on = (step) => step.first <= n && n <= step.last;
      const next = programs[program].findIndex((step, k) => k > at && on(step));
      const first = programs[program].findIndex(on);
      if (first >= 0) stop(() => go(next >= 0 ? next : first));
    });

    // The value that the pointer or a finger is on
    const tell = ({ target }) => {
      const group = target.closest?.("[data-t], [data-r]");
      const isTensor = group && "t" in group.dataset;
      const number = group && Number(isTensor ? group.dataset.t : group.dataset.r);
      const grid = group && (isTensor ? tensors : registers)[number];
      const cell = grid ? grid.rects.indexOf(target) : -1;
      if (cell < 0) return ($(".hover").value = "");
      const [name, shape, columns] = isTensor ? data.tensors[number] : [...data.registers[number], data.registers[number][1].at(-1) ?? 1];
      const index = shape.length < 2 ? (shape.length ? [cell] : []) : [cell % columns];
      for (let row = Math.floor(cell / columns), d = shape.length - 2; d >= 0; d--) {
        index.unshift(d ? row % shape[d] : row);
        row = Math.floor(row / shape[d]);
      }
      const kind = target.getAttribute("class") ?? "";
      const touched = `touched by ${target.dataset.by}`;
      const known = { off: "masked off, not touched", out: "outside of the tensor" };
      const is = /\bpg/.test(kind) ? touched : known[kind.split(" ").at(-1)];
      $(".hover").value = `${name}${index.length ? `[${index.join(", ")}]` : ""}${is ? `: ${is}` : ` = ${grid.texts[cell].textContent || "not written yet"}`}`;
    };
    root.addEventListener("pointerover", tell);
    root.addEventListener("pointerdown", tell);

    choose(program);
    return { go, choose, draw, stop: () => play(false) };
  };

  for (const figure of document.querySelectorAll("figure.step-through")) {
    const launches = [...figure.querySelectorAll(".launch")];
    const data = [...figure.querySelectorAll("script")].map((script) => JSON.parse(script.textContent));
    figure.players = launches.map((launch, n) => player(launch, data[n]));
    const buttons = [...figure.querySelectorAll(".switches button")];
    if (!buttons.length) continue;
    const show = (chosen) => {
      launches.forEach((launch, n) => launch.classList.toggle("chosen", n === chosen));
      buttons.forEach((button, n) => button.setAttribute("aria-pressed", n === chosen));
      figure.players.forEach(({ stop }) => stop());
      figure.players[chosen].draw(); // what is not shown cannot scroll to its line
    };
    buttons.forEach((button, n) => button.addEventListener("click", () => show(n)));
  }
})();
