"""Runs the calls that ops' pages show side by side, on small tensors in float32, and prints in what they differ.

A program of its own: whether Triton interprets is decided when it is first imported.
"""

import ast
import importlib.util
import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from triton_gallery.recipe.names import bound
from triton_gallery.site.replaces import Swap, replaces

# Run on such a GPU alone, in half precision
HOPPER = {"gluon_attention", "gluon_attention_backward", "gluon_matmul", "hopper_attention"}
ROWS = "x = torch.randn(4, 96)"
MATRICES = "a, b = torch.randn(32, 48), torch.randn(48, 64)"
HEADS = "q, k, v = torch.randn(2, 4, 24, 16), torch.randn(2, 2, 24, 16), torch.randn(2, 2, 24, 16)"
NORM = "x, weight, bias = torch.randn(4, 96), torch.randn(96), torch.randn(96)"
LOGITS = "logits, targets = torch.randn(5, 70), torch.tensor([3, 69, -100, 0, 12])"
TOKENS = "(q, k, v), g = torch.randn(3, 1, 20, 2, 16), -torch.rand(1, 20, 2)"
# By the op, or by what today's call imports
GIVEN = {
    "softmax": "scores = torch.randn(4, 96)",
    "softmax_long": "logits = torch.randn(4, 96)",
    "few_long_rows": ROWS,
    "add_rows": "x, y, weight = torch.randn(4, 96), torch.randn(4, 96), torch.randn(4)",
    "rms_norm": f"{NORM}; residual = torch.randn(4, 96)",
    "LlamaRMSNorm": """
class LlamaRMSNorm(torch.nn.RMSNorm):
    variance_epsilon = 1e-5
x, hidden_size, norm = torch.randn(4, 96), 96, LlamaRMSNorm(96, eps=1e-5)
""",
    "layer_norm": NORM,
    "norms_long": NORM,
    "swiglu": """
class mlp:
    gate_proj, up_proj, down_proj = (torch.nn.Linear(*size, bias=False) for size in ((32, 48), (32, 48), (48, 32)))
x, gate_up = torch.randn(4, 32), torch.randn(4, 96)
""",
    "rope": """
q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16)
angles = torch.randn(8, 8).repeat(1, 2).expand(2, 8, 16)
cos, sin = angles.cos(), angles.sin()
""",
    "dropout": "x, p = torch.randn(4, 96), 0.0",  # with nothing dropped: the masks are others
    "cross_entropy": LOGITS,
    "cross_entropy_in_place": f"{LOGITS}; logits.requires_grad_()",
    "linear_cross_entropy": f"{LOGITS}; x, weight = torch.randn(5, 32), torch.randn(70, 32)",
    "cumsum": ROWS,
    "cumsum_long": ROWS,
    "topk": f"{ROWS}; k = 5",
    "topk_long": f"{ROWS}; k = 5",
    "moe_routing": "logits, bias, k = torch.randn(9, 64), torch.randn(64) / 8, 6",
    "matmul": MATRICES,
    "tuned_matmul": MATRICES,
    "persistent_matmul": MATRICES,
    "skinny_matmul": "x, weight = torch.randn(3, 64), torch.randn(32, 64)",
    "quantize": "x = 2.0 ** torch.randint(-3, 9, (4, 256))",
    "fused_quantize": "x, residual, weight, eps = *(2.0 ** torch.randint(0, 3, (2, 4, 256))), torch.ones(256), 1e-6",
    "fp8_matmul": """
x, weight = torch.randint(-2, 3, (2, 16, 32)).to(torch.float8_e4m3fn)
scale_x, scale_weight = 2.0 ** torch.randint(-3, 3, (2, 16, 1))
""",
    "block_scaled_matmul": """
x, weight = torch.randint(-1, 2, (2, 128, 256)).to(torch.float8_e4m3fn)
scale_x, scale_weight = 2.0 ** torch.randint(0, 2, (128, 2)), 2.0 ** torch.randint(0, 2, (1, 2))
""",
    "mx_matmul": """
x, weight = torch.randint(-1, 2, (2, 16, 64)).to(torch.float8_e4m3fn)
scale_x, scale_weight = torch.randint(126, 129, (2, 16, 2), dtype=torch.uint8)
""",
    "int4_matmul": """
x, codes = torch.randn(3, 256), torch.randint(0, 16, (32, 256))
scales, zeros = torch.randint(1, 9, (2, 32)).half() / 16, torch.randint(0, 16, (2, 32))
""",
    "grouped_matmul": """
x, weight, offsets = torch.randn(9, 16), torch.randn(3, 8, 16), torch.tensor([4, 4, 9], dtype=torch.int32)
""",
    "moe_layer": """
x, top_k_weights, top_k_index = torch.randn(5, 16), torch.rand(5, 2), torch.tensor([[0, 2], [1, 0]] * 3)[:5]
gate_up_proj, down_proj = torch.randn(3, 24, 16) / 4, torch.randn(3, 16, 12) / 4
""",
    "expert_all_to_all": """
import torch.distributed as dist

if not dist.is_initialized():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ranks, tokens, k, hidden, num_experts = 1, 7, 2, 16, 5
x, experts = torch.randn(tokens, hidden), torch.randint(num_experts, (tokens, k))
order = experts.flatten().sort(stable=True).indices
inverse, offsets = order.argsort().int(), experts.flatten().bincount(minlength=num_experts).cumsum(0).int()
""",
    "load_balance": """
router_logits, num_experts, k = torch.randn(3, 18, 8).unbind(), 8, 2
attention_mask = (torch.arange(18).view(2, 9) % 9 < 7).long()
""",
    "ScalingType, scaled_grouped_mm": """
x = torch.randint(-2, 3, (9, 32)).to(torch.float8_e4m3fn)
weight, offsets = torch.randint(-2, 3, (3, 16, 32)).to(x.dtype), torch.tensor([4, 4, 9], dtype=torch.int32)
scale_x, scale_weight = 2.0 ** torch.randint(-3, 3, (9,)), 2.0 ** torch.randint(-3, 3, (3, 16))
""",
    "linear_gelu": "x, weight, bias = torch.randn(3, 64), torch.randn(32, 64), torch.randn(32)",
    "flash_attention": HEADS,
    "flash_attn_func": "q, k, v = torch.randn(2, 24, 4, 16), torch.randn(2, 24, 2, 16), torch.randn(2, 24, 2, 16)",
    "flash_attention_forward": HEADS,
    "attention_variants": "T, window = 24, 5; q, k, v = torch.randn(3, 1, 2, 24, 16)",
    "varlen_attention": """
q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
cu_seqlens_q = cu_seqlens_k = torch.tensor([0, 5, 12], dtype=torch.int32)
max_seqlen_q = max_seqlen_k = 7
""",
    "decode_attention": """
q, k_cache, v_cache = torch.randn(2, 1, 4, 16), torch.randn(4, 8, 2, 16), torch.randn(4, 8, 2, 16)
block_table, seq_lens = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32), torch.tensor([11, 16], dtype=torch.int32)
""",
    "kv_cache_write": """
q, k, v = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
k_cache, v_cache = torch.zeros(4, 8, 2, 16), torch.zeros(4, 8, 2, 16)
slots, positions, angles = torch.tensor([9, 30, 2]), torch.tensor([4, 7, 0]), torch.randn(8, 8)
cos, sin = angles.cos(), angles.sin()
""",
    "all_reduce": """
if not torch.distributed.is_initialized():
    options = {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
    torch.distributed.init_process_group("gloo", **options)
x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
""",
    "all_gather_matmul": """
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
x, weight, ranks, group_name = torch.randn(8, 16), torch.randn(24, 16), 1, torch.distributed.group.WORLD.group_name
""",
    "linear_attention": TOKENS,
    "gated_delta_rule": f"{TOKENS}; k = torch.nn.functional.normalize(k, dim=-1); beta = torch.rand(1, 20, 2)",
}
SDPA = "torch.nn.functional.scaled_dot_product_attention"
PACKED = f"""
parts = [[t[begin:end].movedim(1, 0) for t in (q, k, v)] for begin, end in ((0, 5), (5, 12))]
out = torch.cat([{SDPA}(*part, is_causal=True, enable_gqa=True).movedim(0, 1) for part in parts])
"""
TURNED = """
def turned(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
"""
ROTATED = f"""
cos, sin = cos[0, :, :8], sin[0, :, :8]
{TURNED}
q_turned, k_turned = turned(q), turned(k)
"""
STATES = """
state, rows = torch.zeros(1, 2, 16, 16), []
for t in range(20):
    state = g[:, t, :, None, None].exp() * state
    row = {row}
    state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], row)
    rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / 4)
out = torch.stack(rows, dim=1)
"""
# The same in PyTorch, by the name that today's call imports, where that is no function that runs on a CPU
REFERENCE = {
    "LlamaRMSNorm": "y = norm(x)",
    "SiluAndMul": "gate, up = gate_up.chunk(2, dim=-1); h = torch.nn.functional.silu(gate) * up",
    "apply_rotary_pos_emb": ROTATED,
    "liger_rope": ROTATED,
    "LigerFusedLinearCrossEntropyLoss": "loss = torch.nn.functional.cross_entropy(x @ weight.T, targets)",
    "flash_attn_func": f"""
q, k, v = (t.transpose(1, 2) for t in (q, k, v))
out = {SDPA}(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
""",
    "flash_attn_varlen_func": PACKED,
    "varlen_attn": PACKED,
    "flash_attn_with_kvcache": f"""
rows = []
for pages, length, query in zip(block_table, seq_lens, q, strict=True):
    keys, values = (cache[pages].flatten(0, 1)[:length].movedim(1, 0) for cache in (k_cache, v_cache))
    rows.append({SDPA}(query.movedim(1, 0), keys, values, enable_gqa=True).movedim(0, 1))
out = torch.stack(rows)
""",
    "_custom_ops as ops": f"""
cos, sin = cos[positions, None], sin[positions, None]
{TURNED}
q_turned, k_turned = turned(q), turned(k)
k_cache.view(-1, 2, 16)[slots] = k_turned
v_cache.view(-1, 2, 16)[slots] = v
""",
    "load_balancing_loss_func": """
rows = torch.cat(router_logits)[attention_mask.flatten().bool().repeat(3)]
counts = rows.topk(k).indices.flatten().bincount(minlength=num_experts)
loss = num_experts * (counts / len(rows) * rows.softmax(-1).mean(0)).sum()
""",
    "ScalingType, scaled_grouped_mm": """
wide = weight.float() * scale_weight[..., None]
parts = [rows @ matrix.T for rows, matrix in zip(x.float().split([4, 0, 5]), wide, strict=True)]
y = (torch.cat(parts) * scale_x[:, None]).bfloat16()
""",
    "chunk_simple_gla": STATES.format(row="v[:, t]"),
    "chunk_gated_delta_rule": STATES.format(
        row='beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))'
    ),
}
WRITTEN = {"kv_cache_write": {"k_cache", "v_cache"}}


def fault(op: str, swap: Swap) -> str:
    """Return in what the two differ; empty if in nothing."""
    package, _, name = swap.today.partition("\n\n")[0].strip().rpartition(" import ")
    today = [REFERENCE[name]] if name in REFERENCE else [swap.today]
    if package.startswith("from transformers.") and importlib.util.find_spec("transformers"):
        today.append(swap.today)
    given = GIVEN.get(name, GIVEN[op])
    got = values(given, swap.with_op)
    for code in today:
        expected = values(given, code)
        both = {*bound(ast.parse(code).body)} & {*bound(ast.parse(swap.with_op).body)} & got.keys()
        if not both:
            return "the two have no result of one name"
        for name in sorted(both | WRITTEN.get(op, set())):
            try:
                # PyTorch compares float8 by its bits alone.
                both_values = [t.float() if t.dtype.itemsize == 1 else t for t in (got[name], expected[name])]
                torch.testing.assert_close(*both_values, rtol=1e-4, atol=1e-4)
            except AssertionError as error:
                return f"{name}: {error}"
    return ""


def values(given: str, code: str) -> dict:
    """Return what code makes of the tensors that are given, the same each time."""
    torch.manual_seed(0)
    space = {"torch": torch}
    exec(given, space)
    exec(code, space)
    return {name: value.detach() for name, value in space.items() if isinstance(value, torch.Tensor)}


if __name__ == "__main__":
    faults = {}
    for op, entry in replaces().items():
        for number, swap in enumerate(entry.swaps):
            if op not in HOPPER:
                try:
                    faults[f"{op} {number}"] = fault(op, swap)
                except Exception as error:
                    faults[f"{op} {number}"] = f"{type(error).__name__}: {error}"
    print(json.dumps(faults))
