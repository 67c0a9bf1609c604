// Says that the op was copied; the button's text is what it copies. ClipboardJS comes with sphinx_copybutton.
document.addEventListener("DOMContentLoaded", () => {
  new ClipboardJS("button.take").on("success", ({ trigger }) => {
    const said = trigger.textContent;
    trigger.textContent = "Copied";
    setTimeout(() => (trigger.textContent = said), 2000);
  });
});
