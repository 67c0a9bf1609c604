"""Workloads of attention/gluon_attention_backward beside other libraries."""

from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import flash_attention
from triton_gallery.libraries.workload import Function, Workload


def ours(recipe: Any, is_causal: bool) -> Function:
    """Return attention whose forward is flash_attention's, and whose backward is the op."""
    import torch

    from triton_gallery_ops.flash_attention import flash_attention_with_lse

    class Attention(torch.autograd.Function):
        """Attention with that backward."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            """Keep what the op takes."""
            out, lse = flash_attention_with_lse(q, k, v, is_causal)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, do: Any) -> Any:
            """Call the op."""
            return recipe.gluon_attention_backward(do, *ctx.saved_tensors, is_causal)

    return Attention.apply


def work(is_causal: bool) -> Workload:
    """Return the work of attention, which is that of flash_attention."""
    known = flash_attention.work(is_causal)
    return replace(known, recipe="attention/gluon_attention_backward", ours=partial(ours, is_causal=is_causal))


WORKLOADS = [work(False), work(True)]
