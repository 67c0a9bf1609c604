"""One work at one size: its inputs, the calls on them, and the check of their results.

A machine that only measures needs nothing for this but msgspec and what recipes import.
"""

import importlib
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Product, Workload
from triton_gallery.recipe.contents import load

ROOT = Path(__file__).resolve().parents[3]
GALLERY, RECORDS = ROOT / "gallery", ROOT / "docs" / "_records"
DEVICE = "cuda"
TOLERANCE = 0.02  # of the length of the difference, in the length of our result; half precision comes to 0.005


def load_workloads() -> list[Workload]:
    """Return the workloads of all recipes, in the recipes' order; the checkout has to be on the path of imports."""
    names = (f"benchmarks.{recipe.name}" for recipe in load(GALLERY))
    modules = (importlib.import_module(name) for name in names if importlib.util.find_spec(name))
    return [workload for module in modules for workload in module.WORKLOADS]


@cache
def recipe_module(recipe: str) -> ModuleType:
    """Import a recipe by its path, as `import <name>` would in its folder, and add the rest of its op."""
    path = GALLERY / f"{recipe}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return with_op(module)


def with_op(module: ModuleType) -> ModuleType:
    """Add to a recipe's module what its op has and its lesson does not import; return the module."""
    op = f"triton_gallery_ops.{module.__name__}"
    if importlib.util.find_spec(op):
        vars(module).update(vars(importlib.import_module(op)) | vars(module))
    return module


class Trial:
    """The inputs of one work at one size, and the calls on them.

    Some libraries write over what they are given. Liger's `rms_norm` puts the gradient of `x` where that of `y` was,
    its `swiglu` those of `gate` and `up` in their places. It is their default, so it is measured; but from the second
    call on the data would be no longer random. So before each call all inputs are restored, for all libraries alike.
    """

    def __init__(self, work: Workload, shape: tuple[int, ...], dtype: Any, device: Any) -> None:
        """Make random inputs of a size."""
        import torch

        self.work, self.dtype, self.device = work, dtype, device
        self.inputs = work.inputs(partial(torch.randn, dtype=dtype, device=device, requires_grad=True), shape)
        outputs = _tuple(work.torch(torch)(*self.inputs, *work.constants)) if work.backward else ()
        self.grads = [torch.randn_like(output) for output in outputs]
        tensors = [tensor for tensor in (*self.inputs, *self.grads) if isinstance(tensor, torch.Tensor)]
        self.kept = [(tensor.data, tensor.detach().clone()) for tensor in tensors]  # .data: autograd need not know

    def restore(self) -> None:
        """Give the inputs their values back."""
        for tensor, kept in self.kept:
            tensor.copy_(kept)

    def call(self, function: Function, backward: bool) -> Callable[[], tuple[Any, ...]]:
        """Return the function's forward, or its backward on a graph that is there, as a call."""
        import torch

        self.restore()
        if backward:
            outputs = _tuple(function(*self.inputs, *self.work.constants))
            leaves = [tensor for tensor in self.inputs if tensor.requires_grad]
            return partial(torch.autograd.grad, outputs, leaves, self.grads, retain_graph=True)
        return torch.no_grad()(lambda: _tuple(function(*self.inputs, *self.work.constants)))

    def check(self, name: str, outputs: tuple[Any, ...], ours: tuple[Any, ...]) -> None:
        """Compare results with ours: a call that means something else is not worth a time.

        Elements may cancel, so that each alone may be off by more than half precision rounds; all together are not.
        """
        import torch

        def message(reason: str) -> str:
            return f"{self.work.recipe}: {name} has another result than ours: {reason}"

        for pair in zip(outputs, ours, strict=True):
            a, b = (tensor.double() for tensor in self.work.alike(*pair))
            off = (a - b).norm() / b.norm()
            torch.testing.assert_close(off, torch.zeros_like(off), rtol=0, atol=TOLERANCE, msg=message)


def band(times: Sequence[float]) -> list[float]:
    """Return the median of times, then the 20th and the 80th percentile."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return [statistics.median(times), fifths[0], fifths[-1]]


def rates_of(amount: Bytes | Product, times: Sequence[float]) -> list[float]:
    """Return the rates of a band of times, as records have them: the median, then the 20th and the 80th percentile."""
    median, low, high = times
    return [float(f"{amount.rate(time):.5g}") for time in (median, high, low)]


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
