"""Runs the tests of a recipe on a broken copy of the gallery, and says whether they noticed.

Each run is a process that imports this module, and so no tests: they are decorated for the profile that is loaded then.
"""

import multiprocessing
import os
import re
import signal
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONTRACT = HERE.parent / "contract"
# Processes that are forked off one that has imported what takes long
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["hypothesis.strategies", "pandas", "pytest", "torch._dynamo", "triton.testing"])


LIMIT = 300  # seconds for the tests of one
WORDS = "float32 or bool or accumulator"  # in the names of the tests that run on a mutant


def run_tests(gallery: Path, name: str, words: str = WORDS) -> tuple[int | None, str]:
    """Run the property tests of a recipe on another gallery; return the exit status and what they printed.

    The status is None if they took too long.
    """
    log = gallery.with_name("log")
    arguments = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=mutants",
        f"--gallery={gallery}",
        "--thorough=all",
    ]
    arguments += ["-k", words, f"--recipe={name}"]
    # First what has guards: a store out of bounds may end the process
    files = sorted(CONTRACT.glob("test_*.py"), key=lambda path: path.stem != "test_results")
    # On a GPU a broken barrier is waited at for ever: what is in Gluon is asked of its model alone
    files = [] if "/gluon_" in name else files
    arguments += map(str, [*files, HERE / f"test_{Path(name).name}.py"])
    process = SERVER.Process(target=in_a_process, args=(arguments, log))
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
        return None, log.read_text()
    return process.exitcode, log.read_text()


def in_a_process(arguments: list[str], log: Path) -> None:
    """Run pytest with its output in a file."""
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.exit(pytest.main(arguments))


def has_noticed(status: int | None, output: str) -> bool:
    """Whether tests noticed that a recipe is broken: an assertion of theirs failed, or an error did not come.

    That does not count if a set-up failed. Or a kernel read or wrote where nothing is, and ended the interpreter.
    """
    if status == -signal.SIGSEGV:
        return re.search(r"taken\d*/\w+_op\.py", output) is not None  # the op was at work
    failed, in_set_up = (re.search(rf"(?m)^{word} ", output) for word in ("FAILED", "ERROR"))
    asserted = "AssertionError" in output or "DID NOT RAISE" in output
    return status == 1 and bool(failed) and not in_set_up and asserted
