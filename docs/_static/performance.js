// Makes tables sortable by a click on a column's title, those of all recipes filterable by words, and what is about
// several GPUs about one of them.
function makeSortable(table) {
  const body = table.tBodies[0];
  const key = (row, column) => row.cells[column].textContent.trim();
  const unit = (text) => text.match(/ (\S+\/s)$/)?.[1] ?? ""; // rates of unlike units are not compared
  // A number is what a text begins with, or what follows a name and a colon: not of a size, a date or a type
  const number = (text) => parseFloat(text.match(/^(?:[^:]*: )?(-?\d+(?:\.\d+)?)(?![\d.]| ?[×x-] ?\d|[A-Za-z])/)?.[1]);
  const empty = (text) => text === "" || text === "-";
  const compare = (x, y) => {
    if (unit(x) !== unit(y)) return unit(x).localeCompare(unit(y));
    const order = number(x) - number(y);
    return isNaN(order) ? x.localeCompare(y, undefined, { numeric: true }) : order;
  };

  table.querySelectorAll("thead th").forEach((title, column) => {
    const button = document.createElement("button");
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const texts = [...body.rows].map((row) => key(row, column)).filter((text) => !empty(text));
      const orders = ["descending", "ascending"]; // of numbers the largest first
      if (texts.some((text) => isNaN(number(text)))) orders.reverse();
      const order = orders[Number(title.getAttribute("aria-sort") === orders[0])];
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      title.setAttribute("aria-sort", order);
      const sorted = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a, column), key(b, column)];
        if (empty(x) || empty(y)) return empty(x) - empty(y);
        return order === "descending" ? compare(y, x) : compare(x, y);
      });
      body.append(...sorted);
    });
  });
}

function makeFilterable(table) {
  const body = table.tBodies[0];
  const filter = document.createElement("input");
  filter.type = "search";
  filter.placeholder = "Filter: words of a row";
  filter.setAttribute("aria-label", "Filter the table");
  const said = document.createElement("span");
  said.setAttribute("role", "status");
  const show = () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const links = [...row.querySelectorAll("a")].map((link) => link.getAttribute("href"));
      const text = [row.textContent, ...links].join(" ").toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    const shown = [...body.rows].filter((row) => !row.hidden).length;
    said.textContent = filter.value && ` ${shown} of ${body.rows.length} rows`;
  };
  filter.addEventListener("input", show);
  addEventListener("pageshow", show); // a browser that comes back has kept the words
  table.closest(".table-box").before(filter, said);
}

function makeChoosable(choice) {
  const parts = [...document.querySelectorAll("[data-gpu]")];
  const rows = [...document.querySelectorAll("table.performance")].flatMap((table) => {
    const column = [...table.tHead.rows[0].cells].findIndex((title) => title.textContent.trim() === "device");
    return [...table.tBodies[0].rows].map((row) => [row, row.cells[column].textContent.trim()]);
  });
  const gpus = [...new Set([...parts.map((part) => part.dataset.gpu), ...rows.map(([, gpu]) => gpu)])];
  choice.append(new Option("all", ""), ...gpus.map((gpu) => new Option(gpu)));
  const show = () => {
    const isOther = (gpu) => choice.value !== "" && gpu !== choice.value;
    parts.forEach((part) => (part.hidden = isOther(part.dataset.gpu)));
    rows.forEach(([row, gpu]) => row.classList.toggle("of-other-gpu", isOther(gpu)));
  };
  choice.addEventListener("change", () => {
    show();
    try {
      localStorage.setItem("gpu", choice.value);
    } catch {} // where a browser keeps nothing, the choice is of this visit
  });
  try {
    const before = localStorage.getItem("gpu");
    if (gpus.includes(before)) choice.value = before;
  } catch {}
  show();
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll("table.filterable").forEach(makeFilterable);
  document.querySelectorAll(".gpu-choice select").forEach(makeChoosable);
});
