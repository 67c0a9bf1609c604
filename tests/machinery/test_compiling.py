"""Functions that run where Triton compiles: what goes along, what comes back, and what cannot."""

import math
import os
from collections.abc import Callable
from typing import Any

import pytest

from triton_gallery.compiling import compile_only

PAGE = """
from math import prod as product

import torch
import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode
from torch.library import triton_op, wrap_triton

from triton_gallery.compiling import generated_code, launches

FACTOR = tl.constexpr(3)
SHAPE = (2, 64)
tensor = torch.ones(2)


@triton.jit
def scale(x):
    return x * FACTOR


@triton.autotune([triton.Config({}, num_warps=4)], key=[])
@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(x_ptr + offs, scale(tl.load(x_ptr + offs)))


def length():
    return product(SHAPE)


@compile_only
def warps(options):
    tensor = torch.cuda.is_available()
    print("GPU:", tensor)
    compiled = kernel.fn.warmup(torch.float32, length(), grid=(1,), **options)
    return type(kernel.fn).__name__, compiled.metadata.num_warps, "ptx" in compiled.asm


@triton_op("triton_gallery_test::scaled", mutates_args={})
def scaled(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    wrap_triton(kernel)[(1,)](out, BLOCK=64)
    return out


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return FACTOR.value * x

    @staticmethod
    def backward(ctx, grad):
        return FACTOR.value * grad


@compile_only
def derivative():
    x = torch.ones(2, requires_grad=True)
    Thrice.apply(x).sum().backward()
    return x.grad.tolist()


@compile_only
def shape_and_launches():
    shapes, code = [], []

    def backend(module, _):
        code.append(str(module.graph))
        return module

    def launch(x):
        kernel[(1,)](x, BLOCK=64)

    with FakeTensorMode():
        shapes.append(tuple(scaled(torch.empty(2, 3)).shape))
        torch.compile(launch, backend=backend, fullgraph=True)(torch.empty(64))
    return shapes, "triton_kernel" in code[0]


@compile_only
def nested(options):
    return warps(options)


@compile_only
def fails():
    raise ValueError("of the other process")


@compile_only
def reads_tensor():
    return tensor.sum()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kernel[(1,)](x, 64)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def twice(x):
    return Twice.apply(x) + 1


@compile_only
def programs():
    x = torch.ones(64)
    inference = generated_code(twice, (x,), (x[:32],), (x[:16],))
    training = generated_code(twice, (x.requires_grad_(),), dynamic=False)
    return [launches(code) for code in inference + training]


@compile_only
def refused():
    return generated_code(lambda x: print(x), (torch.ones(3),))
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the names of a script that decorates some functions."""
    file = tmp_path_factory.mktemp("page") / "page.py"
    file.write_text(PAGE)
    scope = {"__name__": "page", "compile_only": compile_only}
    exec(compile(PAGE, str(file), "exec"), scope)
    return scope


def test_kernels_functions_and_constants_go_along(
    page: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not need a GPU, nor the interpreter to be off here; what is printed there is printed here."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert page["warps"]({"num_warps": 8}) == ("JITFunction", 8, True)
    assert page["nested"]({}) == ("JITFunction", 4, True)
    assert capsys.readouterr().out == "GPU: False\n" * 2
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_ops_and_compiled_functions(page: dict[str, Any]) -> None:
    """An op goes along with its decorator, and torch.compile takes the stand-in for a GPU."""
    assert page["derivative"]() == [3, 3]  # a class, of a script that is not a module
    assert page["shape_and_launches"]() == ([(2, 3)], True)


def test_errors_of_the_other_process(page: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="ValueError: of the other process"):
        page["fails"]()


@pytest.mark.parametrize(("name", "value"), [("tensor", None), ("tensor", math.inf)])
def test_what_cannot_go_along(page: dict[str, Any], name: str, value: object) -> None:
    """A tensor cannot, nor what its text would not give back."""
    if value is not None:
        page[name] = value
    function: Callable[[], object] = page["reads_tensor"]
    with pytest.raises(TypeError, match=f"{name} cannot go to another process"):
        function()


def test_programs_of_torch_compile(page: dict[str, Any]) -> None:
    """A class goes along; a new size has one more program, and training has one for each pass."""
    first, other_sizes, forward, backward = page["programs"]()
    for calls in (first, other_sizes, forward):
        assert sum(call.startswith("kernel_0.run(") for call in calls) == 1
        assert not any("stream" in call or "assert" in call for call in calls)
    assert len(backward) == 1
    with pytest.raises(RuntimeError, match="print"):
        page["refused"]()
