"""The built site in headless Chromium, served under a sub-path as on GitHub Pages."""

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ABORTED = "net::ERR_ABORTED"  # the test left the page before it was all there


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start the machine's browser."""
    paths = [path for name in BROWSERS if (path := shutil.which(name))]
    if not paths:
        message = f"no browser on this machine ({', '.join(BROWSERS)}): the site is untested in one"
        if "CI" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=paths[0], args=["--no-sandbox", "--disable-quic"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site below a sub-path; return its address."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

    handler = functools.partial(Handler, directory=str(site.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{site.name}/"
        server.shutdown()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Return a fresh profile in which nothing is remembered."""
    context = browser.new_context(color_scheme="light", permissions=["clipboard-read", "clipboard-write"])
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext, address: str) -> Iterator[Page]:
    """Return a tab; when the test ends, no page it opened may have complained or asked another host."""
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: request.failure == ABORTED or complaints.append(f"failed: {request.url}"))
    page.on(
        "response", lambda response: response.status >= 400 and complaints.append(f"{response.status}: {response.url}")
    )

    def only_here(route, request) -> None:
        if urlsplit(request.url).netloc in {urlsplit(address).netloc, ""}:
            route.continue_()
        else:
            complaints.append(f"asked another host: {request.url}")
            route.abort()

    page.route("**/*", only_here)
    yield page
    assert complaints == []


def all_pages(site: Path) -> list[str]:
    """Return the addresses of the site's pages, relative to its root."""
    return [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def test_every_page_loads_cleanly(page: Page, address: str, site: Path) -> None:
    for name in all_pages(site):
        page.goto(address + name)
        assert page.locator("article").count(), name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_scrolls_sideways_on_a_phone(page: Page, address: str, site: Path, theme: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme=theme)
    wide = []
    for name in all_pages(site):
        page.goto(address + name)
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(name)
    assert wide == []


def test_theme_switch(page: Page, address: str) -> None:
    page.goto(address)
    switch = page.locator(".content-icon-container .theme-toggle")
    seen = {}
    for _ in range(3):
        theme = page.evaluate("document.body.dataset.theme")
        seen[theme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        switch.click()
    assert set(seen) == {"auto", "light", "dark"}
    assert seen["auto"] == seen["light"] != seen["dark"]


def test_search_finds_a_recipe(page: Page, address: str) -> None:
    page.goto(address)
    page.locator("input[name=q]").first.fill("bandwidth roof")
    page.keyboard.press("Enter")
    result = page.locator("#search-results a[href*='recipes/']").first
    result.wait_for()
    result.click()
    assert "/recipes/" in page.url


def test_copy_button_copies_the_code(page: Page, address: str) -> None:
    page.goto(f"{address}recipes/first_steps/vector_add.html")
    page.locator("details.fold summary").first.click()
    block = page.locator(".highlight-Python").first
    block.hover()
    block.locator("button.copybtn").click()
    page.locator("button.copybtn.success").first.wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == block.locator("pre").inner_text().strip()
    assert copied.startswith("import os")


def test_outputs_have_no_copy_button(page: Page, address: str) -> None:
    page.goto(f"{address}recipes/first_steps/vector_add.html")
    assert page.locator(".sphx-glr-script-out").count()
    assert page.locator(".sphx-glr-script-out button.copybtn").count() == 0


def test_answers_open_on_a_click(page: Page, address: str) -> None:
    page.goto(f"{address}recipes/first_steps/vector_add.html")
    answer = page.locator("#answers > details > p").first
    assert not answer.is_visible()
    page.locator("#answers summary").click()
    assert answer.is_visible()


def test_formulas_are_typeset(page: Page, address: str) -> None:
    page.goto(f"{address}guide/read.html")
    page.locator(".math .katex-html").first.wait_for()
    loaded = "[...document.fonts].filter(font => font.status === 'loaded').map(font => font.family)"
    families = page.evaluate(f"document.fonts.ready.then(() => {loaded})")
    assert any("KaTeX_Main" in family for family in families), families


def test_performance_table_sorts_and_filters(page: Page, address: str) -> None:
    page.goto(f"{address}performance.html")
    rows = page.locator("table.performance tbody tr")
    count = rows.count()
    assert count > 3
    page.locator("table.performance th button").nth(7).click()
    texts = page.locator("table.performance tbody td:nth-child(8)").all_inner_texts()
    fractions = [float(text) for text in texts if text]
    assert fractions == sorted(fractions, reverse=True)
    assert not any(texts[len(fractions) :]), "rows without a roof come last"
    words = page.get_by_label("Filter the table").first
    words.fill("jax_call h200")
    assert rows.locator("visible=true").count() == 1
    words.fill("no such thing")
    assert rows.locator("visible=true").count() == 0
    works = page.locator("table.peers tbody tr")
    count = works.count()
    page.get_by_label("Filter the table").last.fill("softmax, backward")
    assert 0 < works.locator("visible=true").count() < count


TAKEN = """
import torch
from taken_op import softmax

x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
assert torch.autograd.gradcheck(softmax, x)
"""


def test_listing_opens_in_the_page(page: Page, address: str) -> None:
    """The code that a compiler wrote is loaded when a reader asks for it, and is the file that can be downloaded."""
    page.goto(f"{address}recipes/fusion/softmax.html")
    section = page.locator("#on-other-gpus")
    listing = section.locator("div.listing").first
    assert not section.locator("table").first.is_visible()
    section.locator("summary").click()
    assert page.locator("script[src*='listings/']").count() == 0
    section.locator("button[data-text='sm_90.sass']").first.click()
    listing.locator("pre").wait_for()
    shown = listing.locator("pre").inner_text()
    assert "LDG" in shown
    assert listing.locator("pre .instruction").count() > 10
    with page.expect_download() as download:
        listing.get_by_role("link").click()
    assert Path(download.value.path()).read_text() == listing.locator("pre").text_content()
    section.locator("button[data-text='gfx942.amdgcn']").first.click()
    listing.get_by_text("s_endpgm").first.wait_for()
    section.locator("button[data-text='gfx942.amdgcn']").first.click()
    assert not listing.is_visible()


def test_copied_op_runs_in_an_empty_file(page: Page, address: str, tmp_path: Path) -> None:
    """As does the one that is downloaded: it is the same."""
    page.goto(f"{address}recipes/fusion/softmax.html")
    page.get_by_role("button", name="Copy the op").click()
    page.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    with page.expect_download() as download:
        page.get_by_role("link", name="Take the op: softmax_op.py").click()
    assert Path(download.value.path()).read_text() == copied
    (tmp_path / "taken_op.py").write_text(copied)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", TAKEN]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
