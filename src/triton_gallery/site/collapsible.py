"""Folds what a reader need not see at once: the opening, which is alike on all pages, the op, and "Answers"."""

from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.transforms import SphinxTransform

from triton_gallery.recipe.cells import cells, is_footer
from triton_gallery.recipe.op import SUFFIX
from triton_gallery.site.page_context import op_of_page, recipes

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the transforms."""
    app.add_transform(FoldAnswers)
    app.add_transform(FoldOpening)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class FoldAnswers(SphinxTransform):
    """Puts what follows the title "Answers" into an element that opens on a click, so that a reader can try first."""

    default_priority = 600

    def apply(self, **kwargs: object) -> None:
        """Fold the section, if the document has one."""
        for section in self.document.findall(nodes.section):
            if section[0].astext() == "Answers":
                end = next((place for place, node in enumerate(section) if is_footer(node)), len(section))
                fold(section, 1, end, "Show the answers")


class FoldOpening(SphinxTransform):
    """Puts a recipe's first cell into such an element, and an op that has a page; what they put out stays in sight."""

    default_priority = 610  # after outputs have been put in their places

    def apply(self, **kwargs: object) -> None:
        """Fold the cells, if the document is a recipe's page."""
        recipe = recipes(self.env).get(self.env.current_document.docname)
        if recipe is None:
            return
        op = op_of_page(self.env, recipe)
        for number, cell in enumerate(cells(self.document)):
            section, code = cell.code.parent, cell.code.astext()
            if number == 0:
                times = "def gpu_time(" in code
                summary = "Imports, the device, and what times calls" if times else "Imports and the device"
            elif op and f"\n{op.upper()}{SUFFIX} = " in f"\n{code}":
                summary = f"The op: {len(code.splitlines())} lines of code"
            else:
                continue
            place = section.index(cell.code)
            fold(section, place, place + 1, summary)


def fold(parent: nodes.Element, start: int, end: int, summary: str) -> None:
    """Fold the children of a node from one place up to another."""
    parent.insert(end, nodes.raw("", "</details>", format="html"))
    parent.insert(start, nodes.raw("", f'<details class="fold"><summary>{summary}</summary>', format="html"))
