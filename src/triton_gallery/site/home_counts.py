"""What the home page claims, counted, and a benchmark that shows it."""

import hashlib
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.compiled.gpus import GPUS
from triton_gallery.recipe.op import op_of
from triton_gallery.records.output_diff import STALE, recorded_on
from triton_gallery.records.record_store import Record
from triton_gallery.site import other_gpus, page_context
from triton_gallery.site.chart import svg
from triton_gallery.site.render import page_link

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

STATE = "claims"  # the key in a page's metadata for what it shows


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directive, and make the page follow what it counts."""
    app.add_directive("claims", ClaimsDirective)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class ClaimsDirective(SphinxDirective):
    """`claims`: the counts, and the chart of the recipe that is the argument, `section/name`."""

    required_arguments: ClassVar[int] = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        gallery = self.env.config.sphinx_gallery_conf["gallery_dirs"]
        name = f"{gallery}/{self.arguments[0]}"
        page = page_context.recipe_page(self.env, name)
        if page is None:
            raise self.error(f"{self.arguments[0]} is no recipe")
        self.env.metadata[self.env.docname][STATE] = _state(self.env)
        claims = nodes.bullet_list("", *(_item(claim) for claim in _claims(self.env)), classes=["claims"])
        if page.record is None or page.table is None:
            return [claims]
        stale = "" if page.record.is_fresh(page.recipe) else STALE
        label = nodes.paragraph("", "", page_link(name))
        label += nodes.Text(f", {page.table.unit}: more is better. {recorded_on(page.record)}{stale}.")
        chart = nodes.raw("", f'<div class="chart">{svg(page.table)}</div>', format="html")
        return [claims, nodes.container("", chart, label, classes=["shown"])]


def _item(claim: str) -> nodes.list_item:
    return nodes.list_item("", nodes.paragraph("", claim))


def _claims(env: "BuildEnvironment") -> list[str]:
    """Return what there is, counted."""
    recipes = list(page_context.recipes(env).values())
    ops = [recipe for recipe in recipes if op_of(recipe)]
    kernels = [kernel for recipe in recipes if (of := other_gpus.kept(env, recipe)) for kernel in of.kernels]
    claims = [f"{len(recipes)} recipes, {len(ops)} ops to take"]
    if kernels:
        claims.append(f"{len(kernels)} kernels, compiled for {len(GPUS)} kinds of GPU")
    of_device: dict[str, list[Record]] = {}
    for recipe in recipes:
        for record in page_context.records(env).of(recipe):
            of_device.setdefault(record.environment.name, []).append(record)
    for device, records in of_device.items():
        first, last = min(record.date for record in records)[:10], max(record.date for record in records)[:10]
        when = first if first == last else f"{first} to {last}"
        claims.append(f"{len(records)} recipes run on {device}, {when}")
    return claims


def _state(env: "BuildEnvironment") -> str:
    """Identify what the page shows."""
    pages = [
        page for name in page_context.recipes(env) if (page := page_context.recipe_page(env, name)) and page.record
    ]
    fresh = [(page.recipe.key, page.table, page.record.is_fresh(page.recipe)) for page in pages if page.record]
    return hashlib.sha256(repr((_claims(env), fresh)).encode()).hexdigest()


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the page if it shows something else than it would now."""
    shown = {name: data[STATE] for name, data in env.metadata.items() if STATE in data and name in env.all_docs}
    now = _state(env) if shown else ""
    return [name for name, state in shown.items() if state != now]
