r"""Formulas as MathML, which browsers typeset themselves.

Each is converted when its page is read. From then on its text, which descriptions and the search take, is plain: that
of ``\frac{x_i + 1}{n}`` is (x_i + 1)/n.
"""

import re
from html import unescape
from unicodedata import normalize
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import toplevel_code
from math_core import LatexError, LatexToMathML
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

LOGGER = logging.getLogger(__name__)
CONVERTER = LatexToMathML(fancy_error=False)
MATHML = "mathml"  # the attribute of a formula's node
NAMED_CHARACTER = re.compile(r"&(?!lt;|gt;|amp;)\w+;")  # in HTML, not in XML
SCRIPTS = {"msub": "_", "munder": "_", "msup": "^", "mover": " ", "mfrac": "/", "msubsup": "_^", "munderover": "_^"}
SPACED = "=<>≤≥≈∈+"  # operators between spaces
CHARACTERS = {
    "\N{MODIFIER LETTER CIRCUMFLEX ACCENT}": "\N{COMBINING CIRCUMFLEX ACCENT}",
    "\N{MACRON}": "\N{COMBINING MACRON}",
    "\N{FUNCTION APPLICATION}": " ",
    **{sign: f" {sign} " for sign in SPACED},
}
USELESS_SPACE = re.compile(rf"(?<![{SPACED}]) +(?=[^\w\s(\[√∑∂{SPACED}])")


def convert(document: nodes.document) -> None:
    """Convert the formulas of a page; warn of each that cannot be, which fails the build."""
    for node in (*document.findall(nodes.math), *document.findall(nodes.math_block)):
        tex = node.astext()
        try:
            node[MATHML] = mathml(tex, isinstance(node, nodes.math_block))
        except LatexError as error:
            LOGGER.warning("formula %s: at character %s", tex, error, location=node)
        else:
            node[:] = [nodes.Text(plain_text(node[MATHML]))]


def mathml(tex: str, block: bool) -> str:
    """Return a formula as MathML; raise `LatexError` if it is wrong or has an unknown command."""
    if r"\\" in toplevel_code(tex):  # the converter would ignore it
        raise LatexError(rf"{tex.index(chr(92) * 2)}: a line ends outside of \begin{{aligned}} … \end{{aligned}}")
    markup = CONVERTER.convert_with_local_state(tex, displaystyle=block)
    return markup.replace("<mo>\N{PRIME}", '<mo class="prime">\N{PRIME}')


def plain_text(markup: str) -> str:
    """Return MathML as a line of text."""
    xml = NAMED_CHARACTER.sub(lambda match: unescape(match[0]), markup)
    text = normalize("NFKC", _text(ElementTree.fromstring(xml)))  # noqa: S314 - it is our own
    text = text.replace("^\N{PRIME}", "\N{PRIME}")
    return " ".join(USELESS_SPACE.sub("", text).split())


def _text(element: ElementTree.Element) -> str:
    parts = [_text(child) for child in element]
    if signs := SCRIPTS.get(element.tag):
        base, *scripts = map(_grouped, parts)
        return "".join((base, *map("".join, zip(signs.strip() or [""], scripts, strict=True)), " "))
    text = CHARACTERS.get(element.text or "", element.text or "") + "".join(parts)
    if element.tag == "msqrt":
        return f"√{_grouped(text)}"
    name = element.tag == "mo" and text.isalpha()  # log
    return f"{text} " if name or element.tag in ("mtd", "mtr") or element.get("width") else text


def _grouped(part: str) -> str:
    part = part.strip()
    return part if len(part) < 2 or part.isalnum() else f"({part})"


def visit(self: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write a formula into a page."""
    markup = node.get(MATHML, "")
    if isinstance(node, nodes.math_block):
        markup = f"{self.starttag(node, 'div', CLASS='math')}{markup}</div>\n"
    self.body.append(markup)
    raise nodes.SkipNode
