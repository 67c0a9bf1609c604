// Makes tables sortable by a click on a column's title, and those of all recipes filterable by words.
function makeSortable(table) {
  const body = table.tBodies[0];
  const key = (row, column) => row.cells[column].textContent.trim();
  const number = (text) => parseFloat(text.replace(/^[^0-9.-]*/, ""));
  const unit = (text) => text.match(/ (\S+\/s)$/)?.[1] ?? ""; // rates of unlike units are not compared

  table.querySelectorAll("thead th").forEach((title, column) => {
    const button = document.createElement("button");
    button.append(...title.childNodes);
    title.append(button);
    button.addEventListener("click", () => {
      const down = title.getAttribute("aria-sort") !== "descending";
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      title.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sorted = [...body.rows].sort((a, b) => {
        const [x, y] = [key(a, column), key(b, column)];
        if (unit(x) !== unit(y)) return unit(x).localeCompare(unit(y));
        const order = isNaN(number(x)) || isNaN(number(y)) ? x.localeCompare(y) : number(x) - number(y);
        return down ? -order : order;
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
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  table.closest(".table-box").before(filter);
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll("table.filterable").forEach(makeFilterable);
});
