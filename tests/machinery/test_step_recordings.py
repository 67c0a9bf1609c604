"""Recordings of figures: what is refused, what is left as it was, and what a failure costs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from triton_gallery.recipe.contents import load
from triton_gallery.step_through import recordings

KERNELS = (ROOT / "tests" / "machinery" / "stepped_kernels.py").read_text()
HEAD = KERNELS[: KERNELS.index("# [[tool.triton-gallery")]
BODY = KERNELS[KERNELS.index("# ///\n", 10) :]
ROW = """# [[tool.triton-gallery.step_through]]
# kernel = "row_kernel"
# registers = ["x", "e", "y"]
# inputs = { x = "integers(0, 4, 3, 5)", y = "torch.empty_like(x)" }
# call = "row_kernel[(3,)](x, y, 5, BLOCK_N=8)"
# expected = { y = "torch.softmax(x, -1)" }
"""
REFUSED = {  # what is changed in the declaration, and the reason that is given
    "is declared right, but: `y\\[0, 0\\]`": ("torch.softmax(x, -1)", "torch.softmax(x, 0)"),
    "is declared wrong, but: `y` as in PyTorch": ("# call", "# wrong = true\n# call"),
    "launches row_kernel 0 times": ('"row_kernel[(3,)](x, y, 5, BLOCK_N=8)"', '"None"'),
    "points outside of x in 1 lane; .* `outside = true`": ("x, y, 5, BLOCK_N=8)", "x, y, 8, BLOCK_N=8)"),
    "20 programs of up to 6 steps": ("3, 5)", "20, 5)"),
    "the lesson has no kernel column_kernel": ('kernel = "row_kernel"', 'kernel = "column_kernel"'),
    "no program binds z": ('["x", "e", "y"]', '["x", "z"]'),
    "shows 9 registers; 8 are allowed": ('["x", "e", "y"]', '["x", "e", "y", "a", "b", "c", "d", "f", "g"]'),
    "would be shown as 0": ("integers(0, 4, 3, 5)", "10 * integers(0, 4, 3, 5)"),
    "declares no expected result": ('{ y = "torch.softmax(x, -1)" }', "{}"),
    "the kernel has no tensor out": ("{ y = ", "{ out = "),
    "starts at access 7 of program 1, which has 2": ("# call", "# start = [1, 7]\n# call"),
    "has shape \\(3, 5\\), what is expected \\(5,\\)": ("torch.softmax(x, -1)", "x[0]"),
    "declares that lanes point outside of tensors, but none does": ("# call", "# outside = true\n# call"),
    "NameError: name 'row_kernels'": ("row_kernel[(3,)]", "row_kernels[(3,)]"),
}
DRIVER = """
import json, sys, sysconfig
from pathlib import Path
from triton_gallery.step_through import process, record
from triton.runtime import interpreter

def state():
    owners = interpreter.InterpreterBuilder, interpreter.ReduceScanOpInterface, interpreter.GridExecutor
    return [dict(vars(owner)) for owner in owners]

tracer = lambda *_: None
sys.settrace(tracer)
before = state()
failures = [process.main(Path(script), "").failure for script in sys.argv[1:]]
print(json.dumps([failures, state() == before and sys.gettrace() is tracer]))
"""


def driven(*scripts: Path) -> tuple[list[str], bool]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", DRIVER, *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    failures, is_restored = json.loads(done.stdout)
    return failures, is_restored


def test_what_cannot_be_shown_is_refused_with_the_reason(tmp_path: Path) -> None:
    """And whatever happens, Triton and a debugger's trace are left as they were."""
    scripts = []
    for number, (before, after) in enumerate([("", ""), *REFUSED.values()]):
        assert not before or before in ROW, before
        scripts.append(tmp_path / f"lesson_{number}.py")
        row = ROW.replace("[(3,)]", "[(20,)]") if "20" in after else ROW
        scripts[-1].write_text(HEAD + (row.replace(before, after, 1) if before else row) + BODY)
    (passed, *failures), is_restored = driven(*scripts)
    assert passed == ""
    for reason, failure in zip(REFUSED, failures, strict=True):
        assert re.search(reason, failure), (reason, failure)
    assert is_restored


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    """Return a gallery of two lessons, of which one has a figure that fails."""
    folder = tmp_path / "gallery"
    (folder / "things").mkdir(parents=True)
    (folder / "contents.toml").write_text('things = ["good", "bad", "plain"]\n')
    (folder / "things" / "GALLERY_HEADER.rst").write_text("Things\n======\n")
    (folder / "things" / "good.py").write_text(HEAD + ROW + BODY)
    (folder / "things" / "bad.py").write_text(HEAD + ROW.replace("softmax(x, -1)", "softmax(x, 0)") + BODY)
    (folder / "things" / "plain.py").write_text('"""\nPlain\n=====\n"""\n')
    return folder


def test_recordings_are_made_once_and_a_failure_is_one_lessons(gallery: Path, tmp_path: Path) -> None:
    folder, lines = tmp_path / "steps", list[str]()
    made = recordings.refresh(load(gallery), folder, lines.append)
    assert {key: bool(recording.failure) for key, recording in made.items()} == {
        "things/good": False,
        "things/bad": True,
    }
    assert "is declared right" in made["things/bad"].failure
    again = recordings.refresh(load(gallery), folder, lines.append)
    assert again["things/good"] == made["things/good"]
    assert lines == ["recording the figures of 2 lessons", "recording the figures of 1 lessons"], "the bad one again"
    script = gallery / "things" / "good.py"
    script.write_text(script.read_text().replace("3, 5)", "4, 5)").replace("[(3,)](x, y, 5", "[(4,)](x, y, 5"))
    changed = recordings.refresh(load(gallery), folder, lines.append)["things/good"]
    assert lines[2:] == ["recording the figures of 2 lessons"]
    assert changed.figures[0].traces[0].programs == ["0", "1", "2", "3"]
    script.write_text('"""\nGood\n====\n"""\n')
    recordings.refresh(load(gallery), folder, lines.append)
    assert [path.name for path in folder.glob("*/*")] == ["bad.json"]


def test_a_lesson_that_dies_costs_its_figure(gallery: Path, tmp_path: Path) -> None:
    script = gallery / "things" / "good.py"
    script.write_text(script.read_text() + "\nimport os, signal\n\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    made = recordings.refresh(load(gallery), tmp_path / "steps", print)
    assert "SIGSEGV" in made["things/good"].failure
