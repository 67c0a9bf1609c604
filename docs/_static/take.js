// Copies an op. Its text is loaded when a reader comes to the button; ClipboardJS, which sphinx_copybutton brings, copies.
document.addEventListener("DOMContentLoaded", () => {
  const load = async ({ target }) => {
    const button = target.closest?.("button.take");
    if (button) button.dataset.clipboardText = await deferred.load(button.dataset.from);
  };
  for (const event of ["pointerover", "focusin"]) document.addEventListener(event, (event) => load(event).catch(() => {}));

  const clipboard = new ClipboardJS("button.take");
  clipboard.on("success", ({ trigger }) => {
    const label = trigger.textContent;
    trigger.textContent = "Copied";
    setTimeout(() => (trigger.textContent = label), 2000);
  });
  clipboard.on("error", async ({ trigger }) => {
    if (trigger.dataset.clipboardText) return;
    await load({ target: trigger });
    trigger.click();
  });
});
