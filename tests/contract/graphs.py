"""Prints how many graphs torch.compile makes of each op where a length changes, as JSON.

In a process without the interpreter and without a GPU: tensors are fake, and nothing is compiled beyond the graphs.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from compiled import compile_for_h100
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from triton_gallery_ops.add_rows import add_rows
from triton_gallery_ops.cross_entropy import cross_entropy
from triton_gallery_ops.cumsum import cumsum
from triton_gallery_ops.dropout import dropout
from triton_gallery_ops.flash_attention import flash_attention
from triton_gallery_ops.fused_quantize import fused_quantize_rms_norm_residual, fused_quantize_swiglu
from triton_gallery_ops.gated_delta_rule import gated_delta_rule
from triton_gallery_ops.layer_norm import layer_norm
from triton_gallery_ops.linear_cross_entropy import linear_cross_entropy
from triton_gallery_ops.linear_gelu import linear_gelu
from triton_gallery_ops.load_balance import load_balance_loss
from triton_gallery_ops.matmul import matmul
from triton_gallery_ops.moe_layer import moe_layer
from triton_gallery_ops.moe_routing import moe_routing, moe_routing_with_permutation
from triton_gallery_ops.rms_norm import rms_norm, rms_norm_residual
from triton_gallery_ops.rope import rope
from triton_gallery_ops.softmax import softmax
from triton_gallery_ops.swiglu import swiglu
from triton_gallery_ops.topk import topk
from triton_gallery_ops.varlen_attention import varlen_attention

LENGTHS = (512, 700, 1000, 4096, 8192)
BATCH, HEADS, SHARED, DIM, HIDDEN = 2, 16, 8, 128, 2048
VOCABULARY = 128256  # of Llama 3


def floats(*shape: int, grad: bool = True) -> torch.Tensor:
    """Return a bfloat16 tensor, by default one that requires grad."""
    return torch.empty(shape, dtype=torch.bfloat16, requires_grad=grad)


def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return zeros."""
    return torch.zeros(shape, dtype=dtype)


def calls(T: int) -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Return a call for each op: a function, and its tensors where a sequence has T tokens."""
    rows = floats(BATCH, T, HIDDEN)
    q, k, v = floats(BATCH, HEADS, T, DIM), *(floats(BATCH, SHARED, T, DIM) for _ in range(2))
    table = floats(T, DIM // 2, grad=False)
    ends = integers(3, dtype=torch.int32)
    return {
        "rms_norm": (lambda x, w: rms_norm(x, w, 1e-6), [rows, floats(HIDDEN)]),
        "rms_norm of heads": (lambda x, w: rms_norm(x, w, 1e-6), [q, floats(DIM)]),
        "rms_norm_residual": (
            lambda x, y, w: rms_norm_residual(x, y, w, 1e-6),
            [rows, floats(BATCH, T, HIDDEN), floats(HIDDEN)],
        ),
        "fused_quantize_rms_norm_residual": (
            lambda x, y, w: fused_quantize_rms_norm_residual(x, y, w, 1e-6, (1, -1)),
            [*(floats(BATCH, T, HIDDEN, grad=False) for _ in range(2)), floats(HIDDEN, grad=False)],
        ),
        "fused_quantize_swiglu": (
            lambda x: fused_quantize_swiglu(x, None, (1, 128)),
            [floats(BATCH, T, 2 * HIDDEN, grad=False)],
        ),
        "layer_norm": (lambda x, w, b: layer_norm(x, w, b, 1e-6), [rows, floats(HIDDEN), floats(HIDDEN)]),
        "rope": (rope, [q, k, table, table]),
        "swiglu": (swiglu, [rows, floats(BATCH, T, HIDDEN)]),
        "dropout": (lambda x, seed: dropout(x, 0.1, seed), [rows, integers(1)]),
        "cross_entropy": (cross_entropy, [floats(BATCH * T, VOCABULARY), integers(BATCH * T)]),
        "cross_entropy of a slice": (
            lambda x, targets: cross_entropy(x[:, :-1], targets[:, 1:]),
            [floats(BATCH, T, VOCABULARY), integers(BATCH, T)],
        ),
        "linear_cross_entropy": (linear_cross_entropy, [rows, floats(VOCABULARY, HIDDEN), integers(BATCH, T)]),
        "flash_attention": (lambda q, k, v: flash_attention(q, k, v, causal=True), [q, k, v]),
        "varlen_attention": (
            lambda q, k, v, ends: varlen_attention(q, k, v, ends, ends, T, T),
            [floats(T, HEADS, DIM), floats(T, SHARED, DIM), floats(T, SHARED, DIM), ends],
        ),
        "gated_delta_rule": (
            lambda q, k, v, g, beta, ends, A_log, bias: gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                cu_seqlens=ends,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                A_log=A_log,
                dt_bias=bias,
                use_beta_sigmoid_in_kernel=True,
            ),
            [
                *(floats(1, T, heads, DIM) for heads in (SHARED, SHARED, HEADS)),
                *(floats(1, T, HEADS) for _ in range(2)),
                ends,
                *(floats(HEADS) for _ in range(2)),
            ],
        ),
        "matmul": (lambda x, w: matmul(x.flatten(0, 1), w.t()), [rows, floats(HIDDEN, HIDDEN)]),
        "linear_gelu": (linear_gelu, [rows, floats(4 * HIDDEN, HIDDEN), floats(4 * HIDDEN)]),
        "softmax": (softmax, [floats(BATCH * T, 1000)]),
        "softmax over the length": (softmax, [floats(BATCH * HEADS, T)]),
        "topk": (lambda x: topk(x, 8), [floats(T, 64)]),
        "moe_routing": (lambda x: moe_routing(x, 8), [floats(T, 256)]),
        "moe_routing_with_permutation": (lambda x: moe_routing_with_permutation(x, 8), [floats(T, 256)]),
        "moe_layer": (
            moe_layer,
            [
                floats(T, HIDDEN),
                floats(T, 8),
                integers(T, 8, dtype=torch.int32),
                floats(32, 1536, HIDDEN),
                floats(32, HIDDEN, 768),
            ],
        ),
        "load_balance_loss": (load_balance_loss, [floats(T, 128), integers(T, 8), integers(BATCH, T // BATCH)]),
        "cumsum": (cumsum, [floats(T, 1000)]),
        "add_rows": (add_rows, [*(floats(T, HIDDEN, grad=False) for _ in range(2)), floats(T, grad=False)]),
    }


def graphs(name: str) -> int:
    """Return how many graphs serve the forwards of all lengths; a graph has one backward."""
    made = []

    def keep(module: Any, _: Any) -> Any:
        made.append(module)
        return module

    backend = aot_autograd(fw_compiler=keep, bw_compiler=lambda module, _: module)

    torch._dynamo.reset()
    with FakeTensorMode() as mode:
        changing = [{*t.shape} != {*u.shape} for t, u in zip(calls(512)[name][1], calls(700)[name][1], strict=True)]
        fixed = [mode.from_tensor(t) for t in calls(512)[name][1]]
        compiled = torch.compile(calls(512)[name][0], backend=backend, dynamic=True, fullgraph=True)
        for length in LENGTHS:
            tensors = [mode.from_tensor(t) for t in calls(length)[name][1]]
            for place, changes in enumerate(changing):
                if not changes:  # as a weight, which is the same tensor in each call
                    tensors[place] = fixed[place]
            results = [t for t in tree_leaves(compiled(*tensors)) if t.is_floating_point() and t.requires_grad]
            if results:
                sum(t.float().sum() for t in results).backward()
    return len(made)


if __name__ == "__main__":
    compile_for_h100()
    torch._dynamo.config.recompile_limit = 64
    print(json.dumps({name: graphs(name) for name in calls(512)}))
