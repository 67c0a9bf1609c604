"""What a compiler made of a kernel for a GPU, as the cells of a table: for the terminal and the pages alike."""

from triton_gallery.compiled.gpus import KIB, Gpu
from triton_gallery.compiled.store import FITS, Kernel

COLUMNS = ["verdict", "registers", "spilled", "shared memory", "occupancy", "matrix instructions", "loads", "stores"]


def cells(kernel: Kernel, gpu: Gpu) -> list[str]:
    """Return the row of a GPU: the verdict, and the figures where it compiles."""
    word, why = kernel.verdict(gpu)
    compiled = kernel.on.get(gpu.key)
    verdict = f"{word}: {why}" if why else word
    if compiled is None or compiled.failure is not None:
        return [verdict, *[""] * (len(COLUMNS) - 1)]
    return [
        verdict,
        str(compiled.registers),
        _size(compiled.spilled),
        f"{_size(compiled.shared)} / {_size(gpu.shared)}",
        _occupancy(*compiled.occupancy(gpu)) if word == FITS else "",
        ", ".join(f"{number} \N{MULTIPLICATION SIGN} {name}" for name, number in compiled.matrix.items()) or "none",
        _widths(compiled.loads),
        _widths(compiled.stores),
    ]


def _occupancy(part: float, limit: str) -> str:
    return f"{part:.0%}" if part == 1 else f"{part:.0%}: {limit}"


def _size(count: int) -> str:
    return f"{count / KIB:.3g} KiB" if count >= KIB else f"{count} B"


def _widths(counts: dict[str, int]) -> str:
    """Write how many loads or stores there are of each width."""
    times = "\N{MULTIPLICATION SIGN}"
    parts = (f"{number} {times} {name}{'' if name == 'TMA' else ' B'}" for name, number in counts.items())
    return ", ".join(parts) or "none"
