"""What is folded is loaded when a reader opens it."""

import re
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from playwright.sync_api import Browser, Page, expect
from project import ROOT, deferred, whole_page

from triton_gallery.site.deferred import LARGE, LINK, script, without_large_folds

MOST_ELEMENTS, MOST_BYTES = 5_500, 210_000
STATIC = ROOT / "docs" / "_static"
CODE = '<div class="highlight"><pre>x = 1</pre></div><button class="copybtn" data-clipboard-target="#a">copy</button>'
NESTED = f'<details class="fold"><summary>inner</summary><p id="inside">{"word " * LARGE}</p></details>'
TABLE = (
    '<table class="sortable"><thead><tr><th>N</th></tr></thead>'
    "<tbody><tr><td>1</td></tr><tr><td>2</td></tr></tbody></table>"
)
BLOCK = '<div><div class="highlight"><pre>y</pre></div></div>'
LARGE_FOLD = f'<details class="fold"><summary>Source</summary>{NESTED}{TABLE}{BLOCK}</details>'
OTHER_FOLD = LARGE_FOLD.replace("inside", "other")
SMALL_FOLD = '<details class="fold"><summary>Small</summary><p>few words</p></details>'
STAYS = f'<details class="fold stays"><summary>Answers</summary>{"word " * LARGE}</details>'
BODY = f"<p>before</p>{CODE}{SMALL_FOLD}{LARGE_FOLD}<p>between</p>{STAYS}{OTHER_FOLD}<p>after</p>"


def test_large_folds_alone_are_taken_out() -> None:
    body, parts = without_large_folds(BODY, "page")
    head = '<details class="fold"><summary>Source</summary>'
    assert [fold for fold, _ in parts] == [head, head]
    assert body.count("<details") == body.count("</details>") == 4
    assert STAYS in body
    assert SMALL_FOLD in body
    for number, (fold, content) in enumerate(parts):
        link = LINK.format(address=f"page.folded.html?{zlib.crc32(BODY.encode()):08x}", number=number)
        body = body.replace(fold + link, fold + content, 1)
    assert body == BODY


def test_page_without_folds_is_as_it_was() -> None:
    assert without_large_folds("<p>text</p>", "page") == ("<p>text</p>", [])


@pytest.fixture
def folded_page(tmp_path: Path) -> Path:
    """Return a page with folds, and its files beside it."""
    body, parts = without_large_folds(BODY, "page")
    scripts = "".join(f'<script src="{STATIC / name}.js"></script>' for name in ("deferred", "performance"))
    policy = "default-src 'self' file:; script-src 'self' file:; style-src 'self' file: 'unsafe-inline'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">{scripts}'
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><html><head>{head}</head><body>{body}</body></html>")
    page.with_suffix(".folded.js").write_text(script([content for _, content in parts]))
    return page


@pytest.fixture
def tab(browser: Browser, folded_page: Path) -> Iterator[Page]:
    """Return a tab with the page, opened from the disk."""
    with browser.new_context() as context:
        tab = context.new_page()
        tab.goto(folded_page.as_uri())
        yield tab


def test_fold_is_filled_when_it_is_opened(tab: Page) -> None:
    """Copy buttons and tables work in it, and the other folds stay as they are."""
    assert not tab.locator("#inside").count()
    tab.locator("summary", has_text="Source").first.click()
    expect(tab.locator("summary", has_text="inner")).to_be_visible()
    assert tab.locator("p.deferred").count() == 1
    tab.locator("summary", has_text="inner").click()
    expect(tab.locator("#inside")).to_be_visible()
    block = tab.locator("pre", has_text="y")
    button = block.locator("xpath=following-sibling::button")
    assert button.get_attribute("data-clipboard-target") == f"#{block.get_attribute('id')}"
    tab.locator("th button").click()
    assert tab.locator("td").all_inner_texts() == ["2", "1"]


def test_link_to_what_is_folded_opens_it(tab: Page, folded_page: Path) -> None:
    tab.goto("about:blank")
    tab.goto(f"{folded_page.as_uri()}#other")
    expect(tab.locator("#other")).to_be_in_viewport()
    assert not tab.locator("#inside").count(), "it opened another fold too"
    tab.evaluate("location.hash = '#inside'")
    expect(tab.locator("#inside")).to_be_in_viewport()


@pytest.mark.parametrize("how", ["paper", "search"])
def test_all_is_there_to_be_printed_and_searched(tab: Page, how: str) -> None:
    if how == "paper":
        tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    else:
        tab.keyboard.press("Control+f")
    expect(tab.locator("p.deferred")).to_have_count(0)


def test_link_stays_where_the_content_cannot_be_loaded(tab: Page, folded_page: Path) -> None:
    folded_page.with_suffix(".folded.js").unlink()
    tab.reload()
    tab.locator("summary", has_text="Source").first.click()
    tab.wait_for_timeout(200)
    expect(tab.locator("p.deferred a").first).to_be_visible()


def pages_with_folds(site: Path) -> list[Path]:
    """Return the pages of the site whose folds are in files of their own."""
    return [script.with_name(script.name.replace(".folded.js", ".html")) for script in site.rglob("*.folded.js")]


def test_folds_can_be_read_without_scripts(site: Path) -> None:
    pages = pages_with_folds(site)
    assert len(pages) > 50
    for page in pages:
        plain = page.with_suffix(".folded.html").read_text()
        contents = deferred(page.with_suffix(".folded.js"))
        assert all(content in plain for content in contents)
        links = BeautifulSoup(page.read_text(), "html.parser").select("p.deferred a")
        addresses = [re.sub(r"\?[0-9a-f]{8}#", "#", link["href"]) for link in links]
        assert addresses == [f"{page.stem}.folded.html#fold-{number}" for number in range(len(contents))]
        assert all(f'id="{link["href"].partition("#")[2]}"' in plain for link in links)
        assert 'class="deferred"' not in whole_page(page)


class ElementCounter(HTMLParser):
    """Counts the elements of a page."""

    count = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Count one."""
        self.count += 1


def heavy_pages(site: Path) -> dict[str, tuple[int, int]]:
    """Return the elements and bytes of each page that has too many, by its address."""
    heavy = {}
    for path in site.rglob("*.html"):
        counter, markup = ElementCounter(), path.read_bytes()
        counter.feed(markup.decode())
        if path.name.endswith(".folded.html"):
            continue
        if counter.count > MOST_ELEMENTS or len(markup) > MOST_BYTES:
            heavy[str(path.relative_to(site))] = counter.count, len(markup)
    return heavy


def test_pages_are_light(site: Path) -> None:
    assert heavy_pages(site) == {}
