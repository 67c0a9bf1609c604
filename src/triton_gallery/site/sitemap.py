"""The sitemap, where the site knows its address."""

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

NAMESPACE = "http://www.sitemaps.org/schemas/sitemap/0.9"


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Have it written when the site is."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write(app: "Sphinx", exception: Exception | None) -> None:
    address = app.config.html_baseurl
    if exception or app.builder.format != "html" or not address:
        return
    pages = (urljoin(address, app.builder.get_target_uri(page)) for page in sorted(app.env.all_docs))
    places = "".join(f"<url><loc>{escape(page)}</loc></url>\n" for page in pages)
    text = f'<?xml version="1.0" encoding="utf-8"?>\n<urlset xmlns="{NAMESPACE}">\n{places}</urlset>\n'
    Path(app.outdir, "sitemap.xml").write_text(text, encoding="utf-8")
