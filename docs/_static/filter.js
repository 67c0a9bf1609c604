// Shows the cards of those recipes alone that have all words whose buttons are pressed; the address has the words.
document.addEventListener("DOMContentLoaded", () => {
  const buttons = [...document.querySelectorAll(".filters [data-topic]")];
  const cards = [...document.querySelectorAll("li.card")];
  const said = document.querySelector(".filters [role=status]");
  const all = document.querySelector(".filters .all");

  const name = ({ dataset }) => dataset.topic.replace("topic-", "");
  const show = () => {
    const pressed = buttons.filter((button) => button.getAttribute("aria-pressed") === "true");
    for (const card of cards) card.hidden = !pressed.every(({ dataset }) => card.classList.contains(dataset.topic));
    const shown = cards.filter((card) => !card.hidden);
    for (const list of document.querySelectorAll("ul.cards")) {
      const section = list.closest("section");
      section.hidden = !shown.some((card) => list.contains(card));
      const link = document.querySelector(`.toc-tree a[href="#${section.id}"]`);
      if (link) link.parentElement.hidden = section.hidden;
    }
    for (const title of document.querySelectorAll(".card-group")) {
      let section = title.nextElementSibling;
      while (section?.matches("section") && section.hidden) section = section.nextElementSibling;
      title.hidden = !section?.matches("section");
    }
    const what = `${cards.length} recipes`;
    said.textContent = !pressed.length ? what : shown.length ? `${shown.length} of ${what}` : "No recipe has all of these.";
    all.hidden = !pressed.length;
    if (location.protocol === "file:") return; // there the address must stay
    const address = new URL(location);
    address.search = new URLSearchParams(pressed.map((button) => ["topic", name(button)]));
    history.replaceState(null, "", address);
  };

  const press = (button, on) => button.setAttribute("aria-pressed", String(on));
  for (const button of buttons) {
    button.addEventListener("click", () => {
      press(button, button.getAttribute("aria-pressed") === "false");
      show();
    });
  }
  all.addEventListener("click", () => {
    for (const button of buttons) press(button, false);
    show();
    buttons[0].focus();
  });
  const asked = new URLSearchParams(location.search).getAll("topic");
  for (const button of buttons) press(button, asked.includes(name(button)));
  show();
});
