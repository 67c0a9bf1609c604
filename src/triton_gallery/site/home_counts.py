"""The counts on the home page, and a chart."""

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.compiled.gpus import GPUS
from triton_gallery.recipe.op import op_of
from triton_gallery.records.output_diff import STALE, recorded_on
from triton_gallery.records.record_store import Record
from triton_gallery.site import other_gpus, page_context
from triton_gallery.site.chart import chart
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.panels import Panel, figure_of
from triton_gallery.site.render import bullets, html, page_link, paragraph


class ClaimsDirective(SphinxDirective):
    """`claims`: the counts, and the chart of the recipe given as `section/name`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        page = page_context.recipe_page(self.env, page_context.page_name(self.env, self.arguments[0]))
        if page is None:
            raise self.error(f"{self.arguments[0]} is no recipe")
        depends_on(self.env, shown)
        claims = bullets(map(paragraph, _claims(self.env)), "claims")
        if page.record is None or page.table is None:
            return [claims]
        stale = "" if page.record.is_fresh(page.recipe) else STALE
        facts = f", {page.table.unit}: more is better. {recorded_on(page.record)}{stale}."
        label = paragraph(page_link(page.name), facts)
        return [
            claims,
            nodes.container("", *figure_of([Panel({}, [html(chart(page.table))])]), label, classes=["shown"]),
        ]


def _claims(env: BuildEnvironment) -> list[str]:
    """Return the counts, in words."""
    recipes = list(page_context.recipes(env).values())
    ops = [recipe for recipe in recipes if op_of(recipe)]
    kernels = [kernel for recipe in recipes if (kept := other_gpus.kept(env, recipe)) for kernel in kept.kernels]
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


def shown(env: BuildEnvironment) -> object:
    """Return what the page shows; for `freshness.depends_on`."""
    pages = [page for page in page_context.recipe_pages(env) if page.record]
    return _claims(env), [(page.table, page_context.record_shown(env, page.name)) for page in pages]
