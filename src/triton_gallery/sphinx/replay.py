"""Puts outputs in their places: charts for benchmarks that ran here, recorded outputs where this machine gave none."""

from dataclasses import replace
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.transforms import SphinxTransform

from triton_gallery.outputs import Cell, Output, cells
from triton_gallery.recipes import Recipe
from triton_gallery.records import Record
from triton_gallery.sphinx.page import recipe_page, recipes, records
from triton_gallery.sphinx.show import show

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the transform, and make pages follow their records."""
    app.add_transform(Replay)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Replay(SphinxTransform):
    """Goes through the cells of a recipe's page."""

    default_priority = 600  # before images are collected

    def apply(self, **kwargs: object) -> None:
        """Show the outputs of each cell."""
        name = self.env.current_document.docname
        page = recipe_page(self.env, name)
        if page is None:
            return
        self.env.metadata[name]["record"] = _state(page.record, page.recipe)
        run, record, recipe = page.run, page.record, page.recipe
        recorded = {output.code: output for output in record.outputs} if record else {}
        for index, cell in enumerate(cells(self.document)):
            live = run.outputs[index] if run and index < len(run.outputs) else None
            if live is None:
                continue
            if live.tables:
                _chart(cell, live)
            elif record and (more := _beyond(live, recorded.get(live.code))):
                folder = f"/_records/{record.path.parents[1].name}/{record.path.parent.name}"
                _append(cell, _label(record, recipe, show(more, folder)))


def _beyond(live: Output, recorded: Output | None) -> Output | None:
    """Return what a record has of a cell that this machine did not put out.

    That is all of it if this machine put out nothing, and the rest of the text if it put out the beginning.
    """
    if recorded is None or not live:
        return recorded
    if recorded.text.startswith(live.text) and len(recorded.text) > len(live.text):
        return Output(live.code, recorded.text[len(live.text) :].strip("\n"))
    return None


def _chart(cell: Cell, live: Output) -> None:
    """Replace what the benchmark printed by its chart and its table; other output stays."""
    for node in cell.texts:
        node.parent.remove(node)
    parent = cell.code.parent
    parent.insert(parent.index(cell.code) + 1, show(replace(live, figures=[], frame=None), figures=""))


def _append(cell: Cell, shown: list[nodes.Node]) -> None:
    last = cell.texts[-1] if cell.texts else cell.code
    last.parent.insert(last.parent.index(last) + 1, shown)


def _label(record: Record, recipe: Recipe, shown: list[nodes.Node]) -> list[nodes.Node]:
    label = nodes.paragraph("", f"Recorded on {record.device.name}, {record.date[:10]}", classes=["recorded-label"])
    if not record.is_fresh(recipe):
        label += nodes.strong("", " · stale: this recipe has changed since", classes=["stale"])
    return [nodes.container("", label, *shown, classes=["recorded"])]


def _state(record: Record | None, recipe: Recipe) -> str:
    """Describe which record a page shows, and how."""
    return f"{record.path} {record.path.stat().st_mtime_ns} {record.is_fresh(recipe)}" if record else ""


def _outdated(
    app: "Sphinx", env: "BuildEnvironment", added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Name the pages whose records have changed since they were read."""
    known = records(env)
    states = {page: _state(next(iter(known.of(recipe)), None), recipe) for page, recipe in recipes(env).items()}
    return [page for page, state in states.items() if env.metadata[page].get("record", "") != state]
