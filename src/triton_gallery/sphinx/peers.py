"""Our ops beside other libraries': a table for each device where they were measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.peers import UNIT, Peers, Row, load_all
from triton_gallery.recipes import Recipe
from triton_gallery.sphinx import page
from triton_gallery.sphinx.show import figure, first_cells, grid
from triton_gallery.tables import ROOF, TRITON

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

STATE = "peers"  # the key in a page's metadata for what it shows


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directive."""
    app.add_directive("peers", PeersDirective)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class PeersDirective(SphinxDirective):
    """`peers`: for each device a caption and a table."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        self.env.metadata[self.env.docname][STATE] = _state(self.env)
        found, recipes = _sources(self.env)
        if not found:
            return [nodes.paragraph("", "Nothing has been measured beside other libraries yet.")]
        gallery = self.env.config.sphinx_gallery_conf["gallery_dirs"]
        return [node for run in found for node in (_caption(run), _table(run, recipes, gallery))]


def _caption(run: Peers) -> nodes.paragraph:
    """Say where and with what a run was made."""
    versions = {"driver": run.device.driver, "torch": run.device.torch, "triton": run.device.triton, **run.packages}
    facts = [f"{name} {version}" for name, version in versions.items() if version] + [run.date[:10]]
    if run.commit:
        facts.append(f"commit {run.commit[:10]}")
    return nodes.paragraph(
        "", "", nodes.strong("", run.device.name), nodes.Text("".join(f" · {fact}" for fact in facts))
    )


def _table(run: Peers, recipes: Sequence[Recipe], gallery: str) -> nodes.Node:
    others = [name for row in run.rows for name in row.rates if name not in {TRITON, ROOF}]
    series = [TRITON, *dict.fromkeys(others), ROOF]
    columns = ["work", "size", "Triton / best other", "Triton / roof", f"Triton Gallery ({UNIT})", *series[1:]]
    table = grid(columns, [_cells(row, series) for row in run.rows], "peers", "sortable")
    stale = run.stale(recipes)
    for place, row in zip(first_cells(table), run.rows, strict=True):
        known = any(recipe.key == row.recipe for recipe in recipes)
        link = nodes.reference("", row.work, refuri=f"{gallery}/{row.recipe}.html", internal=True)
        place += link if known else nodes.Text(row.work)
        if row in stale:
            place += nodes.strong("", ", stale", classes=["stale"])
    return table


def _cells(row: Row, series: Sequence[str]) -> list[str]:
    medians = {name: rate[0] if rate else None for name, rate in row.rates.items()}
    other, roof = row.table.ratio(0), row.table.of_roof(0)
    return [
        "",
        " \N{MULTIPLICATION SIGN} ".join(map(str, row.shape)),
        f"{other:.2f}{' (tie)' if row.is_tie else ''}" if other else "",
        f"{roof:.2f}" if roof else "",
        *(figure(medians.get(name)) for name in series),
    ]


def _sources(env: "BuildEnvironment") -> tuple[list[Peers], list[Recipe]]:
    return load_all(page.records(env).folder), list(page.recipes(env).values())


def _state(env: "BuildEnvironment") -> str:
    """Describe what a page would show now."""
    found, recipes = _sources(env)
    return repr([(str(run.path), run.path.stat().st_mtime_ns, run.stale(recipes)) for run in found])


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the pages that show something else than they would now."""
    pages = {name: data[STATE] for name, data in env.metadata.items() if STATE in data and name in env.all_docs}
    return [name for name, shown in pages.items() if shown != _state(env)]
