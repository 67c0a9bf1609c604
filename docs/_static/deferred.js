// Loads what a page leaves out until a reader wants it: the content of large folds, and the text of an op to copy.
// These are script files, as a page that was opened from a disk may fetch nothing else.
const deferred = (() => {
  const waiting = {}; // by address, the promise of what a file has

  const load = (address) =>
    (waiting[address] ??= new Promise((resolve, reject) => {
      const script = Object.assign(document.createElement("script"), { src: address, resolve });
      script.onerror = () => {
        delete waiting[address];
        reject(new Error(`${address} could not be loaded`));
      };
      document.head.append(script);
    }));

  // Fills a fold, or only one that has the element with this id; where it cannot be loaded, the link stays
  const fill = async (fold, id = "") => {
    const place = fold.querySelector(":scope > p.deferred");
    if (!place) return;
    const { href, hash } = place.firstChild;
    const content = (await load(href.replace(/\.html(\?.*)?#.*/, ".js$1")))[hash.replace("#fold-", "")];
    if (!place.isConnected || (id && !content.includes(`id="${id}"`))) return;
    const template = document.createElement("template");
    template.innerHTML = content;
    place.replaceWith(template.content);
    addCopyButtons(fold);
    fold.dispatchEvent(new Event("filled", { bubbles: true }));
  };
  const fillAll = (id) => Promise.all([...document.querySelectorAll("details.fold")].map((fold) => fill(fold, id)));

  // sphinx_copybutton adds its buttons once; a click on one that comes later is seen too
  let blocks = 0;
  const addCopyButtons = (fold) => {
    const button = document.querySelector("button.copybtn");
    for (const block of fold.querySelectorAll("div:not(.sphx-glr-script-out) > div.highlight > pre")) {
      if (!button || block.nextElementSibling) continue;
      block.id = `deferred-block-${blocks++}`;
      block.after(button.cloneNode(true));
      block.nextElementSibling.dataset.clipboardTarget = `#${block.id}`;
    }
  };

  // A link to something in a fold, or to a section that begins with one, opens it, each time
  const show = async () => {
    const id = decodeURIComponent(location.hash.slice(1));
    if (!id) return;
    const wasThere = document.getElementById(id);
    if (!wasThere) await fillAll(id);
    const target = document.getElementById(id);
    target?.querySelector(":scope > details")?.setAttribute("open", "");
    for (let fold = target?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    if (!wasThere) target?.scrollIntoView();
  };

  const quietly = (promise) => promise.catch(() => {}); // the link to the page with the content is still there
  document.addEventListener("toggle", ({ target }) => target.open && quietly(fill(target)), true);
  addEventListener("hashchange", () => quietly(show()));
  addEventListener("load", () => quietly(show()));
  document.addEventListener("click", ({ target }) => target.closest?.("a[href^='#']") && setTimeout(() => quietly(show())));
  // A browser neither searches nor prints what is not there, and does not wait: the keys come before it begins
  addEventListener("beforeprint", () => quietly(fillAll()));
  document.addEventListener("keydown", ({ key, ctrlKey, metaKey }) => (ctrlKey || metaKey) && "fp".includes(key) && quietly(fillAll()));

  return { load, loaded: (data) => document.currentScript.resolve(data) };
})();
