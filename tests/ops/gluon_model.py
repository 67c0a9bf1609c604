"""A model of a multiprocessor that runs Gluon kernels for Hopper: Gluon has no interpreter, and a GPU shows few races.

A kernel's text runs as it is, with the names of this module in place of Gluon's. Each role is a thread. Copies and
asynchronous products happen later than they are asked for: whatever can happen next is drawn by lot. So a wrong phase
or count stops the program, which is noticed, and a buffer that is written while something reads it is named.

Registers, layouts, and the warps of a role are not modelled: the compiler knows those.
"""

import ast
import importlib.util
import math
import operator
import random
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

Done = Callable[[], bool]
LIMIT = 20  # seconds for a thread to reach its next wait
ROOM, REGISTERS = 227 * 1024, 65536  # bytes of shared memory, and registers, of a program
SPARE = 24  # registers that a thread needs beside its sums


class Stop(BaseException):
    """Ends the threads of a program that has failed."""


class Machine:
    """A program's threads and what its engines have still to do; one thing happens at a time."""

    def __init__(self, seed: int) -> None:
        """Begin with a thread for nothing yet."""
        self.lot = random.Random(seed)
        self.later: list[Any] = []  # copies and products, of which `ready` ones may happen
        self.waiting: dict[threading.Thread, tuple[threading.Semaphore, Done]] = {}
        self.turn = threading.Semaphore(0)  # of who draws lots
        self.shared = 0  # bytes
        self.registers: dict[threading.Thread, int] = {}  # of each thread of a role
        self.unfenced: list[tuple[threading.Thread, Shared]] = []  # what a thread wrote, and no fence followed
        self.asked: list[tuple[str, threading.Thread]] = []  # what engines were asked for, in order, and by whom
        self.failed: BaseException | None = None

    def start(self, function: Callable[..., Any], *arguments: Any) -> threading.Thread:
        """Have a thread run a function; it waits for its turn first."""

        def run() -> None:
            try:
                self._pause(semaphore, lambda: True, first=True)
                function(*arguments)
            except Stop:
                pass
            except BaseException as error:
                self.failed = error
            finally:
                self.turn.release()

        semaphore = threading.Semaphore(0)
        thread = threading.Thread(target=run, daemon=True)
        self.waiting[thread] = semaphore, lambda: True
        thread.start()
        return thread

    def until(self, done: Done) -> None:
        """Let others go on until something is so; it may be so already."""
        self._pause(threading.Semaphore(0), done)

    def _pause(self, semaphore: threading.Semaphore, done: Done, first: bool = False) -> None:
        if not first:
            self.waiting[threading.current_thread()] = semaphore, done
            self.turn.release()
        semaphore.acquire()
        if self.failed:
            raise Stop

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function and all that it starts to the end; AssertionError if that does not come."""
        self.start(function, *arguments)
        while self.waiting and not self.failed:
            able = [thread for thread, (_, done) in self.waiting.items() if done()]
            chosen = [*able, *(event for event in self.later if event.ready())]
            try:
                assert chosen, "the program stops for ever: all that is left waits"
                self._go(self.lot.choice(chosen))
            except AssertionError as error:
                self.failed = error
        while self.waiting:  # after a failure
            _, (semaphore, _) = self.waiting.popitem()
            semaphore.release()
        if self.failed:
            raise self.failed
        assert not self.later, f"the program ends before a {self.later[0].kind} does"

    def _go(self, chosen: Any) -> None:
        if isinstance(chosen, threading.Thread):
            semaphore, _ = self.waiting.pop(chosen)
            semaphore.release()
            assert self.turn.acquire(timeout=LIMIT), "a thread does not come to a wait"
        else:
            self.later.remove(chosen)
            chosen.happen()


class Event:
    """Something that an engine does later: it reads some shared memory and writes some."""

    def __init__(self, kind: str, reads: list[Any], writes: list[Any], happen: Callable[[], None]) -> None:
        """Take it, and ask whether it disturbs what is under way."""
        self.kind, self.reads, self.writes, self.happen = kind, reads, writes, happen
        self.thread = threading.current_thread()
        for other in MACHINE.later:
            for buffer, other_buffer in [*product(writes, other.reads + other.writes), *product(reads, other.writes)]:
                assert not buffer.overlaps(other_buffer), f"a {kind} meets a {other.kind} in the same buffer"
        MACHINE.later.append(self)
        MACHINE.asked.append((kind, self.thread))

    def ready(self) -> bool:
        """Whether it is the first of its kind that its thread asked for; loads come in any order."""
        return self.kind == "load" or self is next(e for e in _mine(self.kind, self.thread))


def _mine(kind: str, thread: threading.Thread | None = None) -> list[Event]:
    asked = thread or threading.current_thread()
    return [event for event in MACHINE.later if event.kind == kind and event.thread is asked]


MACHINE = Machine(0)


class Dtype:
    """A dtype as Gluon has it."""

    def __init__(self, torch_dtype: torch.dtype) -> None:
        """Take torch's."""
        self.torch = torch_dtype


class Values:
    """Numbers in registers."""

    def __init__(self, values: torch.Tensor) -> None:
        """Take them."""
        self._values = values

    @property
    def values(self) -> torch.Tensor:
        """The numbers, of which no product is under way."""
        for event in MACHINE.later:
            assert getattr(event, "sums", None) is not self, "sums are read while a product is under way"
        return self._values

    @property
    def shape(self) -> list[int]:
        """As Gluon has it."""
        return list(self._values.shape)

    def to(self, dtype: Dtype) -> "Values":
        """Round."""
        return Values(self.values.to(dtype.torch))

    def __getitem__(self, place: Any) -> "Values":
        """Add dimensions."""
        return Values(self.values[place])

    def reshape(self, shape: list[int]) -> "Values":
        """Give it another shape."""
        return Values(self.values.reshape(shape))

    def permute(self, *order: int) -> "Values":
        """Exchange dimensions."""
        return Values(self.values.permute(*order))

    def split(self) -> "tuple[Values, Values]":
        """Take the last dimension apart."""
        left, right = self.values.unbind(-1)
        return Values(left), Values(right)


def _plain(x: Any) -> Any:
    return x.values if isinstance(x, Values) else x


def _for_each(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of numbers that are in registers, or are the same for all threads."""

    def apply(*numbers: Any) -> Any:
        if not any(isinstance(number, Values) for number in numbers):
            return compute(*numbers)
        return Values(compute(*map(_plain, numbers)))

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "and_", "eq", "le", "lt", "gt"):
    _operator = _for_each(getattr(operator, _name))
    setattr(Values, f"__{_name.strip('_')}__", _operator)
    setattr(Values, f"__r{_name.strip('_')}__", lambda value, other, compute=_operator: compute(other, value))
Values.__neg__ = _for_each(operator.neg)  # type: ignore[attr-defined]


class Int(int):
    """A program's number and what is computed of it, which have a dtype on a GPU."""

    def to(self, _: Dtype) -> "Int":
        """Return it in another dtype."""
        return self


def _to_int(compute: Callable[..., Any]) -> Callable[..., Any]:
    def apply(value: Int, other: Any) -> Any:
        result = compute(value, other)
        return result if result is NotImplemented else Int(result)

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Int, f"__{_name}__", _to_int(getattr(int, f"__{_name}__")))


class Pointer:
    """An address, or one for each number of a tile."""

    def __init__(self, tensor: torch.Tensor, places: Any = 0) -> None:
        """Take the tensor that it points into."""
        self.tensor, self.places = tensor, places

    def __add__(self, other: Any) -> "Pointer":
        """Move it."""
        return Pointer(self.tensor, self.places + _plain(other))

    def __sub__(self, other: Any) -> "Pointer":
        """Move it back."""
        return Pointer(self.tensor, self.places - _plain(other))

    @property
    def dtype(self) -> SimpleNamespace:
        """As Gluon has it."""
        return SimpleNamespace(element_ty=Dtype(self.tensor.dtype))

    @property
    def memory(self) -> torch.Tensor:
        """What lies in memory from its first element on, the padding of its last row too."""
        begin = self.tensor.storage_offset()
        length = self.tensor.untyped_storage().nbytes() // self.tensor.element_size() - begin
        return self.tensor.as_strided((length,), (1,), begin)


class Shared:
    """A piece of shared memory."""

    def __init__(self, values: torch.Tensor, barriers: Any = None, integers: bool = False) -> None:
        """Take memory, or barriers."""
        self.view, self.barriers, self.integers = values, barriers, integers

    @property
    def shape(self) -> list[int]:
        """As Gluon has it."""
        return list(self.view.shape)

    def index(self, place: int) -> "Shared":
        """Return one of several buffers."""
        assert 0 <= place < len(self.view), f"there is no buffer {place}"
        return Shared(self.view[place], self.barriers and self.barriers[place], self.integers)

    def reshape(self, shape: list[int]) -> "Shared":
        """See the same bytes in another shape."""
        return Shared(self.view.view(shape), None, self.integers)

    def permute(self, order: list[int]) -> "Shared":
        """Read it in another order."""
        return Shared(self.view.permute(order), None, self.integers)

    def load(self, _: Any) -> Values:
        """Read it to registers."""
        for event in MACHINE.later:
            for buffer in event.writes:
                assert not self.overlaps(buffer), f"a thread reads what a {event.kind} writes"
        return Values(self.view.long() if self.integers else self.view.clone())

    def overlaps(self, other: "Shared") -> bool:
        """Whether both may have a byte, as far as first and last ones tell."""
        (first, last), (other_first, other_last) = self.ends, other.ends
        return first <= other_last and other_first <= last

    @property
    def ends(self) -> tuple[int, int]:
        """The addresses of its first element and of its last one."""
        first = self.view.data_ptr()
        sides = zip(self.view.shape, self.view.stride(), strict=True)
        return first, first + sum((extent - 1) * stride for extent, stride in sides) * self.view.element_size()

    def store(self, values: Values) -> None:
        """Write registers to it."""
        assert self.shape == values.shape
        for event in MACHINE.later:
            for buffer in event.reads + event.writes:
                assert not self.overlaps(buffer), f"a thread writes where a {event.kind} is under way"
        self.view.copy_(values.values)
        MACHINE.unfenced.append((threading.current_thread(), self))


class Barrier:
    """An mbarrier: a phase ends when nothing is pending, arrivals or bytes."""

    def __init__(self, count: int) -> None:
        """Begin with phase 0."""
        self.count = self.pending = count
        self.bytes, self.ended = 0, 0

    def change(self, arrivals: int, expected: int) -> None:
        """Count arrivals and bytes."""
        self.pending -= arrivals
        self.bytes += expected
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.bytes == 0:
            self.ended, self.pending = self.ended + 1, self.count


class Descriptor:
    """A matrix as the copy engine knows it."""

    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int], block: list[int], layout: Any) -> None:
        """Take it, on the conditions of the engine."""
        assert base.data_ptr() % 16 == 0
        assert all(stride > 0 and stride * base.element_size() % 16 == 0 for stride in strides[:-1])
        assert strides[-1] == 1
        self.base, self.strides = base, strides
        self.shape, self.block_shape, self.layout, self.dtype = shape, block, layout, Dtype(base.dtype)
        self.block_type = SimpleNamespace(nbytes=math.prod(block) * base.element_size())

    @staticmethod
    def from_tensor(x: torch.Tensor, block: list[int], layout: Any) -> "Descriptor":
        """Describe a tensor."""
        return Descriptor(x, [*x.shape], [*x.stride()], block, layout)

    def part(self, place: list[int]) -> torch.Tensor:
        """Return the part of a block that lies within the matrix."""
        place = [getattr(begin, "value", begin) for begin in place]  # of a constant
        assert all(begin >= 0 for begin in place)
        pairs = zip(place, self.block_shape, self.shape, strict=True)
        extents = [max(0, min(extent, length - begin)) for begin, extent, length in pairs]
        # The engine adds up addresses modulo 2**64, which ragged descriptors rely on.
        itemsize = self.base.element_size()
        first = sum(begin * stride for begin, stride in zip(place, self.strides, strict=True)) * itemsize % 2**64
        if not all(extents):
            return self.base.new_empty(extents)
        return torch.as_strided(self.base, extents, self.strides, self.base.storage_offset() + first // itemsize)


class Kernel:
    """A jitted function."""

    def __init__(self, fn: Callable[..., None]) -> None:
        """Take it."""
        self.fn = fn

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run it within another one."""
        return self.fn(*arguments, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return what launches it."""

        def launch(*arguments: Any, num_warps: int, maxnreg: int = 0, **constants: Any) -> None:
            global MACHINE
            gl.num_warps, gl.maxnreg = lambda: num_warps, maxnreg or 255
            gl.num_programs = lambda axis: grid[axis]
            given = [Pointer(argument) if isinstance(argument, torch.Tensor) else argument for argument in arguments]
            for place in product(*(range(extent) for extent in grid)):
                gl.program_id = lambda axis, place=place: Int(place[axis])
                MACHINE = Machine(hash((SEEDS[0], place)))
                MACHINE.run(lambda: self.fn(*given, **constants))

        return launch


SEEDS = [0]  # what the next launch draws lots by


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Shared:
    MACHINE.shared += math.prod(shape) * dtype.torch.itemsize
    assert MACHINE.shared <= ROOM, "too much shared memory"
    if dtype is gl.int64:
        barriers = [[None] for _ in range(shape[0])] if len(shape) == 2 else [None]
        return Shared(torch.zeros(shape, dtype=torch.int64), barriers)
    # Integers are kept as floats as well, so that what was never written is known.
    return Shared(torch.full(shape, torch.nan, dtype=torch.float64), None, not dtype.torch.is_floating_point)


def _specialize(roles: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    assert len(roles) == len(warps) + 1 == len(registers) + 1
    (first, arguments), *others = roles
    # Registers are given to warpgroups; those of the first role are what the others leave.
    groups = [-(-number // 4) for number in warps]
    own_groups = gl.num_warps() // 4
    all_of_them = gl.maxnreg * (own_groups + sum(groups))
    assert all_of_them * 128 <= REGISTERS, "too many registers"
    remaining = all_of_them - sum(number * each for number, each in zip(groups, registers, strict=True))
    MACHINE.registers[threading.current_thread()] = remaining // own_groups
    threads = [MACHINE.start(function, *given) for function, given in others]
    MACHINE.registers |= zip(threads, registers, strict=True)
    first(*arguments)
    MACHINE.until(lambda: not any(thread in MACHINE.waiting for thread in threads))


def _full(shape: tuple[int, ...], value: float, dtype: Dtype, layout: Any) -> Values:
    registers = MACHINE.registers.get(threading.current_thread(), gl.maxnreg)
    held = math.prod(shape) // (32 * gl.num_warps())
    assert held + SPARE <= registers, "sums do not fit into the registers"
    return Values(torch.full(shape, value, dtype=dtype.torch))


def _zeros(shape: tuple[int, ...], dtype: Dtype, layout: Any) -> Values:
    return _full(shape, 0, dtype, layout)


def _arange(start: int, end: int, layout: Any) -> Values:
    return Values(torch.arange(start, end))


def _load_registers(pointers: Pointer, mask: Values | bool | None = None, other: float = 0) -> Any:
    if not isinstance(mask, Values):
        return Int(other) if mask is False else _scalar(pointers.memory[pointers.places])
    kept = mask.values
    values = torch.full(pointers.places.shape, other, dtype=pointers.tensor.dtype)
    values[kept] = pointers.memory[pointers.places[kept]]
    return Values(values)


def _store_registers(pointers: Pointer, values: Values, mask: Values | None = None) -> None:
    kept = torch.ones_like(pointers.places, dtype=torch.bool) if mask is None else mask.values
    pointers.memory[pointers.places[kept]] = values.values[kept].to(pointers.tensor.dtype)


def _scalar(values: torch.Tensor) -> Any:
    """Return an integer that all threads have as such."""
    is_integer = values.ndim == 0 and not values.is_floating_point()
    return Int(values) if is_integer else Values(values)


def _where(condition: Any, x: Any, y: Any) -> Values:
    return Values(torch.where(*map(_plain, (condition, x, y))))


def _extreme(of_tensors: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(*numbers: Any) -> Any:
        if not any(isinstance(number, torch.Tensor) for number in numbers):
            return (
                Int(of_numbers(numbers)) if all(isinstance(number, int) for number in numbers) else of_numbers(numbers)
            )
        return of_tensors(*map(torch.as_tensor, numbers))

    return _for_each(extreme)


def _range(*extents: int) -> Iterator[Int]:
    return map(Int, range(*extents))


def _static_range(count: int) -> Iterator[int]:
    return iter(range(count))


def _static_assert(condition: bool) -> None:
    assert condition


def _init(barrier: Shared, count: int) -> None:
    assert barrier.barriers[0] is None
    barrier.barriers[0] = Barrier(count)


def _invalidate(barrier: Shared) -> None:
    barrier.barriers[0] = None


def _expect(barrier: Shared, expected: int, pred: bool = True) -> None:
    if pred:
        barrier.barriers[0].change(1, expected)


def _arrive(barrier: Shared, *, count: int = 1, pred: bool = True) -> None:
    if pred:
        barrier.barriers[0].change(count, 0)


def _wait(barrier: Shared, phase: int) -> None:
    (state,) = barrier.barriers
    MACHINE.until(lambda: state.ended & 1 != phase)


def _load(descriptor: Descriptor, place: list[int], barrier: Shared, into: Shared, pred: bool = True) -> None:
    if not pred:
        return
    assert into.shape == descriptor.block_shape
    part, (state,) = descriptor.part(place), barrier.barriers

    def happen() -> None:
        into.view.zero_()
        into.view[tuple(map(slice, part.shape))] = part
        state.change(0, -descriptor.block_type.nbytes)

    Event("load", [], [into], happen)


def _store(descriptor: Descriptor, place: list[int], piece: Shared) -> None:
    _visible(piece)
    assert piece.shape == descriptor.block_shape
    part = descriptor.part(place)

    def happen() -> None:
        part.copy_(piece.view[tuple(map(slice, part.shape))])

    Event("store", [piece], [], happen)


def _visible(piece: Shared) -> None:
    """Assert that fences followed what threads wrote into a piece."""
    assert not any(piece.overlaps(other) for _, other in MACHINE.unfenced), "an engine reads what no fence made visible"


def _fence() -> None:
    MACHINE.unfenced = [written for written in MACHINE.unfenced if written[0] is not threading.current_thread()]


def _multiply(a: Any, b: Shared, acc: Values, use_acc: bool = True, is_async: bool = False) -> Values:
    """Multiply; the first operand is in shared memory, or in registers."""
    left = a.view if isinstance(a, Shared) else a.values.double()
    assert left.shape[1] == b.view.shape[0]
    assert acc.shape == [left.shape[0], b.view.shape[1]]
    assert acc._values.dtype == gl.float32.torch, "sums are not in float32"
    sums = Values(torch.full_like(acc._values, torch.nan))
    for operand in (a, b):
        if isinstance(operand, Shared):
            _visible(operand)

    def happen() -> None:
        # Products of a thread end in order, so that another one's sums are known.
        sums._values = (acc._values if use_acc else 0) + left @ b.view

    event = Event("product", [a, b] if isinstance(a, Shared) else [b], [], happen)
    event.sums = sums
    if not is_async:
        _wait_products(0, deps=(sums,))
    return sums


def _wait_products(outstanding: int, deps: tuple[Values, ...]) -> Any:
    asked = threading.current_thread()
    MACHINE.until(lambda: len(_mine("product", asked)) <= outstanding)
    return deps[0] if len(deps) == 1 else deps


def _wait_stores(pendings: int) -> None:
    asked = threading.current_thread()
    MACHINE.until(lambda: len(_mine("store", asked)) <= pendings)


class SharedLayout:
    """A layout of shared memory, of which nothing is modelled."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Take what it is."""

    @staticmethod
    def get_default_for(block: list[int], dtype: Dtype) -> Dtype:
        """Return something in its place."""
        return dtype


gl = SimpleNamespace(
    constexpr=object,
    int32=Dtype(torch.int32),
    int64=Dtype(torch.int64),
    float32=Dtype(torch.float64),  # sums are exact: what is tested is what is added up
    float16=Dtype(torch.float16),
    bfloat16=Dtype(torch.bfloat16),
    float8e4nv=Dtype(torch.float8_e4m3fn),
    float8e5=Dtype(torch.float8_e5m2),
    cdiv=lambda x, y: (x + y - 1) // y,
    minimum=_extreme(torch.minimum, min),
    maximum=_extreme(torch.maximum, max),
    max=lambda values, axis: _scalar(values.values.amax(axis)),
    sum=lambda values, axis: _scalar(values.values.sum(axis)),
    associative_scan=lambda values, axis, combine: Values(values.values.cumsum(axis)),
    exp2=_for_each(torch.exp2),
    log2=_for_each(torch.log2),
    fma=_for_each(lambda x, y, z: x * y + z),
    where=_where,
    arange=_arange,
    load=_load_registers,
    store=_store_registers,
    convert_layout=lambda values, layout: values,
    static_range=_static_range,
    static_assert=_static_assert,
    allocate_shared_memory=_allocate,
    warp_specialize=_specialize,
    barrier=lambda: None,
    zeros=_zeros,
    full=_full,
    NVMMADistributedLayout=lambda *arguments: arguments,
    SliceLayout=lambda *arguments: arguments,
    BlockedLayout=lambda *arguments: arguments,
    SwizzledSharedLayout=lambda *arguments: arguments,
    DotOperandLayout=lambda *arguments: arguments,
    NVMMASharedLayout=SharedLayout,
)


def load(source: str, file: Path) -> ModuleType:
    """Import a recipe from a file that is written for it: its text, with a model of what it imports of Gluon."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton.experimental"):
            for line in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[line] = ""
    lines.insert(lines.index("import torch"), f"import {__name__}\n\nglobals().update({__name__}.names())")
    file.write_text("\n".join(lines))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names() -> dict[str, Any]:
    """Return what a recipe imports of Gluon, modelled."""
    return {
        "gl": gl,
        "range": _range,
        "gluon": SimpleNamespace(jit=Kernel),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: None, init=_init, invalidate=_invalidate, expect=_expect, arrive=_arrive, wait=_wait
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=_load, async_copy_shared_to_global=_store, store_wait=_wait_stores
        ),
        "fence_async_shared": _fence,
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _wait_products,
        "GluonDescriptor": Descriptor,
    }
