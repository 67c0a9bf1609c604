"""Workloads of attention/hopper_attention beside other libraries: those of attention/flash_attention_forward."""

from dataclasses import replace
from functools import partial
from types import ModuleType

from benchmarks.flash_attention_forward import work
from triton_gallery.libraries.workload import Function


def ours(recipe: ModuleType, is_causal: bool) -> Function:
    """Return the op, with a causal mask or without one."""
    return partial(recipe.hopper_attention, causal=is_causal)


WORKLOADS = [
    replace(work(is_causal), recipe="attention/hopper_attention", ours=partial(ours, is_causal=is_causal))
    for is_causal in (False, True)
]
