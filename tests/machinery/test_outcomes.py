"""What becomes of calls of a lesson's functions, each in a process of its own."""

import os
from pathlib import Path
from typing import Any

import pytest

from triton_gallery.outcomes import outcome_table, outcomes, tried

LESSON = """
import os
import signal

import torch
from torch.testing import assert_close

DEVICE = torch.device("cpu")
OPS = {"plain": torch.square, "doubled": lambda x: x + x}

if __name__ != "__main__":
    raise RuntimeError("a statement that is left out")
for word in ("so is", "this one"):
    raise RuntimeError(word)


def attempt(row, api, device):
    return row(OPS[api], torch.full((3,), 3.0, device=device))


def squares(op, x):
    "the square"
    assert_close(op(x), x * x)


def counts(op, x):
    "one number"
    assert_close(len(op(x)), 4)


def returns(op, x):
    return "opaque"


def raises(op, x):
    raise ValueError("first line" + chr(10) + "second line")


def empty(op, x):
    raise NotImplementedError


def crashes(op, x):
    os.kill(os.getpid(), signal.SIGSEGV)


def exits(op, x):
    raise SystemExit(3)


def hangs(op, x):
    signal.pause()


def sees(name):
    return f"{name} {os.environ.get(name)!r}"


def writes(name):
    open("file", "x").close()
    return os.path.basename(os.getcwd())


def asserts(name):
    assert name == "other", "an assertion of its own"
"""


def load(folder: Path, text: str = LESSON, **names: object) -> dict[str, Any]:
    """Return the names of a script that was executed."""
    file = folder / "lesson.py"
    file.write_text(text)
    scope = {"__name__": "__main__", **names}
    kept = text.replace("for word in", "for word in () and")
    exec(compile(kept, str(file), "exec"), scope)
    return scope


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the names of the script above."""
    return load(tmp_path_factory.mktemp("lesson"))


def test_each_end_of_a_call(lesson: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash and a hang are outcomes, too. Kernels are compiled, there is no GPU, and each call has a folder."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    cells = {
        ("squares", "plain"): "ok",
        ("squares", "doubled"): "wrong: Mismatched elements: 3 / 3 (100.0%)",
        ("counts", "plain"): "wrong: Expected 4 but got 3.",
        ("returns", "plain"): "opaque",
        ("raises", "plain"): "fails: ValueError: first line",
        ("empty", "plain"): "fails: NotImplementedError: no message",
        ("crashes", "plain"): "fails: exit code -11",
        ("exits", "plain"): "fails: exit code 1",
        ("hangs", "plain"): "fails: no end in 8 s",
    }
    expected = {(lesson["attempt"], lesson[row], api, "cpu"): outcome for (row, api), outcome in cells.items()}
    expected |= {
        (lesson["asserts"], "this"): "fails: AssertionError: an assertion of its own",
        (lesson["sees"], "TRITON_INTERPRET"): "TRITON_INTERPRET '0'",
        (lesson["sees"], "CUDA_VISIBLE_DEVICES"): "CUDA_VISIBLE_DEVICES ''",
        (lesson["writes"], "a"): "call_12",
        (lesson["writes"], "b"): "call_13",
    }
    assert outcomes([*expected], "cpu", limit=8) == [*expected.values()]
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_table(lesson: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A word for each cell, and each reason once."""
    said = ["ok", "wrong: all", "fails: ValueError: first line", "fails: ValueError: first line"]
    monkeypatch.setattr("triton_gallery.outcomes.outcomes", lambda calls, device: said[: len(calls)])
    found = tried(lesson["attempt"], ["squares", "raises"], lesson["OPS"], "cpu")
    assert found["squares", "doubled"] == "wrong: all"
    table = outcome_table(found)
    assert table.to_dict("index") == {
        "squares": {"plain": "ok", "doubled": "wrong"},
        "raises": {"plain": "fails", "doubled": "fails"},
    }
    assert capsys.readouterr().out.splitlines() == [
        "1 of 4 calls are ok",
        "squares, doubled",
        "    wrong: all",
        "raises, plain (and 1 more)",
        "    fails: ValueError: first line",
    ]
    tried(lesson["attempt"], ["squares"], lesson["OPS"], "cpu", reasons=False)
    assert not capsys.readouterr().out


def test_lesson_that_cannot_be_loaded(tmp_path: Path) -> None:
    """That is no outcome of a call."""
    lesson = load(tmp_path)
    (tmp_path / "lesson.py").write_text(LESSON + "\nraise KeyError('of the lesson')\n")
    with pytest.raises(RuntimeError, match=r"(?s)KeyError: 'of the lesson'.*could not load the lesson"):
        outcomes([(lesson["sees"], "HOME")], "cpu")


def test_in_a_notebook_the_lesson_is_its_cells(tmp_path: Path) -> None:
    """The file of a function there has one cell alone."""
    lesson = load(tmp_path, In=["", *LESSON.split("\n\n\n")])
    (tmp_path / "lesson.py").write_text("a cell\n")
    calls = [(lesson["attempt"], lesson["squares"], "plain", "cpu")]
    assert outcomes(calls, "cpu") == ["ok"]
