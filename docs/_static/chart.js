// Figures of benchmarks: shows the rates at the size that a reader points at, in the legend, the chart and the table;
// and of several panels the one that buttons choose.
function makeReadable(chart, panel) {
  const legend = chart.querySelector(".legend");
  const at = legend.querySelector(".at");
  const svg = chart.querySelector("svg");
  const plot = svg.querySelector("svg");
  const sizes = [...svg.querySelectorAll(".sizes text")];
  const rows = panel.querySelector("table.benchmark")?.tBodies[0].rows ?? [];
  const isRows = chart.classList.contains("rows");
  const cursor = document.createElementNS(svg.namespaceURI, "rect");
  const [along, across, length, breadth] = isRows ? ["y", "x", "height", "width"] : ["x", "y", "width", "height"];
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute(across, 0);
  cursor.setAttribute(breadth, "100%");
  cursor.setAttribute(length, `${100 / sizes.length}%`);
  let shown = -1;

  const show = (index) => {
    if (index === shown) return;
    rows[shown]?.classList.remove("chosen");
    shown = index;
    rows[index]?.classList.add("chosen");
    at.textContent = index < 0 ? "" : `${at.dataset.x} = ${sizes[index].textContent}`;
    for (const series of legend.querySelectorAll(".series")) {
      series.lastElementChild.textContent = index < 0 ? "" : series.dataset.rates.split(" ")[index];
    }
    plot.querySelectorAll(".large").forEach((path) => path.remove());
    if (index < 0) return cursor.remove();
    cursor.setAttribute(along, `${(100 * index) / sizes.length}%`);
    svg.prepend(cursor);
    for (const points of plot.querySelectorAll(".points")) {
      const here = points.getAttribute("d").match(/M\S+ [^hM]+h0/g).filter((point) => {
        const [x, y] = point.slice(1).split(/[ h]/).map(Number);
        return Math.floor(isRows ? y : x) === index;
      });
      const large = points.cloneNode();
      large.setAttribute("class", "large");
      large.setAttribute("d", here.join(""));
      points.after(large);
    }
  };

  const point = (event) => {
    const box = svg.getBoundingClientRect();
    const place = isRows ? (event.clientY - box.top) / box.height : (event.clientX - box.left) / box.width;
    show(Math.max(0, Math.min(sizes.length - 1, Math.floor(place * sizes.length))));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  const leave = ({ pointerType }) => pointerType === "mouse" && show(-1); // a finger that was lifted leaves the rates
  svg.addEventListener("pointerleave", leave);
  [...rows].forEach((row, index) => {
    row.addEventListener("pointerenter", () => show(index));
    row.addEventListener("pointerleave", leave);
  });

  svg.tabIndex = 0;
  svg.addEventListener("focus", () => svg.matches(":focus-visible") && show(Math.max(shown, 0)));
  svg.addEventListener("blur", () => show(-1));
  svg.addEventListener("keydown", (event) => {
    const last = sizes.length - 1;
    const steps = { ArrowRight: shown + 1, ArrowDown: shown + 1, ArrowLeft: shown - 1, ArrowUp: shown - 1 };
    const index = { Home: 0, End: last, ...steps }[event.key];
    if (index === undefined) return;
    event.preventDefault();
    show(Math.max(0, Math.min(last, index)));
  });
}

function makeSwitchable(figure) {
  const panels = [...figure.querySelectorAll(":scope > .panel")];
  const groups = [...figure.querySelectorAll(":scope > .switches > div")];
  const kinds = groups.map((group) => group.dataset.kind);
  const buttons = groups.flatMap((group) => [...group.children]);
  const kind = (button) => button.parentElement.dataset.kind;
  let chosen = panels[0];
  const choose = (panel) => {
    if (!panel) return;
    chosen = panel;
    panels.forEach((other) => other.classList.toggle("chosen", other === panel));
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(panel.dataset[kind(button)] === button.textContent));
    }
  };
  // The panel with this value that is most like the chosen one
  const set = (key, value) => {
    const alike = (panel) => kinds.filter((other) => panel.dataset[other] === chosen.dataset[other]).length;
    const able = panels.filter((panel) => panel.dataset[key] === value);
    choose(able.sort((a, b) => alike(b) - alike(a))[0]);
  };
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const key = kind(button);
      if (key === "gpu") gpuChoice.choose(button.textContent);
      else set(key, button.textContent);
    });
  }
  const hasGpus = kinds.includes("gpu");
  if (hasGpus) addEventListener("gpu", ({ detail }) => set("gpu", detail));
  const follow = () => {
    const anchor = document.getElementById(location.hash.slice(1));
    const panel = panels.find((other) => other !== chosen && other.contains(anchor));
    choose(panel);
    if (panel) anchor.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  if (hasGpus) set("gpu", gpuChoice.remembered());
  follow();
}

function makeFigures(element) {
  for (const figure of element.querySelectorAll("figure.panels")) {
    for (const panel of figure.querySelectorAll(":scope > .panel")) {
      panel.querySelectorAll(".chart").forEach((chart) => makeReadable(chart, panel));
    }
    makeSwitchable(figure);
  }
}

makeFigures(document);
addEventListener("filled", ({ target }) => makeFigures(target)); // a fold that was loaded
