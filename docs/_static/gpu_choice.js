// Shows what is about the chosen GPU alone. The choice is remembered, and holds on every page with such a menu.
document.addEventListener("DOMContentLoaded", () => {
  const menu = document.querySelector(".gpu-choice select");
  const parts = document.querySelectorAll("[data-gpu]");
  const show = () => parts.forEach((part) => (part.hidden = part.dataset.gpu !== menu.value));
  try {
    const remembered = localStorage.getItem("gpu");
    if ([...menu.options].some((option) => option.value === remembered)) menu.value = remembered;
  } catch {} // where a browser keeps nothing, the choice lasts as long as the page
  show();
  menu.addEventListener("change", () => {
    show();
    try {
      localStorage.setItem("gpu", menu.value);
    } catch {}
  });
});
