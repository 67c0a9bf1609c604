# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Attend from a new token to a cache in pages, and split the keys of a long
# sequence among programs."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = false
# deterministic = true
# longer = "two kernels, and a cache in pages has much to check"
#
# [tool.triton-gallery.not_for]  # with five stages; the launcher gives it two
# paged_kernel = ["gfx942"]
# _decode_attention_kernel = ["gfx942"]
# ///
r"""
Decode attention with a paged cache
===================================

A language model writes one token a step. The query of the new token attends to
the keys and values of all tokens before it, which are kept in a *cache*. A step
reads the whole cache and computes little with it, so the speed of the memory
decides. Sequences grow and end at different times. So a serving engine divides
the cache into *pages* of a few keys, and gives a page to whichever sequence
needs one.

After this page you can

* read keys through a block table, in a kernel;
* serve the query heads of a group with one load of their keys;
* split the keys of a sequence among programs, and combine what they found;
* choose the number of parts without asking the GPU for the lengths;
* halve the bytes with a cache of float8, and check several tokens in one step.
"""

# sphinx_gallery_tags = ["attention", "memory bound", "split-K", "inference"]
import math
import os
from functools import partial

import pandas as pd
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

from triton_gallery.bench import gpu_time, rate_table
from triton_gallery.counting import statements

# %%
# In PyTorch
# ----------
#
# The *block table* of a sequence lists its pages in order. Here a page has room
# for four keys, and ``-`` is free:
#
# .. code-block:: text
#
#     block_table          cache: (pages, page size, heads, D)
#     sequence 0: 3 1      page 0 | - - - - |
#     sequence 1: 2        page 1 | 4 5 6 - |  <- keys 4 to 6 of sequence 0
#                          page 2 | 0 1 2 - |  <- keys 0 to 2 of sequence 1
#     seq_lens:   7 3      page 3 | 0 1 2 3 |  <- keys 0 to 3 of sequence 0
#
# PyTorch gathers the pages into a copy for its attention, SDPA. So each key is
# read, written, and read again. The *floor* is one read of keys and values:

generator = torch.Generator(device=DEVICE).manual_seed(0)
HEADS, SHARED, D = 32, 8, 128  # heads of queries and of keys, as models have


def problem(lengths, page=16, queries=1, heads=HEADS, D=D, dtype=torch.float16):
    """Return queries, a cache of random keys, shuffled pages and lengths."""
    width = triton.cdiv(max(lengths), page)
    kind = {"device": DEVICE, "generator": generator}
    table = torch.randperm(len(lengths) * width, **kind).view(-1, width).int()
    kind["dtype"] = dtype
    cache = torch.randn(2, table.numel(), page, heads // 4, D, **kind)
    q = torch.randn(len(lengths), queries, heads, D, **kind)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    return q, *cache, table, seq_lens


def attention_torch(q, k_cache, v_cache, block_table, seq_lens):
    caches = (k_cache, v_cache)
    k, v = (c[block_table].flatten(1, 2).transpose(1, 2) for c in caches)
    keys = torch.arange(k.shape[2], device=q.device)
    seen = (keys < seq_lens[:, None])[:, None, None]
    out = sdpa(q.transpose(1, 2), k, v, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2)


if __name__ == "__main__":
    q, k_cache, v_cache, block_table, seq_lens = problem([1024, 1024])
    floor, copy = 2 * k_cache.nbytes, 2 * k_cache[block_table].nbytes
    print(f"floor {floor:,} bytes, PyTorch {floor + 2 * copy:,}; ", end="")
    print(f"{4 * 2048 * HEADS * D / floor:.0f} operations a byte of the floor")

# %%
# The first kernel
# ----------------
#
# While an H200 reads a byte, it can do about 200 operations (``matmul.py``), an
# H100 about 300. So bytes decide here. A program takes one head of keys of one
# sequence. A *group* of four query heads shares it. They are rows of
# ``tl.dot``, so each key is loaded once for all four. A matrix instruction has
# 16 rows: twelve are zeros. The loop over the keys is an online softmax with
# powers of 2 (``flash_attention_forward.py``).
#
# .. code-block:: text
#
#     a step          BLOCK_N keys: 4 pages of 16
#                     +--------+--------+--------+--------+
#     heads of group  | page 7 | page 2 | page 9 | page 4 |  next BLOCK_N keys
#     and zeros       +--------+--------+--------+--------+  ...


@triton.jit
def paged_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    out_ptr,
    scale,
    heads,
    stride_tb,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch, head = tl.program_id(axis=0), tl.program_id(axis=1)
    rows = tl.arange(0, 16)[:, None]  # (16, 1)
    offs_d = tl.arange(0, D)[None, :]  # (1, D)
    offs = ((batch * heads + head) * GROUP + rows) * D + offs_d  # (16, D)
    q = tl.load(q_ptr + offs, mask=rows < GROUP, other=0.0)
    length = tl.load(lens_ptr + batch)
    m = tl.full((16, 1), -float("inf"), dtype=tl.float32)
    total = tl.zeros((16, 1), dtype=tl.float32)
    acc = tl.zeros((16, D), dtype=tl.float32)
    for start in range(0, length, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        inside = offs_n < length
        # Past the end of a sequence, its table may hold anything.
        page_ptrs = table_ptr + batch * stride_tb + offs_n // PAGE
        page = tl.load(page_ptrs, mask=inside, other=0)
        # In int32, the offset of a page would overflow past element 2**31.
        slot = page.to(tl.int64) * PAGE + offs_n % PAGE  # (BLOCK_N,)
        offs_k = (slot * heads + head)[:, None] * D + offs_d  # (BLOCK_N, D)
        k = tl.load(k_ptr + offs_k, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + offs_k, mask=inside[:, None], other=0.0)
        # A key past the end would have the score 0, and so a weight.
        s = tl.where(inside[None, :], tl.dot(q, k.T) * scale, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1, keep_dims=True))
        p = tl.exp2(s - m_new)  # (16, BLOCK_N)
        total = total * tl.exp2(m - m_new) + tl.sum(p, 1, keep_dims=True)
        acc = tl.dot(p.to(v.dtype), v, acc * tl.exp2(m - m_new))
        m = m_new
    tl.store(out_ptr + offs, acc / total, mask=rows < GROUP)


def first(q, k_cache, v_cache, block_table, seq_lens):
    """Return the attention of one query; all is contiguous, no length is 0."""
    (_, page, shared, D), out = k_cache.shape, torch.empty_like(q)
    scale, width = D**-0.5 * math.log2(math.e), block_table.shape[1]
    tensors = q, k_cache, v_cache, block_table, seq_lens, out
    sizes = scale, shared, width, q.shape[2] // shared, page, D
    # A load of keys waits for the load of its page's number. So it takes five
    # stages to have the keys of two steps in flight.
    paged_kernel[len(q), shared](*tensors, *sizes, BLOCK_N=64, num_stages=5)
    return out


# %%
# Is it right?
# ------------
#
# The probabilities are rounded to float16, and the result is. Each rounding
# costs at most :math:`2^{-11}` of the largest value. We allow twice their sum.

if __name__ == "__main__":
    q, k_cache, v_cache, *pages = x = problem([200, 48, 1], heads=8, D=64)
    wide = [t.double() for t in (q, k_cache, v_cache)]
    out, expected = first(*x).double(), attention_torch(*wide, *pages)
    error, atol = (out - expected).abs().max(), 2**-9 * v_cache.abs().max()
    print(f"largest error {error:.1e}, allowed {atol:.1e}")
    torch.testing.assert_close(out, expected, rtol=0, atol=atol.item())

# %%
# How fast?
# ---------
#
# A rate is the floor's bytes, divided by the time. The roof sums each cache.


def rates(calls, moved, turns=50):
    """Return GB/s of each call that moves ``moved`` bytes."""
    found = gpu_time(calls, turns).items()
    return {who: round(1e-6 * moved / times[0]) for who, times in found}


def read(*caches):
    for cache in caches:
        torch.sum(cache.view(torch.float32).view(-1, 4096), 1)


SIZES = [(1, 131072), (16, 8192), (128, 1024)]  # sequences, keys of each

if __name__ == "__main__" and DEVICE.type == "cuda":
    for batch, keys in SIZES:
        x = problem([keys] * batch)
        torch.compiler.reset()
        fast = torch.compile(attention_torch, dynamic=False, fullgraph=True)
        calls = {"Triton": first, "PyTorch": attention_torch}
        calls = {who: partial(call, *x) for who, call in calls.items()}
        calls["torch.compile"] = partial(fast, *x)
        calls["Roof"] = partial(read, *x[1:3])
        found = rates(calls, moved=x[1].nbytes + x[2].nbytes)
        print(f"{batch} x {keys} keys, GB/s: {found}")

# %%
# Are there enough programs?
# --------------------------
#
# The first kernel has a program for each sequence and head of keys. A single
# sequence has 8 of them, and an H200, like an H100 with SXM, has 132
# multiprocessors. So the keys of a sequence are split into *parts*, each with a
# program, as in ``skinny_matmul.py``. But results of a softmax cannot just be
# added. So part :math:`i` leaves its result :math:`o_i` and the logarithm
# :math:`\lambda_i` of its sum of powers, called ``lse`` in the code:
#
# .. math:: \lambda_i = \log_2 \sum_{j \in i} 2^{s_j}, \qquad
#    o = \frac{\sum_i 2^{\lambda_i} o_i}{\sum_i 2^{\lambda_i}}
#
# A part with a larger sum has a larger weight. In the code, the largest
# :math:`\lambda` is subtracted first, so that no power overflows. A second
# kernel combines the parts in a fixed order, so the bits are always the same:
#
# .. code-block:: text
#
#     keys of a sequence   |  part 0  |  part 1  |  part 2  |  part 3  |
#     launch 1               o0, lse0   o1, lse1   o2, lse2   o3, lse3
#                               +----------+-----+----+----------+
#     launch 2                                   o
#
# How many parts? More parts make more programs. But the result of a part is
# written in float32, and read again. The table below counts both: in a long
# sequence, many parts add few bytes, and many short sequences have enough
# programs without parts. With one part, the op stores the result itself, and no
# bytes are added. The op takes the largest number of parts with at most two
# programs for each multiprocessor: one loads while the other computes. Parts of
# fewer than 1024 keys get one program for each, and have 64 keys or more. With
# float8 it is three and two. Where programs of whole sequences would leave half
# the multiprocessors or more without work at the end, sequences of 2048 keys or
# more get two parts. The table after the op times other numbers.
#
# The number has to be known at the launch, but the lengths are on the GPU. To
# ask for them would make the CPU wait, and a CUDA graph could not record it. So
# the launcher takes a *bound* of the lengths: the argument ``max_seq_len``, or
# what the block table has room for. The kernel divides the true length, so any
# bound gives the right result.

MULTIPROCESSORS = 132  # of an H200

if __name__ == "__main__":
    for batch, keys in SIZES:
        for parts in (1, 8, 64):
            programs = batch * SHARED * parts / MULTIPROCESSORS
            share = 2 * parts * HEADS * 4 * D / (4 * keys * SHARED * D)
            print(f"{batch:3} x {keys:6} keys, {parts:2} parts: ", end="")
            print(f"{programs:5.1f} programs a multiprocessor, ", end="")
            print(f"{share:6.2%} more bytes")

# %%
# Fewer bytes for a key
# ---------------------
#
# A cache of ``float8_e4m3fn`` has half the bytes. This type has 4 bits of
# exponent, 3 of the fraction, and no number above 448. So keys and values are
# divided by *scales* before they are rounded (``kv_cache_write.py``). Serving
# engines keep two scales for a layer or two for each head; the op takes either.
# All keys of a head share a scale, so the kernel multiplies their scores by it,
# not the keys, and the result by the scale of the values. The tensor cores get
# keys in the type of the query, so eight bits become sixteen first.

# %%
# Several queries
# ---------------
#
# In *speculative decoding* a small model guesses a few tokens, and the large
# model checks them all in one step. Their keys are in the cache already. So the
# last query sees the whole sequence, and each earlier one a key less. Counted
# from 0, query i of n sees key j if :math:`j \le \mathit{length} - n + i`.
#
# Four queries of four heads fill 16 rows, of which the first kernel left twelve
# empty. A program of the op has up to 64 rows: queries times heads of a group.
# More rows, as of a long prompt in chunks, take more programs. Each of them
# reads the keys that its rows see. (In ``flash_attention_forward.py``, query
# ``i`` sees the keys up to ``i``.)

# %%
# The op
# ------
#
# In half precision a step of the loop loads at most 32 KB, so a larger ``D``
# means fewer keys. A query that sees no key gives 0. The page
# ``what_a_call_costs.py`` explains how the op is registered.

from triton_gallery_ops.decode_attention import (
    _decode_attention_combine,
    _decode_attention_kernel,
    _decode_attention_launch,
    _decode_attention_parts,
    _decode_attention_scores,
    _decode_attention_span,
    decode_attention,
)

# %%
# What did each step gain? The table has GB/s, and the statements of each
# kernel. "The op in one part" takes all that the op takes, but splits no keys.


OP = (
    _decode_attention_kernel,
    _decode_attention_span,
    _decode_attention_scores,
    _decode_attention_combine,
)
STEPS = {
    "first kernel": (first, paged_kernel),
    "the op in one part": (
        partial(_decode_attention_launch, parts=1),
        *OP[:3],
    ),
    "the op": (decode_attention, *OP),
}

if __name__ == "__main__" and DEVICE.type == "cuda":
    ladder = pd.DataFrame(index=list(STEPS))
    ladder["statements"] = [statements(*of) for _, *of in STEPS.values()]
    for batch, keys in SIZES:
        x = problem([keys] * batch)
        tried = {name: partial(step[0], *x) for name, step in STEPS.items()}
        found = rates(tried, moved=x[1].nbytes + x[2].nbytes)
        ladder[f"{batch} x {keys}"] = pd.Series(found)
    print(ladder.to_string())

# %%
# Only the one long sequence gains from the split. Does the launcher choose a
# good number of parts? A star marks its choice:

PARTS = [1, 2, 4, 8, 16, 32, 64, 128]
MORE = [(1, 1024), (1, 8192), *SIZES, (100, 2048)]

if __name__ == "__main__" and DEVICE.type == "cuda":
    table = pd.DataFrame(index=PARTS)
    for batch, keys in MORE:
        x = problem([keys] * batch)
        ours = _decode_attention_parts(batch * SHARED, keys, x[1])
        tried = sorted({*PARTS, ours})
        call = partial(_decode_attention_launch, *x)
        found = {parts: partial(call, parts=parts) for parts in tried}
        found = rates(found, moved=x[1].nbytes + x[2].nbytes, turns=20)
        table = table.reindex(sorted({*table.index, ours}))
        cells = {n: f"{found[n]}{'*' if n == ours else ' '}" for n in tried}
        table[f"{batch} x {keys}"] = pd.Series(cells)
    print("GB/s for parts", table.fillna("").to_string(), sep="\n")

# %%
# Proof
# -----
#
# The reference gathers the pages of each sequence and computes in float64. In
# half precision the op rounds each :math:`p_j` and the result. We allow twice
# that: two roundings of :math:`\sum_j p_j |v_j|`, two of the result. A rounding
# is :math:`2^{-11}` in float16. In bfloat16 we allow :math:`2^{-7}`, as the
# interpreter cuts off. In float32 and float64 we allow :math:`2^{-18}` and
# :math:`2^{-45}`, as the scores, sums of ``D`` terms, are rounded as well.

EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-18,
    torch.float64: 2.0**-45,
}


def reference(q, k_cache, v_cache, block_table, seq_lens):
    """Return the attention in float64, and the sum of p |v|."""
    (_, queries, heads, D), outs = q.shape, []
    group = heads // k_cache.shape[2]
    for one, pages, length in zip(q, block_table, seq_lens, strict=True):
        pages = pages[: triton.cdiv(length.item(), k_cache.shape[1])]
        caches = (k_cache, v_cache)
        k, v = (c[pages].flatten(0, 1)[:length].double() for c in caches)
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        s = torch.einsum("qhd,khd->hqk", one.double(), k) * D**-0.5
        last = length - queries + torch.arange(queries, device=q.device)
        keys = torch.arange(k.shape[0], device=q.device)
        s = s.masked_fill(keys > last[:, None], -torch.inf)
        p = s.softmax(-1).nan_to_num(0)  # a query that sees nothing
        outs.append([torch.einsum("hqk,khd->qhd", p, t) for t in (v, v.abs())])
    return [torch.stack(of) for of in zip(*outs, strict=True)]


def worst(out, expected, terms, eps):
    """Return the largest error, as a part of what is allowed."""
    allowed = 2 * eps * (terms + expected.abs()) + 1e-300
    return ((out.double() - expected).abs() / allowed).max().item()


def prove(x, eps=None, **options):
    out = decode_attention(*x, **options)
    assert out.dtype == x[0].dtype
    assert out.shape == x[0].shape
    assert worst(out, *reference(*x), eps or EPS[out.dtype]) <= 1, options


prove(problem([300, 0, 17], heads=8, D=64))
if __name__ == "__main__":
    for dtype in EPS:
        for page, queries in ((16, 1), (64, 3), (48, 2), (256, 8)):
            lengths = [0, 1, page - 1, page, 2 * page + 1, 290]
            x = problem(lengths, page, queries, 8, 64, dtype)
            prove(x)
            prove(x, max_seq_len=10**9)
            prove(x, max_seq_len=1)
    for D_ in (16, 80, 128, 256):
        prove(problem([700, 5], 64, 2, heads=8, D=D_))

# %%
# Next come scores in the thousands, whose exponentials would overflow; a table
# that ends with rubbish; NaN in slots that nobody has written; and a cache in
# which keys and values of a page lie side by side.

if __name__ == "__main__":
    x = problem([900, 40], dtype=torch.float64, heads=4, D=16)
    x[0].mul_(100)
    x[1].mul_(100)
    prove(x, eps=2.0**-35)
    q, k_cache, v_cache, block_table, seq_lens = problem([70, 5], heads=4, D=32)
    block_table[1, 1:] = -(2**30)
    out = decode_attention(q, k_cache, v_cache, block_table, seq_lens)
    written = torch.zeros_like(k_cache, dtype=torch.bool)
    written[block_table[0, :4].long()] = True
    written[block_table[0, 4], :6] = True
    written[block_table[1, 0], :5] = True
    k_cache[~written] = v_cache[~written] = torch.nan
    side = torch.stack([k_cache, v_cache], dim=1)
    for caches in ((k_cache, v_cache), side.unbind(1)):
        again = decode_attention(q, *caches, block_table, seq_lens)
        assert torch.equal(again, out)

# %%
# A float8 cache with scales gives what the same numbers give in float64:

if __name__ == "__main__":
    kind = {"device": DEVICE, "generator": generator}
    for count in (1, 2):  # scales: of all heads, of each
        x = problem([600, 33], heads=8, D=64)
        scales = (torch.rand(2, count + 1, **kind) + 0.1)[:, 1:]
        small = [c.to(torch.float8_e4m3fn) for c in x[1:3]]
        wide = zip(small, scales, strict=True)
        wide = [cache.double() * s[:, None] for cache, s in wide]
        out = decode_attention(
            x[0], *small, *x[3:], k_scale=scales[0], v_scale=scales[1]
        )
        assert worst(out, *reference(x[0], *wide, *x[3:]), 2.0**-11) <= 1

# %%
# An error names what the op does not take:

if __name__ == "__main__":
    q, *x = problem([3], heads=8, D=16)
    for one in (q.float(), q[:, :, :3]):
        try:
            decode_attention(one, *x)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")
    try:
        decode_attention(q.requires_grad_(), *x)
    except ValueError as error:
        print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# First there are more and more sequences of 8192 keys, then one sequence of
# more and more keys. PyTorch gets the keys without pages; libraries that read
# pages were not measured. "SDPA" calls the library that PyTorch chooses, the
# other two lines call the one they name.


def unpaged(q, k_cache, v_cache, block_table, seq_lens):
    """Return the same for SDPA: sequences of one length, without pages."""
    caches = (k_cache, v_cache)
    k, v = (c[block_table].flatten(1, 2) for c in caches)
    return [t.transpose(1, 2).contiguous() for t in (q, k, v)]


def library(backend):
    def call(*inputs):
        with sdpa_kernel(backend):
            return sdpa(*inputs, enable_gqa=True)

    return call


BATCHES = [1, 2, 4, 8, 16, 32, 64]
KEYS = [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]


def contestants(batch, keys):
    x = problem([keys] * batch)
    plain = unpaged(*x)
    return {
        "Triton": partial(decode_attention, *x),
        "SDPA": partial(sdpa, *plain, enable_gqa=True),
        "cuDNN": partial(library(SDPBackend.CUDNN_ATTENTION), *plain),
        "FlashAttention-2": partial(
            library(SDPBackend.FLASH_ATTENTION), *plain
        ),
        "Roof": partial(read, *x[1:3]),
    }


def moved(keys):
    """Return the bytes of keys and values, in units of 10**6."""
    return 4e-6 * keys * SHARED * D


if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for batch in BATCHES:
        times[batch] = gpu_time(contestants(batch, 8192), turns=30)
    results = rate_table(times, "batch", "GB/s", lambda n: moved(8192 * n))
    print("sequences of 8192 keys", results.to_string(), sep="\n")
    wide = results.pivot(index="batch", columns="series", values="GB/s")
    wide.plot(logx=True, title="sequences of 8192 keys")

if __name__ == "__main__" and DEVICE.type == "cuda":
    times = {}
    for keys in KEYS:
        times[keys] = gpu_time(contestants(1, keys), turns=30)
    results_of_one = rate_table(times, "keys", "GB/s", moved)
    print("one sequence", results_of_one.to_string(), sep="\n")
    wide = results_of_one.pivot(index="keys", columns="series", values="GB/s")
    wide.plot(logx=True, title="one sequence")

# %%
# Now page sizes, types, several queries and unequal lengths, for 32 sequences
# and 262144 keys in all. A float8 cache has half of the bytes. Its rate is
# lower, so its time is more than half; here it has no scales. With unequal
# lengths, the longest sequence has fifteen times as many keys as the shortest.

UNEQUAL = [1024 + 482 * i for i in range(31)] + [6270]
VARIANTS = {
    "pages of 16": {},
    "pages of 64": {"page": 64},
    "pages of 256": {"page": 256},
    "bfloat16": {"dtype": torch.bfloat16},
    "float8": {"dtype": torch.float8_e4m3fn},
    "4 queries": {"queries": 4},
    "16 queries": {"queries": 16},
    "unequal lengths": {"lengths": UNEQUAL},
}


def variant(lengths=(8192,) * 32, dtype=torch.float16, **options):
    """Return a call of the op, and the bytes of its keys and values."""
    small = dtype == torch.float8_e4m3fn
    half = torch.float16 if small else dtype
    q, *caches, table, lens = problem(list(lengths), dtype=half, **options)
    caches = [c.to(dtype) for c in caches]
    call = partial(decode_attention, q, *caches, table, lens)
    return call, 2 * sum(lengths) * caches[0][0, 0].nbytes


if __name__ == "__main__" and DEVICE.type == "cuda":
    rows = {}
    for name, options in VARIANTS.items():
        call, size = variant(**options)
        ms = gpu_time({name: call}, turns=20)[name][0]
        rows[name] = {"GB/s": round(size * 1e-6 / ms), "us": round(ms * 1e3)}
        del call
    print(pd.DataFrame(rows).T.to_string())

# %%
# This is what a call costs the CPU, in microseconds, for 16 sequences. If calls
# are made one by one, and take less time on the GPU than this, the GPU waits
# for the CPU. ``cuda_graphs.py`` shows how to avoid that.

if __name__ == "__main__" and DEVICE.type == "cuda":
    cost = results[results["batch"] == 16].set_index("series")["CPU us"]
    print(cost.drop("Roof").round(1).to_dict())

# %%
# Reading the result
# ------------------
#
# The roof is two kernels that read the same bytes, not a bound. With few keys
# the op is faster. In this page's tables, cuDNN, which gets the keys without
# pages, is faster than the roof in each row. It is faster than the op in all
# rows but three, and about equal in those.
#
# The op has a lower rate with 64 sequences than with 32, with 16 queries than
# with one, and with unequal lengths. The second exercise has a reason for the
# last.

# %%
# Break it
# --------
#
# What if somebody takes the mean of the parts, without weights? With random
# keys all parts have nearly the same sum. So the error is small, and passes a
# test with a loose tolerance. But one key may matter more than all others.


def mean_of_parts(s, v, parts):
    outs = [
        one.softmax(-1) @ values
        for one, values in zip(s.chunk(parts, -1), v.chunk(parts), strict=True)
    ]
    return torch.stack(outs).mean(0)


if __name__ == "__main__":
    kind = {"dtype": torch.float64, "device": DEVICE, "generator": generator}
    s, v = torch.randn(1, 8192, **kind), torch.randn(8192, 8, **kind)
    for name, peak in (("random scores", 0), ("one score of 20", 20)):
        s[0, 100] = max(s[0, 100], peak)
        right = s.softmax(-1) @ v
        error = (mean_of_parts(s, v, 8) - right).abs().max()
        print(f"{name}: error {error:.1e} of {right.abs().max():.1e}")
        assert (error > 0.1) == (peak > 0)

# %%
# Test with scores that differ widely between parts, and with lengths that leave
# a part without keys.

# %%
# Go further
# ----------
#
# 1. Many sequences begin with the same text, and their tables with the same
#    pages. Each program reads these pages again. Who could share a load?
# 2. All sequences have the same number of parts. When is that slow, and what
#    would a launcher have to know to do better?
# 3. Bits may change with the number of parts, and so with the batch. How would
#    you make the result of a sequence independent of the others?
#
# To read on:
#
# * ``kv_cache_write.py`` writes what this op reads.
# * `Flash-Decoding <https://pytorch.org/blog/flash-decoding/>`_ introduced the
#   split over keys, `PagedAttention <https://arxiv.org/abs/2309.06180>`_ the
#   pages.

# %%
# Answers
# -------
#
# **1.** Queries of several sequences can be the rows of one ``tl.dot``, as the
# heads of a group are. A launch over the common pages treats all sequences as
# one, a second launch treats the rest, and the two are combined like parts.
#
# **2.** One long sequence among short ones has few programs, and they still run
# when all others have ended. With the lengths, a launcher could cut all
# sequences into parts of one size. A kernel on the GPU can prepare this plan.
#
# **3.** Choose parts of a fixed number of keys, whatever the batch is. A part
# of a long sequence then has the same keys each time, and the combination has
# the same order.
