"""What makes a record stale: the code that measurements depend on, and nothing else."""

from pathlib import Path

import pytest
from msgspec import UNSET, structs
from project import ROOT

from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.hashes import hash_of
from triton_gallery.recipe.inline import clock
from triton_gallery.recipe.measured import measured_hash, op_hash
from triton_gallery.records.record_store import Records

SCRIPT = '''"""
One
===
"""

import torch
from triton_gallery.bench import gpu_time

DEVICE = torch.device("cpu")
SIZES = [1, 2]
SIZES += [3]
SIZES.append(5)
OTHERS = {}
OTHERS["more"] = 7
if torch.cuda.is_available():
    MORE = 8
else:
    MORE = 9
LARGE = torch.cuda.is_available()


def double(x):
    """Return twice x."""
    return 2 * x


def call(size):
    x = torch.ones(size)
    return lambda: double(x)


# %%
# Is it right?

if __name__ == "__main__":
    x = torch.ones(3)
    assert double(x).sum() == 6
    print("right")

# %%
# How fast?

if __name__ == "__main__" and LARGE:
    for size in SIZES:
        times = gpu_time({"ours": call(size), "other": call(MORE), **OTHERS})
        print(times)
'''


def of(text: str, folder: Path) -> str:
    """Return the hash of a script."""
    path = folder / "things" / "one.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return measured_hash(Recipe("things", "one", path))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("assert double(x).sum() == 6", "assert double(x).sum() == 6 and x.sum() == 3"),
        ("x = torch.ones(3)", "x = torch.ones(4)[:3]"),
        ('print("right")', 'print("right, all of it")'),
        ("Return twice x.", "Return the double of x."),
        ("# How fast?", "# How fast is it, then?"),
        ("# %%\n# Is it right?\n\n", "# another comment\n"),
    ],
)
def test_proof_and_prose_do_not_count(before: str, after: str, tmp_path: Path) -> None:
    assert before in SCRIPT
    assert of(SCRIPT.replace(before, after), tmp_path) == of(SCRIPT, tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return 2 * x", "return x + x"),
        ("SIZES = [1, 2]", "SIZES = [1, 4]"),
        ("SIZES += [3]", "SIZES += [4]"),
        ("append(5)", "append(6)"),
        ('["more"] = 7', '["more"] = 8'),
        ("MORE = 8", "MORE = 7"),
        ("MORE = 9", "MORE = 7"),
        ("    x = torch.ones(size)", "    x = torch.zeros(size)"),
        ("LARGE = torch.cuda.is_available()", "LARGE = False"),
        ("and LARGE", "and not LARGE"),
        ('"ours": call(size)', '"ours": call(size + 1)'),
    ],
)
def test_what_is_timed_counts(before: str, after: str, tmp_path: Path) -> None:
    assert before in SCRIPT
    assert of(SCRIPT.replace(before, after), tmp_path) != of(SCRIPT, tmp_path)


def test_version_of_the_clock_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(SCRIPT, tmp_path)
    version, functions = clock()
    monkeypatch.setattr("triton_gallery.recipe.hashes.clock", lambda: (version + 1, functions))
    assert of(SCRIPT.replace("How fast", "How quick"), tmp_path) != before  # another text, as hashes are kept


def test_without_a_measurement_all_code_counts(tmp_path: Path) -> None:
    text = SCRIPT.replace("gpu_time(", "dict(").replace("from triton_gallery.bench import gpu_time\n", "")
    assert of(text, tmp_path) == hash_of(Recipe("things", "one", tmp_path / "things" / "one.py"))
    assert of(text.replace("== 6", "== 6.0"), tmp_path) != of(text, tmp_path)


def test_rows_beside_libraries_are_of_the_op_alone() -> None:
    """The lesson around it may change."""
    recipes = {recipe.key: recipe for recipe in load(ROOT / "gallery")}
    softmax = recipes["fusion/softmax"]
    assert op_hash(softmax) not in {hash_of(softmax), measured_hash(softmax)}
    lesson = recipes["first_steps/benchmarking"]
    assert op_hash(lesson) == hash_of(lesson)


def test_record_of_before_counts_by_all_code() -> None:
    records = [record for record in Records(ROOT / "docs" / "_records").all() if record.measured_hash is not UNSET]
    recipes = {recipe.key: recipe for recipe in load(ROOT / "gallery")}
    record = next(record for record in records if record.is_fresh(recipes[record.key]))
    recipe = recipes[record.key]
    assert structs.replace(record, measured_hash=UNSET).is_fresh(recipe) == (record.recipe_hash == hash_of(recipe))
    assert not structs.replace(record, measured_hash="0" * 16).is_fresh(recipe)
