"""A zip of each section: its scripts, its notebooks with their outputs, and the files that go with them."""

import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes
from sphinx.transforms import SphinxTransform

from triton_gallery.sphinx import lookup

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

FOLDER = "sections"  # of the site


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the transform, and have the zips written when the site is."""
    app.add_transform(OfferBundle)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class OfferBundle(SphinxTransform):
    """Puts a link to its zip at the end of a section's page."""

    default_priority = 600

    def apply(self, **kwargs: object) -> None:
        """Add the link, if the document is a section's page."""
        gallery = self.env.config.sphinx_gallery_conf["gallery_dirs"]
        sections = {recipe.section for recipe in lookup.recipes(self.env).values()}
        for section in sections:
            if self.env.current_document.docname == f"{gallery}/{section}/index":
                link = f'<a href="../../{FOLDER}/{section}.zip" download>{section}.zip</a>'
                text = f"<p>All scripts and notebooks of this section: {link}</p>"
                next(iter(self.document.findall(nodes.section))).append(nodes.raw("", text, format="html"))


def _write(app: "Sphinx", exception: Exception | None) -> None:
    if exception or app.builder.format != "html":
        return
    folder = Path(app.outdir, FOLDER)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    recipes, pages = lookup.recipes(app.env).values(), lookup.pages(app.env)
    for section in dict.fromkeys(recipe.section for recipe in recipes):
        with zipfile.ZipFile(folder / f"{section}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            licence = Path(app.confdir, "LICENSE")
            of_section = [recipe for recipe in recipes if recipe.section == section]
            files = [path for it in of_section for path in (it.path, pages.notebook(it), *it.companions)]
            for path in [licence, *files]:
                name = zipfile.ZipInfo(f"{section}/{path.name}")  # without a date: the same each time
                archive.writestr(name, path.read_bytes(), zipfile.ZIP_DEFLATED)
