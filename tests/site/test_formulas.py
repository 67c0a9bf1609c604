"""Formulas become MathML, with a font that has their characters, and plain text where no formula can be."""

import re
from collections.abc import Callable, Iterator
from itertools import chain
from textwrap import dedent
from xml.etree import ElementTree

import pytest
from fontTools.ttLib import TTFont
from math_core import LatexError
from project import ROOT, Project

from triton_gallery.recipe.hashes import blocks
from triton_gallery.site.formulas import NAMED_CHARACTER, mathml, plain_text

# In reST and in Markdown
INLINE = re.compile(r":math:`([^`]+)`|(?<![\w$])\$(?![\s({])([^$\n`]+)(?<!\s)\$(?!\w)")
BLOCK = re.compile(r"(?m)^( *)\.\. math::(.*(?:\n(?:\1 +.*| *))*)|^\$\$((?s:.+?))\$\$")


def texts() -> Iterator[str]:
    """Yield what is prose in the repository."""
    for path in sorted((ROOT / "gallery").rglob("*.py")):
        yield from (content for kind, content in blocks(path.read_text()) if kind == "text")
    for path in chain((ROOT / "gallery").rglob("*.rst"), (ROOT / "src" / "triton_gallery_ops").glob("*.py")):
        yield path.read_text()
    for path in chain((ROOT / "docs").glob("*.md"), (ROOT / "docs" / "guide").glob("*.md")):
        yield re.sub(r"(?ms)^( *)```.*?^\1```$", "", path.read_text())  # without code


def formulas() -> list[tuple[str, bool]]:
    """Return all formulas, and of each whether it is displayed."""
    found = {}
    for text in texts():
        found |= {(dedent(match[2] or match[3]).strip(), True): None for match in BLOCK.finditer(text)}
        found |= {(match[1] or match[2], False): None for match in INLINE.finditer(BLOCK.sub("", text))}
    return list(found)


def test_all_formulas_are_found() -> None:
    """The patterns above do not miss a kind: there are some hundreds, in line and displayed, in reST and Markdown."""
    found = formulas()
    assert len(found) > 250
    assert sum(block for _, block in found) > 50
    assert (r"\frac{3 N s}{10^9\, t}\ \text{GB/s}.", True) in found  # docs/guide/read.md
    assert ("N", False) in found


def test_all_formulas_convert() -> None:
    characters = TTFont(ROOT / "docs" / "_static" / "stix-two-math.woff").getBestCmap()
    for tex, block in formulas():
        markup = mathml(tex, block)
        shown = "".join(ElementTree.fromstring(NAMED_CHARACTER.sub("", markup)).itertext())
        text = plain_text(markup)
        for output in (shown, text):
            assert output.strip(), tex
            assert not re.search(r"[\\{}$&]", output), (tex, output)
        assert "<" not in text.replace(" < ", ""), text
        assert {ord(character) for character in shown} <= characters.keys(), "see docs/_static/stix-two-math.txt"


@pytest.mark.parametrize(
    ("tex", "text"),
    [
        (r"\frac{x_i - m}{n}", "(x_i\N{MINUS SIGN}m)/n"),
        (r"e^{x_k - m}", "e^(x_k\N{MINUS SIGN}m)"),
        (r"m = \max_k x_k", "m = max_k x_k"),
        (r"\sum_{j < i} S'_{ij}\,\hat x", "∑_(j < i) S_ij\N{PRIME} x̂"),
        (r"\sqrt{a + \tfrac12}", "√(a + 1/2)"),
        (r"\begin{aligned} a &= \log b \\ c &= -d \end{aligned}", "a = log b c = \N{MINUS SIGN}d"),
        (r"\lVert x \rVert \in \mathit{Set}", "‖x‖ ∈ Set"),
    ],
)
def test_formula_as_text(tex: str, text: str) -> None:
    assert plain_text(mathml(tex, block=True)) == text


@pytest.mark.parametrize("tex", [r"\foo", r"\frac{a}", "{a", r"a \\ b", r"\begin{cases} a \end{cases} \\ b", "a & b"])
def test_wrong_formula_is_refused(tex: str) -> None:
    with pytest.raises(LatexError):
        mathml(tex, block=True)


def test_build_names_the_place_of_a_wrong_formula(make_project: Callable[..., Project]) -> None:
    project = make_project()
    text = "# %%\n# Good: :math:`\\alpha_1`.\n#\n# .. math:: \\frac{1}{2}\n#\n# Wrong: :math:`a + \\foo`.\nprint(1)"
    project.write(formula=text.replace(r"\foo", "b"))
    status, output = project.build()
    assert status == 0, output
    page = project.page("formula")
    assert "<math><msub><mi>\N{GREEK SMALL LETTER ALPHA}</mi><mn>1</mn></msub></math>" in page
    assert '<math display="block">' in page
    assert not re.search(r"\\frac|\\alpha|katex|mathjax", page, re.IGNORECASE)
    assert "frac" not in (project.root / "_build" / "html" / "_static" / "search_index.js").read_text()
    assert r"\\frac" in next(project.root.glob("docs/recipes/things/formula.ipynb")).read_text()

    project.write(formula=text)
    status, output = project.build()
    assert status != 0
    (line,) = [line for line in output.splitlines() if r"\foo" in line]
    assert re.search(r"recipes/things/formula\.rst:\d+: WARNING: formula a \+ \\foo: .*Unknown command", line), line
