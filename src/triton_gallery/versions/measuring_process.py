"""A process that measures ops under the one Triton that it imports; `measure.py` starts it and says each step.

It recompiles nothing that it compiled before, and holds one work at one size at a time.
"""

import gc
import importlib.util
import sys
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import MagicMock

from triton_gallery.libraries.trial import DEVICE, Trial, load_workloads, recipe_module
from triton_gallery.libraries.workload import Function

WORKLOADS = load_workloads()
MOST_TOLD = 300  # characters of an error; a compiler's has pages


class Bench:
    """The present work at the present size. The public methods are the steps."""

    def __init__(self) -> None:
        """Have Triton tell what it compiles."""
        import triton

        self.seconds: list[float] = []  # of each kernel compiled for the present row
        self.trial: Trial | None = None
        self.call: Function | None = None
        triton.knobs.compilation.listener = self._compiled

    def about(self) -> tuple[str, str]:
        """Return the version of Triton, and that of the assembler that it chooses for this GPU."""
        import torch
        import triton
        from triton.backends.nvidia.compiler import get_ptxas

        major, minor = torch.cuda.get_device_capability()
        return triton.__version__, get_ptxas(10 * major + minor).version

    def prepare(self, index: int, backward: bool, shape: tuple[int, ...], seed: int) -> tuple[float, int]:
        """Make inputs and call our op on them; return the seconds of compiling, and how many kernels that were."""
        import torch

        self.trial = self.call = None
        torch.cuda.empty_cache()
        work = WORKLOADS[index]
        function = work.ours(recipe_module(work.recipe))
        torch.manual_seed(seed)
        self.trial = Trial(work, shape, getattr(torch, work.dtype), DEVICE)
        self.seconds.clear()
        self.call, self.backward = self.trial.call(function, backward), backward
        self.call()
        torch.cuda.synchronize()
        compiled = sum(self.seconds), len(self.seconds)
        torch.cuda.empty_cache()  # other processes use this GPU too
        return compiled

    def check(self) -> None:
        """Compare with PyTorch. What was tuned while others used the GPU is tuned again first."""
        import torch
        from triton.runtime.autotuner import Autotuner

        assert self.trial
        assert self.call
        for tuner in (item for item in gc.get_objects() if type(item) is Autotuner):
            tuner.cache.clear()
        self.trial.restore()
        ours = tuple(tensor.clone() for tensor in self.call())
        work = self.trial.work
        self.trial.check("PyTorch", self.trial.call(work.called(work.torch(torch)), self.backward)(), ours)
        del ours
        torch.cuda.empty_cache()

    def time(self, turns: int) -> list[float]:
        """Return the GPU's milliseconds of so many calls, after one that is not counted: others used the GPU before."""
        from triton_gallery.bench import time_turns

        assert self.trial
        assert self.call
        rows = time_turns({"": self.call}, turns, warm_up=1, prepare=self.trial.restore)[""]  # type: ignore[no-untyped-call]
        return [gpu for gpu, _, _ in rows]

    def _compiled(self, *, times: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            self.seconds.append(times.total * 1e-6)


def serve(connection: Connection) -> None:
    """Take steps until the other end is closed; answer each with its result and None, or with None and the error."""
    if importlib.util.find_spec("matplotlib") is None:  # some recipes import it for drawings, which nobody sees here
        sys.modules["matplotlib"] = sys.modules["matplotlib.pyplot"] = MagicMock()
    bench = Bench()
    while True:
        try:
            step, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((getattr(bench, step)(*arguments), None))
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            connection.send((None, message[:MOST_TOLD]))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
