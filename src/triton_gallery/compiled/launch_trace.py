"""Notes what is compiled for the launches of a recipe, in the process that executes it.

On a GPU they are noted when Triton is about to compile, and never after: what is timed stays as it is. Triton's
interpreter compiles nothing, so each launch is shown to Triton's own front as well, up to that moment. (Triton has a
hook there, which refuses constants that JSON has not.)
"""

import inspect
import json
import math
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from triton_gallery.recipe.launches import ALIGNED, DTYPE, FLOAT, FUNCTION, LAYOUT, TUPLE, Launch, typical

OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}  # and what they are where none is given
ABOUT = 90  # the compute capability for which interpreted launches are specialised: the same for all of NVIDIA's


class Watch:
    """The launches of kernels that a folder's scripts define."""

    def __init__(self, folder: Path) -> None:
        """Watch from now on."""
        import triton
        from triton.runtime.autotuner import Autotuner

        self._folder = f"{folder}/"
        self._seen: list[tuple[Launch, Any, Any]] = []  # each with the autotuner and the config that it tries, if any
        self._tries: tuple[Any, Any] = (None, None)
        self._interprets = not isinstance(triton.language.sum, triton.JITFunction)
        self._watch_tuning(Autotuner)
        self._watch_compiling(triton.JITFunction)
        if self._interprets:
            self._watch_interpreter()

    @property
    def launches(self) -> list[Launch]:
        """The typical launch of each kernel; of what was tuned, only as it was found to be best."""
        found = [
            launch
            for launch, tuner, config in self._seen
            if tuner is None or any(config is best for best in tuner.cache.values())
        ]
        return typical(found)

    def _watch_compiling(self, kind: Any) -> None:
        do_compile = kind._do_compile

        def noted(
            kernel: Any,
            key: Any,
            signature: Any,
            device: Any,
            constants: Any,
            options: Any,
            attributes: Any,
            warmup: Any,
        ) -> Any:
            if kernel.fn.__code__.co_filename.startswith(self._folder):
                kept = [[list(place), _plain(value)] for place, value in constants.items()]
                aligned = [list(place) for place, said in attributes.items() if [ALIGNED, 16] in said]
                given: dict[str, Any] = {name: getattr(options, name, usual) for name, usual in OPTIONS.items()}
                own = {name: value for name, value in given.items() if value != OPTIONS[name]}
                kinds = {name: _listed(kind) for name, kind in signature.items()}
                self._seen.append((Launch(kernel.fn.__name__, kinds, kept, aligned, own), *self._tries))
            if self._interprets:
                return None
            return do_compile(kernel, key, signature, device, constants, options, attributes, warmup)

        kind._do_compile = noted

    def _watch_tuning(self, kind: Any) -> None:
        bench = kind._bench

        def noted(tuner: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
            self._tries = tuner, config
            try:
                return bench(tuner, *args, config=config, **kwargs)
            finally:
                self._tries = None, None

        kind._bench = noted

    def _watch_interpreter(self) -> None:
        import triton
        from triton.runtime.driver import driver
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run
        target = triton.backends.compiler.GPUTarget("cuda", ABOUT, 32)
        gpu = SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
        known = inspect.signature(triton.JITFunction.__init__).parameters
        shadows: dict[int, Any] = {}

        def shadow(value: Any) -> Any:
            if not isinstance(value, InterpretedFunction):
                return value
            if id(value) not in shadows:
                said = {name: option for name, option in value.kwargs.items() if name in known}
                shadows[id(value)] = triton.JITFunction(value.fn, **said)
            return shadows[id(value)]

        def shown(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if kernel.fn.__code__.co_filename.startswith(self._folder) and not warmup:
                given = {name: shadow(value) for name, value in kwargs.items()}
                driver.set_active(gpu)
                with suppress(Exception):  # what Triton refuses, the interpreter may take: it will not be compiled
                    shadow(kernel).run(*map(shadow, args), grid=grid, warmup=True, **given)
                driver.set_active(None)
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        InterpretedFunction.run = shown


def _plain(value: Any) -> Any:
    """Return a constant as JSON can have it."""
    if hasattr(value, "value") and type(value).__name__ == "constexpr":
        value = value.value
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return json.loads(json.dumps(value))  # of its plain type
    if isinstance(value, tuple):
        return {TUPLE: [_plain(item) for item in value]}
    if type(value).__name__ == "dtype":
        return {DTYPE: str(value)}
    if type(value).__name__.endswith("Layout"):
        return {LAYOUT: repr(value)}
    return {FUNCTION: getattr(getattr(value, "fn", value), "__name__", repr(value))}


def _listed(kind: Any) -> Any:
    return [_listed(item) for item in kind] if isinstance(kind, tuple) else kind
