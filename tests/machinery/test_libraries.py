"""Figures beside other libraries': what is written, shown and refused. No GPU is needed: none is measured here."""

import importlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bs4 import BeautifulSoup
from msgspec import structs
from project import ROOT, Project, whole_page

from triton_gallery.libraries import measure
from triton_gallery.libraries.library_rows import LibraryRow, load_all, merge, table_of
from triton_gallery.recipe.contents import load
from triton_gallery.recipe.device import Environment, Slot
from triton_gallery.recipe.hashes import hash_of
from triton_gallery.records.files import BadRecordError

EVIL = '<script>alert("evil")</script>'
ENVIRONMENT = Environment("Test GPU 9000", "9.0", 1, "1.2", "13.0", "2.99", "3.99", "3.11")
DATE, COMMIT = "2026-01-02T03:04:05+00:00", "0123456789abcdef0123"
RATES = {"Triton": [300.0, 290.0, 310.0], "PyTorch": [100.0, 99.0, 101.0], "Roof": [400.0, 399.0, 401.0]}
TIED = {**RATES, "Liger": [303.0, 295.0, 304.0]}
BY = " \N{MULTIPLICATION SIGN} "


@pytest.fixture(scope="module")
def built(make_project: Callable[..., Project]) -> Project:
    """Return a built gallery of two recipes, and the page that their tables link to."""
    project = make_project()
    project.write(one="x = 1", two="x = 2")
    (project.root / "docs" / "performance.md").write_text("# Performance\n\n```{performance}\n```\n")
    index = project.root / "docs" / "index.md"
    index.write_text(index.read_text().replace("recipes/index", "recipes/index\nperformance"))
    status, output = project.build()
    assert status == 0, output
    return project


def a_row(project: Project, name: str, work: str, shape: list[int], rates: dict, **others: object) -> LibraryRow:
    """Return a row of a recipe's present code."""
    (recipe,) = (recipe for recipe in load(project.root / "gallery") if recipe.name == name)
    row = LibraryRow(
        recipe.key, work, shape, "GB/s", hash_of(recipe), ENVIRONMENT, DATE, COMMIT, {"liger-kernel": "0.8.5"}, rates
    )
    return structs.replace(row, **others)


def keep(project: Project, *rows: LibraryRow, known: Sequence[LibraryRow] = ()) -> Path | None:
    """Put rows into their files; return the first that changed."""
    return next(iter(merge(project.root / "docs" / "_records", rows, [row.key for row in known or rows])), None)


def three(project: Project, **others: object) -> list[LibraryRow]:
    """Return the rows of a run."""
    return [
        a_row(project, "one", "one, forward", [131072, 1024], TIED, **others),
        a_row(project, "one", EVIL, [8, 2], {**RATES, "Liger": None}, **others),
        a_row(project, "two", "two, backward", [16], RATES, **others),
    ]


def record(project: Project, **others: object) -> Path:
    """Write a run of three rows; return its file."""
    return keep(project, *three(project, **others))


def read(project: Project) -> list[LibraryRow]:
    """Return what is recorded."""
    return load_all(project.root / "docs" / "_records")


def shown(project: Project, page: str = "recipes/things/one") -> BeautifulSoup:
    """Build the site; return the article of a page."""
    status, output = project.build()
    assert status == 0, output
    return article(project, page)


def article(project: Project, page: str) -> BeautifulSoup:
    """Return the article of a built page."""
    text = whole_page(project.root / "_build" / "html" / f"{page}.html")
    return BeautifulSoup(text, "html.parser").select_one("article")


def cells(article: BeautifulSoup, kind: str = "libraries") -> list[list[str]]:
    """Return the texts of the tables' cells."""
    return [[cell.text.strip() for cell in row.select("td")] for row in article.select(f"table.{kind} tbody tr")]


def captions(article: BeautifulSoup) -> list[str]:
    """Return the lines above the tables."""
    texts = [(strong.text, strong.parent.text) for strong in article.select("p > strong")]
    return [text for device, text in texts if text.startswith(f"{device} · ")]


def test_what_is_written_is_read(project: Project) -> None:
    path = record(project)
    assert path == project.root / "docs" / "_records" / "test-gpu-9000" / "ops" / "one.json"
    assert read(project) == three(project)
    assert all(row.is_fresh(load(project.root / "gallery")) for row in read(project))


def test_rows_are_merged_one_by_one(project: Project) -> None:
    """A row takes the place of that of the same work and size; others stay; those of no known work go."""
    first, second, third = three(project)
    keep(project, first, second, third)
    later = {"date": "2026-05-06T07:08:09+00:00", "commit": None, "packages": {}}
    newer = structs.replace(second, rates=RATES, environment=structs.replace(first.environment, torch="3.0"), **later)
    further = structs.replace(second, shape=[8, 3])
    keep(project, further, newer, known=[first, second, further, third])
    assert read(project) == [first, newer, further, third], "they have the order of what is known"
    keep(project, first, known=[first, third])
    assert read(project) == [first, third]


def test_sizes_of_a_work_are_one_table(project: Project) -> None:
    _, second, _ = three(project)
    table = table_of([second, structs.replace(second, shape=[1, 3], rates={"Triton": [2.0, 1.0, 3.0]})])
    assert table.xs == [f"1{BY}3", f"8{BY}2"], "the smallest comes first"
    assert table.series == {
        "Triton": [2.0, 300.0],
        "PyTorch": [None, 100.0],
        "Liger": [None, None],
        "Roof": [None, 400.0],
    }
    assert (table.band("Triton", 0), table.band("PyTorch", 0)) == ((1.0, 3.0), None)


def test_row_of_before_has_no_dtype_and_no_times(project: Project) -> None:
    """They are shown where any row of the table has them."""
    path = record(project)
    text = path.read_text()
    for new in (',\n   "dtype": ""', ',\n   "cpu_us": {}', ',\n   "first_call_s": {}'):
        assert new in text
        text = text.replace(new, "")
    path.write_text(text)
    assert read(project) == three(project)
    keep(project, *three(project, dtype="float16"))
    assert cells(shown(project))[0][2] == "float16"


WHEN = "2026-01-02 03:04"
FACTS = f"{WHEN} · driver 1.2 · torch 2.99 · triton 3.99 · liger-kernel 0.8.5 · commit 0123456789"


def test_page_shows_the_figures_and_what_they_are_of(project: Project) -> None:
    record(project)
    page = shown(project)
    assert captions(page) == [f"Test GPU 9000 · {FACTS}"]
    assert [title.text.strip() for title in page.select("table.libraries.sortable th")] == [
        *("work", "size", "Triton / best other", "Triton / roof", "Triton Gallery (GB/s)", "PyTorch", "Liger", "Roof")
    ]
    assert cells(page) == [
        ["forward", f"131072{BY}1024", "0.99 (tie)", "0.75", "300", "100", "303", "400"],
        [EVIL, f"8{BY}2", "3.00", "0.75", "300", "100", "-", "400"],
    ]
    assert not page.find("script", string="alert")


def test_recipe_shows_its_rows(project: Project) -> None:
    """They stand at the end of the page, which follows them."""
    project.write(one='x = 1\n\n# %%\n# Go further\n# ----------\n#\n# Read on.\n\nprint("last")')
    assert not shown(project, "recipes/things/one").select("table.libraries, #beside-other-libraries")
    path = record(project)
    page = shown(project, "recipes/things/one")
    assert [title.text.strip("\N{PILCROW SIGN}") for title in page.select("h2")] == [
        "Go further",
        "Beside other libraries",
    ]
    assert [row[0] for row in cells(page)] == ["forward", EVIL]
    assert captions(page) == [f"Test GPU 9000 · {FACTS}"]
    other = article(project, "recipes/things/two")
    assert [row[0] for row in cells(other)] == ["backward"], "another page has its own"
    assert not other.select(".sphx-glr-footer")
    newer = a_row(project, "one", "one, forward", [131072, 1024], RATES, date="2027-01-01T00:00:00+00:00")
    keep(project, newer, known=read(project))
    page = shown(project, "recipes/things/one")
    assert [(row[2], row[-1]) for row in cells(page)] == [("3.00", "2027-01-01 00:00"), ("3.00", WHEN)]
    path.unlink()
    assert not cells(shown(project, "recipes/things/one"))


def test_rows_of_several_runs_say_which(project: Project) -> None:
    first, second, third = three(project)
    software = structs.replace(first.environment, torch="3.0", driver=None)
    newer = structs.replace(second, environment=software, date="2027-01-01T00:00:00+00:00", packages={}, commit=None)
    keep(project, first, newer, third)
    page = shown(project)
    assert captions(page) == [f"Test GPU 9000 · {FACTS}", "Test GPU 9000 · 2027-01-01 00:00 · torch 3.0 · triton 3.99"]
    assert [row[-1] for row in cells(page)] == [WHEN, "2027-01-01 00:00"]


def test_many_runs_are_folded_and_nobody_has_an_empty_column(project: Project) -> None:
    runs = [
        a_row(project, "one", "one", [number], {**RATES, "Liger": None}, date=f"2027-01-0{number}T00:00:00+00:00")
        for number in range(1, 5)
    ]
    keep(project, *runs[:3])
    assert not shown(project).select("section#beside-other-libraries details details p > strong")
    keep(project, *runs)
    page = shown(project)
    assert len(captions(page)) == len(page.select("section#beside-other-libraries details details p > strong")) == 4
    assert "Liger" not in page.select_one("table.libraries thead").text


def test_each_unit_has_its_table(project: Project) -> None:
    first, second, third = three(project)
    keep(project, first, structs.replace(second, unit="TFLOP/s"), third)
    titles = [table.select("th")[4].text.strip() for table in shown(project).select("table.libraries")]
    assert titles == ["Triton Gallery (GB/s)", "Triton Gallery (TFLOP/s)"]


def test_rows_of_changed_code_are_stale(project: Project) -> None:
    record(project)
    project.write(one="x = 1  # a comment")
    assert not shown(project).select("table.libraries .stale")
    project.write(one="x = 3")
    assert [row[0] for row in cells(shown(project))] == ["forward, stale", f"{EVIL}, stale"]
    project.write(one="x = 1")
    assert not shown(project).select("table.libraries .stale")


def test_check_records_names_stale_rows(project: Project) -> None:
    record(project)
    project.write(two="x = 3")
    status, listed = project.run("check-records")
    assert status == 1
    lines = [line.split(maxsplit=1) for line in listed.splitlines()]
    assert lines[:2] == [["things/one", "missing"], ["things/two", "missing, stale beside other libraries"]]


def test_results_have_the_rows(project: Project) -> None:
    """Each says where it comes from."""
    first, second, third = three(project)
    keep(project, first, second, third)
    project.write(two="x = 3")
    recorded = json.loads(results(project, "--json"))
    assert [row["state"] for row in recorded["libraries"]] == ["fresh", "fresh", "stale"]
    assert recorded["libraries"][0] == {
        "recipe": "things/one",
        "work": "one, forward",
        "shape": [131072, 1024],
        "unit": "GB/s",
        "rates": {name: dict(zip(["value", "low", "high"], rate, strict=True)) for name, rate in TIED.items()},
        "device": "Test GPU 9000",
        "driver": "1.2",
        "torch": "2.99",
        "triton": "3.99",
        "packages": {"liger-kernel": "0.8.5"},
        "ratio": 300 / 303,
        "cpu_us": {},
        "first_call_s": {},
        "date": DATE,
        "commit": COMMIT,
        "state": "fresh",
    }
    assert recorded["libraries"][1]["rates"]["Liger"] is None
    assert [row["work"] for row in json.loads(results(project, "things/two", "--json"))["libraries"]] == [
        "two, backward"
    ]
    lines = [line for line in results(project).splitlines() if "things/one" in line and "one, forward" in line]
    assert len(lines) == len(TIED)
    assert all(word in lines[0] for word in (first.size.replace(BY, " x "), "Triton", "300.0", "290.0", "310.0"))


def test_cpu_times_of_calls(project: Project) -> None:
    """The page has them in a column; `results` compares ours with those of torch.compile's functions."""
    first, second, third = three(project)
    keep(
        project,
        structs.replace(first, cpu_us={"Triton": 30.0, "PyTorch": 9.0, "torch.compile": 60.0}),
        structs.replace(second, cpu_us={"Triton": 33.4, "torch.compile": 22.0}),
        structs.replace(third, cpu_us={"Triton": 10.0}),
    )
    page = shown(project)
    assert page.select("table.libraries.sortable th")[-1].text.strip() == "CPU us, Triton Gallery, PyTorch"
    assert [row[-1] for row in cells(page)] == ["30, 9", "33, -"]
    printed = " ".join(results(project).split())
    assert "torch.compile's function, Test GPU 9000, 2 fresh rows: median 1.01, largest 1.52 (<script>" in printed
    project.write(one="x = 3")
    assert "CPU time of a call over" not in results(project)


def test_results_say_how_ratios_lie(project: Project) -> None:
    """Over the sizes of a work; those of all draws are one."""
    rows = [
        a_row(project, "one", f"one, drawn {size % 2}, {way}", [size], {**RATES, "Triton": [10.0 * size] * 3})
        for way in ("forward", "backward")
        for size in range(1, 21)
    ]
    keep(project, *rows)
    lines = [line.split() for line in results(project).splitlines() if "20 " in line and "0.30" in line]
    assert [" ".join(part for part in line if part not in "|│┃") for line in lines] == [
        f"one, drawn, {way} Test GPU 9000 20 0.10 0.30 1.05 2.00" for way in ("forward", "backward")
    ]


def test_results_say_how_long_a_first_call_takes(project: Project) -> None:
    first, second, third = three(project)
    assert "first call, s" not in results(project)
    keep(project, structs.replace(first, first_call_s={"Triton": 1.5, "torch.compile": 2.25}), second, third)
    printed = results(project)
    (line,) = (line for line in printed[printed.index("first call, s") :].splitlines() if "one, forward" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["one, forward", "131072 x 1024", "1.50", "2.25", "Test GPU 9000", "fresh"]


def results(project: Project, *arguments: str) -> str:
    """Return what the command prints of the recorded figures."""
    status, output = project.run("results", *arguments)
    assert status == 0, output
    return output


def test_devices_stand_below_each_other(project: Project) -> None:
    record(project)
    other = Environment("Other GPU", "8.0", 1, None, None, "2.99", "3.99", "3.11")
    record(project, environment=other)
    page = shown(project)
    assert len(page.select("table.libraries")) == 2
    assert captions(page)[0].startswith(f"Other GPU · {WHEN} · torch 2.99 · ")
    of_page = json.loads((project.root / "_build" / "html" / "performance.json").read_text())
    assert of_page == json.loads(results(project, "--json"))
    assert len(of_page["libraries"]) == 6


BREAKS = {
    "cut short": (lambda text: text[: len(text) // 2], "not JSON, perhaps cut short"),
    "newer schema": (lambda text: text.replace('"schema": 2', '"schema": 3'), "of version 3, this project reads"),
    "unknown field": (lambda text: text.replace('"commit"', '"evil": 1, "commit"'), "unknown field `evil`"),
    "missing field": (lambda text: re.sub('"unit": .*', "", text, count=1), "missing required field `unit`"),
    "no GPU": (lambda text: text.replace('"memory": 1', '"memory": null', 1), "its device is no GPU"),
    "text for a number": (lambda text: text.replace("290.0", '"<b>"'), "Expected `float`, got `str`"),
    "another unit": (lambda text: text.replace('"GB/s"', '"calls/s"', 1), r"regex .* - at `\$\.rows\[0\]\.unit`"),
    "no rate of ours": (lambda text: text.replace('"Triton"', '"Titan"', 1), r"no rate of Triton - at `\$\.rows\[0\]`"),
    "two of three": (lambda text: text.replace("300.0,", "", 1), "`array` of length >= 3"),
    "no rate at all": (lambda text: text.replace("300.0", "0.0", 1), "`float` > 0.0"),
    "a path for a recipe": (lambda text: text.replace("things/one", "../one"), "matching regex"),
    "another device": (lambda text: text.replace("9000", "9001"), "it is that of another device, Test GPU 9001"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_bad_record_is_refused(project: Project, how: str) -> None:
    change, reason = BREAKS[how]
    path = record(project)
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    with pytest.raises(BadRecordError, match=reason) as refused:
        read(project)
    assert str(path) in str(refused.value)


def test_bad_record_stops_the_build(project: Project) -> None:
    path = record(project)
    path.write_text(path.read_text()[:100])
    status, output = project.build()
    assert status != 0
    assert "one.json: not JSON, perhaps cut short" in " ".join(output.split())


def test_what_does_not_fit_is_not_written(project: Project) -> None:
    path = record(project)
    before = path.read_bytes()
    row = a_row(project, "one", "one, forward", [131072, 1024], {"Triton": [0.0, 0.0, 0.0]})
    with pytest.raises(BadRecordError, match=r"`float` > 0\.0 - at `\$\.rows\[0\]\.rates"):
        keep(project, row)
    assert path.read_bytes() == before
    assert {file.name for file in path.parent.iterdir()} == {"one.json", "two.json"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark without a GPU."""
    environment = Project(ROOT).environment
    command = [sys.executable, "-m", "triton_gallery.libraries.measure", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_measuring_needs_a_gpu() -> None:
    refused = run()
    assert refused.returncode == 2
    assert refused.stderr == "torch sees no GPU here: libraries are measured on one\n"
    assert refused.stdout == ""


def test_unknown_work_is_named() -> None:
    refused = run("fusion/none")
    assert refused.returncode == 2
    assert refused.stderr == "not measured beside other libraries: fusion/none\n"


def test_several_gpus_measure_side_by_side(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each recipe has a process, and a GPU like the first that no other has; what failed shows in the status."""
    both, busy, started = threading.Barrier(2, timeout=60), set(), []

    def measured(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        *_, key = command
        gpu = env["CUDA_VISIBLE_DEVICES"]
        assert gpu not in busy
        busy.add(gpu)
        started.append((key, gpu))
        both.wait()
        busy.remove(gpu)
        return SimpleNamespace(stdout=f"measured {key}\n", returncode=int(key == "fusion/rope"))

    other = structs.replace(ENVIRONMENT, name="Test GPU 100")
    slots = [Slot(ENVIRONMENT, "5"), Slot(other, "6"), Slot(ENVIRONMENT, "7")]
    monkeypatch.setattr(measure, "detect", lambda: slots)
    monkeypatch.setattr(measure.subprocess, "run", measured)
    keys = ["fusion/softmax", "fusion/rope", "fusion/swiglu", "fusion/topk"]
    assert measure.main(keys) == 1
    assert sorted(key for key, _ in started) == sorted(keys)
    assert {gpu for _, gpu in started} == {"5", "7"}
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(f"measured {key}" for key in keys)


def test_library_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    present, gone = measure.Library("torch", "torch"), measure.Library("no-such-package", "nothing")
    monkeypatch.setattr(measure, "LIBRARIES", {"Torch": present, "Gone": gone})
    assert list(measure.installed()) == ["Torch"]
    assert capsys.readouterr().out == "Gone is left out: it is not installed (pip install no-such-package)\n"


def test_works_are_of_recipes_and_of_known_libraries() -> None:
    assert {work.recipe for work in measure.WORKLOADS} <= {recipe.key for recipe in load(ROOT / "gallery")}
    assert {name for work in measure.WORKLOADS for name in work.libraries} <= set(measure.LIBRARIES)


def test_works_stand_in_the_file_of_their_recipe() -> None:
    files = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"]
    # What is measured by several processes is a program of its own.
    programs = {name for name in files if not importlib.import_module(f"benchmarks.{name}").WORKLOADS}
    assert programs == {"all_reduce"}
    assert {*files} - programs == {work.recipe.partition("/")[2] for work in measure.WORKLOADS}
    for name in {*files} - programs:
        assert {work.recipe.partition("/")[2] for work in importlib.import_module(f"benchmarks.{name}").WORKLOADS} == {
            name
        }


def test_no_two_works_have_one_row() -> None:
    keys = [
        (work.recipe, name, shape) for work in measure.WORKLOADS for name in work.directions for shape in work.shapes
    ]
    assert len(set(keys)) == len(keys)
