// Typesets each formula when it comes near what a reader sees, and brings KaTeX with the first: most visits need none.
document.addEventListener("DOMContentLoaded", () => {
  const from = (file) => `${document.documentElement.dataset.content_root ?? "./"}_static/${file}`;
  let loaded;
  const load = () =>
    (loaded ??= new Promise((resolve) => {
      const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: from("katex/katex.min.css") });
      const script = Object.assign(document.createElement("script"), { src: from("katex.min.js"), onload: resolve });
      document.head.append(style, script);
    }));

  const typeset = (element) => {
    const tex = element.textContent.trim().replace(/^\\[([]|\\[)\]]$/g, "");
    katex.render(tex, element, { displayMode: element.matches("div"), throwOnError: false });
  };
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        observer.unobserve(target);
        waiting.delete(target);
        load().then(() => typeset(target));
      }
    },
    { rootMargin: "100% 0px" },
  );
  const waiting = new Set(document.querySelectorAll(".math"));
  for (const element of waiting) observer.observe(element);
  addEventListener("beforeprint", () => {
    if (!loaded) return; // no formula was near the window, and paper does not wait
    for (const element of waiting) typeset(element);
    waiting.clear();
  });
});
