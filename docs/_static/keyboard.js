// Lets the keyboard reach what the pointer does: boxes whose content scrolls, the switches of the sidebars, and the search.
// The sidebars close as a reader goes to a section, or leaves them with Escape.
document.addEventListener("DOMContentLoaded", () => {
  const observer = new ResizeObserver((entries) => {
    const results = entries.map(({ target }) => [
      target,
      target.scrollWidth > target.clientWidth + 1,
      target.scrollHeight > target.clientHeight + 1,
    ]);
    for (const [box, isWide, isHigh] of results) {
      box.classList.toggle("scrolls", isWide);
      if (isWide || isHigh) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  });
  const watch = (element) => {
    for (const box of element.querySelectorAll("pre, .table-wrapper, .math-wrapper, .filters > div")) observer.observe(box);
  };
  watch(document);
  addEventListener("filled", ({ target }) => watch(target));

  for (const button of document.querySelectorAll("button.switch")) {
    button.addEventListener("click", () => document.getElementById(button.dataset.for).click());
  }
  const close = () => {
    for (const box of document.querySelectorAll("#__navigation, #__toc")) box.checked = false;
  };
  document.querySelector(".toc-drawer")?.addEventListener("click", ({ target }) => target.closest("a") && close());
  document.addEventListener("keydown", ({ key }) => key === "Escape" && close());

  // A slash goes to the search's own field, else to that of the sidebar, else to the search; focus there loads the index ahead
  const fields = [...document.querySelectorAll(".search-here input, .sidebar-search")];
  document.addEventListener("keydown", (event) => {
    const { key, target, ctrlKey, altKey, metaKey } = event;
    if (key !== "/" || ctrlKey || altKey || metaKey || target.matches("input, select, textarea")) return;
    const field = fields.find((field) => field.checkVisibility({ visibilityProperty: true }));
    event.preventDefault();
    if (field) field.focus();
    else document.querySelector(".sidebar-search").form.submit();
  });
  const sidebar = document.querySelector(".sidebar-search");
  const load = () =>
    document.head.append(
      Object.assign(document.createElement("link"), { rel: "prefetch", href: sidebar.dataset.index }),
    );
  sidebar?.addEventListener("focus", load, { once: true });
});
