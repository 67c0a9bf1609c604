// Lists the versions of the site at the end of the sidebar: the newest at the site's root, each other in its folder.
document.addEventListener("DOMContentLoaded", () => {
  const versions = globalThis.siteVersions ?? []; // as versions.js at the root names them; nobody has to have put it there
  const sidebar = document.querySelector(".sidebar-scroll");
  if (!versions.length || !sidebar) return;
  const root = document.querySelector("script[data-site-root]").dataset.siteRoot;
  const path = location.pathname.slice(root.length);
  const current = versions.find((version) => path.startsWith(`${version}/`));
  const page = current ? path.slice(current.length + 1) : path;
  const fold = document.createElement("details");
  fold.className = "site-versions";
  const summary = document.createElement("summary");
  summary.textContent = `Version: ${current ?? "newest"}`;
  fold.append(summary);
  for (const version of [undefined, ...versions]) {
    const link = document.createElement("a");
    link.href = `${root}${version ? `${version}/` : ""}${page}`;
    link.textContent = version ?? "newest";
    if (version === current) link.setAttribute("aria-current", "true");
    fold.append(link);
  }
  sidebar.append(fold);
});
