"""Hands over the ops: of each recipe one file that stands alone, and all of them in one zip."""

import zipfile
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from docutils import nodes

from triton_gallery.figures.ratios import Summary, summaries
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.op import Op, op_of
from triton_gallery.site import page_context
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import figure, size

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

FOLDER = "ops"  # of the site
ZIP = "triton_gallery_ops"
LICENCE = """\
SPDX-FileCopyrightText: 2026 The Triton Gallery authors
SPDX-License-Identifier: MIT
Take it, change it, ship it; keep these lines."""


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Have the files written when the site is."""
    app.connect("build-finished", _write)
    app.add_js_file("take.js", defer="defer")
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def buttons(env: "BuildEnvironment", page: RecipePage, up: str = "../../") -> list[nodes.Node]:
    """Return what takes the op of a recipe, to a file or to the clipboard; nothing if it has none.

    `up` leads from the page to the top of the site.
    """
    op = op_of(page.recipe)
    if op is None:
        return []
    file = f"{up}{FOLDER}/{_file(op.name)}"
    text = escape(text_of(env, op, page))
    take = f'<a class="take" href="{file}" download>Take the op: {_file(op.name)}</a>'
    copy = f'<button class="take" type="button" data-clipboard-text="{text}">Copy the op</button>'
    return [nodes.raw("", f"{take} {copy} ", format="html")]


def text_of(env: "BuildEnvironment", op: Op, page: RecipePage) -> str:
    """Return the file of an op: what it is, whence, under which licence and how fast, then its imports and its cell."""
    address = f"{env.config.html_baseurl.rstrip('/')}/" if env.config.html_baseurl else ""
    facts = [
        f"{op.title}: an op of the Triton Gallery, {address}{FOLDER}/{op.name}.html",
        "",
        *LICENCE.splitlines(),
        "",
    ]
    declared = declaration(page.recipe.path, page.recipe.text)
    needs = " and ".join(str(package) for package in declared.packages if package.name in {"torch", "triton"})
    spaces = [name for name in op.names if name.endswith("_NAMESPACE")]
    facts += [f"Needs {needs}. {name} is yours to set, to a Python identifier." for name in spaces]
    facts += [] if declared.gpus else ["Without a GPU, set TRITON_INTERPRET=1 before triton is imported."]
    for item in summaries(page.records[:1], [], page.recipe):
        facts += ["", *_measured(item)]
    head = "\n".join(f"# {fact}".rstrip() for fact in facts)
    return f"{head}\n\n{op.code}"


def _file(name: str) -> str:
    return f"{name}_op.py"


def _measured(item: Summary) -> list[str]:
    """Return a benchmark as lines of text."""
    where, table = item.environment, item.table
    older = "" if item.is_fresh else ", of older code"
    what = f"{item.kind}, {table.unit}" if item.kind else table.unit
    said = f"{where.name}, torch {where.torch}, triton {where.triton}, {item.date[:10]}{older}: {what}"
    rows = [[size(x), *(figure(values[place]) for values in table.series.values())] for place, x in enumerate(table.xs)]
    rows.insert(0, [table.x, *table.series])
    if table.cpu:
        found = [[time for time in table.cpu.get(name, []) if time is not None] for name in table.series]
        rows.append(["CPU us", *(figure(median(times)) if times else "" for times in found)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [said, *("  ".join(map(str.rjust, row, widths)) for row in rows)]


def _write(app: "Sphinx", exception: Exception | None) -> None:
    """Write a file for each op, and the zip."""
    if exception or app.builder.format != "html":
        return
    found = [page for name in page_context.recipes(app.env) if (page := page_context.recipe_page(app.env, name))]
    files = {_file(op.name): text_of(app.env, op, page) for page in found if (op := op_of(page.recipe))}
    folder = Path(app.outdir, FOLDER)
    folder.mkdir(exist_ok=True)
    for old in folder.glob(_file("*")):
        old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    with zipfile.ZipFile(folder / f"{ZIP}.zip", "w") as archive:
        licence = Path(app.confdir, "LICENSE").read_text(encoding="utf-8")
        for name, text in {"LICENSE": licence, "__init__.py": "", **files}.items():
            archive.writestr(zipfile.ZipInfo(f"{ZIP}/{name}"), text)  # without a date: the same each time
