"""Workloads of attention/gluon_attention beside other libraries."""

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import flash_attention_forward
from triton_gallery.libraries.workload import Function, Workload


def ours(recipe: Any, is_causal: bool) -> Function:
    """Return the op, with a causal mask or without one."""
    return lambda q, k, v: recipe.gluon_attention(q, k, v, causal=is_causal)


def work(is_causal: bool) -> Workload:
    """Return the work of attention, which is that of the page in Triton."""
    known = flash_attention_forward.work(is_causal)
    return replace(known, recipe="attention/gluon_attention", ours=partial(ours, is_causal=is_causal))


WORKLOADS = [work(False), work(True)]
