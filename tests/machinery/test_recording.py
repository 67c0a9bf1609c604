"""How records are made: whole or not at all, of the commit that they name, and of what ran already.

The GPUs are not there; `fake_gpus.py` says how.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_gpus import GpuProject
from project import ROOT

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.hashes import cell_hash
from triton_gallery.recipe.outputs import Output
from triton_gallery.records.files import BadRecordError
from triton_gallery.records.page_cache import Run
from triton_gallery.records.record_store import Records

GPU = Environment("Test GPU", "9.0", 1, None, "13.0", "2", "3", "3.12")
RECIPE = Recipe("things", "matmul", ROOT / "gallery" / "matmul" / "matmul.py")
FIGURES = ["sphx_glr_matmul_001.png", "sphx_glr_matmul_002.png"]
DRAWS = "import matplotlib.pyplot as plt\n\nplt.plot([1, 2])\nplt.show()"


def make_run(text: str) -> Run:
    """Return a run of one cell with this output and two figures."""
    output = Output(cell_hash("x = 1"), text, FIGURES, None, [])
    return Run(GPU, "2026-01-02T03:04:05+00:00", 1.0, [output], source_hash="0")


def write(records: Records, text: str) -> None:
    """Write a record whose text and figures say the same."""
    figures = {name: f"{name} {text}".encode() for name in FIGURES}
    records.write(RECIPE, make_run(text), figures, None)


def fault(monkeypatch: pytest.MonkeyPatch, at: int, how: Callable[[], None]) -> list[int]:
    """Have the operation on files with this number end in a fault; return a counter of the operations that began."""
    count = [0]
    for name in ("write_bytes", "replace", "unlink"):
        original = getattr(Path, name)

        def operation(
            path: Path, *arguments: object, original: Callable[..., object] = original, **more: bool
        ) -> object:
            count[0] += 1
            if count[0] - 1 == at:
                if original.__name__ == "write_bytes":
                    original(path, b"half")
                how()
            return original(path, *arguments, **more)

        monkeypatch.setattr(Path, name, operation)
    return count


def fail() -> None:
    """Say that the disk is full."""
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("how", ["fails", "is killed"])
def test_record_is_the_old_one_or_the_new_one(tmp_path: Path, how: str) -> None:
    """Whatever a write comes to, at each of its steps."""
    seen = set()
    for at in range(100):
        records = Records(tmp_path / str(at))
        write(records, "old")
        folder = tmp_path / str(at) / "test-gpu" / "things"
        (folder / "sphx_glr_matmul_8bit_001.png").touch()
        with pytest.MonkeyPatch.context() as patch:
            if how == "fails":
                count = fault(patch, at, fail)
                try:
                    write(records, "new")
                except OSError:
                    ended = False
                else:
                    ended = True
                ended = ended and count[0] <= at
            else:
                child = os.fork()
                if child == 0:
                    try:
                        fault(patch, at, lambda: os._exit(1))
                        write(records, "new")
                        os._exit(0)
                    finally:
                        os._exit(2)
                ended = os.waitpid(child, 0)[1] == 0
        (record,) = records.all()
        (output,) = record.outputs
        assert [(folder / name).read_text() for name in output.figures] == [f"{name} {output.text}" for name in FIGURES]
        seen.add(output.text)
        if how == "fails":
            assert not list(folder.glob("*partial")), "it left what it did not finish"
        write(records, "newest")
        remaining = {path.name for path in folder.iterdir()}
        assert remaining == {"matmul.json", "sphx_glr_matmul_8bit_001.png", *records.all()[0].outputs[0].figures}
        if ended:
            break
    assert at > 5
    assert seen == {"old", "new"}


def test_figure_of_a_record_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match=r"matmul\.json: its figure sphx_glr_matmul_002\.png is missing"):
        Records(tmp_path).write(RECIPE, make_run("text"), {FIGURES[0]: b"picture"}, None)
    assert not list(tmp_path.iterdir())


def git(project: GpuProject, *arguments: str) -> str:
    """Run git in a project; return what it printed."""
    command = ["git", "-c", "user.name=Someone", "-c", "user.email=someone@example.org", *arguments]
    return subprocess.run(command, cwd=project.root, check=True, capture_output=True, text=True).stdout


def executed(output: str) -> list[str]:
    """Return the recipes that a command reported as executed."""
    return re.findall(r"(?m)^  things/(\w+) ", output)


def test_nothing_runs_that_cannot_be_recorded(make_gpu_project: Callable[..., GpuProject]) -> None:
    """The destination, a record that is there and the commit are looked at first."""
    project = make_gpu_project(one="print('one')")
    (project.root / "file").touch()
    records = project.root / "docs" / "_records" / "test-gpu" / "things"
    records.mkdir(parents=True)
    (records / "one.json").write_text("{")
    for arguments, variables, reason in (
        (["--out", "file"], {}, "one.json cannot be written: Not a directory"),
        ([], {}, "one.json: not JSON"),
        (["--out", "elsewhere"], {"COMMIT": "main"}, "COMMIT is 'main'; a revision has 7 to 40 of the digits"),
    ):
        status, output = project.record(*arguments, **variables)
        assert status == 2, output
        assert reason in " ".join(output.split())
        assert not executed(output)


def test_recipe_is_recorded_under_the_commit_that_has_it(make_gpu_project: Callable[..., GpuProject]) -> None:
    script = "import os\n\nfrom triton_gallery_ops.part import part\n\nprint(part('one'), os.name)"
    project = make_gpu_project(other="print('other')")
    op = project.root / "src" / "triton_gallery_ops" / "part.py"
    op.parent.mkdir()
    op.write_text('"""A part."""\n\nimport math\n\n\ndef part(x):\n    return x, math.pi\n')
    project.write(one=script)
    things = project.root / "gallery" / "things"
    status, output = project.record("--only-stale", COMMIT="0123456")
    assert status == 0, output
    assert project.recorded()["one"]["commit"] == "0123456", "there is no git to compare with"

    (things / "one.txt").write_text("a companion")
    git(project, "init", "--quiet")
    git(project, "add", "gallery", str(op))
    git(project, "commit", "--quiet", "--message", "All")
    head = git(project, "rev-parse", "HEAD").strip()
    status, output = project.record("things/one")
    assert status == 0, output
    assert project.recorded()["one"]["commit"] == head

    for change in (
        lambda: op.write_text(op.read_text().replace("math.pi", "math.e")),
        lambda: project.write(one="print('another')"),
        lambda: (things / "one.txt").write_text("changed"),
        lambda: (things / "one.txt").unlink(),
        lambda: (things / "one.json").write_text("{}"),
    ):
        git(project, "checkout", "--quiet", "--", "gallery", str(op))
        change()
        status, output = project.record()
        assert status == 2, output
        assert f"things/one: not as in the commit {head}" in output
        assert not executed(output)
    status, output = project.record("things/other", "--force")
    assert (status, executed(output)) == (0, ["other"]), "it is as in the commit"

    (things / "one.json").unlink()
    git(project, "checkout", "--quiet", "--", "gallery")
    status, output = project.record(COMMIT="0123456")
    assert status == 2
    assert "git knows no commit 0123456" in output


def test_what_ran_is_recorded_without_a_second_run(make_gpu_project: Callable[..., GpuProject]) -> None:
    """What a build executed here with the present code; the rest, and with --force all, is executed."""
    project = make_gpu_project(drawn=DRAWS, stale="print('before')", failed="raise ValueError")
    status, output = project.build()
    assert sorted(executed(output)) == ["drawn", "failed", "stale"]
    dates = {name: run(project, name)["date"] for name in ("drawn", "stale")}
    project.write(stale="print('after')", failed="print('mended')")

    status, output = project.record()
    assert status == 0, output
    assert sorted(executed(output)) == ["failed", "stale"]
    assert f"kept what ran on {dates['drawn']}: wrote docs/_records/test-gpu/things/drawn.json" in output
    records = project.recorded()
    assert records["drawn"]["date"] == dates["drawn"]
    assert records["stale"]["outputs"][0]["text"] == "after"
    (picture,) = records["drawn"]["outputs"][0]["figures"]
    page = project.root / "docs" / "recipes" / "things" / "images" / "sphx_glr_drawn_001.png"
    assert (project.root / "docs" / "_records" / "test-gpu" / "things" / picture).read_bytes() == page.read_bytes()

    status, output = project.record("--only-stale")
    assert "every record is of the present code" in output
    path = project.root / "docs" / "_records" / "test-gpu" / "things" / "drawn.json"
    path.write_text(json.dumps({**records["drawn"], "sanitized": ["memcheck"]}))
    status, output = project.record("things/drawn")
    assert (status, executed(output)) == (0, [])
    assert project.recorded()["drawn"]["sanitized"] == ["memcheck"], "it is the record of the same run"
    status, output = project.record("things/drawn", "--force")
    assert (status, executed(output)) == (0, ["drawn"])
    assert project.recorded()["drawn"]["sanitized"] == []

    status, output = project.record("things/drawn", TEST_GPU="Other GPU")
    assert (status, executed(output)) == (0, ["drawn"]), "what another GPU executed does not count"
    page.unlink(missing_ok=True)
    status, output = project.record("things/drawn", TEST_GPU="Other GPU")
    assert (status, executed(output)) == (0, ["drawn"]), "its figure is gone"


def test_newer_record_is_not_replaced_by_an_older_run(make_gpu_project: Callable[..., GpuProject]) -> None:
    project = make_gpu_project(one="print('one')")
    status, output = project.record()
    assert status == 0, output
    path = project.root / "docs" / "_records" / "test-gpu" / "things" / "one.json"
    path.write_text(json.dumps({**project.recorded()["one"], "date": "2999-01-01T00:00:00+00:00"}))
    status, output = project.record()
    assert (status, executed(output)) == (0, ["one"])


def run(project: GpuProject, name: str) -> dict[str, object]:
    """Return what is known of the run that made a page."""
    return json.loads((project.root / "docs" / "recipes" / "things" / f"{name}.run.json").read_text())
