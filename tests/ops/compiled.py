"""What the compiler makes of a recipe, on any machine.

The tests interpret kernels where there is no GPU, and a kernel is interpreted or compiled from its decorator on. So
another process imports the recipes, as on an H100 that compiles for it and runs nothing.
"""

import importlib
import itertools
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from collect_cases import definitions
from packaging.version import Version
from torch.utils._pytree import tree_leaves

from triton_gallery.compiled import machine_code

Ask = Callable[..., list[Any]]
# For what the compiler makes of a kernel in one version and not in another
TRITON = Version(version("triton")).release[:2]


@contextmanager
def h100() -> Iterator[Ask]:
    """Start that process; give a function that has it import a recipe.

    It returns what functions of a test module return there, given what the recipe defines.
    """
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        compile_only = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": ""}
        # The default up to Triton 3.9, which warns that 3.10 has another: a * b + c in one instruction
        for name, value in (compile_only | {"TRITON_DEFAULT_FP_FUSION": "1"}).items():
            patch.setenv(name, value)
        pool = multiprocessing.get_context("spawn").Pool(1, _as_on_h100, (folder,))
        patch.undo()

        def ask(recipe: Path, *looks: Callable[[ModuleType], Any]) -> list[Any]:
            # Not the line that asks for the interpreter
            source = definitions(recipe.read_text()).replace("raise RuntimeError(", "(", 1)
            Path(folder, recipe.name).write_text(source)
            return pool.apply_async(_answers, (recipe.stem, looks)).get(timeout=300)

        with pool:
            yield ask


def compiled(
    kernel: Any,
    dtype: str,
    num_warps: int = 4,
    multiples: Collection[str] = (),
    num_stages: int = 3,
    maxnreg: int | None = None,
    **known: Any,
) -> Any:
    """Return what the compiler makes of a kernel.

    It asserts that the machine code reads nothing that nothing wrote: the ptxas of Triton 3.6 and 3.7 makes such code.

    Args:
        kernel: one of that process.
        dtype: of what the arguments named `…_ptr` point to; all of them are divisible by 16.
        num_warps: as at a launch.
        multiples: other arguments that 16 divides.
        num_stages: as at a launch.
        maxnreg: as at a launch.
        known: the values of constants, and the dtypes of pointers that have another, or None for one that is not given;
            what is left are `i32`.
    """
    import triton  # where it is imported first, the choice of the interpreter is made

    given = {name for name in kernel.arg_names if name.endswith("_ptr") and known.get(name, dtype) is not None}
    types = {name: "*" + known.pop(name, dtype) if name in given else "i32" for name in kernel.arg_names}
    special = {param.name for param in kernel.params if not param.do_not_specialize}
    by_16 = [i for i, name in enumerate(types) if name in special and (name in given or name in multiples)]
    aligned = {(i,): [["tt.divisibility", 16]] for i in by_16}
    source = triton.compiler.ASTSource(kernel, types | dict.fromkeys(known, "constexpr"), known, aligned)
    target = triton.runtime.driver.active.get_current_target()
    made = triton.compile(
        source, target=target, options={"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    )
    if "wgmma" in made.asm["ptx"]:
        wrong = machine_code.unwritten(
            _said(triton.knobs.nvidia.nvdisasm.path, "--print-code", cubin=made.asm["cubin"])
        )
        assert not wrong, f"{kernel.__name__} reads {wrong}, which nothing wrote"
    return made


def _said(*command: str, cubin: bytes) -> str:
    """Return what a tool says of machine code."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


def ptx(kernel: Any, dtype: str, num_warps: int = 4, **known: Any) -> str:
    """Return a kernel's PTX; the arguments are those of `compiled`."""
    return compiled(kernel, dtype, num_warps, **known).asm["ptx"]


def stack(kernel: Any, dtype: str, num_warps: int = 4, **known: Any) -> int:
    """Return the bytes of a thread's stack, where registers are spilled; the arguments are those of `compiled`."""
    import triton

    cubin = compiled(kernel, dtype, num_warps, **known).asm["cubin"]
    usage = _said(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin=cubin)
    (size,) = re.findall(r"STACK:(\d+)", usage)
    return int(size)


def narrow(taken: ModuleType, at_launch: Callable[..., Any], kernels: Collection[str]) -> None:
    """Compile kernels for narrow heads, one or more, for lengths that 16 divides and others: wrong code fails.

    Args:
        taken: the op, as its test imports it.
        at_launch: returns a kernel, and what the launchers pass on to it, given its name, a dtype and the heads' sizes.
        kernels: their names.
    """
    jobs = itertools.product([(1, 64), (16, 256), (64, 16), (64, 1)], kernels, [["T", "HEADS"], []])
    for (K, V), which, multiples in jobs:  # noqa: N806 - sizes have the recipes' names
        kernel, known = at_launch(taken, which, "bf16", K, V)
        one_head = any(param.name == "HEADS" and not param.do_not_specialize for param in kernel.params)
        compiled(kernel, **known | {"multiples": multiples})
        if one_head and not multiples:  # Triton puts the 1 into the kernel
            compiled(kernel, **known | {"multiples": multiples, "HEADS": 1})


def graphs(op: Callable[..., Any], *inputs: torch.Tensor) -> list[list[str]]:
    """Return what is called in the graphs that torch.compile makes of an op for any sizes.

    There are two, forward and backward, if inputs require gradients.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._subclasses import FakeTensorMode

    calls = []

    def keep(module: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        calls.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module

    torch._dynamo.reset()
    compiled = torch.compile(op, backend=aot_autograd(fw_compiler=keep), dynamic=True, fullgraph=True)
    with FakeTensorMode() as mode:
        out = compiled(*(mode.from_tensor(tensor) for tensor in inputs))
        total = sum(tensor.sum() for tensor in tree_leaves(out))
        if total.requires_grad:
            total.backward()
    return calls


def compile_for_h100() -> None:
    """Have Triton compile for an H100 that is not there, from now on in this process."""
    import triton  # not before the choice of the interpreter is made

    h100 = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: h100, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )


def _as_on_h100(folder: str) -> None:
    compile_for_h100()
    sys.path.insert(0, folder)


def _answers(name: str, looks: tuple[Callable[[ModuleType], Any], ...]) -> list[Any]:
    recipe = importlib.import_module(name)
    return [look(recipe) for look in looks]
