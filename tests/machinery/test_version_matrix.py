"""What is tried with each version of Triton: what fails, what is tried again, kept, and shown."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from project import ROOT, Project

from triton_gallery.cli import main
from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.hashes import cell_hash
from triton_gallery.records.files import BadRecordError
from triton_gallery.versions import matrix
from triton_gallery.versions.matrix import FEATURE, KERNELS, LESSON, OP, Outcome, Pair, Tried, failures, hashes
from triton_gallery.versions.trials import ON_A_GPU, TrialError, _asked, newest_release, try_pair

HERE = version("triton")
ONE, OTHER = Pair(HERE, []), Pair(HERE, ["planted==1.0"])  # the same Triton, and what else lies over the pins
PROBES = ROOT / "src" / "triton_gallery" / "versions" / "probes.py"
DATE = "2026-05-06T07:08:09+00:00"
BREAKS_WITH_IT = "import importlib.util\nassert not importlib.util.find_spec('planted'), 'the name is gone'"


@pytest.fixture
def project(make_project: Callable[..., Project], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Return a project of two lessons, and be in its folder."""
    project = make_project()
    project.write(one="x = 1", two=BREAKS_WITH_IT)
    folder = project.root / "docs" / "_versions"
    folder.mkdir()
    (folder / "pairs.txt").write_text("# two\n3.8.0\n3.9.0 numpy==2.3.5\n")
    monkeypatch.chdir(project.root)
    return project


def overlay(project: Project, pair: Pair) -> Path:
    """Return the folder that lies over the pinned packages with a Triton, as if pip had filled it."""
    folder = project.root / "_build" / "triton" / "_".join(pair.requirements)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@cache
def probes(before: str = "", then: str = "print(*probes.PROBES, sep='\\n')", cached: str = "") -> list[str]:
    """Return the lines of what a process printed that has the probes: this one must not import Triton itself."""
    variables = os.environ | {"TRITON_INTERPRET": "0", **({"TRITON_CACHE_DIR": cached} if cached else {})}
    command = [sys.executable, "-c", f"{before}\nfrom triton_gallery.versions import probes\n{then}"]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return ended.stdout.splitlines() if ended.returncode == 0 else ended.stderr.splitlines()[-1:]


def probed() -> Tried:
    """Return what is known where the probes were made, so that they are not made again."""
    tried = Tried.nothing(HERE, version("torch"), version("numpy"), platform.python_version())
    code = cell_hash(PROBES.read_text())
    tried.outcomes[FEATURE] = {name: Outcome(code, DATE) for name in probes() if not name.endswith(ON_A_GPU)}
    return tried


def recipes(project: Project) -> list[Recipe]:
    """Return the project's recipes."""
    return load(project.root / "gallery")


def test_what_breaks_with_one_version_fails_there_alone(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    keys = [recipe.key for recipe in recipes(project)]
    overlay(project, ONE)
    (overlay(project, OTHER) / "planted.py").touch()
    good, bad = (try_pair(pair, keys, probed(), False, None) for pair in (ONE, OTHER))
    now = hashes(recipes(project))
    assert list(failures(good, now)) == []
    assert list(failures(bad, now)) == [(LESSON, "things/two", "AssertionError: the name is gone")]
    assert bad.outcomes[LESSON]["things/one"].passed
    assert bad.outcomes[FEATURE].items() >= probed().outcomes[FEATURE].items(), "no probe was made again"
    assert "lesson   things/two" in capfd.readouterr().out

    (overlay(project, OTHER) / "planted.py").unlink()
    again = try_pair(OTHER, keys, bad, False, None)
    assert again.outcomes[LESSON]["things/two"].passed, "what failed is tried again"
    assert again.outcomes[LESSON]["things/one"] == bad.outcomes[LESSON]["things/one"], "what passed is not"

    project.write(two="x = 2")
    late = try_pair(OTHER, keys, again, False, 0)
    assert late.outcomes == again.outcomes
    assert "NOT TRIED, 0 s are over: lesson things/two" in capfd.readouterr().out


def test_folder_without_the_whole_triton_is_told(project: Project) -> None:
    pair = Pair("99.0", [])
    overlay(project, pair)
    with pytest.raises(TrialError, match=rf"is no whole Triton 99\.0: {HERE} was found"):
        try_pair(pair, [], None, False, 0)


def test_what_pip_cannot_install_is_told(project: Project, capfd: pytest.CaptureFixture[str]) -> None:
    """The command goes on to the other Tritons, and fails."""
    (project.root / "docs" / "_versions" / "pairs.txt").write_text(f"0.0.1\n{HERE}\n")
    overlay(project, ONE)
    matrix.write(project.root / "docs" / "_versions", probed(), recipes(project))
    assert main(["versions"]) == 1
    output = capfd.readouterr().out
    assert "Triton 0.0.1: pip could not install triton==0.0.1" in output
    assert f"Triton {HERE}: nothing failed" in output
    assert main(["versions", "--triton", "newest"]) == 0
    (tried,) = matrix.load(project.root / "docs" / "_versions")
    assert {*tried.outcomes[LESSON]} == {"things/one", "things/two"}


OF_RECIPE = '<testcase><properties><property name="recipe" value="a/b"/></properties>'
REPORTS = {
    "passes": (f"{OF_RECIPE}</testcase>", 0, None),
    "fails": (
        f'{OF_RECIPE}<failure message="it is off"/></testcase>',
        1,
        "it is off",
    ),
    "a process crashed": (
        f'{OF_RECIPE}</testcase><testcase><failure message="worker gw0 crashed"/></testcase>',
        1,
        "worker gw0 crashed",
    ),
    "all were skipped": (
        f"{OF_RECIPE}<skipped/></testcase>",
        0,
        "no example was asked of it",
    ),
    "pytest stopped": (
        f"{OF_RECIPE}</testcase>",
        3,
        "pytest ended with status 3: no more",
    ),
    "pytest did not start": (None, 4, "pytest ended with status 4: no more"),
}


@pytest.mark.parametrize("report", REPORTS)
def test_examples_that_were_not_asked_are_no_pass(monkeypatch: pytest.MonkeyPatch, report: str) -> None:
    cases, status, fault = REPORTS[report]

    def pretend(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (report,) = (word.removeprefix("--junitxml=") for word in command if word.startswith("--junitxml="))
        if cases:
            Path(report).write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
        return subprocess.CompletedProcess(command, status, "", "a line\nno more\n")

    monkeypatch.setattr("triton_gallery.versions.trials.subprocess.run", pretend)
    assert _asked(["a/b"]) == {"a/b": fault}


def test_what_is_missing_is_not_tried(project: Project) -> None:
    needs = '# /// script\n# requires-python = ">=3.11"\n# dependencies = ["no-such-package"]\n# ///\n'
    project.write(two=f"{needs}raise ValueError")
    overlay(project, ONE)
    tried = try_pair(ONE, ["things/two"], probed(), False, None)
    assert tried.outcomes[LESSON]["things/two"].missing == ["no-such-package"]
    assert not tried.outcomes[LESSON]["things/two"].passed
    assert list(failures(tried, hashes(recipes(project)))) == []


def test_kept_beside_the_others(project: Project) -> None:
    folder = project.root / "docs" / "_versions"
    first, second = probed(), probed()
    first.triton, second.triton = "3.8.0", "3.9.0"
    second.outcomes[LESSON]["things/one"] = Outcome("0123456789abcdef", DATE, "it fails")
    second.outcomes[LESSON]["things/gone"] = Outcome("0123456789abcdef", DATE)
    for tried in (second, first):
        path = matrix.write(folder, tried, recipes(project))
    assert [*second.outcomes[LESSON]] == ["things/one"], "what is gone is dropped"
    assert matrix.load(folder) == [first, second], "in the order of the list"
    (folder / "pairs.txt").write_text("3.9.0\n")
    assert matrix.load(folder) == [second]
    text = path.read_text()
    for old, new, reason in (
        ('"code"', '"evil"', "contains unknown field `evil` - at `$.tried[0].outcomes[...][...]`"),
        ('"lesson"', '"evil"', "its outcomes are of the kinds evil, op, kernels, feature"),
        ('"it fails"', '""', "length >= 1"),
        ('"it fails"', "null", "Expected `str`, got `null`"),
        ('"numpy"', '"evil"', "contains unknown field `evil`"),
        ('"schema": 1', '"schema": 2', "version 2, this project reads version 1"),
    ):
        path.write_text(text.replace(old, new))
        with pytest.raises(BadRecordError, match=f"versions\\.json: .*{re.escape(reason)}"):
            matrix.load(folder)


def test_line_without_a_version_is_refused(project: Project) -> None:
    path = project.root / "docs" / "_versions" / "pairs.txt"
    path.write_text("3.9.0\nnumpy==2.3.5 3.6.0\n")
    with pytest.raises(BadRecordError, match=r"pairs\.txt: a line begins with a version of Triton, not so 'numpy"):
        matrix.pairs(path.parent)


def test_probe_fails_where_the_feature_is_not_there(tmp_path: Path) -> None:
    """One compiles, so it needs no GPU; without the function it cannot."""
    call = "probes.PROBES['tl.gather, for an H100']()"
    assert probes(then=call, cached=str(tmp_path / "with")) == []
    (fault,) = probes("import triton.language as tl; del tl.gather", call, str(tmp_path / "without"))
    assert "no attribute 'gather'" in fault


def test_newest_release_is_what_pip_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Said:
        stdout = "triton (3.10.0)\nAvailable versions: 3.10.0, 3.9.0\n"

    monkeypatch.setattr("triton_gallery.versions.trials._pip", lambda *_, **__: Said)
    assert newest_release() == "3.10.0"


def test_pages_say_what_was_tried(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(one="x = 1", three="x = 3", two="x = 2")
    docs = project.root / "docs"
    (docs / "_versions").mkdir()
    (docs / "_versions" / "pairs.txt").write_text("3.8.0\n3.9.0\n")
    (docs / "versions.md").write_text(
        "# What runs where\n\n```{features-by-version}\n```\n\n```{recipes-by-version}\n```\n"
    )
    index = docs / "index.md"
    index.write_text(index.read_text().replace("recipes/index", "recipes/index\nversions"))
    now = hashes(recipes(project))[LESSON]
    old, new = (Tried.nothing(triton, "2.13.0", "2.4.6", "3.11.7") for triton in ("3.8.0", "3.9.0"))
    old.outcomes[LESSON] = {"things/one": Outcome(now["things/one"], DATE), "things/two": Outcome("0" * 16, DATE)}
    new.outcomes[LESSON] = {
        "things/one": Outcome(now["things/one"], DATE, "NameError: make_block_ptr <gone>"),
        "things/two": Outcome(now["things/two"], DATE, missing=["a GPU"]),
    }
    old.outcomes[FEATURE] = {"block pointers": Outcome("0" * 16, DATE)}
    new.outcomes[FEATURE] = {"block pointers": Outcome("0" * 16, DATE, "they have been removed")}
    for tried in (old, new):
        tried.outcomes[LESSON]["things/three"] = Outcome(now["things/three"], DATE)
        matrix.write(docs / "_versions", tried, recipes(project))
    status, output = project.build()
    assert status == 0, output

    def shown(name: str) -> list[tuple[str, str]]:
        line = BeautifulSoup(project.page(name), "html.parser").find("a", string="Runs with Triton").parent
        assert line.a["href"] == "../../versions.html"
        return [(mark.text, mark["title"].partition("numpy 2.4.6: ")[2]) for mark in line("span")]

    assert shown("one") == [("3.8", "tried on 2026-05-06"), ("3.9 fails", "NameError: make_block_ptr <gone>")]
    assert shown("two") == [
        ("3.8 older code", "on 2026-05-06 an older version was tried"),
        ("3.9 not tried", "needs a GPU"),
    ]
    page = BeautifulSoup((project.root / "_build/html/versions.html").read_text(), "html.parser")
    assert "1 of 3 lessons passed with each Triton. The others:" in page.select_one("article").text
    assert "ops passed" not in page.select_one("article").text, "there are none"
    rows = [[cell.get_text(strip=True) for cell in row("td")] for row in page.select("table.tried tbody tr")]
    assert rows == [
        ["block pointers", "passed", "fails"],
        ["one", "passed", "fails"],
        ["two", "older code", "not tried"],
        ["three", "passed", "passed"],
    ]
    assert [cell.text.strip() for cell in page.select("table.tried td.failed")] == ["fails", "fails"]
    assert [line.text.strip() for line in page.select("article details li")] == [
        "block pointers, Triton 3.9: they have been removed",
        "things/one, Triton 3.9: NameError: make_block_ptr <gone>",
        "things/two, Triton 3.8: on 2026-05-06 an older version was tried",
        "things/two, Triton 3.9: needs a GPU",
    ]

    new.outcomes[LESSON]["things/one"] = Outcome(now["things/one"], DATE)
    matrix.write(docs / "_versions", new, recipes(project))
    assert project.build()[0] == 0
    assert shown("one")[1] == ("3.9", "tried on 2026-05-06"), "the page follows what is kept"


def test_nothing_failed_that_was_tried() -> None:
    """With each Triton that is listed, and what was tried is of the gallery."""
    tried = matrix.load(ROOT / "docs" / "_versions")
    folder = ROOT / "docs" / "_versions"
    assert [entry.triton for entry in tried] == [pair.triton for pair in matrix.pairs(folder)]
    now = hashes(load(ROOT / "gallery"))
    for entry in tried:
        assert {*entry.outcomes[LESSON]} <= {*now[LESSON]}, entry.triton
        assert {*entry.outcomes[OP]} <= {*now[OP]}, entry.triton
        assert {*entry.outcomes[FEATURE]} == {*probes()}, entry.triton
        assert {*entry.outcomes[KERNELS]} <= {*now[KERNELS]}, entry.triton
        assert list(failures(entry, now)) == [], entry.triton
    assert json.loads((folder / "versions.json").read_text())["schema"] == 1
