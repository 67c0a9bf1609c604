// Makes tables sortable by a click on a column's title, those of all ops or recipes filterable by words, and opens the
// sizes of an op below its row.
(() => {
  const load = (op) => deferred.load(`${document.documentElement.dataset.content_root ?? "./"}sizes/${op}.js`);

  const element = (name, ...children) => {
    const made = document.createElement(name);
    made.append(...children);
    return made;
  };
  const tableOf = ({ title, columns, rows, notes }) => {
    const cells = (kind, texts) => element("tr", ...texts.map((text) => element(kind, text)));
    const head = element("thead", cells("th", columns));
    const body = element("tbody", ...rows.map((row) => cells("td", row)));
    return [element("table", element("caption", title), head, body), ...notes.map((note) => element("p", note))];
  };

  document.addEventListener("click", async ({ target }) => {
    const button = target.closest?.("button.sizes");
    if (!button) return;
    const row = button.closest("tr");
    if (button.getAttribute("aria-expanded") === "true") return closeSizes(row);
    button.setAttribute("aria-expanded", "true");
    const box = element("div", "loading …");
    box.tabIndex = 0; // it scrolls
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", button.getAttribute("aria-label"));
    const cell = element("td", box);
    cell.colSpan = row.cells.length;
    const below = element("tr", cell);
    below.className = "sizes";
    row.after(below);
    try {
      const tables = (await load(button.dataset.op))[button.dataset.gpuName];
      box.replaceChildren(...tables.flatMap(tableOf));
    } catch (error) {
      box.replaceChildren(`The sizes could not be opened: ${error.message}`);
    }
  });
})();

function closeSizes(row) {
  if (row.nextElementSibling?.matches("tr.sizes")) row.nextElementSibling.remove();
  row.querySelector("button.sizes")?.setAttribute("aria-expanded", "false");
}

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

  [...table.tHead.rows[0].cells].forEach((title, column) => {
    const button = document.createElement("button");
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      [...body.rows].forEach(closeSizes);
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
    [...body.rows].forEach(closeSizes);
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
  const line = document.createElement("div");
  line.className = "table-filter";
  line.append(filter, said);
  table.closest(".table-box").prepend(line);
}

const makeTables = (element) => {
  element.querySelectorAll("table.sortable").forEach(makeSortable);
  element.querySelectorAll("table.filterable").forEach(makeFilterable);
};
document.addEventListener("DOMContentLoaded", () => makeTables(document));
addEventListener("filled", ({ target }) => makeTables(target)); // a fold that was loaded
