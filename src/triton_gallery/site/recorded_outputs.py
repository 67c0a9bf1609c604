"""Puts outputs in their places: charts for benchmarks that ran here, recorded outputs beside what a GPU did not do."""

from typing import TYPE_CHECKING

from docutils import nodes
from msgspec.structs import replace
from sphinx.transforms import SphinxTransform

from triton_gallery.recipe.cells import Cell, cells
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.outputs import Output
from triton_gallery.records.output_diff import STALE, Shown, ran_here, recorded_on, side_by_side
from triton_gallery.records.page_cache import Run
from triton_gallery.records.record_store import Record
from triton_gallery.site.page_context import pages, recipe_page, recipes, records
from triton_gallery.site.render import frame, show

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
        if page.run is None:
            return
        figures = pages(self.env).figures(page.recipe)
        for cell, shown in zip(cells(self.document), side_by_side(page.run, page.record, figures), strict=False):
            _show_frame(cell, shown.here)
            here = _chart(cell, shown.here) if shown.here.tables else cell.outputs
            if page.record and shown.there:
                _set_beside(cell, here, shown, page.run, page.record, page.recipe)


def _set_beside(cell: Cell, here: list[nodes.Node], shown: Shown, run: Run, record: Record, recipe: Recipe) -> None:
    """Show what a record has of a cell and this machine has not; where they differ, both say what they are."""
    folder = f"/_records/{record.path.parents[1].name}/{record.path.parent.name}"
    last = here[-1] if here else cell.code
    parent = cell.code.parent
    about = parent[0].astext() if isinstance(parent, nodes.section) else recipe.name
    recorded = _labelled("recorded", _label(record, recipe), show(shown.there, folder, about))
    parent.insert(parent.index(last) + 1, recorded)
    if shown.differ:
        place = parent.index(here[0])
        for node in here:
            parent.remove(node)
        parent.insert(place, _labelled("here", [nodes.Text(ran_here(run))], here))


def _show_frame(cell: Cell, live: Output) -> None:
    """Show the data frame that a cell ends with as one that was recorded, in place of what pandas makes of it."""
    for place, node in enumerate(cell.outputs):
        if live.frame and isinstance(node, nodes.raw) and "dataframe" in node.astext():
            shown = frame(live.frame, "dataframe")
            node.replace_self(shown)
            cell.outputs[place] = shown


def _chart(cell: Cell, live: Output) -> list[nodes.Node]:
    """Replace what the benchmark printed by its chart and its table; return the outputs, of which the others stay."""
    for node in cell.texts:
        node.parent.remove(node)
    shown = show(replace(live, figures=[], frame=None), figures="")
    parent = cell.code.parent
    parent.insert(parent.index(cell.code) + 1, shown)
    return [*shown, *(node for node in cell.outputs if node not in cell.texts)]


def _label(record: Record, recipe: Recipe) -> list[nodes.Node]:
    said: list[nodes.Node] = [nodes.Text(recorded_on(record))]
    if not record.is_fresh(recipe):
        said.append(nodes.strong("", STALE, classes=["stale"]))
    return said


def _labelled(kind: str, label: list[nodes.Node], shown: list[nodes.Node]) -> nodes.container:
    return nodes.container("", nodes.paragraph("", "", *label, classes=[f"{kind}-label"]), *shown, classes=[kind])


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
