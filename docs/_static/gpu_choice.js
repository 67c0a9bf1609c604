// The GPU that a reader chooses, by a menu or by the buttons of a figure: it is remembered, and holds on every page.
// The event "gpu" tells the rest of the page.
const gpuChoice = {
  remembered() {
    try {
      return localStorage.getItem("gpu");
    } catch {
      return null; // where a browser keeps nothing, the choice lasts as long as the page
    }
  },
  choose(gpu) {
    dispatchEvent(new CustomEvent("gpu", { detail: gpu }));
    try {
      localStorage.setItem("gpu", gpu);
    } catch {}
  },
};

// The menu: parts of the page that are about other GPUs are hidden
document.addEventListener("DOMContentLoaded", () => {
  const menu = document.querySelector(".gpu-choice select");
  if (!menu) return;
  const remembered = gpuChoice.remembered();
  if ([...menu.options].some((option) => option.value === remembered)) menu.value = remembered;
  const show = () => document.querySelectorAll("[data-gpu]").forEach((part) => (part.hidden = part.dataset.gpu !== menu.value));
  show();
  menu.addEventListener("change", () => gpuChoice.choose(menu.value));
  addEventListener("gpu", show);
});
