"""What the site offers besides pages: Markdown, the addresses of figures, and links elsewhere."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest
from bs4 import BeautifulSoup
from project import ROOT, Project
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

from triton_gallery.recipe.contents import Recipe, load, sections
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.needs import packages
from triton_gallery.site.notebook import OURS, install_missing

RECIPES = load(ROOT / "gallery")
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)


@pytest.fixture(scope="module")
def page_of(parsed: Callable[[str], BeautifulSoup]) -> Callable[[Recipe], BeautifulSoup]:
    """Return a function that returns the page of a recipe."""
    return lambda recipe: parsed(f"recipes/{recipe.key}.html")


@each_recipe
def test_page_has_a_twin_in_markdown(site: Path, page_of: Callable[[Recipe], BeautifulSoup], recipe: Recipe) -> None:
    """It has all of the code and what the page shows, and no picture spelled out in letters."""
    (link,) = page_of(recipe).select("link[rel=alternate][type='text/markdown']")
    twin = (site / "recipes" / recipe.section / link["href"]).read_text()
    assert twin.startswith("# ")
    _, blocks = split_code_and_text_blocks(str(next(site.glob(f"_downloads/*/{recipe.name}.py"))))
    code = [block.content.strip("\n") for block in blocks if block.type == "code"]
    listed = "\n".join(re.findall(r"(?s)```python\n(.*?)\n```", twin))
    assert all(line in listed for cell in code for line in cell.splitlines() if "sphinx_gallery" not in line)
    assert "```text\n" in twin or recipe.name.startswith("gluon_"), "no output"
    assert "install_missing" not in twin
    assert "iVBOR" not in twin
    assert len(twin) < 420_000


def test_llms_txt_lists_every_page(site: Path) -> None:
    title, about, *lines = [line for line in (site / "llms.txt").read_text().splitlines() if line]
    assert title == "# Triton Gallery"
    assert re.fullmatch(r"> .{20,}", about)
    assert sum(line.startswith("## ") for line in lines) == len(sections(ROOT / "gallery")) + 1
    links = [re.fullmatch(r"- \[.+?\]\((.+?)\): .{20,}", line) for line in lines if not line.startswith("## ")]
    assert all(links)
    addresses = [link[1] for link in links if link]
    assert addresses[: len(RECIPES)] == [f"recipes/{recipe.key}.md" for recipe in RECIPES]
    assert "guide/run.html" in addresses
    assert [address for address in addresses if not (site / address).is_file()] == []


@each_recipe
def test_figures_have_addresses(page_of: Callable[[Recipe], BeautifulSoup], recipe: Recipe) -> None:
    page = page_of(recipe)
    charts = page.select("div.chart:not(.glance div.chart)")
    links = [chart.find_next_sibling(class_="figure-links").a["href"] for chart in charts]
    assert len(set(links)) == len(charts)
    assert {link.removeprefix("#") for link in links} <= {element["id"] for element in page.select("[id]")}


@each_recipe
def test_page_leads_to_those_alike(page_of: Callable[[Recipe], BeautifulSoup], recipe: Recipe) -> None:
    path = page_of(recipe).select_one(".glance .recipe-path")
    links = [link["href"] for link in path.select("a")]
    assert "Related: " in path.text
    assert len(links) == len(set(links)) >= 4
    assert f"{recipe.name}.html" not in links


def test_without_an_address_nothing_needs_one(site: Path, page_of: Callable[[Recipe], BeautifulSoup]) -> None:
    assert not (site / "sitemap.xml").exists()
    assert not list(page_of(RECIPES[0]).select("a.elsewhere"))


@pytest.fixture(scope="module")
def known(make_project: Callable[..., Project]) -> Project:
    """Return a project that knows its address and its repository, built."""
    project = make_project()
    project.write(good="print('good')")
    variables = {
        "SITE_URL": "https://example.org/gallery/",
        "SITE_REPOSITORY": "https://github.com/someone/gallery",
        "SITE_NOTEBOOKS": "notebooks",
    }
    status, output = project.run("html", **variables)
    assert status == 0, output
    return project


def test_known_address_is_used(known: Project) -> None:
    html = known.root / "_build" / "html"
    tree = ElementTree.parse(html / "sitemap.xml")
    places = [place.text or "" for place in tree.iter("{http://www.sitemaps.org/schemas/sitemap/0.9}loc")]
    assert "https://example.org/gallery/recipes/things/good.html" in places
    assert [
        place for place in places if not (html / place.removeprefix("https://example.org/gallery/")).is_file()
    ] == []
    assert "(https://example.org/gallery/recipes/things/good.md)" in (html / "llms.txt").read_text()
    notebook = json.loads(next(html.glob("_downloads/*/good.ipynb")).read_text())
    texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]
    assert any("(https://example.org/gallery/recipes/things/good.html)" in text for text in texts)


def test_versions_and_reports_need_an_address(known: Project) -> None:
    page = BeautifulSoup(known.page("good"), "html.parser")
    root = "https://example.org/gallery/"
    assert page.select_one("link[rel=canonical]")["href"] == f"{root}recipes/things/good.html"
    assert page.select_one("script[data-site-root]")["src"] == "/gallery/versions.js"
    assert (known.root / "_build" / "html" / "versions.js").is_file()
    (report,) = page.select(".report a")
    assert unquote(report["href"]).endswith(f"&body=On {root}recipes/things/good.html:\n\n")


def test_known_repository_is_linked(known: Project) -> None:
    page = BeautifulSoup(known.page("good"), "html.parser")
    links = {link.text: unquote(link["href"]) for link in page.select(".glance a.elsewhere")}
    place = "someone/gallery/blob"
    assert links == {
        "Source": f"https://github.com/{place}/HEAD/gallery/things/good.py",
        "Open in Colab": f"https://colab.research.google.com/github/{place}/notebooks/docs/recipes/things/good.ipynb",
    }


@each_recipe
def test_notebook_begins_with_what_installs_its_packages(site: Path, recipe: Recipe) -> None:
    notebook = json.loads(next(site.glob(f"_downloads/*/{recipe.name}.ipynb")).read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ours = 1 + (declaration(recipe.path, recipe.text).of_op.gpus > 1)
    assert [OURS in cell["metadata"].get("tags", []) for cell in code] == [index < ours for index in range(len(code))]
    needs = ", ".join(f'"{package}"' for package in packages(recipe.path, recipe.text))
    assert code[0]["source"].rpartition("\n")[2] == f"install_missing({needs})"


def test_only_what_is_missing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By pip or, where there is none, by uv; without both, a message says what to install."""
    called: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: called.append(command))
    install_missing("torch>=2.11", "pytest")
    assert called == []
    wanted = "torch>=2.11", "pytest>=1000", "no-such-package"
    install_missing(*wanted)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    install_missing(*wanted)
    by_pip = [sys.executable, "-m", "pip", "install"]
    by_uv = ["/bin/uv", "pip", "install", "--python", sys.executable]
    assert called == [[*by, "--quiet", *wanted[1:]] for by in (by_pip, by_uv)]
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="neither pip nor uv: install pytest>=1000, no-such-package"):
        install_missing(*wanted)
