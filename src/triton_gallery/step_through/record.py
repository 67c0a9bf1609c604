"""Records what a launch does in Triton's interpreter, statement by statement, and checks its result."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal

import numpy as np
import torch
import triton.language as tl

from triton_gallery.execute import triton_patches
from triton_gallery.step_through.cells import Array, Lanes, Named, locate
from triton_gallery.step_through.trace import Kind

PROGRAMS, STEPS, REGISTERS, CELLS = 16, 40, 8, 160  # the most that a figure has: programs, steps of each, … of a tensor


@dataclass(frozen=True)
class Statement:
    """A statement of a kernel.

    Attributes:
        first: its first line, counted as the kernel's file has it.
        last: its last line; of a loop or a condition the end of the head.
        body: the first line of the body of a loop or a condition; else 0.
        targets: the names that it binds.
        sources: the names that it reads, in order.
        text: its text.
    """

    first: int
    last: int
    body: int
    targets: tuple[str, ...]
    sources: tuple[str, ...]
    text: str

    @property
    def is_loop(self) -> bool:
        """Whether it is the head of a loop."""
        return self.text.startswith(("for ", "while "))


@dataclass
class Event:
    """What a statement did: an access to memory, a product of matrices, or a reduction.

    Attributes:
        kind: "load", "store", "atomic", "dot" or "reduce".
        lanes: where an access points to.
        values: what is there afterwards, for each lane that is inside; of a reduction its result.
        shapes: of the operands of a product; of the operand of a reduction.
        name: of a reduction.
    """

    kind: Kind | Literal["dot", "reduce"]
    lanes: Lanes | None = None
    values: list[float] = field(default_factory=list)
    shapes: tuple[tuple[int, ...], ...] = ()
    name: str = ""


@dataclass
class Ran:
    """A statement that a program ran.

    Attributes:
        program: which program.
        statement: the statement.
        events: what it did.
        values: the registers that it bound.
        before: what these held.
    """

    program: tuple[int, int, int]
    statement: Statement
    events: list[Event] = field(default_factory=list)
    values: dict[str, Array] = field(default_factory=dict)
    before: dict[str, Array] = field(default_factory=dict)


def statements(function: Callable[..., object]) -> tuple[dict[int, Statement], list[str], int]:
    """Return the innermost statement at each line of a kernel, the kernel's lines, and the number of its first line."""
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    by_line: dict[int, Statement] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Name)] if not body else []
        if isinstance(node, ast.For):
            parts = [part for half in (node.target, node.iter) for part in ast.walk(half) if isinstance(part, ast.Name)]
        elif isinstance(node, (ast.If, ast.While)):
            parts = [part for part in ast.walk(node.test) if isinstance(part, ast.Name)]
        called = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
        functions = {function.id for function in called if isinstance(function, ast.Name)}
        targets = tuple(part.id for part in parts if isinstance(part.ctx, ast.Store))
        read = [part for part in parts if isinstance(part.ctx, ast.Load) and part.id not in functions | {"tl", "range"}]
        read.sort(key=lambda part: (part.lineno, part.col_offset))
        sources = tuple(dict.fromkeys(part.id for part in read))
        if isinstance(node, ast.AugAssign):
            sources = tuple(dict.fromkeys((*targets, *sources)))
        text = "\n".join(source.splitlines()[node.lineno - 1 : last]).strip()
        start = body[0].lineno + first - 1 if body else 0
        statement = Statement(first + node.lineno - 1, first + last - 1, start, targets, sources, text)
        for line in range(node.lineno, last + 1):
            by_line[first + line - 1] = statement
    return by_line, source.splitlines(), first


class Recorder:
    """Observes the launch of one kernel.

    Attributes:
        tensors: what the launch was given.
        ran: what its programs ran, in the interpreter's order.
        launches: how many launches of the kernel there were.
    """

    def __init__(self, kernel: Callable[..., object], registers: Sequence[str], outside: bool, wave: int) -> None:
        """Take the kernel's function, the registers to keep, whether lanes may point outside, and the wave of a race.

        In a race, as many programs as the wave has read what was in memory before any of them wrote; 0 is for no race.
        """
        self._function, self._registers, self._outside, self._wave = kernel, set(registers), outside, wave
        self.by_line, self.lines, self.first_line = statements(kernel)
        self.tensors: list[Named] = []
        self.ran: list[Ran] = []
        self.launches = 0
        self._now: Ran | None = None
        self._held: dict[str, Array] = {}
        self._program: tuple[int, int, int] | None = None
        self._is_running = False
        self._tracer: Any = None
        self._wave_start: list[torch.Tensor] = []
        self._written: list[list[tuple[Array, Array]]] = []

    @property
    def accesses_made(self) -> list[Lanes]:
        """Where each access pointed to."""
        return [event.lanes for ran in self.ran for event in ran.events if event.lanes]

    # What `triton_patches.observe` calls

    def launched(self, code: CodeType, arguments: Mapping[str, Any]) -> None:
        """Keep the tensors, and trace the kernel's code."""
        if code.co_name != self._function.__name__:
            return
        self.launches += 1
        self._is_running = True
        for name, argument in arguments.items():
            tensor = getattr(argument, "base", argument)
            if isinstance(tensor, torch.Tensor):
                tensor = tensor.detach()
                self.tensors.append(Named(name.removesuffix("_ptr"), tensor, tensor.clone()))
        self._tracer = sys.gettrace()  # a debugger's, or what counts coverage
        sys.settrace(lambda frame, *_: self._enter(frame) if frame.f_code is code else None)

    def accesses(self, kind: Kind, pointers: Array, mask: Array) -> Array:
        """Note where an access points to."""
        if not self._is_running or self._now is None:
            return mask
        lanes = locate(pointers, mask, self.tensors, self._now.statement.sources)
        if lanes.outside and not self._outside:
            name, count = self.tensors[lanes.tensor].name, len(lanes.outside)
            raise ValueError(
                f"`{self._now.statement.text}` points outside of {name} in {count} lane{'s' if count > 1 else ''}; "
                f"a launch that shows that declares `outside = true`"
            )
        self._now.events.append(Event(kind, lanes))
        return lanes.inside.reshape(mask.shape)

    def accessed(self, values: Array) -> None:
        """Note what is there now."""
        if self._is_running and self._now is not None:
            event = self._now.events[-1]
            assert event.lanes is not None
            event.values = values.reshape(-1)[event.lanes.inside.reshape(-1)].astype(float).tolist()

    def multiplied(self, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        """Note a product of matrices."""
        if self._is_running and self._now is not None:
            self._now.events.append(Event("dot", shapes=shapes))

    def reduced(self, name: str, operand: Array, result: Array) -> None:
        """Note a reduction."""
        if self._is_running and self._now is not None:
            values = np.ravel(result).astype(float).tolist()
            self._now.events.append(Event("reduce", values=values, shapes=(np.shape(operand),), name=name))

    def ended(self) -> None:
        """Stop tracing."""
        if self._is_running:
            sys.settrace(self._tracer)
            self._is_running = False
            self._end_wave()

    # What Python calls for each line of the kernel

    def _enter(self, frame: FrameType) -> Any:
        self._program = triton_patches.program_id()
        self._held = {}
        if self._wave:
            if len(self._written) == self._wave:
                self._end_wave()
            if not self._written:
                self._wave_start = [named.tensor.clone() for named in self.tensors]
            for named, before in zip(self.tensors, self._wave_start, strict=True):
                named.tensor.copy_(before)
        return self._line

    def _line(self, frame: FrameType, kind: str, _: object) -> Any:
        if kind == "line" and (statement := self.by_line.get(frame.f_lineno)):
            if self._now is None or self._now.statement is not statement:  # it may have several lines
                self._close(frame)
                assert self._program is not None
                self._now = Ran(self._program, statement)
        elif kind == "return":
            self._close(frame)
            if self._wave:
                pairs = zip(self.tensors, self._wave_start, strict=True)
                self._written.append([_changes(named.tensor.numpy(), before.numpy()) for named, before in pairs])
        return self._line

    def _close(self, frame: FrameType) -> None:
        if self._now is None:
            return
        for name in self._now.statement.targets:
            if name in self._registers and name in frame.f_locals:
                value = _numbers(name, frame.f_locals[name])
                if name in self._held:
                    self._now.before[name] = self._held[name]
                self._now.values[name] = self._held[name] = value
        self.ran.append(self._now)
        self._now = None

    def _end_wave(self) -> None:
        """Write what the programs of a race have written, in their order."""
        if not self._written:
            return
        for number, named in enumerate(self.tensors):
            named.tensor.copy_(self._wave_start[number])
            for written in self._written:
                changed, values = written[number]
                named.tensor.numpy()[changed] = values[changed]
        self._written = []


def _changes(after: Array, before: Array) -> tuple[Array, Array]:
    """Return where values have changed, and a copy of them; what was not written may be NaN."""
    return (after != before) & ~((after != after) & (before != before)), after.copy()


def _numbers(name: str, value: Any) -> Array:
    """Return what a name in a kernel holds."""
    if isinstance(value, tl.core.tensor):
        if value.dtype.is_ptr():
            raise ValueError(f"{name} holds pointers, which the figure cannot show as registers")
        shape = [int(size) for size in value.shape] if value.type.is_block() else []
        return triton_patches.numbers(value.handle).reshape(shape).copy()
    return np.asarray(getattr(value, "value", value))


def kernel_function(namespace: Mapping[str, Any], name: str) -> Callable[..., object]:
    """Return the Python function of a lesson's kernel, of one that is tuned too.

    Raises:
        ValueError: if there is no such kernel.
    """
    kernel: Any = namespace.get(name)
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    if not callable(kernel):
        raise ValueError(f"the lesson has no kernel {name}")
    function: Callable[..., object] = kernel
    return function


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    """Return float32 integers from low to high, without high; deterministic."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(low, high, shape, generator=generator).float()


def record(kernel: Callable[..., object], call: Callable[[], object], **settings: Any) -> Recorder:
    """Record a call that launches a kernel once.

    Args:
        kernel: the kernel's function.
        call: launches it.
        settings: of the recorder.

    Raises:
        ValueError: if it launches the kernel not once, or does more than a figure can show.
    """
    recorder = Recorder(kernel, **settings)
    with triton_patches.observe(recorder):
        call()
    if recorder.launches != 1:
        raise ValueError(f"the call launches {kernel.__name__} {recorder.launches} times, not once")
    counts = dict[tuple[int, int, int], int]()
    for ran in recorder.ran:
        counts[ran.program] = counts.get(ran.program, 0) + 1
    if len(counts) > PROGRAMS or max(counts.values()) > STEPS:
        raise ValueError(
            f"{len(counts)} programs of up to {max(counts.values())} steps; a figure has at most {PROGRAMS} of {STEPS}"
        )
    for named in recorder.tensors:
        if named.tensor.numel() > CELLS:
            raise ValueError(f"{named.name} has {named.tensor.numel()} elements; a figure shows at most {CELLS}")
    return recorder
