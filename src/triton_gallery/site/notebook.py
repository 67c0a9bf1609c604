"""Puts outputs into the notebooks on offer, which sphinx-gallery writes without: those that the recipe's page shows."""

import inspect
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx_gallery.utils import zip_files

from triton_gallery.recipe.needs import packages
from triton_gallery.recipe.outputs import Frame, Output
from triton_gallery.records.files import replace
from triton_gallery.records.output_diff import STALE, Shown, pictures, ran_here, recorded_on, side_by_side
from triton_gallery.site.chart import png
from triton_gallery.site.notebook_setup import install_missing
from triton_gallery.site.page_context import RecipePage, pages, recipe_page
from triton_gallery.site.render import benchmark, clocks

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata


OURS = "install"  # the tag of cells that the page has not


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Have a notebook filled when its recipe's page is read."""
    app.connect("doctree-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _fill(app: "Sphinx", _: nodes.document) -> None:
    """Write the outputs into the notebook, and the notebook into the zipped files, if it has others."""
    page = recipe_page(app.env, app.env.current_document.docname)
    if page is None or page.run is None or page.run.failure is not None:
        return
    path = pages(app.env).notebook(page.recipe)
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    notebook["cells"] = [cell for cell in notebook["cells"] if OURS not in cell["metadata"].get("tags", [])]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    figures = pages(app.env).figures(page.recipe)
    for cell, shown in zip(code, side_by_side(page.run, page.record, figures), strict=False):
        cell["outputs"] = list(_outputs(page, shown, figures))
    first = notebook["cells"].index(code[0]) if code else 0
    notebook["cells"][first:first] = _added(app, page)
    filled = json.dumps(notebook, indent=1)
    if filled != text:  # a newer file would have every other site of this checkout read the page again
        replace(path, filled.encode())
        zip_files([path.with_suffix(".py"), path], path.with_suffix(".zip"), path.parent)


def _added(app: "Sphinx", page: RecipePage) -> Iterator[dict[str, Any]]:
    """Yield the cells that a page has not: where its page is, if that is known, and what installs its packages."""
    tags: dict[str, Any] = {"metadata": {"tags": [OURS]}}
    if app.config.html_baseurl:
        place = f"{app.config.sphinx_gallery_conf['gallery_dirs']}/{page.recipe.key}.html"
        said = f"From the [Triton Gallery]({app.config.html_baseurl.rstrip('/')}/{place})."
        yield {"cell_type": "markdown", **tags, "source": said}
    needs = packages(page.recipe.path, page.recipe.text)
    call = f"install_missing{tuple(needs)!r}".replace("'", '"')
    source = f"{inspect.getsource(install_missing)}\n\n{call}"
    yield {"cell_type": "code", **tags, "execution_count": None, "outputs": [], "source": source}


def _outputs(page: RecipePage, shown: Shown, figures: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    """Yield what a cell put out here and what a record has beyond it, labelled as on the page."""
    if page.run and shown.differ:
        yield _text(f"{ran_here(page.run)}:")
    yield from _made(shown.here, figures)
    if page.record and shown.there:
        yield _text(f"{recorded_on(page.record)}{'' if page.record.is_fresh(page.recipe) else STALE}:")
        yield from _made(shown.there, pictures(page.record, shown.there))


def _made(output: Output, figures: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    """Yield an output as a notebook has it, in the order of `show`."""
    for table in output.tables:
        yield _picture(png(table))
        yield _table(benchmark(table))
        yield from map(_text, clocks(table))
    for name in output.figures:
        yield _picture(figures[name])
    if output.text:
        yield _text(output.text)
    if output.frame:
        yield _table(output.frame)


def _text(printed: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": f"{printed}\n"}


def _picture(content: bytes) -> dict[str, Any]:
    return _display({"image/png": b64encode(content).decode()})


def _table(frame: Frame) -> dict[str, Any]:
    """Return a table, as markup and, for a program that shows none, in columns of text."""
    lines = [frame.columns, *frame.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    plain = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    rows = "".join(_row("td", row) for row in frame.rows)
    markup = f"<table><thead>{_row('th', frame.columns)}</thead><tbody>{rows}</tbody></table>"
    return _display({"text/html": markup, "text/plain": "\n".join(plain)})


def _row(kind: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(text)}</{kind}>' for text in texts)}</tr>"


def _display(data: dict[str, str]) -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": data}
