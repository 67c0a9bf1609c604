// Lets the keyboard reach what the pointer does: boxes whose content scrolls, and the switches of the sidebars. These
// close as a reader goes to a section, or leaves them with Escape.
document.addEventListener("DOMContentLoaded", () => {
  const observer = new ResizeObserver((entries) => {
    const found = entries.map(({ target }) => [
      target,
      target.scrollWidth > target.clientWidth + 1 || target.scrollHeight > target.clientHeight + 1,
    ]);
    for (const [box, scrolls] of found) {
      if (scrolls) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  });
  for (const box of document.querySelectorAll("pre, .table-wrapper, .math-wrapper, .filters > div")) observer.observe(box);

  for (const button of document.querySelectorAll("button.switch")) {
    button.addEventListener("click", () => document.getElementById(button.dataset.for).click());
  }
  const close = () => {
    for (const box of document.querySelectorAll("#__navigation, #__toc")) box.checked = false;
  };
  document.querySelector(".toc-drawer")?.addEventListener("click", ({ target }) => target.closest("a") && close());
  document.addEventListener("keydown", ({ key }) => key === "Escape" && close());
});
