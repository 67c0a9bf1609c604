"""The tests of the ops find what they are for: with the masks taken out of a recipe, its tests fail.

The mutants of a recipe stand in its tests, as `BREAKS`; `generated_mutants.json` has those made of its syntax tree.
"""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import generated_mutants
import pytest
import torch
from collect_cases import collect, definitions, runs_here
from generated_mutants import TRIED
from guard import PAD, guarded
from mutants import HERE, WORDS, has_noticed, run_tests
from op_fixtures import recipe_in


@dataclass(frozen=True)
class Mutant:
    """A recipe that is broken in one place.

    Attributes:
        recipe: `section/name`.
        name: a name for it.
        old: what is taken out of the script; it stands there once.
        new: what takes its place.
    """

    recipe: str
    name: str
    old: str
    new: str


MUTANTS = [Mutant(recipe, *entry) for recipe, entry in collect("BREAKS")]
TRIVIAL = [
    (recipe, name, noticed)
    for recipe, of_one in json.loads(TRIED.read_text()).items()
    for name, noticed in of_one.items()
    if runs_here(recipe)
]


def copy_gallery(gallery: Path, to: Path) -> Path:
    """Return a copy of the gallery."""
    return Path(shutil.copytree(gallery, to / "gallery", ignore=shutil.ignore_patterns("__pycache__")))


def test_mutants_are_of_the_present_code(gallery: Path) -> None:
    """What each takes out stands once in its recipe: one that no longer does would show nothing."""
    counts = {f"{m.recipe}: {m.name}": (gallery / f"{m.recipe}.py").read_text().count(m.old) for m in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_each_recipe_with_mutants_has_tests_for_them() -> None:
    """The words select some of its tests, or it has the contract's."""
    recipes = {mutant.recipe for mutant in MUTANTS} - {recipe for recipe, _ in collect("CONTRACT")}
    files = {HERE / f"test_{Path(recipe).name}.py" for recipe in recipes}
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "--thorough=all", "-k", WORDS]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert {file.name for file in files} - {*re.findall(r"(?m)^tests/ops/(test_\w+\.py)::", found)} == set()


def test_copy_passes(gallery: Path, tmp_path: Path) -> None:
    """A copy as it is passes, so that failures mean something; of each recipe its own tests say so."""
    status, output = run_tests(copy_gallery(gallery, tmp_path), "first_steps/vector_add")
    assert status == 0, output


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.recipe}: {mutant.name}")
def test_broken_recipe_fails(gallery: Path, tmp_path: Path, mutant: Mutant) -> None:
    """A recipe that is broken in one place fails its tests (and does not fail to be collected)."""
    copy = copy_gallery(gallery, tmp_path)
    file = copy / f"{mutant.recipe}.py"
    source = file.read_text()
    assert source.count(mutant.old) == 1
    # Without its checks, which would stop the import: the tests have to notice by themselves.
    file.write_text(definitions(source.replace(mutant.old, mutant.new)))
    status, output = run_tests(copy, mutant.recipe)
    assert has_noticed(status, output), output


@pytest.mark.thorough
@pytest.mark.anywhere
@pytest.mark.parametrize(("recipe", "name", "noticed"), TRIVIAL, ids=str)
def test_trivial_mutant(gallery: Path, tmp_path: Path, recipe: str, name: str, noticed: bool) -> None:
    """A mask, a cast or a condition that is left out is noticed, or not, as it was when it was tried first."""
    source = generated_mutants.of_recipe(recipe_in(gallery / f"{recipe}.py"))[name]
    assert generated_mutants.is_noticed(copy_gallery(gallery, tmp_path), recipe, source) == noticed


def test_trivial_mutants_are_of_the_present_code(gallery: Path) -> None:
    """Whatever was tried can be tried again; who changes a kernel drops those of it that are gone."""
    for recipe in {recipe for recipe, *_ in TRIVIAL}:
        present = generated_mutants.of_recipe(recipe_in(gallery / f"{recipe}.py"))
        assert {name for other, name, _ in TRIVIAL if other == recipe} <= present.keys()


def test_failure_in_set_up_is_not_noticed(gallery: Path, tmp_path: Path) -> None:
    """A mutant that its own check stops, before a test has looked at it, shows nothing of the tests."""
    copy = copy_gallery(gallery, tmp_path)
    file = copy / "first_steps" / "vector_add.py"
    file.write_text(definitions(file.read_text()) + '\nassert False, "its own check"\n')
    status, output = run_tests(copy, "first_steps/vector_add")
    assert status == 1
    assert "AssertionError: its own check" in output
    assert not has_noticed(status, output)


def test_checks_are_found() -> None:
    """In a page of either form, below their headings and elsewhere."""
    heading = "# %%\n# {0}\n# ---------\n\n{1} = 1\n"
    page = "".join(heading.format(*part) for part in [("Kernel", "a"), ("Is it right?", "b"), ("The op", "c")])
    for source in (page, *(page + heading.format(last, "d") for last in ("The check", "Proof"))):
        assert re.findall(r"(\w) = 1", definitions(source)) == ["a", "c"]
    for check in ("assert True\n", "for x in y:\n    torch.testing.assert_close(x, x)\n"):
        assert definitions(f"a = 1\n{check}b = 1\n") == "a = 1\nb = 1\n"
        left_out_by_an_import = f'if __name__ == "__main__":\n{textwrap.indent(check, "    ")}'
        assert definitions(left_out_by_an_import) == left_out_by_an_import


@pytest.mark.parametrize("index", [-PAD, -1, 5, PAD - 1])
def test_guard_finds_stores_out_of_bounds(index: int) -> None:
    """One byte beside an allocation is enough, on either side."""

    def op() -> torch.Tensor:
        out = torch.empty(5, dtype=torch.uint8)
        memory = torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage())
        memory[out.storage_offset() + index] ^= 1
        return out

    with pytest.raises(AssertionError, match=r"a store (before the start|behind the end)"):
        guarded(op)


def test_guard_looks_into_ops() -> None:
    """What an op of torch.library allocates is guarded too."""

    @torch.library.custom_op("triton_gallery_tests::overrun", mutates_args=())
    def overrun(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        memory = torch.empty(0, dtype=torch.float32).set_(out.untyped_storage())
        if out.storage_offset():  # between guards
            memory[out.storage_offset() + out.numel()] = 0
        return out

    for op in (overrun, torch.ops.triton_gallery_tests.overrun, torch.ops.triton_gallery_tests.overrun.default):
        with pytest.raises(AssertionError, match="behind the end"):
            guarded(op, torch.ones(5))


def test_guard_finds_changed_inputs_and_poisons_outputs() -> None:
    """An op may not write to its inputs, and has to write all of its output."""
    with pytest.raises(AssertionError, match="a store to an input"):
        guarded(lambda x: x.neg_(), torch.ones(3))
    assert guarded(torch.empty_like, torch.ones(2, 3).T).isnan().all()
    assert torch.equal(guarded(torch.zeros_like, torch.ones(2, 3)), torch.zeros(2, 3))
