"""Which tests run: the quick ones, those that prove given recipes thoroughly too, or all.

Thorough are mutants, generated tests in all their examples, every autotune config, what is compiled for a GPU, and
whatever a page's own run shows already. A test is marked `thorough` for that, and left out of a quick run. There a
generated test takes few examples, the same each time, and a test of one recipe that is asked of many dtypes and sizes
takes two dtypes, and of each a few sizes, the first and the last among them.
"""

import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, is_hypothesis_test, settings
from project import ROOT

from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.hashes import cell_hash
from triton_gallery.recipe.inline import inlined, ops_in

EXAMPLES = 4  # of a generated test in a quick run
DTYPES = {torch.float32, torch.bfloat16}  # in a quick run, where a test has one of them
EACH = 4  # of what a test of one recipe is asked in one dtype in a quick run
KEYS = {recipe.name: recipe.key for recipe in load(ROOT / "gallery")}
OWN = re.compile(r"(?:gallery/\w+|src/triton_gallery_ops|tests/ops|benchmarks)/(?:test_)?(\w+)\.[^/]+")
OPS = {op: recipe.name for recipe in load(ROOT / "gallery") for op in ops_in(recipe.path.read_text("utf-8"))}


@dataclass(frozen=True)
class Selection:
    """Which tests run.

    Attributes:
        thorough: the recipes to prove thoroughly; None is all, and whatever is of no recipe.
        alone: the one recipe whose tests run; None is all.
    """

    thorough: Collection[str] | None
    alone: str | None = None

    def is_thorough(self, item: pytest.Item) -> bool:
        """Whether a test runs in full."""
        return self.thorough is None or recipe_of(item) in self.thorough

    def split(self, items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
        """Return the tests that run, and those that are left out; what is generated runs as it has to."""
        chosen = [item for item in items if self.alone is None or recipe_of(item) == self.alone]
        omitted = _left_of_many([item for item in chosen if not self.is_thorough(item)])
        runs = [item for item in chosen if self.is_thorough(item) or not (_is_slow(item) or item in omitted)]
        for item in runs:
            if not self.is_thorough(item):
                _take_few_examples(item)
        return runs, [item for item in items if item not in set(runs)]


def select(thorough: str, alone: str | None) -> Selection:
    """Return what is asked for: `all`, `changed`, or recipes `section/name`; pytest.UsageError if there is no such."""
    if thorough == "all":
        keys = None
    elif thorough == "changed":
        keys = changed(ROOT)
    else:
        keys = {*thorough.split(), *([alone] if alone else [])}
    if unknown := {*(keys or ()), *([alone] if alone else [])} - {*KEYS.values()}:
        raise pytest.UsageError(f"no such recipe: {', '.join(sorted(unknown))}; one is called section/name")
    return Selection(keys, alone)


def changed(root: Path) -> set[str] | None:
    """Return the recipes of which a file differs from the commit before; None, so all, where there is none.

    Of the script, that is its code: comments and prose prove nothing.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)

    diff = git("diff", "--name-only", "HEAD~1")
    if diff.returncode != 0:
        return None
    files = [line for line in diff.stdout.splitlines() if OWN.fullmatch(line)]
    names = {
        OWN.sub(r"\1", line) for line in files if not _same_code(git("show", f"HEAD~1:{line}").stdout, root / line)
    }
    names = {OPS.get(name, name) for name in names}
    return {KEYS[name] for name in names & KEYS.keys()}


def _same_code(before: str, path: Path) -> bool:
    """Whether a file is a script of a recipe, or an op, with the code that it had."""
    if not {"gallery", "src"} & {path.parts[-3]} or path.suffix != ".py" or not before or not path.exists():
        return False
    return cell_hash(inlined(before)) == cell_hash(inlined(path.read_text(encoding="utf-8")))


def recipe_of(item: pytest.Item) -> str | None:
    """Return the recipe that a test is of, by its parameter or its file; None if it is of none or of several."""
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec else ():
        if isinstance(value, Recipe):
            return value.key
        key = value if isinstance(value, str) else getattr(value, "recipe", None)
        if isinstance(key, str) and key in KEYS.values():
            return key
    return _of_file(item)


def _of_file(item: pytest.Item) -> str | None:
    """Return the recipe that the file of a test is about."""
    match = OWN.fullmatch("/".join(item.path.parts[-3:]))
    return KEYS.get(match[1]) if match else None


def examples(items: Sequence[pytest.Item], keys: str) -> list[pytest.Item]:
    """Return the tests of some recipes, `section/name ...`: in float32, or bfloat16 where an op takes none."""

    def is_wanted(item: pytest.Item) -> bool:
        params = getattr(getattr(item, "callspec", None), "params", {})
        takes = getattr(params.get("case"), "dtypes", [torch.float32])
        dtype = torch.float32 if torch.float32 in takes else torch.bfloat16
        return recipe_of(item) in keys.split() and params.get("dtype", dtype) == dtype

    return [item for item in items if is_wanted(item)]


def left_out(count: int) -> str:
    """Say how many tests a quick run left out, and how to run them."""
    return (
        f"quick: {count} thorough tests were left out, and generated tests took {EXAMPLES} examples at the most; "
        "make test THOROUGH=1 runs all, make test RECIPE=section/name those of one recipe"
    )


def _is_slow(item: pytest.Item) -> bool:
    """Whether only a thorough run has a test."""
    compiles = "on_h100" in getattr(item, "fixturenames", ()) and _of_file(item)
    return bool(compiles) or item.get_closest_marker("thorough") is not None


def _left_of_many(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of one recipe that a quick run leaves out, as others are the same in another dtype or size."""
    asked = defaultdict[str, defaultdict[torch.dtype, list[pytest.Item]]](lambda: defaultdict(list))
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        dtype = next((value for value in values if isinstance(value, torch.dtype)), None)
        if dtype and _of_file(item) and not _is_slow(item):
            asked[item.nodeid.partition("[")[0]][dtype].append(item)
    omitted = set()
    for by_dtype in asked.values():
        for dtype, of_dtype in by_dtype.items():
            last = len(of_dtype) - 1
            taken = {of_dtype[last * place // (EACH - 1)] for place in range(EACH)}
            omitted |= {*of_dtype} - (taken if dtype in DTYPES or not DTYPES & by_dtype.keys() else set())
    return omitted


def _take_few_examples(item: pytest.Item) -> None:
    test = getattr(item, "obj", None)
    if is_hypothesis_test(test):
        full = test._hypothesis_internal_use_settings
        test._hypothesis_internal_use_settings = settings(
            full,
            max_examples=min(full.max_examples, EXAMPLES),
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
        )
