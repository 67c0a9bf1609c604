"""Run as a script: print the most bytes that the benchmark of a recipe holds, from tensors without data.

The benchmark runs PyTorch's op, or the roof, on the device "meta", without a GPU.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that live after each operator."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__()
        self.peak, self.live = 0, {}

    def __torch_dispatch__(self, operator: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; count."""
        out = operator(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def do_bench(call: Callable[[], object], *args: object, quantiles: list[float], **options: object) -> list[float]:
    """Call once, and say that it took a millisecond."""
    call()
    return [1.0] * len(quantiles)


def load(path: str) -> ModuleType:
    """Import a recipe, which then makes tensors without data."""
    triton.testing.do_bench = do_bench
    spec = importlib.util.spec_from_file_location("recipe", path)
    assert spec
    assert spec.loader
    recipe = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = recipe
    spec.loader.exec_module(recipe)
    recipe.DEVICE = torch.device("meta")
    recipe.rms_norm_torch = lambda x, weight, eps: torch.layer_norm(x, weight.shape, weight)  # one kernel on a GPU
    torch.compile = lambda function=None, **options: function
    return recipe


def peak(recipe: ModuleType) -> int:
    """Return the most bytes, over all tables, at all sizes."""
    most = 0
    marked = recipe.benchmark
    for table in marked.benchmarks if isinstance(marked.benchmarks, list) else [marked.benchmarks]:
        for x in table.x_vals:
            for series in ("PyTorch", "Roof"):
                with Memory() as memory:
                    marked.fn(**{table.x_names[0]: x, table.line_arg: series}, **table.args)
                most = max(most, memory.peak)
    return most


if __name__ == "__main__":
    print(peak(load(sys.argv[1])))
