"""One sentence for each step: what it did, what changed, and from what."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from triton_gallery.step_through.cells import Array, Named

if TYPE_CHECKING:  # it imports Triton, which a test must not do before it has chosen the interpreter
    from triton_gallery.step_through.record import Event, Ran

FEW = 4  # values that a sentence lists; of more it says how many
VERBS = {"load": "Loads", "store": "Stores to"}


def short(value: float) -> str:
    """Return a number as a cell shows it.

    Raises:
        ValueError: if it would be shown as 0 and is not 0.
    """
    value = float(value)
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e11:
        return str(int(value)).replace("-", "−")
    if abs(value) < 0.005:
        raise ValueError(f"{value:g} would be shown as 0; choose other inputs")
    text = f"{value:.2f}" if abs(value) < 100 else f"{value:.4g}"
    text = text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
    return text.replace("0.", ".", 1).replace("-", "−") if abs(value) < 1 else text.replace("-", "−")


def sentence(ran: "Ran", tensors: Sequence[Named], following: "Ran | None") -> str:
    """Return what a step did.

    Args:
        ran: the step.
        tensors: what the launch was given.
        following: the program's next step.
    """
    statement = ran.statement
    if statement.body:
        enters = following is not None and following.statement.first == statement.body
        if not statement.is_loop:
            return f"The condition is {'true' if enters else 'false'}."
        if not enters:
            return "The loop ends."
        targets = ", ".join(_changed(name, ran) for name in ran.values)
        return f"The loop’s next turn{f': {targets}' if targets else ''}."
    parts = [_event(event, tensors, ran) for event in ran.events]
    computed = [name for name in ran.values if not _only_loaded(ran)]
    names = computed or [name for name in statement.targets if name not in ran.values and not ran.events]
    if names:
        sources = [f"`{source}`" for source in statement.sources if not source.endswith(("_ptr", "_ptrs"))][:FEW]
        if "tl.program_id(" in statement.text:
            sources.insert(0, "the program’s number")
        from_what = f", from {_listed(sources)}" if sources else ""
        changes = [_changed(name, ran) if name in ran.values else f"`{name}` is computed" for name in names]
        parts.append("; ".join(changes) + from_what)
    text = ". ".join(part[0].upper() + part[1:] if part[0].islower() else part for part in parts)
    return f"{text or 'Runs this line'}."


def _only_loaded(ran: "Ran") -> bool:
    """Whether a statement loads a value and does nothing else with it, so that the load says all."""
    return bool(ran.events) and all(event.kind == "load" for event in ran.events) and len(ran.values) <= 1


def _changed(name: str, ran: "Ran") -> str:
    """Return the new value of a register, and the old one if it had one."""
    after, before = ran.values[name], ran.before.get(name)
    if after.size > FEW:
        shape = " × ".join(map(str, after.shape)) if after.ndim > 1 else str(after.size)
        return f"`{name}` has {shape} {'new ' if before is not None else ''}values"
    if before is not None and np.array_equal(before, after, equal_nan=True):
        return f"`{name}` stays {_values(after)}"
    return f"`{name}` is {_values(after)}" + (f"; it was {_values(before)}" if before is not None else "")


def _values(array: Array) -> str:
    texts = [short(value) for value in np.ravel(array).tolist()]
    return texts[0] if array.ndim == 0 or len(texts) == 1 else f"[{', '.join(texts)}]"


def _event(event: "Event", tensors: Sequence[Named], ran: "Ran") -> str:
    """Return what an event was."""
    if event.kind == "dot":
        (m, k), n = event.shapes[0][-2:], event.shapes[1][-1]
        return f"`tl.dot` multiplies a {m} × {k} tile by a {k} × {n} tile"
    if event.kind == "reduce":
        count = math.prod(event.shapes[0])
        of = " × ".join(map(str, event.shapes[0])) if len(event.shapes[0]) > 1 else str(count)
        results = f"{len(event.values)} results" if len(event.values) > FEW else ", ".join(map(short, event.values))
        return f"`tl.{event.name}` of {of} values: {results}"
    lanes = event.lanes
    assert lanes is not None
    named, total = tensors[lanes.tensor], lanes.inside.size
    verb = VERBS.get(event.kind)
    if verb is None:
        found = re.search(r"tl\.(atomic_\w+)", ran.statement.text)
        verb = f"`tl.{found[1]}` on" if found else "Changes"
    off = total - len(lanes.active) - len(lanes.outside)
    alone = verb.removesuffix(" to").removesuffix(" on")
    if not lanes.active and not lanes.outside:
        return f"{alone} nothing: {'the mask is false' if total == 1 else f'all {total} elements are masked off'}"
    if total == 1 and lanes.outside:
        text = f"{alone} {_where(lanes.outside, named)}"
    else:
        text = f"{verb} {place(lanes.active, lanes.is_block, named.name)}" if lanes.active else f"{verb} {named.name}"
        if off:
            text += f"; {off} of {total} elements {'is' if off == 1 else 'are'} masked off"
        if lanes.outside:
            count = len(lanes.outside)
            text += f"; {count} of {total} elements {'is' if count == 1 else 'are'} {_where(lanes.outside, named)}"
    if lanes.outside and event.kind == "load":
        text += ", and reads whatever lies there (0 in this figure)"
    return text


def _where(offsets: Sequence[int], named: Named) -> str:
    """Return where offsets outside of a tensor are."""
    if min(offsets) < 0:
        return f"in front of `{named.name}`, the first by {-offsets[0]:,} elements"
    return f"past the end of `{named.name}`"


def place(indices: Sequence[tuple[int, ...]], is_block: bool, name: str) -> str:
    """Return which elements of a tensor these are, as Python would write a slice of them."""
    axes = [sorted({*values}) for values in zip(*indices, strict=True)]
    if is_block and all(values == [*range(values[0], values[-1] + 1)] for values in axes):
        slices = (f"{v[0]}" if len(v) == 1 else f"{v[0]}:{v[-1] + 1}" for v in axes)
        return f"`{name}[{', '.join(slices)}]`"
    texts = [str(index[0]) if len(index) == 1 else f"({', '.join(map(str, index))})" for index in indices]
    if len(texts) > 2 * FEW:
        return f"{len(texts)} scattered elements of `{name}`"
    return f"element{'s' if len(texts) > 1 else ''} {_listed(texts)} of `{name}`"


def _listed(texts: Iterable[str]) -> str:
    """Return words in a row."""
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last
