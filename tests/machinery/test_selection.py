"""Which tests run: what a quick run leaves out, what one recipe's proof has, and what changed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from project import ROOT
from selection import EXAMPLES, KEYS, Selection, changed, examples, select

RECIPE = "first_steps/autotune"
FILES = [
    "tests/site/test_recipes.py",
    "tests/machinery/test_contents.py",
    *(f"tests/ops/test_{name}.py" for name in ("autotune", "strides", "mutants", "on_gpu", "workloads")),
]
COLLECT = """
import json, sys, pytest

for number, options in enumerate(json.loads(sys.argv[1])):
    number and print("collected")
    pytest.main(["--collect-only", "-q", "-n", "0", *options])
"""


@pytest.fixture(scope="module")
def collected() -> dict[str, tuple[set[str], str]]:
    """Return the tests that are collected from some files, and what the terminal showed, by the options given."""
    asked = ["", f"--recipe {RECIPE}", f"--thorough {RECIPE}", "--thorough all"]
    command = [sys.executable, "-c", COLLECT, json.dumps([[*options.split(), *FILES] for options in asked])]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = output.split("collected\n")
    return {
        options: ({line for line in text.splitlines() if "::" in line}, text)
        for options, text in zip(asked, texts, strict=True)
    }


def test_quick_run_leaves_out_what_is_thorough_and_says_so(collected: dict[str, tuple[set[str], str]]) -> None:
    (quick, output), (everything, _) = collected[""], collected["--thorough all"]
    assert quick < everything
    omitted = everything - quick
    names = {re.search(r"::(\w+)", test)[1] for test in omitted}
    thorough = {"test_broken_recipe_fails", "test_every_config_float32", "test_script_runs_alone"}
    assert names >= thorough
    assert not thorough & {re.search(r"::(\w+)", test)[1] for test in quick}
    assert f"quick: {len(omitted)} thorough tests were left out" in output


def test_one_recipe_is_proved_thoroughly_by_its_tests_alone(collected: dict[str, tuple[set[str], str]]) -> None:
    (selected, output), (everything, _) = collected[f"--recipe {RECIPE}"], collected["--thorough all"]
    assert "tests were left out" not in output
    of_file = {test for test in everything if test.startswith("tests/ops/test_autotune.py")}
    mutants = {test for test in everything if f"[{RECIPE}: " in test}
    pages = {test for test in everything if test.startswith("tests/site/test_recipes.py") and f"[{RECIPE}]" in test}
    gpu = {test for test in everything if "test_on_gpu.py" in test and f"[{RECIPE}:" in test}
    assert min(map(len, (of_file, mutants, pages, gpu))) > 0
    assert selected >= of_file | mutants | pages | gpu
    assert not {test for test in selected if "strides" in test or "contents" in test}


def test_some_recipes_are_proved_thoroughly_among_quick_tests(collected: dict[str, tuple[set[str], str]]) -> None:
    (some, _), (quick, _) = collected[f"--thorough {RECIPE}"], collected[""]
    assert quick < some
    assert {test.partition("[")[2].partition(":")[0] for test in some - quick if "test_mutants" in test} == {RECIPE}


def test_quick_run_asks_a_test_of_two_dtypes_and_of_a_few_sizes_in_each() -> None:
    """The first and the last among them; of what is asked in other dtypes alone, nothing is left out."""

    class Item:
        def __init__(self, name: str, file: str = "tests/ops/test_softmax.py", **params: object) -> None:
            self.nodeid, self.path, self.callspec = (
                f"{file}::{name}[{params}]",
                ROOT / file,
                SimpleNamespace(params=params),
            )

        def get_closest_marker(self, name: str) -> None:
            """Return none: nothing is marked."""

    item: Any = Item
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    many = [item("test_sizes", dtype=dtype, n=n) for n in range(10) for dtype in dtypes]
    others = [item("test_half", dtype=torch.float16, n=n) for n in range(3)]
    others += [item("test_words", n=n) for n in range(10)]
    others += [
        item("test_sizes", "tests/ops/test_hard_values.py", dtype=dtype, n=n) for n in range(10) for dtype in dtypes
    ]
    runs, _ = Selection(set()).split([*many, *others])
    assert [test for test in runs if test in others] == others
    kept = [tuple(test.callspec.params.values()) for test in runs if test in many]
    assert sorted(kept, key=repr) == [(dtype, n) for dtype in dtypes[1:] for n in (0, 3, 6, 9)]
    assert Selection({"fusion/softmax"}).split([*many, *others])[1] == []


def test_unknown_recipe_is_told() -> None:
    for thorough, alone in (("things/one", None), ("", "things/one")):
        with pytest.raises(pytest.UsageError, match="no such recipe: things/one"):
            select(thorough, alone)


def test_examples_are_in_float32_or_else_in_bfloat16() -> None:
    def asked(dtypes: list[torch.dtype]) -> list[torch.dtype]:
        case = SimpleNamespace(recipe="attention/hopper_attention", dtypes=dtypes)
        tests = [SimpleNamespace(callspec=SimpleNamespace(params={"case": case, "dtype": dtype})) for dtype in dtypes]
        return [test.callspec.params["dtype"] for test in examples(tests, case.recipe)]

    assert asked([torch.float16, torch.bfloat16, torch.float32]) == [torch.float32]
    assert asked([torch.float16, torch.bfloat16]) == [torch.bfloat16]


def test_generated_tests_take_few_examples_in_a_quick_run(request: pytest.FixtureRequest) -> None:
    """The same each time; in full where they are of a recipe to be proved thoroughly."""
    seen = []

    @settings(max_examples=12)
    @given(st.integers(0, 1000))
    def test_generated(number: int) -> None:
        seen.append(number)

    def run(thorough: set[str] | None) -> list[int]:
        item = pytest.Function.from_parent(request.node.parent, name="test_generated", callobj=test_generated)
        Selection(thorough).split([item])
        seen.clear()
        test_generated()
        return seen.copy()

    assert len(run(None)) == 12
    first = run(set())
    assert len(first) == EXAMPLES
    assert run(set()) == first


def git(folder: Path, *arguments: str) -> None:
    """Run git as someone."""
    command = ["git", "-c", "user.name=Someone", "-c", "user.email=someone@example.org", *arguments]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def test_recipes_that_differ_from_the_commit_before(tmp_path: Path) -> None:
    """By the script, a companion, the test or the works; where there is no commit before, all are proved."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "README.md").touch()
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "First")
    assert changed(tmp_path) is None
    for name in (
        "gallery/fusion/rope.py",
        "gallery/xla/pytorch_xla.json",
        "tests/ops/test_softmax.py",
        "benchmarks/topk.py",
        "tests/ops/test_mutants.py",
        "docs/rope.md",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "Second")
    assert changed(tmp_path) == {"fusion/rope", "xla/pytorch_xla", "fusion/softmax", "fusion/topk"}
    assert changed(tmp_path) <= set(KEYS.values())


def test_group_shares_a_process(tmp_path: Path) -> None:
    """With pytest 9.2 and pytest-xdist 3.8 it did not, and each process built the site."""
    (tmp_path / "test_group.py").write_text(
        "import os, pathlib, pytest\n\n"
        "@pytest.mark.xdist_group('one')\n"
        "@pytest.mark.parametrize('index', range(12))\n"
        "def test_one(index):\n"
        "    pathlib.Path(str(os.getpid())).touch()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "12 passed" in result.stdout
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 1


WHOLE_RUN = """
import sys, pytest

class AtTheEnd:
    def pytest_collection_finish(self, session):
        print("collected", len(session.items), "triton" in sys.modules)

pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider"], plugins=[AtTheEnd()])
"""


def test_no_test_imports_triton_before_it_runs() -> None:
    """Those that run later in the process could not choose the interpreter any more."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON", "PYTEST"))}
    done = subprocess.run([sys.executable, "-c", WHOLE_RUN], cwd=ROOT, env=environment, capture_output=True, text=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("collected"))
    _, count, is_imported = line.split()
    assert int(count) > 5000
    assert is_imported == "False"
