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

  const typeset = async (element) => {
    await load();
    const tex = element.textContent.trim().replace(/^\\[([]|\\[)\]]$/g, "");
    katex.render(tex, element, { displayMode: element.matches("div"), throwOnError: false });
  };
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        observer.unobserve(target);
        typeset(target);
      }
    },
    { rootMargin: "100% 0px" },
  );
  for (const element of document.querySelectorAll(".math")) observer.observe(element);
});
