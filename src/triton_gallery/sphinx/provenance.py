"""The strip under a recipe's title: what executed it and when, its files to download, what went wrong if it failed."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

from triton_gallery.recipes.device import Environment
from triton_gallery.records.formats import Device
from triton_gallery.records.pages import Run
from triton_gallery.records.recorded import Record
from triton_gallery.sphinx.lookup import RecipePage, pages, recipe_page

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
        page = recipe_page(self.env, self.env.current_document.docname)
        if page is None or page.run is None:
            return
        self.env.note_dependency(str(pages(self.env).run_file(page.recipe.key)))
        for note in list(self.document.findall(nodes.note)):
            if "sphx-glr-download-link-note" in note["classes"]:
                note.parent.remove(note)
        title = next(self.document.findall(nodes.title))
        place = title.parent.index(title) + 1
        title.parent.insert(place, [_strip(page, page.run, self.document), *_failure(page.run)])


def _strip(page: RecipePage, run: Run, document: nodes.document) -> nodes.container:
    environment = run.environment
    facts = [*_software(environment, run.packages), run.date[:10], f"page made in {run.seconds:.0f} s"]
    if not environment.is_gpu:
        facts[-1] += "; no kernel is timed here"
    lines = [_line("Executed by ", environment.name, facts)]
    record = _record(page, run)
    if run.missing:
        lines = [_line("Not executed where this page was built, which lacks ", ", ".join(run.missing), [])]
    if record and (run.missing or not environment.is_gpu):
        stale = [] if record.is_fresh(page.recipe) else ["of older code"]
        facts = [*_software(record.device, record.packages), record.date[:10], *stale, *_sanitized(page, record)]
        lines.append(_line("GPU outputs recorded on ", record.device.name, facts))
    elif record:
        lines[0] += nodes.Text("".join(f" · {fact}" for fact in _sanitized(page, record)))
    downloads = nodes.paragraph(classes=["recipe-downloads"])
    for link in list(document.findall(addnodes.download_reference)):
        file = link["reftarget"].rpartition("/")[2]
        if file.endswith((".py", ".ipynb")):
            button = addnodes.download_reference("", "", nodes.Text(file), **link.attributes)
            downloads += [button, nodes.Text(" ")]
    for path in page.recipe.companions:
        target = os.path.relpath(path, document.settings.env.srcdir)
        downloads += [
            addnodes.download_reference("", "", nodes.Text(path.name), reftarget=f"/{target}"),
            nodes.Text(" "),
        ]
    return nodes.container("", nodes.container("", *lines), downloads, classes=["recipe-strip"])


def _line(what: str, device: str, facts: list[str]) -> nodes.paragraph:
    return nodes.paragraph("", what, nodes.strong("", device), nodes.Text("".join(f" · {fact}" for fact in facts)))


def _software(device: Environment | Device, packages: Mapping[str, str]) -> list[str]:
    driver = [f"driver {device.driver}"] if device.driver else []
    more = [f"{name} {version}" for name, version in packages.items()]
    return [*driver, f"torch {device.torch}", f"triton {device.triton}", *more]


def _record(page: RecipePage, run: Run) -> Record | None:
    """Return the record that tells of this page: of the GPU that executed it, or the one that is shown on it."""
    if run.environment.is_gpu and not run.missing:
        return next((record for record in page.records if record.device.name == run.environment.name), None)
    return page.record


def _sanitized(page: RecipePage, record: Record) -> list[str]:
    """Say which sanitizers found nothing, if they looked at the recipe's present code."""
    tools = record.sanitized if record.is_fresh(page.recipe) else []
    return [f"{', '.join(tools)} clean"] if tools else []


def _failure(run: Run) -> list[nodes.Node]:
    if run.failure is None:
        return []
    box = nodes.danger(
        "", nodes.paragraph("", "This recipe failed when this page was built: ", nodes.literal("", run.failure))
    )
    if run.detail:
        box += nodes.literal_block(run.detail, run.detail, language="none")
    return [box]
