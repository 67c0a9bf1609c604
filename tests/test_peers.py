"""Figures beside other libraries': what is written, shown and refused. No GPU is needed: none is measured here."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peers
import pytest
from bs4 import BeautifulSoup
from project import ROOT, Project

from triton_gallery.device import Environment
from triton_gallery.formats import BadRecordError
from triton_gallery.peers import Peers, Row, load_all, write
from triton_gallery.recipes import hash_of, load

EVIL = '<script>alert("evil")</script>'
ENVIRONMENT = Environment("Test GPU 9000", "0", "9.0", 1, "1.2", "13.0", "2.99", "3.99", "3.11")
DATE, COMMIT = "2026-01-02T03:04:05+00:00", "0123456789abcdef0123"
RATES = {"Triton": [300.0, 290.0, 310.0], "PyTorch": [100.0, 99.0, 101.0], "Roof": [400.0, 399.0, 401.0]}
TIED = {**RATES, "Liger": [303.0, 295.0, 304.0]}


@pytest.fixture
def project(make_project: Callable[..., Project]) -> Project:
    """Return a gallery of two recipes, not built, and a performance page."""
    project = make_project()
    project.write(one="x = 1", two="x = 2")
    (project.root / "docs" / "performance.md").write_text("# Performance\n\n```{peers}\n```\n")
    index = project.root / "docs" / "index.md"
    index.write_text(index.read_text().replace("recipes/index", "recipes/index\nperformance"))
    return project


def record(project: Project, environment: Environment = ENVIRONMENT) -> Path:
    """Write a run of three rows; return its file."""
    one, two = load(project.root / "gallery")
    rows = [
        Row(one.key, "one, forward", [131072, 1024], hash_of(one), TIED),
        Row(one.key, EVIL, [8, 2], hash_of(one), {**RATES, "Liger": None}),
        Row(two.key, "two, backward", [16], hash_of(two), RATES),
    ]
    return write(project.root / "docs" / "_records", environment, DATE, COMMIT, {"liger-kernel": "0.8.5"}, rows)


def read(project: Project) -> list[Peers]:
    """Return what is recorded."""
    return load_all(project.root / "docs" / "_records")


def shown(project: Project) -> BeautifulSoup:
    """Build the site; return the article of the performance page."""
    status, output = project.build()
    assert status == 0, output
    page = (project.root / "_build" / "html" / "performance.html").read_text()
    return BeautifulSoup(page, "html.parser").select_one("article")


def cells(article: BeautifulSoup) -> list[list[str]]:
    """Return the texts of the table's cells."""
    return [[cell.text.strip() for cell in row.select("td")] for row in article.select("table.peers tbody tr")]


def test_what_is_written_is_read(project: Project) -> None:
    path = record(project)
    assert path == project.root / "docs" / "_records" / "test-gpu-9000" / "peers.json"
    (run,) = read(project)
    assert (run.path, run.device.name, run.date, run.commit) == (path, "Test GPU 9000", DATE, COMMIT)
    assert run.rows[0].rates == TIED
    assert run.stale(load(project.root / "gallery")) == []


def test_page_shows_the_figures_and_what_they_are_of(project: Project) -> None:
    assert "Nothing has been measured beside other libraries yet." in shown(project).text
    path = record(project)
    article = shown(project)
    caption = article.find("strong", string="Test GPU 9000").parent.text
    facts = "driver 1.2 · torch 2.99 · triton 3.99 · liger-kernel 0.8.5 · 2026-01-02 · commit 0123456789"
    assert caption == f"Test GPU 9000 · {facts}"
    assert [title.text.strip() for title in article.select("table.peers.sortable th")] == [
        *("work", "size", "Triton / best other", "Triton / roof", "Triton Gallery (GB/s)", "PyTorch", "Liger", "Roof")
    ]
    assert cells(article) == [
        ["one, forward", "131072 \N{MULTIPLICATION SIGN} 1024", "0.99 (tie)", "0.75", "300", "100", "303", "400"],
        [EVIL, "8 \N{MULTIPLICATION SIGN} 2", "3.00", "0.75", "300", "100", "-", "400"],
        ["two, backward", "16", "3.00", "0.75", "300", "100", "-", "400"],
    ]
    assert not article.find("script", string="alert")
    links = [link["href"] for link in article.select("table.peers a")]
    assert links == ["recipes/things/one.html"] * 2 + ["recipes/things/two.html"]
    path.unlink()
    assert not cells(shown(project)), "the page does not follow its record"


def test_rows_of_changed_code_are_stale(project: Project) -> None:
    record(project)
    project.write(one="x = 1  # a comment")
    assert not shown(project).select("table.peers .stale")
    project.write(one="x = 3")
    article = shown(project)
    assert [row[0] for row in cells(article)] == ["one, forward, stale", f"{EVIL}, stale", "two, backward"]
    project.write(one="x = 1")
    assert not shown(project).select("table.peers .stale")
    project.remove("one")
    assert [row[0] for row in cells(shown(project))] == ["one, forward, stale", f"{EVIL}, stale", "two, backward"]


def test_check_records_names_stale_rows(project: Project) -> None:
    record(project)
    project.write(two="x = 3")
    command = [*project.command, "check-records"]
    listed = subprocess.run(command, cwd=project.root, env=project.environment, capture_output=True, text=True)
    assert listed.returncode == 1
    lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines()]
    assert lines[:2] == [["things/one", "missing"], ["things/two", "missing, stale beside other libraries"]]


def test_devices_stand_below_each_other(project: Project) -> None:
    record(project)
    record(project, Environment("Other GPU", "0", "8.0", 1, None, None, "2.99", "3.99", "3.11"))
    article = shown(project)
    assert len(article.select("table.peers")) == 2
    assert "Other GPU · torch 2.99 · " in article.text


BREAKS = {
    "cut short": (lambda text: text[: len(text) // 2], "not JSON, perhaps cut short"),
    "wrong schema": (lambda text: text.replace('"schema": 1', '"schema": 2'), r"\$\.schema: 1 was expected"),
    "unknown field": (lambda text: text.replace('"commit"', '"evil": 1, "commit"'), "'evil' was unexpected"),
    "text for a number": (lambda text: text.replace("290.0", '"<b>"'), "is not of type"),
    "no rate of ours": (lambda text: text.replace('"Triton"', '"Titan"', 1), "'Triton' is a required property"),
    "two of three": (lambda text: text.replace("300.0,", "", 1), "is too short"),
    "no rate at all": (lambda text: text.replace("300.0", "0.0", 1), "0.0 is less than or equal to"),
    "a path for a recipe": (lambda text: text.replace("things/one", "../one"), "does not match"),
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
    assert "peers.json: not JSON, perhaps cut short" in " ".join(output.split())


def test_what_does_not_fit_is_not_written(project: Project) -> None:
    path = record(project)
    before = path.read_bytes()
    row = Row("things/one", "one", [4], "0" * 16, {"Triton": [0.0, 0.0, 0.0]})
    with pytest.raises(BadRecordError, match=r"\$\.rows\[0\]\.rates\.Triton"):
        write(project.root / "docs" / "_records", ENVIRONMENT, DATE, None, {}, [row])
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark without a GPU."""
    environment = Project(ROOT).environment
    command = [sys.executable, "benchmarks/peers.py", *arguments]
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


def test_library_that_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there, gone = peers.Peer("torch", "torch"), peers.Peer("no-such-package", "nothing")
    monkeypatch.setattr(peers, "PEERS", {"Torch": there, "Gone": gone})
    assert list(peers.installed()) == ["Torch"]
    assert capsys.readouterr().out == "Gone is left out: it is not installed (pip install no-such-package)\n"


def test_works_are_of_recipes_and_of_known_libraries() -> None:
    assert {work.recipe for work in peers.WORKS} <= {recipe.key for recipe in load(ROOT / "gallery")}
    assert {name for work in peers.WORKS for name in work.peers} <= set(peers.PEERS)
