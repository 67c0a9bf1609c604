"""Scripts as readers take them: with the text of what they import of this project."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from triton_gallery.recipe import hashes, inline
from triton_gallery.recipe.contents import load
from triton_gallery.recipe.hashes import cell_hash
from triton_gallery.recipe.inline import inlined

SCRIPT = """import os

import torch

DEVICE = "cuda"

from triton_gallery.bench import gpu_time

# %%
# Prose
x = gpu_time({})
"""
PARTS = """\"\"\"Parts.\"\"\"

import math

import torch
import triton

PARTS_HALF = 2


def parts(x):
    return math.ceil(x / PARTS_HALF)
"""
WHOLE = """\"\"\"The whole.\"\"\"

from functools import cache

import torch
import triton
import triton.language as tl

from triton_gallery_ops.parts import parts


@cache
def whole(x):
    return parts(x)


whole.ready = True
"""
LESSON = """\"\"\"Lesson.\"\"\"

import os

import torch

os.environ["TRITON_INTERPRET"] = "1"

import triton

# %%
# Prose

from triton_gallery_ops.whole import whole

print(whole(3))
"""
INLINED = """\"\"\"Lesson.\"\"\"

import math
import os
from functools import cache

import torch

os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

# %%
# Prose

PARTS_HALF = 2


def parts(x):
    return math.ceil(x / PARTS_HALF)


@cache
def whole(x):
    return parts(x)


whole.ready = True

print(whole(3))
"""


@pytest.fixture
def ops(tmp_path: Path) -> Path:
    """Return the folder of a package with an op that is made of another one."""
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "whole.py").write_text(WHOLE)
    return tmp_path


def test_text_takes_the_place_of_an_import() -> None:
    source = inline.CLOCK_FILE.read_text()
    functions = source[source.index("def time_turns(") : source.index("\n\n\ndef rate_table")]
    head, tail = "import os\nimport time\n\nimport torch\n", "# %%\n# Prose\nx = gpu_time({})\n"
    assert inlined(SCRIPT) == f'{head}\nDEVICE = "cuda"\n\n\n{functions}\n\n\n{tail}'
    assert inlined(SCRIPT.replace("import torch\n\n", "", 1)) == inlined(SCRIPT)


def test_class_brings_what_it_imports() -> None:
    """A class takes the place of its import as a function does; what it does not use is not imported."""
    script = "import torch\n\nfrom triton_gallery.counting import Traffic\n\nprint(Traffic)\n"
    tree = ast.parse(inlined(script))
    imports = [ast.unparse(node) for node in tree.body[:-2]]
    assert imports == [
        "import torch",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.utils._pytree import tree_leaves",
    ]
    assert isinstance(tree.body[-2], ast.ClassDef)
    assert inline.sources(script) == [inline.HELPERS["triton_gallery.counting"]]


def test_what_counts_is_a_recipes_code() -> None:
    """A change of it makes the records of lessons that use it old, and no others."""
    script = "import torch\n\nfrom triton_gallery.counting import statements\n\nprint(statements)\n"
    text = inlined(script)
    assert "Traffic" not in text
    assert cell_hash(text) != cell_hash(text.replace("- 1\n", "- 2\n"))


def test_op_takes_the_place_of_its_import_with_those_that_it_is_made_of(ops: Path) -> None:
    assert inlined(LESSON, ops) == INLINED
    both = LESSON.replace("# %%", "from triton_gallery_ops.parts import parts\n\n# %%")
    assert inlined(both, ops).count("def parts(") == 1
    assert inline.ops_in(both) == ["parts", "whole"]
    assert "triton_gallery" not in inlined(WHOLE, ops)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("print(", "PARTS_HALF = 3\nprint("), "both bind PARTS_HALF"),
        (("whole import whole", "whole import half"), "cannot be inlined: from triton_gallery_ops.whole import half"),
        (("ops.whole", "ops.nothing"), "there is no op triton_gallery_ops.nothing"),
        (("import os\n", "import os\nfrom os import remove as cache\n"), "cache is imported of os and of functools"),
    ],
)
def test_what_cannot_be_of_an_op_is_told(ops: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inlined(LESSON.replace(*change, 1), ops)


def test_ops_are_not_made_of_each_other(ops: Path) -> None:
    circle = PARTS.replace("import triton\n", "import triton\n\nfrom triton_gallery_ops.whole import whole\n")
    (ops / "parts.py").write_text(circle)
    with pytest.raises(ValueError, match="ops are made of each other"):
        inlined(LESSON, ops)


def test_clock_counts_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mend of it makes no record old, a new version makes all; docstrings make none."""
    timed = "import time\n\n\ndef gpu_time(calls):\n    return 1\n"
    first = cell_hash(timed)
    assert first == cell_hash(timed.replace("1", "2"))
    assert first != cell_hash("import time\n")
    monkeypatch.setattr(hashes, "clock", lambda: (2, frozenset({"gpu_time"})))
    assert first != cell_hash(timed)
    plain = 'def f():\n    """Say."""\n    return 1\n'
    assert cell_hash(plain) == cell_hash(plain.replace("Say", "Say more")) != cell_hash(plain.replace("1", "2"))


def test_nothing_else_changes() -> None:
    """Nor does what imports nothing of ours, or is no Python."""
    for script in ("import torch\n\n\n\nx = 1", "from triton_gallery.bench import (", ""):
        assert inlined(script) == script
    assert inlined(inlined(SCRIPT)) == inlined(SCRIPT)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("x = gpu_time", "def gpu_time():\n    pass\n\n\nx = gpu_time", "both bind gpu_time"),
        ('DEVICE = "cuda"', "", "needs DEVICE, which the script lacks"),
        ("import gpu_time", "import gpu_time as clock", "cannot be inlined"),
        ("import gpu_time", "import nothing", "cannot be inlined"),
        ("import gpu_time", "import *", "cannot be inlined"),
    ],
)
def test_what_cannot_be_is_told(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inlined(SCRIPT.replace(old, new, 1))


def test_contents_tell_it(tmp_path: Path) -> None:
    gallery = tmp_path / "gallery"
    (gallery / "things").mkdir(parents=True)
    (gallery / "contents.toml").write_text('things = ["one"]\n')
    (gallery / "things" / "GALLERY_HEADER.rst").touch()
    (gallery / "things" / "one.py").write_text("from triton_gallery.bench import nothing\n")
    with pytest.raises(ValueError, match=r"one\.py: cannot be inlined: from triton_gallery\.bench import nothing"):
        load(gallery)


def test_scripts_of_readers_import_nothing_of_ours() -> None:
    for recipe in load(ROOT / "gallery"):
        tree = ast.parse(recipe.text)
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        assert [name for name in modules if name.startswith("triton_gallery")] == [], recipe.key


def test_scripts_of_readers_choose_the_interpreter_before_triton_is_loaded() -> None:
    """Without a GPU they set TRITON_INTERPRET, which Triton reads at its import. Modules of torch import it too."""
    lines: dict[str, set[str]] = {}
    for recipe in load(ROOT / "gallery"):
        above, choice, _ = recipe.text.partition('"TRITON_INTERPRET", "1"')
        if choice:
            tree = ast.parse(above.rpartition("\nif ")[0])
            for node in tree.body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    lines.setdefault(ast.unparse(node), set()).add(recipe.key)
    assert len(set().union(*lines.values())) > 50
    program = "import sys\nfor line in sys.argv[1:]: exec(line); 'triton' in sys.modules and sys.exit(line)"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program, *sorted(lines)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert not run.returncode, f"{run.stderr}in {lines.get(run.stderr.strip())}"


def test_clock_needs_no_more_than_a_script_has() -> None:
    """The module imports torch and Python's own alone, so it comes before the choice of the interpreter as well."""
    program = "import sys, triton_gallery.bench; print('triton' in sys.modules)"
    environment = {"PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout == "False\n", run.stderr
