"""The built site: every link leads somewhere, every recipe page is whole, nothing comes from another host."""

import re
import zipfile
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup
from project import ROOT

from triton_gallery.recipes.contents import Recipe, load
from triton_gallery.records.recorded import TOOLS

each_recipe = pytest.mark.parametrize("recipe", load(ROOT / "gallery"), ids=lambda recipe: recipe.key)
FETCHED = "script[src], img[src], iframe[src], source[src], video[src], link[rel~=stylesheet], link[rel~=icon]"
NOT_PAGES = {"404.html"}  # its links are absolute: it is shown at any address


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, BeautifulSoup]:
    """Return the parsed pages by their paths."""
    return {path: BeautifulSoup(path.read_text(), "html.parser") for path in sorted(site.rglob("*.html"))}


def test_internal_links_resolve(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    broken = []
    for path, page in pages.items():
        if path.name in NOT_PAGES:
            continue
        for element in page.select("a[href], link[href], img[src], script[src]"):
            target = urlsplit(element.get("href") or element.get("src"))
            if target.scheme or target.netloc or element.get("rel") == ["canonical"]:
                continue
            file = (path.parent / unquote(target.path)).resolve() if target.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.is_relative_to(site) or not file.is_file():
                broken.append(f"{path.relative_to(site)} -> {target.geturl()}")
            elif target.fragment and file in pages and not pages[file].find(id=unquote(target.fragment)):
                broken.append(f"{path.relative_to(site)} -> {target.geturl()} (no such anchor)")
    assert broken == []


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    fetched = [
        f"{path.relative_to(site)}: {element}"
        for path, page in pages.items()
        for element in page.select(FETCHED)
        if urlsplit(element.get("href") or element.get("src")).netloc
    ]
    for sheet in site.rglob("*.css"):
        fetched += [f"{sheet.name}: {url}" for url in re.findall(r"url\([\"']?(https?:|//)[^)]*\)", sheet.read_text())]
    assert fetched == []


def test_links_of_style_sheets_resolve(site: Path) -> None:
    for sheet in site.rglob("*.css"):
        for url in re.findall(r"url\([\"']?([^)\"']+)", sheet.read_text()):
            if not url.startswith(("data:", "#")):
                assert (sheet.parent / url.partition("?")[0].partition("#")[0]).is_file(), f"{sheet.name}: {url}"


@each_recipe
def test_recipe_page_is_whole(site: Path, pages: dict[Path, BeautifulSoup], recipe: Recipe) -> None:
    page = pages[site / "recipes" / recipe.section / f"{recipe.name}.html"]
    box = page.select_one(".glance")
    assert box, "no box under the first sentences"
    assert not box.find_previous(class_="highlight"), "code before the box"
    strip = box.select_one(".recipe-strip")
    unseen = "lacks an NVIDIA GPU" in strip.text  # nor has it a record yet
    assert unseen or re.search(r"torch \d.* triton \d.* \d{4}-\d\d-\d\d .* page made in \d+ s", strip.text)
    if "interpreter" in strip.text:
        assert "no kernel is timed here" in strip.text
    explained = [word for word in ["older code", *TOOLS] if word in strip.text]
    assert [link.text for link in strip.select("a .glossary-link")] == explained
    names = {Path(urlsplit(link["href"]).path).name for link in box.select("a.reference[download]")}
    assert names == {f"{recipe.name}.py", f"{recipe.name}.ipynb", *(path.name for path in recipe.companions)}
    assert unseen or page.select(".sphx-glr-script-out"), "no output"
    assert not page.select(".admonition.danger"), "it failed"
    assert not page.select(".system-message, .problematic")
    assert not page.select(".sphx-glr-timing, .sphx-glr-download-link-note")
    assert page.select("a .glossary-link"), "no word leads to the glossary"
    if unseen:
        pytest.skip("it needs a GPU that is not here, and has no record: its page shows no output")


@each_recipe
def test_answers_are_folded(site: Path, pages: dict[Path, BeautifulSoup], recipe: Recipe) -> None:
    page = pages[site / "recipes" / recipe.section / f"{recipe.name}.html"]
    answers = page.select_one("#answers > details")
    assert answers, "no folded answers"
    assert answers.select_one("summary").next_sibling, "nothing in the fold"


@each_recipe
def test_downloaded_script_is_the_recipe(site: Path, recipe: Recipe) -> None:
    (script,) = site.glob(f"_downloads/*/{recipe.name}.py")
    assert script.read_bytes() == recipe.path.read_bytes()


@each_recipe
def test_notebook_shows_what_the_page_shows(site: Path, pages: dict[Path, BeautifulSoup], recipe: Recipe) -> None:
    (path,) = site.glob(f"_downloads/*/{recipe.name}.ipynb")
    (zipped,) = site.glob(f"_downloads/*/{recipe.name}.zip")
    assert zipfile.ZipFile(zipped).read(f"{recipe.name}.ipynb") == path.read_bytes()
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [kind for output in outputs for kind in output.get("data", {})]
    page = pages[site / "recipes" / recipe.section / f"{recipe.name}.html"]
    pictures = [image for image in page.select("article img") if "_images" in image["src"]]
    assert data.count("image/png") == len(page.select(".chart:not(.glance .chart) svg")) + len(pictures)
    assert data.count("text/html") == len(page.select("table.benchmark, table.dataframe"))
    printed = [output.text for output in outputs if "text" in output]
    shown = [node.text for node in page.select(".recorded-label, .here-label, p.clocks, .sphx-glr-script-out pre")]
    printed, shown = (re.sub("[:'\N{RIGHT SINGLE QUOTATION MARK}]", "", " ".join(texts)) for texts in (printed, shown))
    assert printed.split() == shown.split()


def test_recipes_stand_in_their_order(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    index = pages[site / "recipes" / "index.html"]
    links = [link["href"] for link in index.select(".sphx-glr-thumbcontainer a")]
    assert links == [f"{recipe.section}/{recipe.name}.html" for recipe in load(ROOT / "gallery")]


@pytest.mark.parametrize(
    ("after", "before"),
    [(after, before) for before, after in pairwise(load(ROOT / "gallery")) if before.section == after.section],
    ids=lambda recipe: recipe.name,
)
def test_page_before_leads_on(site: Path, pages: dict[Path, BeautifulSoup], after: Recipe, before: Recipe) -> None:
    link = pages[site / "recipes" / before.section / f"{before.name}.html"].select_one("a.next-page")
    assert link["href"] == f"{after.name}.html"


def test_failure_page_for_missing_addresses(pages: dict[Path, BeautifulSoup], site: Path) -> None:
    assert pages[site / "404.html"].select_one("h1")


def test_no_path_of_the_building_machine(site: Path) -> None:
    leaks = [
        path.name
        for path in site.rglob("*")
        if path.suffix in {".html", ".ipynb", ".py", ".js", ".txt"}
        and any(word in path.read_text(errors="replace") for word in (str(ROOT), "/tmp/triton-gallery-"))
    ]
    assert leaks == []
