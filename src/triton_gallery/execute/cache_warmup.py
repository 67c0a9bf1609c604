"""Fills the compilers' caches: recipes are executed side by side, once, before each is executed alone and timed.

On a GPU most of a recipe's time goes into compiling, on one core. The warm-up does that on all cores. What it compiles
stays in Triton's cache, and in one of Inductor's that the recipe has to itself until all have ended. What it measures
is thrown away, as others have the GPU too.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from triton_gallery.recipe.device import Slot

EACH = 12e9  # bytes of GPU memory with which every recipe runs
LASTING = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_AUTOTUNING"}  # what is tuned beside others would stay


def places(slots: Sequence[Slot], tasks: int) -> list[Slot]:
    """Return the GPU of each recipe that runs at a time; none where no more can than are timed at a time."""
    if LASTING & os.environ.keys():
        return []
    rooms = [int((slot.environment.memory or 0) // EACH) for slot in slots]
    crowd = [slot for n in range(max(rooms)) for slot, room in zip(slots, rooms, strict=True) if n < room]
    crowd = crowd[: min(tasks, len(os.sched_getaffinity(0)))]
    return crowd if len(crowd) > len(slots) else []


def forget_tuning(caches: Path) -> None:
    """Take out of Inductor's caches which configs were the fastest, so that each recipe finds out alone.

    There is no variable that keeps Inductor from noting it. A choice that it made before it wrote code is in that code,
    and stays: of kernels for products of matrices, which no recipe compiles.
    """
    for path in caches.rglob("*.best_config"):
        path.unlink()
