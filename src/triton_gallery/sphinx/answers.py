"""Folds the section "Answers" of a recipe, so that a reader can try first."""

from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.transforms import SphinxTransform

from triton_gallery.recipes.cells import is_footer

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the transform."""
    app.add_transform(FoldAnswers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class FoldAnswers(SphinxTransform):
    """Puts what follows the title "Answers" into an element that opens on a click."""

    default_priority = 600

    def apply(self, **kwargs: object) -> None:
        """Fold the section, if the document has one."""
        for section in self.document.findall(nodes.section):
            if section[0].astext() == "Answers":
                section.insert(1, nodes.raw("", "<details><summary>Show the answers</summary>", format="html"))
                end = next((place for place, node in enumerate(section) if is_footer(node)), len(section))
                section.insert(end, nodes.raw("", "</details>", format="html"))
