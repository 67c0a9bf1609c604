"""Names of Triton and PyTorch: found in scripts, listed with the recipes that use them, linked where they stand."""

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from bs4 import BeautifulSoup
from project import ROOT
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.names import Use, uses
from triton_gallery.site.api import TABLE, address_of, in_full
from triton_gallery.site.links import linked

RECIPES = load(ROOT / "gallery")
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)

SCRIPT = """
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton as wrap
from triton.testing import Benchmark

@triton.jit
def kernel(x_ptr, wrap):
    tl.store(x_ptr, tl.load(x_ptr).to(tl.float32))

def other():
    import torch
    return torch.ones(3).sum(), F.gelu

Benchmark = 3
print(wrap, Benchmark, np.load, triton_op)
"""


def test_names_are_resolved_through_imports() -> None:
    """Aliases too; what the script also calls something else tells nothing."""
    found = dict.fromkeys(uses(SCRIPT))
    assert list(found) == [
        Use("triton.jit", "triton.jit"),
        Use("tl.store", "triton.language.store"),
        Use("tl.load", "triton.language.load"),
        Use("tl.float32", "triton.language.float32"),
        Use("torch.ones", "torch.ones"),
        Use("F.gelu", "torch.nn.functional.gelu"),
        Use("triton_op", "torch.library.triton_op"),
    ]


@pytest.mark.usefixtures("quick_interpreter")  # it imports Triton
def test_table_of_documentation_has_names_that_exist() -> None:
    names = [name for line in re.findall(r'(?s)names = "+(.*?)"', TABLE.read_text()) for name in line.split()]
    assert len(names) == len(set(names)) > 100
    missing = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not hasattr(importlib.import_module(module), attribute):
            missing.append(name)
    assert missing == []
    assert {urlsplit(address_of(name) or "").hostname for name in names} == {"triton-lang.org", "docs.pytorch.org"}


def test_address_is_that_of_the_name_or_of_its_class() -> None:
    load_page = "https://triton-lang.org/main/python-api/generated/triton.language.load.html"
    assert address_of(in_full("tl.load")) == load_page
    assert address_of("torch.device.type") == address_of("torch.device")
    assert address_of("torch.no_such_thing") is None
    assert address_of("load") is None


def test_code_keeps_its_text_and_gets_links() -> None:
    code = "@triton.jit\ndef kernel(x):\n    y = tl.load(x.tl.load)\n"
    markup = highlight(code, PythonLexer(), HtmlFormatter())
    page = BeautifulSoup(linked(markup, {"tl.load": "L", "triton.jit": "J"}), "html.parser")
    assert page.get_text() == BeautifulSoup(markup, "html.parser").get_text()
    links = [(link.text, link["href"]) for link in page.select("a.code-link")]
    assert links == [("@triton.jit", "J"), ("tl.load", "L")]


@pytest.fixture(scope="module")
def listed(parsed: Callable[[str], BeautifulSoup]) -> dict[str, set[str]]:
    """Return the names on the page of names, and the recipes of each."""
    page = parsed("api.html")
    terms = page.select("dl.names > dt")
    return {
        term["id"].removeprefix("name-"): {
            link["href"].removeprefix("recipes/").removesuffix(".html")
            for link in term.find_next_sibling("dd").select("a")
        }
        for term in terms
    }


def test_names_have_all_recipes_that_use_them(listed: dict[str, set[str]]) -> None:
    for name in ("dot", "associative_scan", "topk", "make_tensor_descriptor", "atomic_add"):
        having = {recipe.key for recipe in RECIPES if f"tl.{name}(" in code_of(recipe)}
        assert listed.get(f"triton.language.{name}", set()) == having
    assert listed["torch.library.triton_op"] >= {"pytorch/triton_op", "fusion/softmax"}
    assert not any(part.startswith("_") for name in listed for part in name.split("."))


def code_of(recipe: Recipe) -> str:
    """Return a recipe's code without comments and texts that stand for themselves."""
    tree = ast.parse(recipe.text)
    return "\n".join(ast.unparse(node) for node in tree.body if not isinstance(getattr(node, "value", 0), ast.Constant))


def test_names_can_be_searched(site: Path) -> None:
    assert '"tl.topk"' in (site / "_static" / "search_index.js").read_text()


@each_recipe
def test_names_in_code_lead_to_their_documentation(parsed: Callable[[str], BeautifulSoup], recipe: Recipe) -> None:
    page = parsed(f"recipes/{recipe.key}.html")
    links = page.select(".highlight-Python a.code-link")
    assert links
    by_name = {use.written: use.name for use in uses(recipe.text)}
    for link in links:
        assert link["href"] == address_of(by_name[link.text.removeprefix("@")])
    attributes = [node for node in ast.walk(ast.parse(recipe.text)) if isinstance(node, ast.Attribute)]
    loads = sum(ast.unparse(node) == "tl.load" for node in attributes)
    assert sum(link.text == "tl.load" for link in links) == loads


def test_names_in_prose_are_linked_once(parsed: Callable[[str], BeautifulSoup]) -> None:
    page = parsed("recipes/matmul/matmul.html")
    links = [link["href"] for link in page.select("p a.code-link, li a.code-link")]
    assert address_of("triton.language.dot") in links
    assert len(links) == len(set(links))


def test_terms_lead_to_recipes_that_show_them(parsed: Callable[[str], BeautifulSoup]) -> None:
    page = parsed("glossary.html")
    shown = {
        term["id"].removeprefix("term-"): [link.text for link in term.find_next_sibling("dd").select(".shown-in a")]
        for term in page.select("dl.glossary > dt")
    }
    assert "Autotuning" in shown["autotuning"]
    assert shown["body"][0] == "Unaligned rows"
    assert "Decode attention with a paged cache" in shown["block-table"]
    assert sum(map(bool, shown.values())) > len(shown) / 2
