"""What one needs to refer to a figure: a link to each chart on a recipe's page."""

from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.transforms import SphinxTransform

from triton_gallery.records.output_diff import side_by_side
from triton_gallery.site import page_context
from triton_gallery.site.page_context import RecipePage

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the transform."""
    app.add_transform(LinkFigures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class LinkFigures(SphinxTransform):
    """Puts an anchor at each chart below the box, and below it the link."""

    default_priority = 620  # after charts have been put in their places

    def apply(self, **kwargs: object) -> None:
        """Add them, if the document is a recipe's page."""
        page = page_context.recipe_page(self.env, self.env.current_document.docname)
        if page is None or page.run is None:
            return
        seen: list[str] = []
        for chart, name in zip(_charts(self.document), _tables(self.env, page), strict=False):
            anchor = f"figure-{name}-{seen.count(name) + 1}" if name in seen else f"figure-{name}"
            seen.append(name)
            link = f'<a href="#{anchor}">Link to this figure</a>'
            place = chart.parent.index(chart)
            chart.parent.insert(place + 1, nodes.raw("", f'<p class="figure-links">{link}</p>', format="html"))
            chart.parent.insert(place, nodes.raw("", f'<span id="{anchor}"></span>', format="html"))


def _charts(document: nodes.document) -> list[nodes.raw]:
    box = [node for node in document.findall(nodes.container) if "glance" in node["classes"]]
    inside = {id(node) for container in box for node in container.findall(nodes.raw)}
    charts = (node for node in document.findall(nodes.raw) if node.astext().startswith('<div class="chart"'))
    return [chart for chart in charts if id(chart) not in inside]


def _tables(env: "BuildEnvironment", page: RecipePage) -> list[str]:
    """Return the names of the tables that the page shows, in the order of its charts."""
    figures = page_context.pages(env).figures(page.recipe)
    shown = side_by_side(page.run, page.record, figures) if page.run else []
    return [table.name for cell in shown for table in (*cell.here.tables, *cell.there.tables)]
