"""Puts the figures that step through kernels on pages: each after the cell that defines its kernel."""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from triton_gallery.recipe.contents import load
from triton_gallery.site.page_context import RecipePage, recipes
from triton_gallery.site.render import html
from triton_gallery.site.step_drawing import HATCH, drawing
from triton_gallery.step_through import recordings
from triton_gallery.step_through.trace import Figure, Recording

FOLDER = Path("_build", "steps")

logger = logging.getLogger(__name__)


def record(app: Sphinx) -> None:
    """Record the figures of lessons when a build begins; a warning for each that failed."""
    conf = app.config.sphinx_gallery_conf
    lessons = load(Path(app.confdir, "gallery"))
    made = recordings.refresh(lessons, Path(app.confdir, FOLDER), logger.info)
    for key, recording in made.items():
        if recording.failure:
            logger.warning("no figure: %s", recording.failure, location=f"{conf['gallery_dirs']}/{key}")


def add_figures(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Put the figures of a lesson on its page, or the reason why there are none."""
    if not page.declared.of_op.step_through:
        return
    recording = _recording(env, page.name)
    for number, declared in enumerate(page.declared.of_op.step_through):
        block = next((node for node in document.findall(nodes.literal_block) if _defines(node, declared.kernel)), None)
        if block is None:
            logger.warning("no cell defines the kernel %s of a figure", declared.kernel, location=page.name)
            continue
        child: nodes.Element = block
        while not isinstance(child.parent, nodes.section):
            child = child.parent
        section, place = child.parent, child.parent.index(child) + 1
        while place < len(section) and not isinstance(section[place], (nodes.comment, nodes.section, nodes.paragraph)):
            place += 1
        section.insert(place, _shown(recording, number, is_first=number == 0))


def _defines(node: nodes.literal_block, kernel: str) -> bool:
    return f"\ndef {kernel}(" in f"\n{node.astext()}"


def _recording(env: BuildEnvironment, page: str) -> Recording | None:
    """Return the recording of a lesson; the page is read again when it is made again."""
    path = recordings.path_of(Path(env.app.confdir, FOLDER), recipes(env)[page])
    env.note_dependency(str(path))
    return recordings.read(path)


def _shown(recording: Recording | None, number: int, is_first: bool) -> nodes.Node:
    """Return a figure, or why there is none."""
    if recording and not recording.failure:
        return html((HATCH if is_first else "") + drawing(recording.figures[number]))
    reason = recording.failure if recording else "it was not recorded"
    return nodes.error("", nodes.paragraph("", f"The figure of this kernel could not be made: {reason}"))


class StepThroughDirective(SphinxDirective):
    """`{step-through} section/name kernel`: a lesson's figure on another page."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Return the figure."""
        key, kernel = self.arguments
        recording = _recording(self.env, f"{self.config.sphinx_gallery_conf['gallery_dirs']}/{key}")
        figures: list[Figure] = recording.figures if recording else []
        numbers = [number for number, figure in enumerate(figures) if figure.kernel == kernel]
        if not numbers:
            raise self.error(f"{key} has no figure of {kernel}: {recording.failure if recording else 'not recorded'}")
        return [_shown(recording, numbers[0], is_first=True)]
