# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.11", "triton>=3.6", "matplotlib", "pandas"]
#
# [tool.triton-gallery]
# description = """
# Run one program for each multiprocessor: it goes on from tile to tile, and
# loads the next before it stores the last."""
# dtypes = ["float16", "bfloat16", "float32", "float64"]
# backward = true
# deterministic = true
# longer = "it plans tiles and parts, and copies what the engine refuses"
#
# [tool.triton-gallery.not_for]
# tile_kernel = ["sm_80", "sm_89", "gfx942"]
# walk_kernel = ["sm_80", "sm_89", "gfx942"]
# _persistent_matmul_kernel = ["sm_80", "sm_89", "sm_120", "gfx942"]
# ///
r"""
Persistent matmul
=================

A matrix product that runs one program for each multiprocessor. Each program
goes on from tile to tile, so it loads the next tile before it stores the last
one. The copy engine fetches the tiles, through tensor descriptors. NVIDIA's
GPUs have it from compute capability 9.0 on, which is Hopper's.

After this page you can

* multiply matrices through tensor descriptors;
* write a persistent kernel, and say what flattening its loops does;
* count what its shared memory holds, and make room for one stage more;
* choose a tile by counting, without autotuning.
"""

# sphinx_gallery_tags = ["matmul", "compute bound", "TMA", "autograd"]
import os
import warnings
from functools import partial

import pandas as pd
import torch

if not torch.cuda.is_available():  # no GPU: Triton interprets the kernels
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = torch.accelerator.current_accelerator(
    check_available=True
) or torch.device("cpu")
if DEVICE.type == "cpu" and isinstance(tl.sum, triton.JITFunction):
    raise RuntimeError("no GPU: set TRITON_INTERPRET=1 before importing triton")

# Whether there is a copy engine. The interpreter can do without.
CAN = DEVICE.type == "cpu" or (
    not torch.version.hip and torch.cuda.get_device_capability() >= (9, 0)
)
if __name__ == "__main__" and not CAN:
    print("This GPU has no copy engine: nothing is launched or timed on it.")

from triton_gallery.bench import gpu_time, rate_table

# %%
# In PyTorch
# ----------
#
# ``a @ b`` calls cuBLAS, the vendor's library. How much is there to do?

generator = torch.Generator(device=DEVICE).manual_seed(0)


def random(rows, columns, dtype=torch.float16):
    """Return a random matrix."""
    kind = {"device": DEVICE, "dtype": dtype}
    return torch.randn(rows, columns, generator=generator, **kind)


# M, K and N
SIZES = [(8192, 8192, 8192), (8192, 512, 8192), (4096, 4096, 4096)]

if __name__ == "__main__":
    for M, K, N in SIZES:
        flops, moved = 2 * M * N * K, 2 * (M * K + K * N + M * N)
        print(f"({M}, {K}) @ ({K}, {N}) in float16: {flops / 1e12:.2f} Tflop,")
        print(f"    {moved / 1e6:.0f} MB, {flops / moved:.0f} flop a byte")

# %%
# The bytes are the *floor*: ``a`` and ``b`` are read once, and the result is
# written once. By their data sheets, an H100 and an H200 do 200 to 300
# operations in the time of reading a byte. These products have more, so the
# matrix units bound them, and a kernel has to keep those busy.

# %%
# The first kernel
# ----------------
#
# A *tensor descriptor* has a matrix's address, shape and strides, and the shape
# of a tile. The kernel asks the GPU's copy engine for the tile at a row and a
# column. Past the matrix's edge a tile has zeros, and a store leaves out what
# lies there. So the kernel has neither masks nor pointers.
# ``tensor_descriptors.py`` is about what that spares.
#
# .. code-block:: text
#
#     a            K              b     off_n           c     off_n
#         +-----------------+       +----------+          +----------+
#         |                 |       |   |  |   |          |          |
#     M   |-------+-----+---| off_m |   +--+   | k        |   +--+   | off_m
#         |       |     |   |       |   |  |   |          |   |  |   |
#         |-------+-----+---|       |   +--+   |          |   +--+   |
#         +-----------------+       |   |  |   |          +----------+
#                 k                 +----------+
#
# Each program computes one tile of the result. Neighbours take eight rows of
# tiles together, to read more from L2 (``tile_order.py`` draws that order).


@triton.jit
def place(tile, tiles_m, tiles_n):
    """Return the row and the column of a tile: column by column, in groups."""
    first = tile // (8 * tiles_n) * 8
    rows = tl.minimum(tiles_m - first, 8)
    within = tile % (8 * tiles_n)
    return first + within % rows, within // rows


@triton.jit
def tile_kernel(a_desc, b_desc, c_desc):
    # The descriptors know the sizes: those of matrices and those of tiles.
    M, K = a_desc.shape
    BLOCK_M: tl.constexpr = c_desc.block_shape[0]
    BLOCK_N: tl.constexpr = c_desc.block_shape[1]
    BLOCK_K: tl.constexpr = a_desc.block_shape[1]
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(c_desc.shape[1], BLOCK_N)
    pid_m, pid_n = place(tl.program_id(axis=0), tiles_m, tiles_n)
    # Rows and columns fit int32, even where the number of elements does not.
    off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = a_desc.load([off_m, k])  # (BLOCK_M, BLOCK_K)
        b = b_desc.load([k, off_n])  # (BLOCK_K, BLOCK_N)
        # Past the edge of K both are zero, so what lies there adds nothing.
        acc = tl.dot(a, b, acc)
    c_desc.store([off_m, off_n], acc.to(c_desc.dtype))


def descriptors(a, b, c, tile, parts=1):
    """Return descriptors; a tile has ``parts`` blocks of c."""
    m, n, k = tile
    blocks = [m, k], [k, n], [m, n // parts]
    pairs = zip((a, b, c), blocks, strict=True)
    return [TensorDescriptor.from_tensor(*pair) for pair in pairs]


def tiles_of(M, N, tile):
    return triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])


TILE, BIG = (128, 128, 64), (128, 256, 64)  # BLOCK_M, BLOCK_N, BLOCK_K


def by_tiles(a, b, tile=TILE, num_warps=8, num_stages=3):
    """Multiply row-major float16 matrices; 8 divides the length of a row."""
    c = a.new_empty(a.shape[0], b.shape[1])
    options = {"num_warps": num_warps, "num_stages": num_stages}
    launch = tile_kernel[(tiles_of(*c.shape, tile),)]
    launch(*descriptors(a, b, c, tile), **options)
    return c


# %%
# Is it right?
# ------------
#
# We compare with float64. A sum of ``K`` products in float32 has at most ``K``
# roundings, each at most :math:`2^{-24}` of the products' summed magnitudes.
# The last rounding may add one ``eps``. The error is divided by all of that.


def error_of(out, a, b):
    a, b = a.detach().double(), b.detach().double()
    expected, info = a @ b, torch.finfo(out.dtype)
    unit = 2**-53 if out.dtype == torch.float64 else 2**-24
    bound = a.shape[1] * unit * (a.abs() @ b.abs())
    bound += info.eps * (expected.abs() + info.tiny)
    return (out.double() - expected) / bound


if __name__ == "__main__" and CAN:
    for M, K, N in ((256, 256, 256), (200, 72, 136)):
        a, b = random(M, K), random(K, N)
        error = error_of(by_tiles(a, b), a, b)
        print(f"{M}x{K}x{N}: error {error.abs().max():.2f} of the allowed")
        torch.testing.assert_close(error, 0 * error, rtol=0, atol=1)

# %%
# How fast?
# ---------
#
# Each step of this page is tried with the same tiles, warps and stages, beside
# cuBLAS, which ``torch.compile`` calls, too. A table has each one's best rate.


def rates(calls, M, K, N):
    """Return the TFLOP/s of calls that multiply (M, K) by (K, N)."""
    work = 2e-9 * M * N * K
    calls = {name: call for name, call in calls.items() if starts(call)}
    found = gpu_time(calls, turns=20).items()
    return {name: round(work / ms) for name, (ms, *_) in found}


def starts(call):
    """Whether there is enough shared memory. This compiles, too."""
    try:
        call()
    except triton.OutOfResources:
        return False
    return True


TRIED = [(TILE, 4, 4), (TILE, 8, 4), (BIG, 8, 3), (BIG, 8, 4)]  # warps, stages
CUBLAS = {"cuBLAS": torch.matmul}


def rate_of(steps, others, sizes=SIZES):
    """Print a table of the best rates of steps, and of other functions."""
    rows = {}
    for M, K, N in sizes:
        a, b = random(M, K), random(K, N)
        tried = {(name, ""): partial(f, a, b) for name, f in others.items()}
        for name, step in steps.items():
            for how in TRIED:
                tried[name, str(how)] = partial(step, a, b, *how)
        best = pd.Series(rates(tried, M, K, N)).groupby(level=0).max()
        rows[f"{M}x{K}x{N}"] = best.reindex([*steps, *others])
    print("TFLOP/s", pd.DataFrame(rows).T.to_string(), sep="\n")


if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    rate_of({"a program a tile": by_tiles}, CUBLAS)

# %%
# Should a program go on to other tiles?
# --------------------------------------
#
# A program begins with empty buffers and waits for its first tiles. It ends
# with a store, and no matrix unit works meanwhile. The next program on the
# multiprocessor does both again. A *persistent* program goes on to another tile
# instead. ``flatten=True`` makes one loop of the loop over tiles and the loop
# over ``K``. So the next tile's loads can start before this tile is stored:
#
# .. code-block:: text
#
#     a program a tile   load | dots        | store | load | dots      | store
#
#     persistent         load | dots        | store | dots      | store
#                                      load ......|        load ......|
#
# There are as many programs as multiprocessors. On an H100 or H200, which have
# 132, program 0 takes the tiles 0, 132, 264 and so on. The shorter the sum over
# ``K``, the larger the part of beginning and end: look at the line with a ``K``
# of 512 first.
#
# The next kernel has two switches. Without ``FLATTEN`` (*persistent* in the
# table) each tile still begins with empty buffers. ``PARTS=2`` stores the
# accumulator in two halves, for the next section.


@triton.jit
def walk_kernel(
    a_desc,
    b_desc,
    c_desc,
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
):
    M, N = c_desc.shape
    BLOCK_M: tl.constexpr = c_desc.block_shape[0]
    BLOCK_N: tl.constexpr = b_desc.block_shape[1]
    BLOCK_K: tl.constexpr = a_desc.block_shape[1]
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(
        tl.program_id(axis=0),
        tiles_m * tiles_n,
        tl.num_programs(axis=0),
        flatten=FLATTEN,
    ):
        pid_m, pid_n = place(tile, tiles_m, tiles_n)
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        # Zeros for each tile: the last one's sum is still in these registers.
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, a_desc.shape[1], BLOCK_K):
            a = a_desc.load([off_m, k])  # (BLOCK_M, BLOCK_K)
            b = b_desc.load([k, off_n])  # (BLOCK_K, BLOCK_N)
            acc = tl.dot(a, b, acc)
        if PARTS == 2:
            # tl.split takes the last dimension apart, so the halves go there.
            both = tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2))
            left, right = tl.split(both.permute(0, 2, 1))
            c_desc.store([off_m, off_n], left.to(c_desc.dtype))
            right = right.to(c_desc.dtype)  # (BLOCK_M, BLOCK_N // 2)
            c_desc.store([off_m, off_n + BLOCK_N // 2], right)
        else:
            c_desc.store([off_m, off_n], acc.to(c_desc.dtype))


PROGRAMS = 2  # without a GPU
if DEVICE.type == "cuda":
    gpu = torch.cuda.get_device_properties(DEVICE)
    PROGRAMS = gpu.multi_processor_count


def walk(a, b, tile=TILE, num_warps=8, num_stages=3, flatten=True, parts=1):
    c = a.new_empty(a.shape[0], b.shape[1])
    walk_kernel[(min(PROGRAMS, tiles_of(*c.shape, tile)),)](
        *descriptors(a, b, c, tile, parts),
        FLATTEN=flatten,
        PARTS=parts,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return c


STEPS = {
    "a program a tile": by_tiles,
    "persistent": partial(walk, flatten=False),
    "flattened": walk,
    "in halves": partial(walk, parts=2),
    "in halves, not flattened": partial(walk, parts=2, flatten=False),
}

if __name__ == "__main__" and CAN:
    a, b = random(200, 72), random(72, 264)
    expected = by_tiles(a, b)
    for step in STEPS.values():
        c = step(a, b)
        torch.testing.assert_close(c, expected, rtol=0, atol=0)

if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    rate_of({name: STEPS[name] for name in [*STEPS][:3]}, CUBLAS)

# %%
# What does shared memory hold?
# -----------------------------
#
# A larger tile does more with what it loads. With a tile of 128x256, each
# element of ``a`` is multiplied 256 times, and each of ``b`` 128 times. But
# what is loaded lies in shared memory, and so does the tile that the engine
# stores. A program on an H100 or an H200 has 227 KB of it:
#
# .. code-block:: text
#
#     a stage of the loop        (128 + 256) * 64 * 2 bytes      48 KB
#     the tile that is stored     128 * 256       * 2 bytes      64 KB
#     half of that tile           128 * 128       * 2 bytes      32 KB
#
# A fourth stage does not fit, unless the tile is stored in two halves, one
# after the other. The accumulator lies in registers: eight warps hold 128x256
# numbers, 128 in each thread.

ROOM = 227 * 1024  # bytes


def held(tile, stages, parts, itemsize=2):
    """Return the bytes of shared memory that a program needs, by counting."""
    m, n, k = tile
    return (stages * (m + n) * k + m * n // parts) * itemsize


if __name__ == "__main__":
    for parts in (1, 2):
        for stages in (3, 4):
            needs = held(BIG, stages, parts)
            fits = "fits" if needs + 1024 <= ROOM else "does not fit"
            print(f"{stages} stages, {parts} part(s): {needs} bytes, {fits}")
            assert (fits == "fits") == ((parts, stages) != (1, 4))

# %%
# The 1024 bytes are more than enough for barriers, which the compiler adds. In
# halves, the large tile has a fourth stage to try:

if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    rate_of({name: STEPS[name] for name in [*STEPS][2:]}, CUBLAS)

# %%
# Which tile?
# -----------
#
# A large tile loads less for each multiplication. But if a product has only a
# few large tiles, many multiprocessors get none. So the op counts. Tiles are
# done in *rounds*: in each round every multiprocessor does one tile. The time
# of a tile grows with its area, which is multiplied, and with its edges, which
# are loaded. The op takes the tile of :math:`m` rows and :math:`n` columns with
# the least
#
# .. math:: \Big\lceil \frac{\text{tiles}}{\text{multiprocessors}} \Big\rceil
#    K \big( m\,n + 80\,(m + n) \big).
#
# The 80 weighs loads against products; we chose it by timing full rounds of
# each tile. The tiles of a last round that is less than half full may be
# divided: each is for several programs, with a part of ``K`` for each, and a
# second kernel adds the parts in a fixed order. The op counts what writing and
# adding them costs, and takes the less. Nothing is tuned at the first call, so
# a sum has the same order in each run.
#
# The tile has as many stages as shared memory has room for, four to eight at
# most: a multiprocessor has one program, so no other's work fills its waits.
# Tiles of 64 rows have little to multiply in a step, so they take 128 of ``K``
# instead of 64, and wait half as often.

# %%
# Transposed operands
# -------------------
#
# The engine wants rows of adjacent elements, each beginning at a multiple of 16
# bytes. ``weight.T`` has adjacent columns instead. Its transpose has adjacent
# rows, so the descriptor is of the transpose, and the kernel transposes the
# tile, by ``.T``. In half precision that is no instruction: the matrix units of
# an H100 read either order from shared memory. So the op takes all four pairs
# of orders. The backward needs them: from the gradient :math:`g` of the result
# it computes those of ``a`` and of ``b``, by the same op.
#
# .. math:: d_a = g\,b^T, \qquad d_b = a^T g.
#
# Rows at odd multiples of 16 bytes are taken, but slowly: memory is read in
# *sectors* of 32 bytes, and each row of a tile begins within one. An operand of
# such rows is copied to rows that begin at multiples of 128 bytes, if it is
# multiplied by 4096 rows or more of the other.
#
# If ``a`` is a transpose itself, we compute :math:`(b\,g^T)^T` for it instead.
# Then the gradient lies in memory as ``a`` does.

# %%
# The op
# ------
#
# A *host descriptor*, one made on the CPU, is no tensor. If a ``triton_op`` has
# one, ``torch.compile`` of PyTorch 2.13 loses the kernel, and nobody writes the
# result. So this op is a ``custom_op``, into which ``torch.compile`` does not
# look. On a GPU a call goes straight to the launcher: ``what_a_call_costs.py``
# explains how. The engine stores only rows that begin at multiples of 16 bytes.
# So the result's rows do: where ``N`` is odd, for example, gaps follow them.

from triton_gallery_ops.persistent_matmul import (
    PERSISTENT_MATMUL_ACC,
    PERSISTENT_MATMUL_STAGES,
    PERSISTENT_MATMUL_TILES,
    _persistent_matmul_gpu,
    _persistent_matmul_plan,
    _persistent_matmul_stages,
    persistent_matmul,
)

# %%
# What did each step gain? *Triton* is the op.

PRODUCTS = {"Triton": persistent_matmul, "cuBLAS": torch.matmul}

if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    rate_of(STEPS, PRODUCTS, [*SIZES, (8192, 2048, 8192)])

# %%
# And the tile that the op chooses? For some products of models, this is its
# choice on an H100 or H200, and how much of the time of all rounds is filled.
# On a GPU the rates of all tiles follow, with a star at the choice.

LAYERS = [
    (128, 4096, 14336),
    (256, 7168, 2048),
    (1024, 7168, 2048),
    (2048, 2880, 5120),
    (4096, 4096, 14336),
]


def chosen(M, N, K, gpu=(132, ROOM)):
    """Return the tile, its stages, its number and the rounds that it takes."""
    tiles = tuple(PERSISTENT_MATMUL_TILES)
    plan = _persistent_matmul_plan(M, N, K, tiles, 2, *gpu)
    tile, stages, whole, tail, parts, _ = plan
    rounds = triton.cdiv(whole, gpu[0]) + (1 / parts if tail else 0)
    return tile[:3], stages, whole + tail, rounds


def with_tile(tile, a, b):
    """Return persistent_matmul(a, b) as if there were one tile alone."""
    kept = PERSISTENT_MATMUL_TILES.copy()
    try:
        PERSISTENT_MATMUL_TILES[:] = [tile]
        return persistent_matmul(a, b)
    finally:
        PERSISTENT_MATMUL_TILES[:] = kept


if __name__ == "__main__":
    for M, K, N in LAYERS:
        tile, stages, tiles, rounds = chosen(M, N, K)
        print(f"{M}x{K}x{N}: {tiles} tiles of {tile} with {stages} stages,")
        filled = tiles / rounds / 132
        print(f"    {rounds:.3g} round(s), filled to {filled:.0%}")

if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    rows = {}
    for M, K, N in LAYERS:
        a, b = random(M, K), random(N, K).T
        gpu = _persistent_matmul_gpu(a.device)
        tried = {"cuBLAS": partial(torch.matmul, a, b)}
        for tile in PERSISTENT_MATMUL_TILES:
            stages = _persistent_matmul_stages(tile, 2, gpu[1])
            if stages >= PERSISTENT_MATMUL_STAGES:
                star = "*" * (tile[:3] == chosen(M, N, K, gpu)[0])
                tried[f"{tile[:3]}{star}"] = partial(with_tile, tile, a, b)
        rows[M, K, N] = rates(tried, M, K, N)
    for size, row in rows.items():
        print(size, "TFLOP/s:", row)

# %%
# Proof
# -----
#
# Value and gradients of every dtype and every pair of orders are compared with
# float64. A gradient is a product, so the same bound holds for it.


def prove(M, K, N, dtype, a_t, b_t):
    a = random(K, M, dtype).T if a_t else random(M, K, dtype)
    b = random(N, K, dtype).T if b_t else random(K, N, dtype)
    grad = random(M, N, dtype)
    c = persistent_matmul(a.requires_grad_(), b.requires_grad_())
    d_a, d_b = torch.autograd.grad(c, (a, b), grad)
    for out, pair in ((c, (a, b)), (d_a, (grad, b.T)), (d_b, (a.T, grad))):
        assert error_of(out.detach(), *pair).abs().max() <= 1
    assert d_a.stride() == a.stride()
    assert d_b.stride() == b.stride()


if __name__ == "__main__" and CAN:
    prove(128, 72, 1024, torch.float16, False, False)  # large tiles
    for dtype in PERSISTENT_MATMUL_ACC:
        for a_t in (False, True):
            for b_t in (False, True):
                prove(72, 136, 200, dtype, a_t, b_t)
    a, b = random(5, 4, torch.float64), random(6, 4, torch.float64).T
    pair = a.requires_grad_(), b.requires_grad_()
    assert torch.autograd.gradcheck(persistent_matmul, pair)
    assert torch.autograd.gradgradcheck(persistent_matmul, pair)

# %%
# Next come rows with gaps, and operands that the launcher first copies, as
# neither their rows nor their columns begin at multiples of 16 bytes. Matrices
# with nothing in them follow:

if __name__ == "__main__" and CAN:
    x = random(40, 48)
    odd = random(21, 21)
    copied = (odd, x[:21]), (x[:, 1:17], x[:16]), (x[:, ::2], x[:24])
    for pair in ((x[:, :21], x[:21]), (x[::2, 8:], x[:, :40].T), *copied):
        assert error_of(persistent_matmul(*pair), *pair).abs().max() <= 1
    for M, K, N in ((0, 8, 8), (8, 8, 0), (8, 0, 8)):
        out = persistent_matmul(random(M, K), random(K, N))
        assert out.shape == (M, N)
        assert not out.any()

# %%
# NaN and inf go into the rows or columns of the result to which they belong,
# and into no other, at the edges too. (`An open report
# <https://github.com/triton-lang/triton/issues/9719>`_ tells of NaN
# from host descriptors, but has no program that shows it.)

if __name__ == "__main__" and CAN:
    a, b = random(72, 88), random(88, 104)
    a[3, 87], a[71, 0], b[87, 103], b[87, 5] = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, torch.nan]
    )
    with warnings.catch_warnings():  # NumPy warns, in the interpreter
        warnings.simplefilter("ignore", RuntimeWarning)
        c = persistent_matmul(a, b)
    spoilt = torch.zeros_like(c, dtype=torch.bool)
    spoilt[[3, 71]], spoilt[:, [5, 103]] = True, True
    assert torch.equal(c.isfinite(), ~spoilt)
    torch.testing.assert_close(c, a @ b, rtol=1e-2, atol=1e-2, equal_nan=True)

# %%
# An error names what the op does not take:

if __name__ == "__main__" and CAN:
    for pair in ((x, x), (x, x.T.int())):
        try:
            persistent_matmul(*pair)
        except (TypeError, ValueError) as error:
            print(f"{type(error).__name__}: {error}")

# %%
# The benchmark
# -------------
#
# This is a layer of a model with 4096 inputs and 14336 outputs, in bfloat16,
# for several numbers of tokens. The weight is a transpose, as in
# ``torch.nn.Linear``. The backward computes both gradients, through autograd.
# ``CPU us`` is what a call costs the CPU, which encodes three descriptors.
# Called one by one, small products wait for the CPU; in a CUDA graph
# (``cuda_graphs.py``) they do not.

TOKENS = [256, 1024, 2048, 4096, 8192, 16384]
INPUTS, OUTPUTS = 4096, 14336


def layer_calls(tokens):
    x = random(tokens, INPUTS, torch.bfloat16)
    weight = random(OUTPUTS, INPUTS, torch.bfloat16)
    return {who: partial(op, x, weight.T) for who, op in PRODUCTS.items()}


def layer_calls_backward(tokens):
    x = random(tokens, INPUTS, torch.bfloat16).requires_grad_()
    weight = random(OUTPUTS, INPUTS, torch.bfloat16).requires_grad_()
    g = random(tokens, OUTPUTS, torch.bfloat16)
    grad = partial(torch.autograd.grad, retain_graph=True)
    outs = {who: op(x, weight.T) for who, op in PRODUCTS.items()}
    return {who: partial(grad, y, (x, weight), g) for who, y in outs.items()}


def work(tokens, products=1):
    return products * 2e-9 * tokens * INPUTS * OUTPUTS


if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    times = {n: gpu_time(layer_calls(n), turns=30) for n in TOKENS}
    results = rate_table(times, "tokens", "TFLOP/s", work)
    print("forward", results.to_string(), sep="\n")
    wide = results.pivot(index="tokens", columns="series", values="TFLOP/s")
    wide.plot(logx=True, title="forward")

if __name__ == "__main__" and CAN and DEVICE.type == "cuda":
    times = {n: gpu_time(layer_calls_backward(n), turns=20) for n in TOKENS}
    work_of_two = partial(work, products=2)
    results_backward = rate_table(times, "tokens", "TFLOP/s", work_of_two)
    print("backward", results_backward.to_string(), sep="\n")
    wide = results_backward.pivot(
        index="tokens", columns="series", values="TFLOP/s"
    )
    wide.plot(logx=True, title="backward")

# %%
# Reading the result
# ------------------
#
# Where our line lies below that of cuBLAS, look at four things.
#
# * *Rounds*: the table of choices says how much of all rounds is filled. A last
#   round of a few tiles leaves the other multiprocessors without work, unless
#   its tiles are divided, and then the parts are written and read once more.
# * *Tile*: a smaller tile fills its rounds better, and loads more for each
#   product. The table of choices has the rate of each tile.
# * *Bytes*: 256 tokens give about 240 operations a byte, which lies within the
#   200 to 300 of the data sheets, and 128 tokens give about 120. There the
#   memory bounds the product. ``skinny_matmul.py`` is about up to 64 tokens.
# * *Beginning and end*: with a short ``K`` the first loads and the last stores
#   are a larger part of a tile's time. The table of steps has such a size.

# %%
# Go further
# ----------
#
# 1. Let ``BLOCK_K`` be 128. How many stages of a tile of 128x256 fit into 227
#    KB, if it is stored in halves?
# 2. How would the kernel compute ``c + a @ b``?
#
# To read on:
#
# * ``tensor_descriptors.py`` is about descriptors, and about warps with
#   different work. This op does not ask for such warps: where a program has
#   eight, the compiler ignores that on an H100, as that page shows.
# * Triton's tutorials, of which *Persistent Matmul* includes float8:
#   https://triton-lang.org/main/getting-started/tutorials/

# %%
# Answers
# -------
#
# **1.** A stage has 384 rows of 256 bytes, 96 KB. Beside the half tile of 32 KB
# two fit. As many bytes are in flight as with four stages of 64.
#
# **2.** The accumulator would begin as a tile of ``c`` instead of zeros. The
# descriptor of ``c`` has half a tile as its block, so the kernel loads two and
# joins them by ``tl.join``, the reverse of ``tl.split``.
