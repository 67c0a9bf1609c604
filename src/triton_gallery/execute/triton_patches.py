"""All that this package replaces in Triton, whose names are private: read in 3.6, 3.7.1, 3.8 and 3.9.

Triton's interpreter is made quick, and it tells what it compiles for which launch. (It has a hook for that, which
refuses constants that JSON has not.) `compiled/compiler_process.py` calls the compiler and replaces nothing.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

COMPUTE_CAPABILITY = 90  # for which interpreted launches are specialised: the same for all of NVIDIA's GPUs


def is_interpreting() -> bool:
    """Return whether kernels of this process run in the interpreter."""
    return not isinstance(tl.sum, triton.JITFunction)


def on_compile(tell: Callable[..., None]) -> None:
    """Tell of each kernel that is about to be compiled: the kernel, its signature, constants, options, attributes.

    The interpreter compiles nothing: there each launch is prepared as for a GPU, up to that moment.
    """
    do_compile = triton.JITFunction._do_compile
    interprets = is_interpreting()

    def replacement(
        kernel: Any,
        key: Any,
        signature: Any,
        device: Any,
        constants: Any,
        options: Any,
        attributes: Any,
        warmup: Any,
    ) -> Any:
        tell(kernel, signature, constants, options, attributes)
        if interprets:
            return None
        return do_compile(kernel, key, signature, device, constants, options, attributes, warmup)

    triton.JITFunction._do_compile = replacement
    if interprets:
        _prepare_interpreted_launches()


def on_trial(tell: Callable[[Any, Any], None]) -> None:
    """Tell which autotuner tries which config, and None and None when it has been tried."""
    bench = Autotuner._bench

    def replacement(tuner: Any, *args: Any, config: Any, **kwargs: Any) -> Any:
        tell(tuner, config)
        try:
            return bench(tuner, *args, config=config, **kwargs)
        finally:
            tell(None, None)

    Autotuner._bench = replacement


def _prepare_interpreted_launches() -> None:
    run = interpreter.InterpretedFunction.run
    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", COMPUTE_CAPABILITY, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    parameters = inspect.signature(triton.JITFunction.__init__).parameters
    compilable: dict[int, Any] = {}

    def to_compilable(value: Any) -> Any:
        if not isinstance(value, interpreter.InterpretedFunction):
            return value
        if id(value) not in compilable:
            options = {name: option for name, option in value.kwargs.items() if name in parameters}
            compilable[id(value)] = triton.JITFunction(value.fn, **options)
        return compilable[id(value)]

    def replacement(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if not warmup:
            arguments = {name: to_compilable(value) for name, value in kwargs.items()}
            driver.set_active(gpu)
            with suppress(Exception):  # what Triton refuses, the interpreter may take: it will not be compiled
                to_compilable(kernel).run(*map(to_compilable, args), grid=grid, warmup=True, **arguments)
            driver.set_active(None)
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    interpreter.InterpretedFunction.run = replacement


class Patch:
    """Takes the place of Triton's function that patches `triton.language`, and keeps what that did at the first launch.

    Triton looks for what it has to patch at each launch and, within, at each call of a function, which takes longer
    than the small kernels of most tests and pages. What it patches for such a call stays patched, and the compiler then
    chokes on it.
    """

    def __init__(self, patch_lang: Callable[..., Any]) -> None:
        """Take Triton's function."""
        self._patch_lang = patch_lang
        self._changes: list[tuple[object, str, object, object]] = []
        self._patched = False

    def __call__(self, function: Callable[..., object]) -> "Patch":
        """Patch the language, but for a call within a launch."""
        if not self._patched:
            self._patched = True
            if not self._changes:
                scope = self._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
                self._changes = [(place, name, before, vars(place)[name]) for place, name, before in scope._changes]
            for place, name, _, after in self._changes:
                setattr(place, name, after)
        return self

    def restore(self) -> None:
        """Give the language back as it was; Triton asks for that after a launch."""
        for place, name, before, _ in reversed(self._changes):
            if before is interpreter._MISSING:
                delattr(place, name)
            else:
                setattr(place, name, before)
        self._patched = False


def quicken(replace: Callable[[object, str, object], object] = setattr) -> None:
    """Have the interpreter do the same in less time, in this process; `replace` is another function than setattr.

    Where a later Triton has other names, the interpreter stays as it is.
    """
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype", "_MISSING")):
        return
    known = functools.cache(interpreter._get_np_dtype)  # which makes a table of all dtypes at each call

    def np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        scalar = dtype.scalar
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else known(scalar)

    replace(interpreter, "_patch_lang", Patch(interpreter._patch_lang))
    replace(interpreter, "_get_np_dtype", np_dtype)
