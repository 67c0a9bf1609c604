"""The order of sections on a recipe's page."""

from types import SimpleNamespace

import pytest
from docutils.core import publish_doctree
from project import ROOT

from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.declaration import OfOp, declaration
from triton_gallery.site.transforms import move_first

PAGE = """
Title
=====

What it is about.

First
-----

One.

Second
------

Two.

Verdict
-------

Three.
"""


@pytest.mark.parametrize(
    ("title", "order"),
    [("Verdict", ["Verdict", "First", "Second"]), ("First", ["First", "Second", "Verdict"]), ("", None)],
)
def test_declared_section_comes_first(title: str, order: list[str] | None) -> None:
    """It stays below the introduction; without a declaration nothing moves."""
    document = publish_doctree(PAGE, settings_overrides={"doctitle_xform": False})
    page = SimpleNamespace(declared=SimpleNamespace(of_op=OfOp(shown_first=title)))
    move_first(None, document, page)
    texts = [node.astext() for node in document[0].children]
    assert texts[:2] == ["Title", "What it is about."]
    assert [text.split()[0] for text in texts[2:]] == (order or ["First", "Second", "Verdict"])


@pytest.mark.parametrize("recipe", load(ROOT / "gallery"), ids=lambda recipe: recipe.key)
def test_declared_section_is_there(recipe: Recipe) -> None:
    title = declaration(recipe.path, recipe.text).of_op.shown_first
    assert not title or f"\n# {title}\n# {'-' * len(title)}\n" in recipe.text
