"""A gallery whose contents and files disagree is refused, with every fault named."""

from pathlib import Path

import pytest
from project import ROOT

from triton_gallery.recipe.contents import load
from triton_gallery.recipe.hashes import hash_of


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    """Return a gallery of two recipes in one section."""
    section = tmp_path / "things"
    section.mkdir()
    (section / "GALLERY_HEADER.rst").touch()
    (section / "one.py").touch()
    (section / "two.py").touch()
    (tmp_path / "contents.toml").write_text('things = ["two", "one"]')
    return tmp_path


def test_order_is_that_of_the_contents(gallery: Path) -> None:
    assert [recipe.key for recipe in load(gallery)] == ["things/two", "things/one"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ('things = ["one"]', r"two\.py is not listed in contents\.toml"),
        ('things = ["one", "two", "three"]', r"lists things/three, but .*three\.py does not exist"),
        ('things = ["one", "two", "two"]', "things/two shares its name with another recipe"),
        (
            'things = ["one", "two"]\nothers = ["one"]',
            "others/one shares its name(.|\n)*section others has no GALLERY_HEADER",
        ),
        ('things = ["one", "two", "2-d"]', "things/2-d cannot be imported under its name"),
        ('things = "one"', "section things is not a list of recipe names"),
        ("things = [", r"contents\.toml: "),
    ],
)
def test_faults_are_named(gallery: Path, contents: str, message: str) -> None:
    (gallery / "contents.toml").write_text(contents)
    with pytest.raises(ValueError, match=message):
        load(gallery)


def test_no_contents(gallery: Path) -> None:
    (gallery / "contents.toml").unlink()
    with pytest.raises(ValueError, match="No such file"):
        load(gallery)


def test_every_recipe_of_the_gallery_has_its_place() -> None:
    assert {recipe.path for recipe in load(ROOT / "gallery")} == set((ROOT / "gallery").glob("*/*.py"))


def test_hash_is_that_of_the_present_code(gallery: Path) -> None:
    (recipe, _) = load(gallery)
    hashes = []
    for code in ("x = 1", "x = 2", "x = 1  # a comment"):
        recipe.path.write_text(f'"""\nTwo\n===\n"""\n\n{code}\n')
        hashes.append(hash_of(recipe))
    assert hashes[0] == hashes[2] != hashes[1]
