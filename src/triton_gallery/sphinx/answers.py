"""Folds the section "Answers" of a recipe, so that a reader can try first."""

from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.transforms import SphinxTransform

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
                end = next((node for node in section if "sphx-glr-footer" in _classes(node)), None)
                section.insert(section.index(end) if end else len(section), nodes.raw("", "</details>", format="html"))


def _classes(node: nodes.Node) -> list[str]:
    return list(node["classes"]) if isinstance(node, nodes.Element) else []
