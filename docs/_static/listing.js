// Opens the code that a compiler wrote for a kernel: loads the kernel's file once, shows one text of it, coloured.
(() => {
  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  const load = async (file) =>
    unpack(await deferred.load(`${document.documentElement.dataset.content_root ?? "./"}listings/${file}.js`));

  // Comments, strings and names of instructions, labels and registers: alike enough in all of these languages.
  const KINDS = {
    comment: /\/\/.*|;[^\n]*$|\/\*.*?\*\//,
    string: /"[^"\n]*"/,
    label: /^[.$\w]+:/,
    register: /[%$][\w.#:]+|\b(?:[UR]?R\d+|UP?R?\d+|P\d+|[vsa]\d+|[vsa]\[\d+:\d+\])\b/,
    instruction: /\b(?:tt|ttg|ttng|amdg|arith|scf|math|gpu|llvm)\.[\w.]+|^\s+@?!?[\w%]*\s*[a-z][\w]*(?:\.[\w:]+)+|\b[A-Z]{3,}[A-Z0-9]*(?:\.[\w]+)*\b|^\t[a-z]\w+/,
    number: /\b(?:0x[0-9a-f]+|\d+(?:\.\d+)?)\b/,
  };
  const TOKENS = new RegExp(Object.entries(KINDS).map(([kind, its]) => `(?<${kind}>${its.source})`).join("|"), "gm");

  const coloured = (text) => {
    const shown = document.createElement("pre");
    let end = 0;
    for (const match of text.matchAll(TOKENS)) {
      const [kind] = Object.entries(match.groups).find(([, found]) => found !== undefined);
      const span = document.createElement("span");
      span.className = kind;
      span.textContent = match[0];
      shown.append(text.slice(end, match.index), span);
      end = match.index + match[0].length;
    }
    shown.append(text.slice(end));
    return shown;
  };

  const show = async (button) => {
    const { file, text: name } = button.dataset;
    const box = button.closest(".table-box").nextElementSibling;
    const pressed = button.getAttribute("aria-expanded") === "true";
    button.closest("table").querySelectorAll("button.listing").forEach((other) => other.setAttribute("aria-expanded", "false"));
    box.hidden = pressed;
    if (pressed) return;
    button.setAttribute("aria-expanded", "true");
    box.replaceChildren("loading …");
    try {
      const text = (await load(file))[name];
      const link = document.createElement("a");
      link.download = `${file.split("/").pop()}.${name}`;
      link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
      link.textContent = `Download ${link.download}`;
      box.replaceChildren(link, coloured(text));
    } catch (error) {
      box.replaceChildren(`The listing could not be opened: ${error.message}`);
    }
  };

  document.addEventListener("click", ({ target }) => {
    const button = target.closest?.("button.listing");
    if (button) show(button);
  });
})();
