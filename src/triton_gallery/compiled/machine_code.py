"""Reads what a compiler made of a kernel: how it uses registers and memory, and which instructions it has."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

SASS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", re.MULTILINE)
STEP = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)([^;]*);|^(\$__internal\S+):", re.MULTILINE)
UNIFORM = re.compile(r"(gdesc\[)?\bUR(\d+)\b")
GCN = re.compile(r"^\t([a-z]\w+)", re.MULTILINE)
MATRIX = re.compile(r"[A-Z]GMMA|[A-Z]MMA|UTC\w*MMA|v_s?mfma|v_smfmac")
LOADS, STORES = ("LDG", "LDGSTS", "global_load", "buffer_load"), ("STG", "global_store", "buffer_store")
TMA = {"UTMALDG": "loads", "UTMASTG": "stores"}
WIDTHS = {"256": 32, "128": 16, "96": 12, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1, "8": 1}  # in SASS
WORD = 4
GCN_WIDTHS = (("x4", 16), ("x3", 12), ("x2", 8), ("dword", 4), ("short", 2), ("byte", 1))


def opcodes(code: str, is_amd: bool) -> list[str]:
    """Return the instructions of a disassembly, or of AMD's assembly, without their operands."""
    return (GCN if is_amd else SASS).findall(code)


def matrix(instructions: Iterable[str]) -> dict[str, int]:
    """Return how many there are of each matrix instruction."""
    return dict(Counter(name for name in instructions if MATRIX.match(name)))


def widths(instructions: Iterable[str], kind: str) -> dict[str, int]:
    """Return how many loads or stores of global memory there are of each width.

    Args:
        instructions: those of a kernel.
        kind: "loads" or "stores".

    Returns:
        The numbers by the bytes that one thread moves, as text, widest first; by "TMA" of those that move a tile.
    """
    counts = Counter(_widths(instructions, kind))
    return {name: counts[name] for name in sorted(counts, key=lambda name: -int(name) if name.isdigit() else 1)}


def _widths(instructions: Iterable[str], kind: str) -> Iterator[str]:
    names = LOADS if kind == "loads" else STORES
    for instruction in instructions:
        name, *parts = instruction.split(".")
        if TMA.get(name) == kind:
            yield "TMA"
        elif name in names:
            yield str(next((WIDTHS[part] for part in parts if part in WIDTHS), WORD))
        elif name.startswith(names) and "_lds" not in name:
            yield str(next((width for mark, width in GCN_WIDTHS if mark in name), WORD))


def unwritten(code: str) -> list[str]:
    """Return the uniform registers that code for Hopper reads before anything writes them, in the order of its text.

    The ptxas 12.8 of Triton 3.6 and 3.7 makes such code of some kernels with narrow tiles; in that of 3.8 and 3.9 no
    such code was found. A descriptor of a tile in shared memory is then wrong: so are results, or the GPU stops at an
    address outside. What is written in a function that the kernel calls counts as written from the beginning.
    """
    steps = list(STEP.finditer(code))
    called = next((place for place, step in enumerate(steps) if step[3]), len(steps))
    written = {number for step in steps[called:] for number in _writes(step)}
    unknown: dict[int, None] = {}
    for step in steps[:called]:
        unknown |= dict.fromkeys(number for number in _reads(step) if number not in written)
        written.update(_writes(step))
    return [f"UR{number}" for number in unknown]


def _into(step: re.Match[str]) -> re.Match[str] | None:
    """Return the uniform register that an instruction writes; a predicate may stand before it."""
    return None if "SETP" in step[1] else re.match(r"\s*(?:U?P\d\s*,\s*)?UR(\d+)\s*(?:,|$)", step[2])


def _writes(step: re.Match[str]) -> range:
    """Return the uniform registers that an instruction writes."""
    into = _into(step) if step[1] else None
    first = int(into[1]) if into else 0
    return range(first, first + (2 if re.search(r"\.64|WIDE", step[1]) else 1) if into else 0)


def _reads(step: re.Match[str]) -> Iterator[int]:
    """Return the uniform registers that an instruction reads."""
    into, operands = _into(step), step[2]
    pair = step[1].startswith("U") and ".64" in step[1]
    # Of the two descriptors of a product, the first is left out where registers hold that side.
    held = re.match(r"[^,]*,\s*R\d", operands) is not None
    for descriptor, number in UNIFORM.findall(operands[into.end() :] if into else operands):
        first = int(number)
        yield from range(first + 2 * (bool(descriptor) and held), first + (4 if descriptor else 2 if pair else 1))


def nvidia_usage(text: str) -> tuple[int, int]:
    """Return the registers and the bytes of stack that a thread uses, as `cuobjdump --dump-resource-usage` says."""
    return _only(text, r"REG:(\d+)"), _only(text, r"STACK:(\d+)")


def amd_usage(assembly: str) -> tuple[int, int]:
    """Return the vector registers and the bytes of scratch memory that a thread uses, of AMD's assembly."""
    return _only(assembly, r"; TotalNumVgprs: (\d+)"), _only(assembly, r"; ScratchSize: (\d+)")


def _only(text: str, pattern: str) -> int:
    (number,) = re.findall(pattern, text)
    return int(number)
