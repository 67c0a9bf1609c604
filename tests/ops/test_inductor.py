"""Inductor writes the kernels of an op down as text: on any machine, that text has to be a module that imports."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from collect_cases import definitions

# In a process without the interpreter, as only Triton's own functions have a text. Prints what failed, by source file.
WRITE = """
import importlib.util, json, sys
from pathlib import Path
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as text_of

HEADER = "import triton\\nimport triton.language as tl\\n"  # of what Inductor puts before, all that recipes use

def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

failed = {}
for folder in Path(sys.argv[1]).iterdir():
    try:
        recipe = load(folder / "recipe.py")
        for name in json.loads((folder / "names.json").read_text()):
            kernel = getattr(recipe, name)
            while not hasattr(kernel, "arg_names"):
                kernel = kernel.fn
            defaults = [param.name for param in kernel.params if param.has_default]
            assert not defaults, f"{name} has defaults for {defaults}, which Inductor does not fill in"
            path = folder / f"{name}_text.py"
            path.write_text(HEADER + text_of(kernel))
            load(path)
    except Exception as error:
        failed[folder.name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""


def wrapped(source: str) -> list[str]:
    """Return the names of the kernels that a recipe wraps for its ops."""
    return sorted(set(re.findall(r"wrap_triton\(\s*(\w+)\s*\)", source)))


def failures(sources: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Have Inductor write down the kernels of recipes, import what it wrote, and return what failed."""
    for name, source in sources.items():
        (folder / name).mkdir()
        # The definitions alone, not the line that asks for the interpreter. Two recipes may register the same op.
        text = definitions(source).replace("raise RuntimeError(", "print(")
        text = text.replace('_NAMESPACE = "triton_gallery"', f'_NAMESPACE = "{name}"')
        (folder / name / "recipe.py").write_text(text, "utf-8")
        (folder / name / "names.json").write_text(json.dumps(wrapped(source)), "utf-8")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", WRITE, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_kernels_survive_being_written_down(gallery: Path, tmp_path: Path) -> None:
    """Neither a name nor a value of a recipe's kernels is lost in Inductor's text."""
    texts = {path.stem: path.read_text("utf-8") for path in gallery.glob("*/*.py")}
    sources = {name: text for name, text in texts.items() if wrapped(text)}
    assert len(sources) > 3
    assert failures(sources, tmp_path) == {}


FAULTY = """
import torch, triton, triton.language as tl
{constant}

@triton.jit
def policy({argument}):
    return policy

@triton.jit
def kernel(x_ptr, N, BLOCK: tl.constexpr{default}):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, tl.load(x_ptr + offs, mask=offs < N, {use}))

# wrap_triton(kernel)
# The check
# ---------
"""
FAULTS = {
    "a_global_infinity": (
        {"constant": 'HIDDEN = tl.constexpr(float("-inf"))', "use": "other=HIDDEN"},
        "NameError: name 'inf' is not defined",
    ),
    "a_global_as_a_default": (
        {"constant": 'NONE = tl.constexpr("")', "argument": "policy: tl.constexpr = NONE", "use": "other=policy()"},
        "NameError: name 'NONE' is not defined",
    ),
    "a_default": ({"default": " = 16"}, "AssertionError: kernel has defaults for ['BLOCK']"),
}


def test_faults_are_found(tmp_path: Path) -> None:
    """What Inductor refuses on a GPU is refused here too."""
    blank = dict.fromkeys(["constant", "argument", "default", "use"], "")
    messages = failures({name: FAULTY.format(**blank | fault) for name, (fault, _) in FAULTS.items()}, tmp_path)
    assert set(messages) == set(FAULTS)
    for name, (_, message) in FAULTS.items():
        assert messages[name].startswith(message)


@pytest.mark.parametrize("source", ["wrap_triton(a)", "wrap_triton(\n    a\n)"])
def test_wrapped_kernels_are_found(source: str) -> None:
    assert wrapped(source) == ["a"]
