"""All that this package replaces in Triton, whose names are private: read in 3.6, 3.7.1, 3.8 and 3.9.

Triton's interpreter is made quick, it tells what it compiles for which launch, and it tells an observer what a kernel
does. (Triton has a hook for launches, which refuses constants that JSON has not.) `compiled/compiler_process.py` calls
the compiler and replaces nothing.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CodeType, SimpleNamespace
from typing import Any, Literal, Protocol

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


Array = np.ndarray[Any, Any]


class Observer(Protocol):
    """What is told of a kernel that runs in the interpreter."""

    def launched(self, code: CodeType, arguments: Mapping[str, Any]) -> None:
        """A launch begins: the code that a program runs, and its arguments by name, tensors as PyTorch has them."""

    def accesses(self, kind: Literal["load", "store", "atomic"], pointers: Array, mask: Array) -> Array:
        """A program is about to load, store or change what pointers point to; return the mask to do it with."""

    def accessed(self, values: Array) -> None:
        """It has: what is there now, for each pointer."""

    def multiplied(self, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        """A program has multiplied two matrices of these shapes."""

    def reduced(self, name: str, operand: Array, result: Array) -> None:
        """A program has reduced a tensor."""

    def ended(self) -> None:
        """A launch has ended, or failed."""


def numbers(handle: Any) -> Array:
    """Return the numbers that the interpreter holds as a value; it keeps bfloat16 as integers."""
    data = np.asarray(handle.data)
    if handle.dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data


def program_id() -> tuple[int, int, int]:
    """Return which program the interpreter runs."""
    return tuple(interpreter.interpreter_builder.grid_idx)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Tell an observer of all launches within this context."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    rmw, cas, dot = builder.create_atomic_rmw, builder.create_atomic_cas, builder.create_dot
    reduce = interpreter.ReduceScanOpInterface.apply
    arguments, call = interpreter.GridExecutor._init_args_hst, interpreter.GridExecutor.__call__

    def access(kind: Literal["load", "store", "atomic"], pointers: Any, mask: Any) -> Any:
        lanes = np.ones_like(pointers.data, dtype=bool) if mask is None else mask.data
        lanes = observer.accesses(kind, pointers.data, np.broadcast_to(lanes, pointers.data.shape))
        return interpreter.TensorHandle(lanes, tl.int1)

    def masked_load(self: Any, pointers: Any, mask: Any, *others: Any, **named: Any) -> Any:
        result = load(self, pointers, access("load", pointers, mask), *others, **named)
        observer.accessed(numbers(result))
        return result

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any, **named: Any) -> Any:
        result = store(self, pointers, value, access("store", pointers, mask), *others, **named)
        observer.accessed(np.broadcast_to(numbers(value), pointers.data.shape))
        return result

    def atomic_rmw(self: Any, operator: Any, pointers: Any, value: Any, mask: Any, *others: Any, **named: Any) -> Any:
        lanes = access("atomic", pointers, mask)
        result = rmw(self, operator, pointers, value, lanes, *others, **named)
        observer.accessed(_now_at(pointers, lanes.data, result))
        return result

    def atomic_cas(self: Any, pointers: Any, *others: Any, **named: Any) -> Any:
        lanes = access("atomic", pointers, None)
        result = cas(self, pointers, *others, **named)
        observer.accessed(_now_at(pointers, lanes.data, result))
        return result

    def create_dot(self: Any, a: Any, b: Any, *others: Any, **named: Any) -> Any:
        observer.multiplied((a.data.shape, b.data.shape))
        return dot(self, a, b, *others, **named)

    def apply(self: Any, values: Any) -> Any:
        result = reduce(self, values)
        if isinstance(values, tuple):  # it calls itself with one
            name = getattr(self.combine_fn, "__name__", "").strip("_")
            name = name.replace("elementwise_", "").replace("_combine", "")
            if isinstance(self, interpreter.ScanOps):
                name = {"sum": "cumsum", "prod": "cumprod"}.get(name, "associative_scan")
            observer.reduced(name, values[0].handle.data, numbers(result[0].handle))
        return result

    def prepare_arguments(self: Any, positional: Any, named: Any) -> Any:
        on_host, named_on_host = arguments(self, positional, named)
        observer.launched(self.fn.__code__, dict(zip(self.arg_names, on_host, strict=False)) | named_on_host)
        return on_host, named_on_host

    def run_grid(self: Any, *positional: Any, **named: Any) -> Any:
        try:
            return call(self, *positional, **named)
        finally:
            observer.ended()

    replacements = [
        (builder, "create_masked_load", load, masked_load),
        (builder, "create_masked_store", store, masked_store),
        (builder, "create_atomic_rmw", rmw, atomic_rmw),
        (builder, "create_atomic_cas", cas, atomic_cas),
        (builder, "create_dot", dot, create_dot),
        (interpreter.ReduceScanOpInterface, "apply", reduce, apply),
        (interpreter.GridExecutor, "_init_args_hst", arguments, prepare_arguments),
        (interpreter.GridExecutor, "__call__", call, run_grid),
    ]
    for owner, name, _, after in replacements:
        setattr(owner, name, after)
    try:
        yield
    finally:
        for owner, name, before, _ in replacements:
            setattr(owner, name, before)


def _now_at(pointers: Any, lanes: Array, like: Any) -> Array:
    """Return what is in memory where pointers point to."""
    values: Array = interpreter._interpreter.load(pointers.data, lanes, np.zeros_like(like.data), like.data.dtype)
    return values
