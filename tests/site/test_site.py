"""The built site: every link leads somewhere, every recipe page is whole, nothing comes from another host."""

import base64
import hashlib
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from bs4 import BeautifulSoup
from project import ROOT

from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.declaration import declaration
from triton_gallery.records.record_store import TOOLS, Records
from triton_gallery.site.index_cards import LESSONS_TITLE, OPS_TITLE
from triton_gallery.site.op_grid import UNMEASURED
from triton_gallery.site.page_context import line

each_recipe = pytest.mark.parametrize("recipe", load(ROOT / "gallery"), ids=lambda recipe: recipe.key)
LABELS = ("Recorded on ", "Here, without a GPU")  # begin what says where outputs come from
FETCHED = "script[src], img[src], iframe[src], source[src], video[src], link[rel~=stylesheet], link[rel~=icon]"
NOT_PAGES = {"404.html"}  # its links are absolute: it is shown at any address


@pytest.fixture(scope="module")
def pages(site: Path, parsed: Callable[[str], BeautifulSoup]) -> dict[Path, BeautifulSoup]:
    """Return the parsed pages by their paths."""
    paths = [path for path in sorted(site.rglob("*.html")) if not path.name.endswith(".folded.html")]
    return {path: parsed(str(path.relative_to(site))) for path in paths}


def test_internal_links_resolve(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    broken = []
    anchors = {path: {element["id"] for element in page.select("[id]")} for path, page in pages.items()}
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
            elif target.fragment and file in pages and unquote(target.fragment) not in anchors[file]:
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
    assert unseen or re.search(r"torch \d.* triton \d.* \d{4}-\d\d-\d\d", strip.text)
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
    assert not page.select("table.sortable th a"), "a link within a title that is a button"
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
    assert script.read_text() == recipe.text


@each_recipe
def test_notebook_shows_what_the_page_shows(site: Path, pages: dict[Path, BeautifulSoup], recipe: Recipe) -> None:
    (path,) = site.glob(f"_downloads/*/{recipe.name}.ipynb")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [kind for output in outputs for kind in output.get("data", {})]
    page = pages[site / "recipes" / recipe.section / f"{recipe.name}.html"]
    pictures = [image for image in page.select("article img") if "_images" in image["src"]]
    for panel in page.select(".of-other-record"):  # other GPUs are on the page alone
        panel.clear()
    assert data.count("image/png") == len(page.select(".chart:not(.glance .chart)")) + len(pictures)
    assert data.count("text/html") == len(page.select("table.benchmark, table.dataframe"))
    printed = [output.text for output in outputs if "text" in output]
    labels = {node.text for node in page.select(".recorded-label, .here-label, .gpu-label")}
    assert {text.strip().removesuffix(":") for text in printed if text.startswith(LABELS)} <= labels
    printed = [text for text in printed if not text.startswith(LABELS)]
    shown = [node.text for node in page.select("p.clocks, .sphx-glr-script-out pre")]
    printed, shown = (re.sub("[:'\N{RIGHT SINGLE QUOTATION MARK}]", "", " ".join(texts)) for texts in (printed, shown))
    printed, shown = printed.split(), shown.split()
    if declaration(recipe.path, recipe.text).of_op.shown_first:  # the notebook has the order of the script
        printed, shown = sorted(printed), sorted(shown)
    assert printed == shown


def test_recipes_stand_in_their_order(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    index = pages[site / "recipes" / "index.html"]
    links = [link["href"] for link in index.select(".card a")]
    assert links == [f"{recipe.section}/{recipe.name}.html" for recipe in load(ROOT / "gallery")]


@pytest.mark.parametrize(
    ("after", "before"),
    [(after, before) for before, after in pairwise(load(ROOT / "gallery")) if before.section == after.section],
    ids=lambda recipe: recipe.name,
)
def test_page_before_leads_on(site: Path, pages: dict[Path, BeautifulSoup], after: Recipe, before: Recipe) -> None:
    link = pages[site / "recipes" / before.section / f"{before.name}.html"].select_one("a.next-page")
    assert link["href"] == f"{after.name}.html"


def test_page_for_missing_addresses_leads_on(pages: dict[Path, BeautifulSoup], site: Path) -> None:
    """Its links are absolute, below the path where the site is served: here the root."""
    links = [link["href"] for link in pages[site / "404.html"].select("article li a")]
    assert links == ["/recipes/index.html", "/glossary.html", "/index.html"]
    assert all((site / link.removeprefix("/")).is_file() for link in links)


@each_recipe
def test_recipe_has_its_line(site: Path, pages: dict[Path, BeautifulSoup], recipe: Recipe) -> None:
    """It is a plain sentence, and search engines, link previews and both indexes have the same."""
    said = line(recipe)
    assert re.fullmatch(r"[A-Z][^`*|<>\\]+\.", said)
    assert len(said) <= 160
    page = pages[site / "recipes" / recipe.section / f"{recipe.name}.html"]
    found = page.select("meta[name=description], meta[property='og:description']")
    assert [meta["content"] for meta in found] == [said, said]
    for index, link in (("", f"{recipe.section}/{recipe.name}.html"), (recipe.section, f"{recipe.name}.html")):
        card = pages[site / "recipes" / index / "index.html"].select_one(f".card:has(a[href='{link}'])")
        assert card.select("p")[1].text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'") == said


def test_every_page_is_described_in_whole_sentences(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    said = {}
    for path, page in pages.items():
        if path.name not in {"404.html", "genindex.html", "search.html"}:
            (meta,) = page.select("meta[name=description]")
            said[path.relative_to(site)] = meta["content"]
    assert [path for path, text in said.items() if not re.fullmatch(r"[^\\]{20,200}[.?!]", text)] == []
    assert len(set(said.values())) == len(said), "two pages say the same of themselves"


def test_no_markup_shows(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    shown = []
    for path, page in pages.items():
        texts = page.select_one("article").find_all(string=re.compile(r"```|:::|:doc:|\{\w+\}`|``|\\[(\[]|\\[a-z]+\{"))
        shown += [f"{path.relative_to(site)}: {text}" for text in texts if not text.find_parent(["pre", "code"])]
    assert shown == []


def test_cards_are_pictures_and_badges(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    index = pages[site / "recipes" / "index.html"]
    cards = index.select(".card")
    assert all(card.select("svg.picture") and len(card.select(".badges span")) >= 2 for card in cards)
    assert not index.select("article img")
    assert [title.text for title in index.select(".card-group")] == [OPS_TITLE, LESSONS_TITLE]


def test_charts_are_told_apart_and_can_be_read(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    """Each has a name of its own; its letters stand beside the lines, whose width follows the window's."""
    for path, page in pages.items():
        charts = page.select(".chart > svg")
        names = [chart["aria-label"] for chart in charts]
        assert len(set(names)) == len(names), path
        for chart in charts:
            places = [text[axis] for text in chart.select("text") for axis in ("x", "y") if text.has_attr(axis)]
            assert all(0 <= float(place.removesuffix("%")) <= 100 for place in places), path


def test_pages_forbid_other_hosts_and_scripts_that_others_write(pages: dict[Path, BeautifulSoup]) -> None:
    for path, page in pages.items():
        (meta,) = page.select("meta[http-equiv=Content-Security-Policy]")
        policy = dict(part.strip().split(" ", 1) for part in meta["content"].split(";"))
        assert not re.search(r"\*|http|//|[\w-]\.\w", meta["content"]), path
        assert policy["default-src"] == "'self' file:"
        scripts = page.select("script:not([src], [type='application/json'])")
        inline = [script.string for script in scripts if script.string]
        allowed = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline}
        assert {f"'sha256-{digest}'" for digest in allowed} == {
            part for part in policy["script-src"].split() if part.startswith("'sha256")
        }


def test_pages_load_what_they_use(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    """And no more files than that: a recipe's page less than twenty, besides figures."""
    for path, page in pages.items():
        fetched = [urlsplit(one.get("src") or one["href"]).path for one in page.select(FETCHED)]
        files = {name for name in (Path(file).name for file in fetched) if not name.startswith("sphx_glr_")}
        assert ("copybutton.js" in files) == bool(page.select(".highlight")), path
        assert ("filter.js" in files) == bool(page.select(".filters")), path
        assert ("chart.js" in files) == bool(page.select("figure.panels")), path
        assert [file for file in files if file.endswith(".css")] == ["all.css"], path
        assert ("performance.js" in files) == bool(page.select("table.sortable")), path
        assert ("gpu_choice.js" in files) == bool(page.select(".gpu-choice, [data-kind=gpu]")), path
        assert not [file for file in files if file.startswith(("sg", "sphinx-design"))], path
        assert len(files) < 19, path  # and the page itself


@each_recipe
def test_breadcrumbs(site: Path, pages: dict[Path, BeautifulSoup], recipe: Recipe) -> None:
    page = pages[site / "recipes" / recipe.section / f"{recipe.name}.html"]
    links = [link["href"] for link in page.select("nav.breadcrumbs a")]
    assert links == ["../../index.html", "../index.html", "index.html"]


def test_home_counts_what_there_is(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    """At its foot, below what it offers."""
    recipes, records = load(ROOT / "gallery"), Records(ROOT / "docs" / "_records")
    home = pages[site / "index.html"]
    assert home.select_one("ul.counts").find_previous("h2").text.startswith("Find what you need")
    counts = home.select_one("ul.counts").text
    assert f"{len(recipes)} recipes" in counts
    assert f"{len(list((site / 'ops').glob('*.py')))} ops" in counts
    rows = pages[site / "targets.html"].select("table.sortable tbody tr")
    assert f"{len(rows)} kernels" in counts
    for device in {record.environment.name for recipe in recipes for record in records.of(recipe)}:
        assert re.search(rf"\d+ recipes run on {device}, \d{{4}}-\d\d-\d\d", counts)


@pytest.mark.parametrize("name", ["index.html", "ops/index.html"])
def test_every_op_has_its_speed_on_each_gpu(site: Path, pages: dict[Path, BeautifulSoup], name: str) -> None:
    page = pages[site / name]
    gpus = [option.text for option in page.select(".gpu-choice option")]
    assert len(gpus) > 1
    tiles = page.select("ul.op-grid > li")
    assert len(tiles) == len(list((site / "ops").glob("*_op.py")))
    for tile in tiles:
        parts = tile.select("[data-gpu]")
        assert [part["data-gpu"] for part in parts] == gpus
        assert [part.has_attr("hidden") for part in parts] == [False, *(True for _ in gpus[1:])]
        for part in parts:
            assert part.select(".speed") or part.text.strip() == UNMEASURED
            assert all(re.search(r"\d\.\d\d", line.text) for line in part.select(".speed")), tile.text


def test_performance_is_light(site: Path, pages: dict[Path, BeautifulSoup]) -> None:
    """An op a line; its sizes are in a script, which is loaded when a reader opens them."""
    page = pages[site / "performance.html"]
    assert len(page.find_all(True)) < 4000
    assert (site / "performance.html").stat().st_size < 150_000
    ops = {path.name.removesuffix("_op.py") for path in (site / "ops").glob("*_op.py")}
    assert {path.stem for path in (site / "sizes").glob("*.js")} == ops
    for table in page.select("table.performance"):
        listed = [row.select_one("a").text for row in table.select("tbody tr")]
        assert len(set(listed)) == len(listed)
        assert {*listed} <= ops


def test_no_path_of_the_building_machine(site: Path) -> None:
    leaks = [
        path.name
        for path in site.rglob("*")
        if path.suffix in {".html", ".ipynb", ".py", ".js", ".txt"}
        and any(word in path.read_text(errors="replace") for word in (str(ROOT), "/tmp/triton-gallery-"))
    ]
    assert leaks == []
