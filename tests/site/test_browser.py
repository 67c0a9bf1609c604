"""The built site in headless Chromium, served under a sub-path as on GitHub Pages."""

import functools
import gzip
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Response, expect

ABORTED = "net::ERR_ABORTED"  # the test left the page before it was all there


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
    paths = [path for path in sorted(site.rglob("*.html")) if not path.name.endswith(("404.html", ".folded.html"))]
    return [str(path.relative_to(site)) for path in paths]


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.thorough)])
def test_every_page_loads_cleanly_and_fits_a_phone(page: Page, address: str, site: Path, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    wide = []
    for name in all_pages(site):
        page.set_viewport_size({"width": 1280, "height": 844})
        page.goto(address + name)
        assert page.locator("article").count(), name
        page.set_viewport_size({"width": 390, "height": 844})
        if page.evaluate("document.documentElement.scrollWidth") > 390:
            wide.append(name)
    assert wide == []


def test_chart_tells_the_rates_at_a_size(page: Page, address: str) -> None:
    """To the pointer and to the keyboard; the table has the same, and nothing moves."""
    page.goto(f"{address}recipes/fusion/softmax.html")
    panel = page.locator(".recorded .panel.chosen").first
    chart, legend = panel.locator(".chart > svg"), panel.locator(".legend")
    panel.get_by_text("The numbers in this chart").click()
    chart.scroll_into_view_if_needed()
    before = chart.bounding_box()
    chart.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    row = panel.locator("table.benchmark tbody tr").nth(-2)
    expect(row).to_have_class(re.compile("chosen"))
    cells = row.locator("td").all_inner_texts()
    rates = [text for text in legend.locator("b").all_inner_texts() if text]
    assert rates == [text.split()[0] for text in cells[-len(rates) :]]
    assert legend.locator(".at").inner_text() == f"N = {cells[0]}"
    assert chart.bounding_box() == before
    chart.hover(position={"x": 5, "y": 50})
    expect(panel.locator("table.benchmark tbody tr").first).to_have_class(re.compile("chosen"))
    panel.locator("table.benchmark tbody tr").nth(2).hover()
    third = panel.locator("table.benchmark tbody tr").nth(2).locator("td").first.inner_text()
    assert legend.locator(".at").inner_text() == f"N = {third}"
    page.locator("h1").hover()
    assert not legend.locator(".at").inner_text()


def test_figures_are_of_the_gpu_that_a_reader_chooses(page: Page, address: str) -> None:
    """All of a page, and those of the next."""
    page.goto(f"{address}recipes/fusion/swiglu.html")
    figure = page.locator("figure.panels:has([data-kind=gpu])").first
    labels = figure.locator(".panel").locator("visible=true").locator(".gpu-label")
    for gpu in figure.locator("[data-kind=gpu] button").all_inner_texts():
        button = figure.get_by_role("button", name=gpu, exact=True)
        button.press("Enter")
        assert button.get_attribute("aria-pressed") == "true"
        assert gpu in labels.inner_text()
        figure.get_by_role("button", name="backward").click()
        assert "backward" in figure.locator(".panel").locator("visible=true").locator(".legend").inner_text()
        assert gpu in labels.inner_text(), "the direction leaves the GPU"
    page.goto(f"{address}ops/swiglu.html")
    page.evaluate("document.querySelectorAll('details.fold').forEach((fold) => (fold.open = true))")
    expect(page.locator("[data-kind=gpu]")).not_to_have_count(1)  # when folds have been loaded
    chosen = page.locator("[data-kind=gpu] button[aria-pressed=true]").evaluate_all(
        "all => all.map((one) => one.textContent)"
    )
    assert len(chosen) > 1
    assert set(chosen) == {gpu}


def test_address_of_a_figure_shows_its_panel(page: Page, address: str) -> None:
    page.goto(f"{address}recipes/fusion/softmax.html#figure-results_backward")
    panel = page.locator(".recorded .panel.chosen").first
    assert "backward" in panel.locator(".legend").inner_text()
    expect(panel.locator(".chart > svg")).to_be_in_viewport()


def test_without_scripts_all_panels_are_there(browser: Browser, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{address}recipes/fusion/softmax.html")
    panels = page.locator(".recorded .panel")
    assert panels.count() > 1
    assert panels.locator("visible=true").count() == panels.count()
    assert not page.locator(".switches").locator("visible=true").count()
    context.close()


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


def test_copy_button_copies_the_code(page: Page, address: str) -> None:
    page.goto(f"{address}recipes/first_steps/vector_add.html")
    page.locator("details.fold:not(.glance *) summary").first.click()
    block = page.locator(".highlight-Python").first
    block.hover()
    block.locator("button.copybtn").click()
    page.locator("button.copybtn.success").first.wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.strip() == block.locator("pre").inner_text().strip()
    assert copied.startswith("import os")


LONG = ("recipes/fusion/softmax.html", "recipes/attention/flash_attention.html", "performance.html")


@pytest.mark.parametrize("how", ["opened", "clicked"])
def test_link_to_a_section_shows_it(page: Page, address: str, how: str) -> None:
    """Blocks that are laid out late, above it, would push it out of the window."""
    missed = {}
    for name in LONG:
        page.goto(address + name)
        links = page.locator(".toc-tree a[href^='#']").evaluate_all("links => links.map(link => link.hash)")
        for link in [link for link in links if link][-4:]:
            page.goto("about:blank")
            page.goto(address + name + link * (how == "opened"))
            if how == "clicked":
                page.locator(f".toc-tree a[href='{link}']").evaluate("link => link.click()")
            page.wait_for_timeout(100)
            top = page.locator(link).evaluate("section => section.getBoundingClientRect().top")
            if not 0 <= top < page.viewport_size["height"]:
                missed[name + link] = top
        assert links, name
    assert missed == {}


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
    fraction = page.locator("math mfrac").first
    above, below = (part.bounding_box() for part in fraction.locator("> *").all())
    assert above["y"] + above["height"] <= below["y"]
    page.wait_for_function("document.fonts.check('16px \"STIX Two Math\"')")
    assert page.evaluate("document.fonts.ready.then(fonts => [...fonts].map(font => font.status))") == ["loaded"]


KINDS = [  # a page of each kind, and of what axe once found
    "index.html",
    "recipes/index.html",
    "ops/index.html",
    "recipes/fusion/softmax.html",
    "recipes/first_steps/launch.html",
    "recipes/xla/pytorch_xla.html",
    "performance.html",
    "targets.html",
    "gpu.html",
    "glossary.html",
    "api.html",
    "search.html?q=tl.dot",
    "guide/read.html",
    "guide/run.html",
]


def accessible(page: Page, address: str, name: str) -> list[str]:
    """Return what axe finds on a page, and of the colours of the dark theme, with all that is folded."""
    found = []
    colours = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
    for theme, rules in (("light", {}), ("dark", colours)):
        page.emulate_media(color_scheme=theme)
        page.goto(address + name)
        page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
        page.mouse.wheel(0, 800)
        page.wait_for_timeout(200)
        page.mouse.wheel(0, -400)  # now the link back to the top is there
        page.wait_for_timeout(200)
        violations = Axe().run(page, options={"resultTypes": ["violations"], **rules}).response["violations"]
        found += [f"{name}, {theme}: {one['id']}: {one['nodes'][0]['html'][:200]}" for one in violations]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_axe_finds_nothing(page: Page, address: str, name: str) -> None:
    assert accessible(page, address, name) == []


@pytest.mark.thorough
@pytest.mark.timeout(2400)
def test_axe_finds_nothing_on_any_page(page: Page, address: str, site: Path) -> None:
    assert [found for name in all_pages(site) for found in accessible(page, address, name)] == []


# Names what is cut off: elements that are wider than a box that clips them, or leave the window or their figure and are
# in no box that scrolls
CUT = """() => {
  const known = new Map();
  const overflow = (element) => {
    if (!known.has(element)) known.set(element, getComputedStyle(element).overflowX);
    return known.get(element);
  };
  const cut = [];
  for (const element of document.querySelectorAll("article *")) {
    const { left, right, width } = element.getBoundingClientRect();
    if (!width || element.closest(".unseen, .headerlink, svg.picture")) continue;
    const name = `${element.tagName}.${element.getAttribute("class")} ${element.textContent.trim().slice(0, 30)}`;
    const isClipped = /hidden|clip/.test(overflow(element)) && element.scrollWidth > element.clientWidth + 1;
    let box = element.parentElement;
    while (box !== document.body && !/auto|scroll/.test(overflow(box))) box = box.parentElement;
    const figure = element.closest("figure.panels");
    const frames = box === document.body ? [[0, innerWidth]] : [];
    if (figure && !figure.contains(box)) {
      const edges = figure.getBoundingClientRect();
      frames.push([edges.left, edges.right]);
    }
    if (isClipped || frames.some(([first, last]) => left < first - 1 || right > last + 1)) cut.push(name);
  }
  return cut;
}"""


def cut_off(page: Page, address: str, name: str) -> dict[str, list[str]]:
    """Return what is cut off at the widths of a laptop, a desktop and a telephone, with all that is folded open."""
    cut = {}
    page.goto(address + name)
    page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
    for width in (1280, 1600, 390):
        page.set_viewport_size({"width": width, "height": 844})
        if elements := page.evaluate(CUT):
            cut[f"{name}, {width}"] = elements
    return cut


@pytest.mark.parametrize("name", [*KINDS, "ops/softmax.html", "recipes/pytorch/cuda_graphs.html"])
def test_nothing_is_cut_off(page: Page, address: str, name: str) -> None:
    assert cut_off(page, address, name) == {}


@pytest.mark.thorough
@pytest.mark.timeout(2400)
def test_nothing_is_cut_off_on_any_page(page: Page, address: str, site: Path) -> None:
    assert [cut for name in all_pages(site) if (cut := cut_off(page, address, name))] == []


def test_index_is_filtered_by_keyboard(page: Page, address: str) -> None:
    page.goto(f"{address}recipes/index.html")
    cards, said = page.locator("li.card"), page.get_by_role("status")
    sections = page.locator("article section section")
    count, sections_count = cards.count(), sections.count()
    assert said.inner_text() == f"{count} recipes"
    for topic in ("attention", "memory bound"):
        button = page.locator(".filters button", has_text=topic)
        shown = int(button.locator("span").inner_text())
        button.focus()
        page.keyboard.press("Enter")
        assert button.get_attribute("aria-pressed") == "true"
        if topic == "attention":
            assert cards.locator("visible=true").count() == shown
    left = cards.locator("visible=true").count()
    assert 0 < left < shown
    assert said.inner_text() == f"{left} of {count} recipes"
    assert 0 < sections.locator("visible=true").count() < sections_count, "a section without cards is shown"
    page.locator(".filters button", has_text="debugging").press(" ")
    assert cards.locator("visible=true").count() == sections.locator("visible=true").count() == 0
    assert "No recipe" in said.inner_text()
    page.get_by_role("button", name="Show all").press("Enter")
    assert cards.locator("visible=true").count() == count
    assert page.locator(".filters [aria-pressed=true]").count() == 0


def test_filtered_index_has_an_address(page: Page, address: str) -> None:
    """One can send it, and reload; the contents have the sections that are left."""
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(f"{address}recipes/index.html")
    contents = page.locator(".toc-tree a[href^='#']").locator("visible=true")
    sections = contents.count()
    page.locator(".filters button", has_text="attention").click()
    said = page.get_by_role("status").inner_text()
    assert page.url.endswith("?topic=attention")
    assert 0 < contents.count() < sections
    page.goto("about:blank")
    page.go_back()
    page.reload()
    assert page.get_by_role("status").inner_text() == said


def test_filters_leave_a_telephone_its_first_screen(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}recipes/index.html")
    assert page.locator(".filters").bounding_box()["height"] < 120


def test_keyboard_opens_what_a_telephone_hides(page: Page, address: str) -> None:
    """The drawers are out of reach until they are open, and folds of the sidebar open too."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}recipes/fusion/softmax.html")
    assert page.locator(".sidebar-tree a").first.evaluate("link => getComputedStyle(link).visibility") == "hidden"
    page.get_by_role("button", name="Navigation").press("Enter")
    page.locator(".sidebar-tree a").first.wait_for()
    fold = page.get_by_role("switch", name="Toggle navigation of Attention")
    entry = page.locator(".sidebar-tree a", has_text="Variable-length attention")
    assert not entry.is_visible()
    fold.press(" ")
    assert entry.is_visible()


def test_sidebar_shows_one_section(page: Page, address: str) -> None:
    page.goto(f"{address}recipes/fusion/softmax.html")
    entries = page.locator(".sidebar-tree a")
    visible = entries.locator("visible=true").evaluate_all("links => links.map((a) => a.getAttribute('href'))")
    pages = [href for href in visible if re.fullmatch(r"(\.\./\w+/|\.\./\.\./ops/)?(?!index\b)\w+\.html", href)]
    assert "rms_norm.html" in pages
    assert [href for href in pages if "/" in href] == [], "of another section"
    assert entries.count() > 45


def test_what_scrolls_can_be_reached(page: Page, address: str) -> None:
    """And nothing else costs a press of the tabulator."""
    page.set_viewport_size({"width": 320, "height": 844})
    page.goto(f"{address}targets.html")
    page.locator(".table-wrapper[tabindex='0']").first.wait_for()
    page.goto(f"{address}recipes/attention/gated_delta_rule.html")
    page.locator(".math-wrapper[tabindex='0']").first.wait_for()
    page.goto(f"{address}guide/run.html")
    page.locator("pre[tabindex='0']").first.wait_for()
    page.set_viewport_size({"width": 1400, "height": 844})
    expect(page.locator("pre[tabindex]")).to_have_count(0)


def test_recipe_page_is_light(page: Page, address: str) -> None:
    """Twenty requests and 300 KB, packed as web servers do, before figures."""
    sizes = {}

    def note(response: Response) -> None:
        if not response.url.endswith(".png"):
            sizes[response.url] = len(gzip.compress(response.body()))

    page.on("response", note)
    for name in ("fusion/softmax", "attention/flash_attention"):
        sizes.clear()
        page.goto(f"{address}recipes/{name}.html", wait_until="load")
        assert len(sizes) < 20, sizes
        assert sum(sizes.values()) < 300_000, sizes


def test_pages_do_not_shift(page: Page, address: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.add_init_script(
        "window.shift = 0;"
        "new PerformanceObserver((list) => list.getEntries().forEach((entry) => (shift += entry.value)))"
        ".observe({ type: 'layout-shift', buffered: true })"
    )
    for name in KINDS:
        page.goto(address + name)
        page.wait_for_timeout(300)
        assert page.evaluate("shift") < 0.02, name


def test_paper_has_what_is_folded(page: Page, address: str) -> None:
    page.goto(f"{address}recipes/fusion/softmax.html")
    page.emulate_media(media="print")
    assert page.locator("#answers > details > p").first.bounding_box()["height"] > 10
    assert not page.locator(".recipe-downloads").first.is_visible()
    assert not page.locator(".sidebar-drawer").is_visible()
    assert not page.locator(".skip-to-content").is_visible()


def test_paper_has_formulas(page: Page, address: str) -> None:
    """And neither they nor tables go on beyond the paper."""
    page.goto(f"{address}recipes/attention/flash_attention_forward.html")
    page.set_viewport_size({"width": 720, "height": 1000})
    page.emulate_media(media="print")
    assert page.locator("math mfrac").count()
    for box in page.locator(".table-wrapper table, math").all():
        assert box.evaluate("box => box.getBoundingClientRect().right") <= 720


def test_contents_of_a_telephone_close(page: Page, address: str) -> None:
    """When they have led to a section, and on Escape."""
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}recipes/fusion/softmax.html")
    link = page.locator(".toc-drawer a", has_text="The result")
    for leave in (link.click, lambda: page.keyboard.press("Escape")):
        page.get_by_role("button", name="This page").press("Enter")
        expect(link).to_be_in_viewport()
        leave()
        expect(link).not_to_be_in_viewport()


def test_performance_table_sorts_and_filters(page: Page, address: str) -> None:
    page.goto(f"{address}performance.html")
    table = page.locator("table.performance").first
    rows = table.locator("tbody tr")
    count = rows.count()
    assert count > 3
    table.locator("th button").nth(7).press("Enter")
    texts = table.locator("tbody td:nth-child(8)").all_inner_texts()
    fractions = [float(text) for text in texts if text]
    assert fractions == sorted(fractions, reverse=True)
    assert 0 < len(fractions) < count
    assert not any(texts[len(fractions) :]), "rows without a backward come last"
    table.locator("th button").nth(9).click()
    dates = table.locator("tbody td:nth-child(10)").all_inner_texts()
    assert dates == sorted(dates)
    assert len(set(dates)) > 1
    words = page.get_by_label("Filter the table").first
    words.fill("few_long_rows")
    assert rows.locator("visible=true").count() == 1
    expect(page.get_by_role("status").first).to_have_text(f"1 of {count} rows")
    words.fill("no such thing")
    assert rows.locator("visible=true").count() == 0


def test_row_opens_to_its_sizes(page: Page, address: str) -> None:
    """By keyboard too; they go when the table is sorted or filtered."""
    page.goto(f"{address}performance.html")
    table = page.locator("table.performance").first
    opened = table.locator("tr.sizes")
    button = table.get_by_role("button", name="sizes of softmax", exact=False).first
    for leave in (lambda: button.press("Enter"), lambda: table.locator("th button").first.click()):
        button.press("Enter")
        opened.locator("caption", has_text="forward, bfloat16, beside libraries").first.wait_for()
        assert button.get_attribute("aria-expanded") == "true"
        assert "Liger (GB/s)" in opened.locator("th").all_inner_texts()
        leave()
        expect(opened).to_have_count(0)
        assert button.get_attribute("aria-expanded") == "false"


@pytest.mark.parametrize("name", ["index.html", "ops/index.html", "performance.html"])
def test_page_is_of_the_gpu_that_a_reader_chooses(page: Page, address: str, name: str) -> None:
    page.goto(address + name)
    choice, parts = page.get_by_label("GPU:", exact=False).first, page.locator("[data-gpu]")
    gpus = choice.locator("option").all_inner_texts()
    assert len(gpus) == len(set(gpus)) > 1
    for gpu in gpus:
        choice.select_option(gpu)
        shown = parts.evaluate_all("parts => parts.filter(part => part.offsetParent).map(part => part.dataset.gpu)")
        assert {*shown} == {gpu}
    for other in ("performance.html", "index.html"):
        page.goto(address + other)
        assert choice.input_value() == gpus[-1], "it is remembered"


TAKEN = """
import torch
from taken_op import softmax

x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
assert torch.autograd.gradcheck(softmax, x)
"""


def test_listing_opens_in_the_page(page: Page, address: str) -> None:
    """The code that a compiler wrote is loaded when a reader asks for it, and is the file that can be downloaded."""
    page.goto(f"{address}ops/softmax.html")
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
