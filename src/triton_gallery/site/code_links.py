"""Links in a recipe's code: names of Triton and PyTorch lead to their documentation."""

import re
from html import escape
from typing import TYPE_CHECKING, Any

from triton_gallery.recipe.names import uses
from triton_gallery.site import page_context
from triton_gallery.site.api_inventory import address_of

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.util.typing import ExtensionMetadata

CODE = re.compile(r'(?s)<div class="highlight-Python notranslate">.*?</pre>')
DOT = '<span class="o">.</span>'  # as Pygments marks up what it colours


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Have the links set when a page is written."""
    app.connect("html-page-context", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def linked(markup: str, addresses: dict[str, str]) -> str:
    """Return the markup of code with links on names, given where each leads, by how the code writes it."""
    if not addresses:
        return markup
    forms = sorted(addresses, key=len, reverse=True)
    pattern = re.compile(rf"(?<!{re.escape(DOT)})(?:{'|'.join(map(_spans, forms))})")

    def link(match: re.Match[str]) -> str:
        written = re.sub(r"<[^>]*>|@", "", match[0])
        return f'<a class="code-link" href="{escape(addresses[written])}">{match[0]}</a>'

    return pattern.sub(link, markup)


def _spans(written: str) -> str:
    """Return a pattern for the markup of a name."""
    first, *rest = (re.escape(part) for part in written.split("."))
    spans = [rf'<span class="n[a-z]?">@?{first}</span>', *(rf'<span class="n[a-z]?">{part}</span>' for part in rest)]
    return re.escape(DOT).join(spans)


def _link(app: "Sphinx", page: str, template: str, context: dict[str, Any], _: object) -> None:
    recipe = page_context.recipes(app.env).get(page)
    if recipe is None or "body" not in context:
        return
    found = ((use.written, address_of(use.name)) for use in uses(recipe.text))
    addresses = {written: address for written, address in found if address}
    context["body"] = CODE.sub(lambda block: linked(block[0], addresses), context["body"])
