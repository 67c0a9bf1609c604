"""Workloads of attention/gluon_attention beside other libraries."""

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import flash_attention
from triton_gallery.libraries.workload import Function, Workload


def ours(recipe: Any, is_causal: bool) -> Function:
    """Return the op, with a causal mask or without one."""
    return lambda q, k, v: recipe.gluon_attention(q, k, v, causal=is_causal)


def work(known: Workload) -> Workload:
    """Return the work of attention forward, with the heads that the op takes."""
    shapes = [shape for shape in known.shapes if shape[-1] in (64, 128)]
    causal = known.variant.endswith("causal")
    return replace(
        known,
        recipe="attention/gluon_attention",
        ours=partial(ours, is_causal=causal),
        shapes=shapes,
        backward=None,
    )


WORKLOADS = [found for known in flash_attention.WORKLOADS if (found := work(known)).shapes]
