"""Figures under several versions of Triton: what is measured, written, shown and refused. No GPU is needed."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from msgspec import structs
from project import ROOT, Project
from test_libraries import BY, COMMIT, DATE, ENVIRONMENT, article, captions, cells, record, shown

from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.device import Slot
from triton_gallery.recipe.hashes import hash_of
from triton_gallery.records.files import BadRecordError
from triton_gallery.versions import measure, measuring_process
from triton_gallery.versions.rates import Contender, VersionRow, load_all, merge

OLD, NEW, OFF = "3.6.0", "3.9.0", "3.9.0, FP fusion off"


@pytest.fixture(scope="module")
def built(make_project: Callable[..., Project]) -> Project:
    """Return a built gallery of two recipes, and the pages that it links to."""
    project = make_project()
    project.write(one="x = 1", two="x = 2")
    docs = project.root / "docs"
    (docs / "versions.md").write_text("# Versions\n\n```{versions}\n```\n")
    (docs / "performance.md").write_text("# Performance\n\n```{performance}\n```\n")
    index = docs / "index.md"
    index.write_text(index.read_text().replace("recipes/index", "recipes/index\nversions\nperformance"))
    status, output = project.build()
    assert status == 0, output
    return project


def came(rate: float | None, seconds: float = 1.5, assembler: str = "12.8") -> Contender:
    """Return what came of one version of Triton."""
    band = rate and [rate, rate - 1, rate + 1]
    return Contender(band, seconds, 2, assembler, None if rate else "ValueError: no such op")


def a_row(project: Project, name: str, work: str, shape: list[int], **contenders: Contender) -> VersionRow:
    """Return a row of a recipe's present code, by default of a baseline and a faster one."""
    (recipe,) = (recipe for recipe in load(project.root / "gallery") if recipe.name == name)
    device = structs.replace(ENVIRONMENT, triton=OLD)
    outcomes = contenders or {OLD: came(200.0), NEW: came(204.0, 2.25, "13.3")}
    return VersionRow(recipe.key, work, shape, "GB/s", hash_of(recipe), device, DATE, COMMIT, outcomes)


def keep(project: Project, *rows: VersionRow) -> Path:
    """Put rows into their file; return it."""
    return merge(project.root / "docs" / "_records", rows, [row.key for row in rows])[0]


def slower(project: Project) -> VersionRow:
    """Return a row of an op that lost."""
    lost = {OLD: came(200.0), NEW: came(190.5), OFF: came(182.0)}
    return a_row(project, "one", "one, backward", [4096, 5120], **lost)


def test_rows_are_read_and_merged(project: Project) -> None:
    first, second = a_row(project, "one", "one", [8]), slower(project)
    records = project.root / "docs" / "_records"
    (path,) = merge(records, [first, second], [second.key, first.key])
    assert path == records / "test-gpu-9000" / "versions.json"
    assert load_all(records) == [second, first], "they have the order of what is known"
    newer = structs.replace(first, date="2026-05-06T07:08:09+00:00", contenders={OLD: came(2.0), NEW: came(None)})
    merge(records, [newer], [first.key, second.key])
    assert load_all(records) == [newer, second]
    assert newer.ratio(NEW) is None
    assert second.ratio(OFF) == 0.91
    assert (second.baseline, second.others) == (OLD, [NEW, OFF])


BREAKS = {
    "cut short": (lambda text: text[: len(text) // 2], "not JSON, perhaps cut short"),
    "newer schema": (
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        "of version 2, this project reads version 1",
    ),
    "unknown field": (lambda text: text.replace('"kernels"', '"evil": 1, "kernels"', 1), "unknown field `evil`"),
    "no rate at all": (lambda text: text.replace("204.0", "0.0", 1), "`float` > 0.0"),
    "less than no time": (lambda text: text.replace("2.25", "-2.25", 1), "`float` >= 0.0"),
    "no version": (lambda text: text.replace('"3.9.0"', '"<b>"', 1), "`str` matching regex"),
    "an assembler's path": (lambda text: text.replace('"13.3"', '"/bin/ptxas"', 1), "`str` matching regex"),
    "another device": (lambda text: text.replace("9000", "9001"), "it is that of another device, Test GPU 9001"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_bad_record_is_refused(project: Project, how: str) -> None:
    change, reason = BREAKS[how]
    path = keep(project, a_row(project, "one", "one", [8]))
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    with pytest.raises(BadRecordError, match=reason) as refused:
        load_all(project.root / "docs" / "_records")
    assert str(path) in str(refused.value)


def test_page_shows_the_rows(project: Project) -> None:
    """With the software, the means, the ratios, and which code they are of; it follows its record."""
    assert "Nothing has been measured under several versions of Triton yet." in article(project, "versions").text
    two = a_row(project, "two", "two", [16], **{OLD: came(100.0), NEW: came(None)})
    path = keep(project, a_row(project, "one", "one, forward", [8, 2]), slower(project), two)
    page = shown(project, "versions")
    when = "2026-01-02 03:04"
    assert captions(page)[0] == (
        f"Test GPU 9000 · {when} · driver 1.2 · torch 2.99 · triton 3.6.0 (ptxas 12.8) · triton 3.9.0 (ptxas 13.3) · "
        "commit 0123456789"
    )
    mean = (1.02 * 0.9525) ** 0.5
    assert f"3.9.0 / 3.6.0: {mean:.3f} over 2 rows; 3.9.0, FP fusion off / 3.6.0: 0.910 over 1 rows." in page.text
    assert "compiling, all rows together: 3.6.0 4, 3.9.0 5, 3.9.0, FP fusion off 2." in page.text
    titles = [title.text.strip() for title in page.select("table.sortable.filterable th")]
    names = (OLD, NEW, OFF)
    assert titles == [
        *("work", "size", f"{NEW} / {OLD}", f"{OFF} / {OLD}"),
        *(f"{name} (GB/s)" for name in names),
        *(f"{name}, compiled (s)" for name in names),
        "measured",
    ]
    assert cells(page) == [
        ["one, forward", f"8{BY}2", "1.02", "", "200", "204", "", "1.50", "2.25", "", when],
        ["one, backward", f"4096{BY}5120", "0.95", "0.91", "200", "190", "182", "1.50", "1.50", "1.50", when],
        ["two", "16", "", "", "100", "failed", "", "1.50", "1.50", "", when],
    ]
    assert page.select_one("table a")["href"] == "recipes/things/one.html"
    project.write(one="x = 3")
    page = shown(project, "versions")
    assert [row[0] for row in cells(page)] == ["one, forward, stale", "one, backward, stale", "two"]
    assert "Geometric mean" not in page.text, "no fresh row has a ratio"
    path.unlink()
    assert not cells(shown(project, "versions"))


def test_page_of_an_op_that_lost_says_so(project: Project) -> None:
    """Where it lost most; an op that lost less than 5 %, or whose code has changed, says nothing."""
    text = (
        "With Triton 3.9.0, FP fusion off this op reaches 0.91 of its rate with 3.6.0 "
        f"(backward, 4096{BY}5120, on Test GPU 9000); Versions has every size."
    )
    path = keep(project, slower(project), a_row(project, "two", "two", [8], **{OLD: came(100.0), NEW: came(96.0)}))
    page = shown(project, "recipes/things/one")
    section = page.select_one("section#with-another-triton")
    assert section.select_one("p").text == text
    assert section.select_one("a[href$='versions.html']").text == "Versions"
    assert "With Triton" not in article(project, "recipes/things/two").text
    project.write(one="x = 3")
    assert "With Triton" not in shown(project, "recipes/things/one").text
    project.write(one="x = 1")
    assert text in shown(project, "recipes/things/one").text
    path.unlink()
    assert "With Triton" not in shown(project, "recipes/things/one").text


def test_sentence_stands_beside_other_libraries(project: Project) -> None:
    record(project)
    keep(project, slower(project))
    section = shown(project, "recipes/things/one").select_one("section#beside-other-libraries")
    assert section.select("p")[-1].text.startswith("With Triton 3.9.0, FP fusion off this op reaches 0.91")


TINY = """
import os
from operator import attrgetter

from triton_gallery.libraries.workload import Workload

BROKEN = os.environ.get("WHO") == "3.9.0" and os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"

def of(name):
    def function(x):
        if BROKEN and name == "frail":
            raise ValueError("no such op")
        if BROKEN and name == "deadly":
            os._exit(7)
        return x * (3 if BROKEN and name == "wrong" else 2)
    return function

WORKLOADS = [
    Workload(
        "things/one", ours=lambda module, name=name: of(name), torch=lambda torch: lambda x: x * 2, variant=name,
        shapes=[(8, 4), (2, 4), (4, 4), (16, 4)] if name == "" else [(2, 4)],
        inputs=lambda random, shape: (random(shape),), dtype="float32", backward=None,
    )
    for name in ("", "frail", "deadly", "wrong")
]
"""
PROGRAM = """
import os, sys
from multiprocessing.connection import Connection
os.environ["TRITON_INTERPRET"] = "1"
fused = os.environ["TRITON_DEFAULT_FP_FUSION"] == "1"
assert not os.path.exists(os.environ["TRITON_CACHE_DIR"])
os.environ["WHO"] = "3.9.0" if "other" in os.environ["PYTHONPATH"].split(os.pathsep)[0] else "3.6.0"
import tiny, torch
from triton_gallery.versions import measuring_process
from triton_gallery.libraries.trial import Trial
from triton_gallery import bench
measuring_process.DEVICE, measuring_process.WORKLOADS = "cpu", tiny.WORKLOADS
measuring_process.recipe_module = lambda recipe: None
torch.cuda.synchronize = lambda: None
class Bench(measuring_process.Bench):
    def about(self):
        return os.environ["WHO"], "12.8"
    def prepare(self, *arguments):
        made = super().prepare(*arguments)
        with open({log!r}, "a") as log:
            log.write(f"{{float(self.trial.inputs[0].detach().sum())}}\\n")
        return made
def time_turns(calls, turns, warm_up, prepare):
    for call in (1 + turns) * [*calls.values()]:
        prepare()
        call()
    time = 1e-6 * (1 if os.environ["WHO"] == "3.6.0" else 2 if fused else 4)
    return {{name: turns * [(time, 0.0, False)] for name in calls}}
measuring_process.Bench, bench.time_turns = Bench, time_turns
measuring_process.serve(Connection(int(sys.argv[1])))
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder for rows, on a host of which all but the GPU and the other Triton is real."""
    (tmp_path / "tiny.py").write_text(TINY)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(log=str(tmp_path / "log")))
    script = tmp_path / "gallery" / "things" / "one.py"
    script.parent.mkdir(parents=True)
    script.write_text('"""\nOne\n===\n"""\n\nx = 1\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "triton").symlink_to(Path(find_spec("triton").origin).parent)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("COMMIT", COMMIT)
    monkeypatch.delitem(sys.modules, "tiny", raising=False)
    import tiny

    monkeypatch.setattr(measure, "WORKLOADS", tiny.WORKLOADS)
    monkeypatch.setattr(measure, "PROGRAM", program)
    monkeypatch.setattr(measure, "GALLERY", tmp_path / "gallery")
    monkeypatch.setattr(measure, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(measure, "detect", lambda: [Slot(ENVIRONMENT, "0")])
    yield tmp_path / "rows"
    monkeypatch.delitem(sys.modules, "tiny")


def test_a_whole_run_is_measured_and_merged(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the clock and the other Triton is what a GPU host does."""
    arguments = ["--triton", str(host.parent / "other"), "--no-fusion", "--records", str(host)]
    assert measure.main(arguments) == 1, "one of the contenders failed"
    printed = capsys.readouterr().out
    assert "3.9.0 failed: ValueError: no such op" in printed
    assert "3.9.0 failed: its process died with exit status 7" in printed
    assert re.search("3.9.0 failed: AssertionError: things/one: PyTorch has another result than ours", printed)
    assert "lost more than 5% at a size: 5" in printed, "one with both, the others without fusion"
    assert re.search(r"one +3\.9\.0 / 3\.6\.0: 0\.500  0\.500  0\.500\n", printed)
    assert printed.endswith("failed: 3\n")
    sums = (host.parent / "log").read_text().split()
    assert len(sums) == 3 * 3 + 2 + 2 + 3, "what fails in its first call is not there"
    assert all(len(set(sums[first : first + 3])) == 1 for first in (0, 3, 6)), "all have the same inputs"
    assert len({sums[0], sums[3], sums[6]}) == 3

    (host.parent / "gallery" / "things" / "one.py").write_text("x = 5  # the code changes before rows are merged")
    assert measure.main(["--merge", str(host)]) == 0
    rows = load_all(host.parent / "records")
    assert [(row.work, row.shape) for row in rows[:3]] == [("one", [8, 4]), ("one", [2, 4]), ("one", [16, 4])]
    assert [row.work for row in rows[3:]] == ["one, frail", "one, deadly", "one, wrong"]
    (first, *_) = rows
    assert (first.environment.triton, first.environment.name, first.commit) == (OLD, "Test GPU 9000", COMMIT)
    assert first.unit == "GB/s"
    assert {name: result.rate for name, result in first.contenders.items()} == {
        OLD: [256.0] * 3,
        NEW: [128.0] * 3,
        OFF: [64.0] * 3,
    }
    assert [(result.seconds, result.kernels, result.assembler) for result in first.contenders.values()] == [
        (0, 0, "12.8")
    ] * 3
    for row in rows[3:]:
        assert [row.ratio(name) for name in (NEW, OFF)] == [None, 0.25]
    (script,) = host.glob("*.py")
    assert "x = 1" in script.read_text()
    assert {row.op_hash for row in rows} == {hash_of(Recipe("things", "one", script))}, "it is of what was measured"


def test_no_row_begins_after_the_limit(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--limit", "-1", "--records", str(host)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("left out for want of time: ") == 6
    assert "left out for want of time: one, frail (2, 4)\n" in printed
    assert not host.exists()


SLOW = """
import sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.recv()
connection.send((("9.9.9", "1.2"), None))
connection.recv()
time.sleep(600)
"""


def test_contender_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets another process for its next step."""
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    monkeypatch.setattr(measure, "PROGRAM", program)
    contender = measure.Contender(None, True, tmp_path)
    monkeypatch.setattr(measure, "STEP", 0.3)
    process, began = contender.process, time.monotonic()
    with pytest.raises(measure.FailedError, match=r"a step took more than 0\.3 s"):
        contender.do("prepare")
    assert time.monotonic() - began < 30
    assert process.poll() is not None
    monkeypatch.setattr(measure, "STEP", 60)
    assert contender.do("about") == ("9.9.9", "1.2")
    contender.stop()


def test_shards_share_the_recipes() -> None:
    """Each is measured in one of them, at three sizes."""
    every = measure.tasks([], (0, 1))
    parts = [measure.tasks([], (place, 4)) for place in range(4)]
    assert sorted(task for part in parts for task in part) == sorted(every)
    recipes = [{task.work.recipe for task in part} for part in parts]
    assert sum(map(len, recipes)) == len(set().union(*recipes))
    assert {task.work.recipe for task in measure.tasks(["fusion/rope"], (0, 1))} == {"fusion/rope"}
    assert measure.three([(8, 8), (2, 2), (4, 4), (1, 1)]) == [(1, 1), (4, 4), (8, 8)]
    assert measure.three([(8,)]) == [(8,)]
    assert measure.three([(8,), (2,)]) == [(2,), (8,)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "torch sees no GPU here: versions are measured on one\n"),
        (["--recipes", "fusion/none"], "not measured: fusion/none\n"),
        (["--triton", "/nowhere"], "no Triton in /nowhere\n"),
    ],
)
def test_what_cannot_be_measured_is_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none = Slot(structs.replace(ENVIRONMENT, capability=None), None)
    monkeypatch.setattr(measure, "detect", lambda: [none])
    assert measure.main(arguments) == 2
    assert capsys.readouterr().err == message


def test_bad_rows_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "RECORDS", tmp_path / "records")
    (tmp_path / "versions.jsonl").write_text(f"{json.dumps({'recipe': 'things/one'})}\n")
    assert measure.main(["--merge", str(tmp_path)]) == 2
    assert "versions.jsonl: not a row of make measure-versions" in capsys.readouterr().err
    assert measure.main(["--merge", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "records").exists()


def test_contender_knows_its_triton_and_counts_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton  # not with this module: the choice of the interpreter is made when it is imported first

    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    bench = measuring_process.Bench()
    version, assembler = bench.about()
    assert version == triton.__version__
    assert re.fullmatch(r"\d+\.\d+", assembler)

    class Times:
        total = 1_500_000  # microseconds

    tell = triton.knobs.compilation.listener
    for hit in (False, True, False):
        tell(src=None, metadata={}, metadata_group={}, times=Times, cache_hit=hit)
    assert bench.seconds == [1.5, 1.5]


def test_measuring_needs_no_package_of_the_site() -> None:
    """Neither to measure, nor the process that does."""
    missing = "('sphinx', 'sphinx_gallery', 'docutils', 'rich', 'matplotlib')"
    code = f"import sys; sys.modules |= dict.fromkeys({missing}); import triton_gallery.versions.measuring_process"
    code += ", triton_gallery.versions.measure"
    environment = Project(ROOT).environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
