"""Figures that step through a kernel: in a browser, each state is what was in memory."""

import gzip
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from project import ROOT

from triton_gallery.site.step_drawing import HATCH, drawing
from triton_gallery.step_through.sentences import short
from triton_gallery.step_through.trace import Figure, Recording, Trace

KERNELS = ROOT / "tests" / "machinery" / "stepped_kernels.py"
STATIC = ROOT / "docs" / "_static"
UNWRITTEN = -9  # what is in tensors that the kernels only write
MOST = 10_000  # bytes of a figure, compressed
MOST_FILES = 8_000  # bytes of script and style, compressed


def run(*command: str) -> str:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    from msgspec import json as decoder

    recording = decoder.decode(run("-m", "triton_gallery.step_through.process", str(KERNELS), ""), type=Recording)
    assert not recording.failure
    return recording.figures


@pytest.fixture(scope="module")
def address(figures: list[Figure], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("figures")
    body = HATCH + "".join(map(drawing, figures))
    (folder / "index.html").write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Figures</title>'
        f'<link rel="stylesheet" href="{(STATIC / "step_through.css").as_uri()}">'
        f'<script defer src="{(STATIC / "step_through.js").as_uri()}"></script></head>'
        f"<body><main><h1>Figures</h1>{body}</main></body></html>"
    )
    return (folder / "index.html").as_uri()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    yield page
    page.close()
    assert errors == []


def traces(figures: list[Figure]) -> list[tuple[int, int, Trace]]:
    return [
        (number, launch, trace) for number, figure in enumerate(figures) for launch, trace in enumerate(figure.traces)
    ]


def states(page: Page, figure: int, launch: int, program: int, count: int) -> list[dict]:
    """Return the texts of all cells, and how many have each class, at each step of a program."""
    return page.evaluate(
        """([figure, launch, program, count]) => {
          const root = document.querySelectorAll("figure.step-through")[figure];
          const launchRoot = root.querySelectorAll(".launch")[launch];
          const texts = (key) => [...launchRoot.querySelectorAll(`[data-${key}]`)]
            .map((group) => [...group.querySelectorAll("text")].map((text) => text.textContent));
          root.players[launch].choose(program);
          return [...Array(count).keys()].map((step) => {
            root.players[launch].go(step);
            const number = (name) => launchRoot.querySelectorAll(`[data-t] rect.${name}`).length;
            return { t: texts("t"), r: texts("r"), ld: number("ld"), st: number("st"), off: number("off"),
                     out: number("out"), sentence: launchRoot.querySelector(".sentence").textContent,
                     now: [...launchRoot.querySelectorAll(".ln.now")].map((line) => Number(line.dataset.n)) };
          });
        }""",
        [figure, launch, program, count],
    )


def test_every_state_is_what_was_in_memory(page: Page, figures: list[Figure]) -> None:
    """Programs that ran earlier have stored what they store; in a race, only those of earlier waves have."""
    noted = json.loads(run(str(ROOT / "tests" / "machinery" / "stepped_memory.py"), str(KERNELS)))
    for (figure, launch, trace), memory in zip(traces(figures), noted, strict=True):
        programs = sorted(memory["programs"], key=lambda program: program["program"][::-1])
        assert len(programs) == len(trace.programs)
        stored = memory["before"]
        for number, program in enumerate(programs):
            if not trace.is_race or number % trace.at_once == 0:
                base = {name: list(values) for name, values in stored.items()}
            shown = states(page, figure, launch, number, len(program["steps"]))
            for state, step in zip(shown, program["steps"], strict=True):
                now = changed(base, program["start"], step["memory"])
                for tensor, texts in zip(trace.tensors, state["t"], strict=True):
                    assert texts == cells(tensor, now[tensor.name]), (trace.kernel, trace.label, number, tensor.name)
                for register, texts in zip(trace.registers, state["r"], strict=True):
                    values = step["registers"].get(register.name, [])
                    assert [text for text in texts if text] == [short(value) for value in values]
            stored = changed(stored, program["start"], program["steps"][-1]["memory"])


def changed(base: dict, start: dict, now: dict) -> dict:
    """Return what tensors hold once what a program has changed is stored."""
    result = {}
    for name, old in base.items():
        pairs = zip(old, start[name], now[name], strict=True)
        result[name] = [after if after != before else value for value, before, after in pairs]
    return result


def cells(tensor, values: list[float]) -> list[str]:
    """Return what cells show of a tensor's values, with nothing where it is padded or unwritten."""
    rows, columns = tensor.drawn
    own = tensor.shape[-1]
    texts = [""] * (rows * columns)
    for place, value in enumerate(values):
        if tensor.before or value != UNWRITTEN:
            texts[place // own * columns + place % own] = short(value)
    return texts


def test_lanes_and_lines_are_marked(page: Page, figures: list[Figure]) -> None:
    for figure, launch, trace in traces(figures):
        for program in range(len(trace.programs)):
            steps = [step for step in trace.steps if step.program == program]
            for state, step in zip(states(page, figure, launch, program, len(steps)), steps, strict=True):
                for name, kinds in (("ld", {"load"}), ("st", {"store", "atomic"})):
                    assert state[name] == len({cell for a in step.accesses if a.kind in kinds for cell in a.cells})
                assert state["off"] == len({cell for a in step.accesses for cell in a.masked})
                assert state["out"] == len({cell for a in step.accesses for cell in a.outside})
                assert state["now"] == [*range(step.lines[0], step.lines[1] + 1)]
                assert state["sentence"].endswith(step.sentence.replace("`", ""))


def test_without_scripts_the_first_step_is_the_scripts(browser: Browser, address: str, figures: list[Figure]) -> None:
    """The page is drawn with the state that the script sets for it, and shows all launches."""
    texts = """() => [...document.querySelectorAll("figure.step-through .launch")].map((launch) => [
      [...launch.querySelectorAll("[data-t] rect:not(.strip), [data-r] rect")]
        .map((cell) => (cell.getAttribute("class") ?? "").trim()),
      [...launch.querySelectorAll("[data-t] text, [data-r] text, .sentence")].map((text) => text.textContent.trim()),
      [...launch.querySelectorAll(".ln.now")].map((line) => line.dataset.n)])"""
    results = []
    for scripts in (False, True):
        context = browser.new_context(java_script_enabled=scripts)
        page = context.new_page()
        page.goto(address)
        assert page.locator(".bar").first.is_visible() == scripts, "its style needs `scripting`"
        visible = page.locator(".launch").locator("visible=true").count()
        assert visible == (len(figures) if scripts else len(traces(figures)))
        results.append(page.evaluate(texts))
        context.close()
    assert results[0] == results[1]


def test_by_keyboard_and_pointer(page: Page, figures: list[Figure]) -> None:
    figure = page.locator("figure.step-through").first
    figure.locator(".next").focus()
    at = figure.locator(".at")
    expect(at).to_have_text("3 of 6")
    page.keyboard.press("ArrowRight")
    expect(at).to_have_text("4 of 6")
    page.keyboard.press("Home")
    expect(at).to_have_text("1 of 6")
    figure.locator("input").focus()
    page.keyboard.press("End")
    expect(at).to_have_text("6 of 6")
    figure.locator(".ln", has_text="tl.load").click()
    expect(at).to_have_text("3 of 6")
    figure.locator("rect.off").first.hover()
    expect(figure.locator(".hover")).to_have_text("x[1, 5]: masked off, not touched")
    figure.locator("rect.ld").nth(1).hover()
    expect(figure.locator(".hover")).to_have_text(f"x[1, 1] = {figures[0].traces[0].tensors[0].before[9]}")
    figure.get_by_role("button", name="all at once").click()
    expect(figure.locator(".sentence")).to_contain_text("Programs 0, 1, 2")
    figure.locator("rect.pg1").first.hover()
    expect(figure.locator(".hover")).to_have_text("x[1, 0]: touched by 1")
    surplus = page.locator("figure.step-through").last  # two of its six programs are masked off
    surplus.get_by_role("button", name="all at once").click()
    named = "Programs (0, 0), (1, 0), (0, 1), (1, 1) store to out."
    expect(surplus.locator(".sentence")).to_contain_text(named)


def test_switch_between_launches(page: Page) -> None:
    figure = page.locator("figure.step-through").nth(2)
    figure.get_by_role("button", name="a race").click()
    expect(figure.locator(".launch").locator("visible=true")).to_have_count(1)
    expect(figure.locator(".outcome").locator("visible=true")).to_contain_text("After all programs: wrong.")
    figure.get_by_role("button", name="without the mask").click()
    figure.locator(".launch").nth(2).locator(".programs button").nth(2).click()
    figure.locator(".launch").nth(2).locator(".ln", has_text="tl.load").click()
    expect(figure.locator(".launch").nth(2).locator("rect.out")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_and_a_phone(browser: Browser, address: str, scheme: str) -> None:
    context = browser.new_context(color_scheme=scheme, viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert Axe().run(page).response["violations"] == []
    context.close()


def test_sums_and_running_sums_are_told_apart(figures: list[Figure]) -> None:
    """The interpreter adds up for both with one function."""
    sentences = [step.sentence for _, _, trace in traces(figures) for step in trace.steps]
    for name in ("cumsum", "sum"):
        assert any(f"`tl.{name}` of 4 × 4 values" in sentence for sentence in sentences)


def test_figures_are_small(figures: list[Figure]) -> None:
    for figure in figures:
        assert len(gzip.compress(drawing(figure).encode())) <= MOST
    assert sum(len(gzip.compress(path.read_bytes())) for path in STATIC.glob("step_through.*")) <= MOST_FILES


def test_a_number_that_would_be_shown_as_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="would be shown as 0"):
        short(0.001)
    assert [*map(short, (0.0, -1.5, 0.25, 1234.0, math.inf, math.nan))] == ["0", "−1.5", ".25", "1234", "∞", "nan"]
