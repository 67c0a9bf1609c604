"""Files for programs that read the site: each recipe as Markdown beside its page, llms.txt, and a sitemap."""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urljoin

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from triton_gallery.site import page_context
from triton_gallery.site.meta_description import description
from triton_gallery.site.notebook import OURS

NAMESPACE = "http://www.sitemaps.org/schemas/sitemap/0.9"


def of_notebook(notebook: dict[str, Any]) -> str:
    """Return a recipe's notebook, with its outputs, as Markdown."""
    return "\n\n".join(part.strip("\n") for cell in notebook["cells"] for part in _of_cell(cell)) + "\n"


def _of_cell(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if OURS in cell["metadata"].get("tags", []):
        return
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield _fenced("python", source)
    for output in cell["outputs"]:
        text = output.get("text") or output.get("data", {}).get("text/plain")
        yield _fenced("text", "".join(text)) if text else "*A picture, on the page and in the notebook.*"


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.strip(chr(10))}\n```"


def announce(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    """Add a link to a recipe's Markdown to the head of its page."""
    if page in page_context.recipes(app.env):
        name = escape(PurePosixPath(page).name)
        context["metatags"] += f'<link rel="alternate" type="text/markdown" href="{name}.md" />\n'


def write(app: Sphinx) -> None:
    """Write the recipes, llms.txt, and the sitemap if the site knows its address."""
    out, pages = Path(app.outdir), page_context.pages(app.env)
    for page, recipe in page_context.recipes(app.env).items():
        notebook = json.loads(pages.notebook(recipe).read_text(encoding="utf-8"))
        (out / f"{page}.md").write_text(of_notebook(notebook), encoding="utf-8")
    (out / "llms.txt").write_text("\n".join(_lines(app.env)) + "\n", encoding="utf-8")
    if address := app.config.html_baseurl:
        addresses = (urljoin(address, app.builder.get_target_uri(page)) for page in sorted(app.env.all_docs))
        entries = "".join(f"<url><loc>{escape(page)}</loc></url>\n" for page in addresses)
        text = f'<?xml version="1.0" encoding="utf-8"?>\n<urlset xmlns="{NAMESPACE}">\n{entries}</urlset>\n'
        (out / "sitemap.xml").write_text(text, encoding="utf-8")


def _lines(env: BuildEnvironment) -> Iterator[str]:
    """Yield the lines of llms.txt: what the site is, the recipes by sections, the other pages."""
    yield f"# {env.config.project}"
    if about := description(env, env.config.root_doc):
        yield f"\n> {about}"
    section = ""
    for page, recipe in page_context.recipes(env).items():
        if recipe.section != section:
            section = recipe.section
            yield f"\n## {env.titles[page.rpartition('/')[0] + '/index'].astext()}\n"
        yield _line(env, page, "md")
    others = [page for page in env.toctree_includes.get(env.config.root_doc, []) if "/index" not in page]
    if others:
        yield "\n## About the gallery\n"
        yield from (_line(env, page, "html") for page in others)


def _line(env: BuildEnvironment, page: str, suffix: str) -> str:
    address = f"{page_context.site_address(env)}{page}.{suffix}"
    return f"- [{env.titles[page].astext()}]({address}): {description(env, page)}"
