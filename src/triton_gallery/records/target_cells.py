"""What a compiler made of a kernel for a GPU, as the cells of a table: for the terminal and the pages alike."""

from triton_gallery.recipes.gpus import KIB, Gpu
from triton_gallery.records.targets import FITS, Kernel

COLUMNS = ["", "registers", "spilled", "shared memory", "occupancy", "matrix instructions", "loads", "stores"]


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
        f"{_size(compiled.shared)} of {_size(gpu.shared)}",
        f"{compiled.occupancy(gpu):.0%}" if word == FITS else "",
        ", ".join(f"{number} {name}" for name, number in compiled.matrix.items()) or "none",
        _widths(compiled.loads),
        _widths(compiled.stores),
    ]


def _size(count: int) -> str:
    return f"{count / KIB:.3g} KiB" if count >= KIB else f"{count} B"


def _widths(found: dict[str, int]) -> str:
    """Write how many loads or stores there are of each width: `8 of 16 B`."""
    said = (f"{number} by {name}" if name == "TMA" else f"{number} of {name} B" for name, number in found.items())
    return ", ".join(said) or "none"
