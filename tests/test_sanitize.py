"""What a run under compute-sanitizer says; a stand-in takes the tool's place, the real one needs a GPU."""

import os
from pathlib import Path

import pytest

from triton_gallery.sanitize import sanitize

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


CASES = {
    "": "clean",
    "open('found', 'w').close()": "found",
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
