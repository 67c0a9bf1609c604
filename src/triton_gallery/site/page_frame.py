"""What stands around each page: the link to report a mistake, and the versions of the site."""

import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlparse

from sphinx.application import Sphinx

from triton_gallery.site import page_context

VERSIONS = "versions.js"  # at the site's root: its released versions


def add_to_context(app: Sphinx, page: str, template: str, context: dict[str, Any], _: object) -> None:
    """Give the template of pages the address of a new issue, and the root of the site; each if it is known."""
    if repository := page_context.repository_address(app.env):
        title = unescape(re.sub(r"<[^>]+>", "", context.get("title", page)))
        address = context.get("pageurl") or app.builder.get_target_uri(page)
        query = urlencode({"title": f"{title}: ", "body": f"On {address}:\n\n"}, quote_via=quote)
        context["report_address"] = f"{repository}/issues/new?{query}"
    if site := page_context.site_address(app.env):
        context["site_root"] = urlparse(site).path


def write(app: Sphinx) -> None:
    """Write an empty list of versions, in whose place whoever deploys the site with some puts theirs."""
    if page_context.site_address(app.env):
        Path(app.outdir, VERSIONS).write_text("globalThis.siteVersions = [];\n", encoding="utf-8")
