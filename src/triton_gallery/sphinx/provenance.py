"""The strip under a recipe's title: what executed it and when, its files to download, what went wrong if it failed."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

from triton_gallery.pages import Pages, Run

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the transform."""
    app.add_transform(Strip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Strip(SphinxTransform):
    """Puts the strip on each page that a run made."""

    default_priority = 600  # before downloads are collected

    def apply(self, **kwargs: object) -> None:
        """Insert the strip after the title of the document, if it is a recipe's page."""
        folder, _, key = self.env.current_document.docname.partition("/")
        if folder != self.config.sphinx_gallery_conf["gallery_dirs"]:
            return
        pages = Pages(Path(self.env.srcdir, folder))
        run = pages.run(key)
        if run is None:
            return
        self.env.note_dependency(str(pages.run_file(key)))
        for note in list(self.document.findall(nodes.note)):
            if "sphx-glr-download-link-note" in note["classes"]:
                note.parent.remove(note)
        title = next(self.document.findall(nodes.title))
        place = title.parent.index(title) + 1
        title.parent.insert(place, [_strip(run, self.document), *_failure(run)])


def _strip(run: Run, document: nodes.document) -> nodes.container:
    environment = run.environment
    day = datetime.fromisoformat(run.date).strftime("%Y-%m-%d")
    facts = [f"torch {environment.torch}", f"triton {environment.triton}", day]
    if environment.is_gpu:
        driver = [f"driver {environment.driver}"] if environment.driver else []
        facts = [*driver, *facts, f"page made in {run.seconds:.0f} s"]
    else:
        facts += [f"page made in {run.seconds:.0f} s; no kernel is timed here"]
    executed = nodes.paragraph(
        "", "Executed by ", nodes.strong("", environment.name), nodes.Text(f" · {' · '.join(facts)}")
    )
    downloads = nodes.paragraph(classes=["recipe-downloads"])
    for link in list(document.findall(addnodes.download_reference)):
        file = link["reftarget"].rpartition("/")[2]
        if file.endswith((".py", ".ipynb")):
            button = addnodes.download_reference("", "", nodes.Text(file), **link.attributes)
            downloads += [button, nodes.Text(" ")]
    return nodes.container("", executed, downloads, classes=["recipe-strip"])


def _failure(run: Run) -> list[nodes.Node]:
    if run.failure is None:
        return []
    box = nodes.danger(
        "", nodes.paragraph("", "This recipe failed when this page was built: ", nodes.literal("", run.failure))
    )
    if run.detail:
        box += nodes.literal_block(run.detail, run.detail, language="none")
    return [box]
