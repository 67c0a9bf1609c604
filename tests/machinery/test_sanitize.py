"""What a run under compute-sanitizer says; a stand-in takes the tool's place, the real one needs a GPU."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_gpus import GpuProject

from triton_gallery.cli import PLANTED
from triton_gallery.execute.sanitize import sanitize
from triton_gallery.records.record_store import TOOLS

# As compute-sanitizer does: run the command, and end with the asked status if something was found.
TOOL = """#!/bin/sh
while [ "$1" != --error-exitcode ]; do shift; done
found=$2
shift 2
"$@" || exit $?
[ -e found ] && exit $found
exit 0
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in on the PATH."""
    path = tmp_path / "bin" / "compute-sanitizer"
    path.parent.mkdir()
    path.write_text(TOOL)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")


FINDING = "open('found', 'w').close()"
CASES = {
    "": "clean",
    FINDING: "found",
    "raise SystemExit(1)": "failed",
    "import nothing": "failed",
}


@pytest.mark.parametrize(("text", "outcome"), CASES.items())
def test_a_failure_is_no_finding(tool: None, tmp_path: Path, text: str, outcome: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    (verdict,) = sanitize([script], ["memcheck"])
    assert verdict.outcome == outcome, verdict.report


def test_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="compute-sanitizer is not on the PATH"):
        sanitize([], ["memcheck"])


def plant(project: GpuProject, text: str) -> None:
    """Write the scripts whose faults have to be found."""
    for path in PLANTED:
        (project.root / path).parent.mkdir(parents=True, exist_ok=True)
        (project.root / path).write_text(text)


def test_verdicts_that_can_be_kept_are(tool: None, make_gpu_project: Callable[..., GpuProject]) -> None:
    """A recipe without a record of its code costs its own verdict, and is named."""
    project = make_gpu_project(changed="print('before')", faulty="print('faulty')", kept="print('kept')")
    plant(project, FINDING)
    status, output = project.record()
    assert status == 0, output
    project.write(changed="print('after')")
    faulty = project.root / "docs" / "_records" / "test-gpu" / "things" / "faulty.json"
    faulty.write_text("{")
    status, output = project.run("sanitize")
    assert status == 1, output
    text = " ".join(output.split())
    assert "things/changed was looked at, but its record could not say so: " in text
    assert "no record of the recipe's present code; run make record first" in text
    assert "things/faulty was looked at, but its record could not say so: " in text
    assert "things/kept was" not in text
    faulty.unlink()
    assert {name: record["sanitized"] for name, record in project.recorded().items()} == {"changed": [], "kept": TOOLS}
    project.record("things/changed", "things/faulty")
    status, output = project.run("sanitize")
    assert status == 0, output
    assert all(record["sanitized"] == TOOLS for record in project.recorded().values())


def test_planted_fault_that_is_not_found_keeps_nothing(tool: None, make_gpu_project: Callable[..., GpuProject]) -> None:
    project = make_gpu_project(one="print('one')")
    plant(project, "")
    project.record()
    status, output = project.run("sanitize")
    assert status == 2
    assert "a planted fault was not found" in output
    assert project.recorded()["one"]["sanitized"] == []


@pytest.mark.parametrize(("text", "outcome"), CASES.items())
def test_each_rank_is_watched(tool: None, tmp_path: Path, text: str, outcome: str) -> None:
    """What the last rank does decides; every rank finds how many there are and where they meet."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nassert os.environ['WORLD_SIZE'] == '3' and os.environ['MASTER_PORT']\n"
        "assert os.environ['LOCAL_RANK'] == os.environ['RANK']\n"
        f"if os.environ['RANK'] == '2':\n    {text or 'pass'}\n"
    )
    (verdict,) = sanitize([script], ["memcheck"], 3)
    assert verdict.outcome == outcome, verdict.report


def test_a_recipe_for_several_gpus_has_them_all(tool: None, make_gpu_project: Callable[..., GpuProject]) -> None:
    project = make_gpu_project(several="print('several')", one="print('one')")
    file = project.root / "gallery" / "things" / "several.py"
    file.write_text("# /// script\n# [tool.triton-gallery]\n# gpus = 2\n# ///\n" + file.read_text())
    plant(project, FINDING)
    status, output = project.record(TEST_GPU="Test GPU,Test GPU", CUDA_VISIBLE_DEVICES="0,1")
    assert status == 0, output
    status, output = project.run("sanitize", TEST_GPU="Test GPU,Test GPU", CUDA_VISIBLE_DEVICES="0,1")
    assert status == 0, output
    assert project.recorded("2-x-test-gpu")["several"]["sanitized"] == list(TOOLS)
    assert project.recorded()["one"]["sanitized"] == list(TOOLS)
    status, output = project.run("sanitize")
    assert "things/several was not looked at" in " ".join(output.split())
