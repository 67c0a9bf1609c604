"""Persistent matrix product (matmul) through TMA, for Hopper and newer GPUs.

Computes a @ b on NVIDIA GPUs of compute capability 9.0 or more. There is one
program per multiprocessor, and it loads its next tile through the copy engine
before it stores the last. The engine takes contiguous rows or columns that
begin at multiples of 16 bytes; a matrix without them is copied in each call.
The result's rows are padded to such multiples, so it may not be contiguous. The
tile follows from a formula, without tuning: deterministic on a given GPU model.
Float32 has full precision unless ``input_precision`` says otherwise. The sum
over K is not split, so products of few tiles leave multiprocessors
idle; ``skinny_matmul`` is for up to 64 rows. Gradients of any order.
"""

import threading
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch.library import Library, custom_op
from triton.tools.tensor_descriptor import TensorDescriptor

PERSISTENT_MATMUL_NAMESPACE = "triton_gallery"
PERSISTENT_MATMUL_THREAD = threading.local()
PERSISTENT_MATMUL_ACC = {
    torch.float16: tl.float32,
    torch.bfloat16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
# BLOCK_M, BLOCK_N, BLOCK_K, warps and the most stages, of half precision, of
# wider dtypes, and of float32 as TF32
PERSISTENT_MATMUL_TILES = [
    (128, 256, 64, 8, 4),
    (128, 128, 64, 4, 6),
    (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 6),
    (64, 128, 64, 4, 6),  # where shared memory is small
]
PERSISTENT_MATMUL_WIDE = [(64, 64, 16, 8, 4)]
PERSISTENT_MATMUL_TF32 = [
    (128, 128, 32, 8, 4),
    (64, 128, 32, 4, 4),
    (64, 64, 32, 4, 4),
]
PERSISTENT_MATMUL_EDGE = 48  # what an edge of a tile costs, beside its area
PERSISTENT_MATMUL_STAGES = 3  # the fewest
PERSISTENT_MATMUL_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _persistent_matmul_place(tile, tiles_m, tiles_n):
    """Return the row and the column of a tile: column by column, in groups."""
    # Eight rows of tiles together: what is read again is still in L2.
    first = tile // (8 * tiles_n) * 8
    rows = tl.minimum(tiles_m - first, 8)
    within = tile % (8 * tiles_n)
    return first + within % rows, within // rows


@triton.jit
def _persistent_matmul_kernel(
    a_desc,
    b_desc,
    c_desc,
    A_T: tl.constexpr,  # a_desc is of a's transpose
    B_T: tl.constexpr,
    ACC: tl.constexpr,
    PRECISION: tl.constexpr,  # "ieee", "tf32" or "tf32x3"
):
    M, N = c_desc.shape
    K = a_desc.shape[0 if A_T else 1]
    BLOCK_M: tl.constexpr = c_desc.block_shape[0]
    BLOCK_N: tl.constexpr = c_desc.block_shape[1] * 2  # c's block is half
    BLOCK_K: tl.constexpr = a_desc.block_shape[0 if A_T else 1]
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first, programs = tl.program_id(axis=0), tl.num_programs(axis=0)
    # Flattened, the loads of the next tile begin before this one is stored.
    for tile in tl.range(first, tiles_m * tiles_n, programs, flatten=True):
        pid_m, pid_n = _persistent_matmul_place(tile, tiles_m, tiles_n)
        # Rows and columns fit int32, whatever their product is.
        off_m, off_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        for k in range(0, K, BLOCK_K):
            # The engine fills with zeros past K, so those add nothing.
            # (BLOCK_M, BLOCK_K) and (BLOCK_K, BLOCK_N)
            a = a_desc.load([k, off_m]).T if A_T else a_desc.load([off_m, k])
            b = b_desc.load([off_n, k]).T if B_T else b_desc.load([k, off_n])
            if PERSISTENT_MATMUL_INTERPRETED:
                # Triton's interpreter multiplies bfloat16 wrongly.
                a, b = a.to(ACC), b.to(ACC)
            acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=ACC)
        # In halves, the store needs half as much shared memory, and the loads
        # have a stage more. tl.split takes apart the last dimension.
        both = tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)).permute(0, 2, 1)
        left, right = tl.split(both)  # (BLOCK_M, BLOCK_N // 2)
        c_desc.store([off_m, off_n], left.to(c_desc.dtype))
        c_desc.store([off_m, off_n + BLOCK_N // 2], right.to(c_desc.dtype))


@cache
def _persistent_matmul_gpu(device):
    """Return how many multiprocessors there are, and their shared memory."""
    if device.type == "cpu":  # interpreted: few programs, with many tiles each
        return 4, 227 * 1024
    driver = triton.runtime.driver.active
    with torch.accelerator.device_index(device.index):
        target = driver.get_current_target()
    if target.backend != "cuda" or target.arch < 90:
        raise RuntimeError(
            "persistent_matmul takes tensors on NVIDIA GPUs of compute "
            f"capability 9.0 or more, which have a copy engine, and this is "
            f"{target.backend} {target.arch}: tuned_matmul takes any GPU"
        )
    gpu = driver.utils.get_device_properties(device.index)
    return gpu["multiprocessor_count"], gpu["max_shared_mem"]


def _persistent_matmul_stages(tile, itemsize, shared):
    """Return how many stages a tile has, as far as shared memory has room."""
    BLOCK_M, BLOCK_N, BLOCK_K, _, most = tile
    half = BLOCK_M * BLOCK_N // 2 * itemsize  # of the tile that is stored
    stage = (BLOCK_M + BLOCK_N) * BLOCK_K * itemsize
    free = shared - half - 1024  # barriers take less
    return min(most, free // stage)


def _persistent_matmul_plan(
    M, N, itemsize, multiprocessors, shared, precision="ieee"
):
    """Return the number of programs, their tile and its stages."""
    wide = itemsize > 2
    tiles = PERSISTENT_MATMUL_WIDE if wide else PERSISTENT_MATMUL_TILES
    tiles = tiles if precision == "ieee" else PERSISTENT_MATMUL_TF32
    stages = {t: _persistent_matmul_stages(t, itemsize, shared) for t in tiles}
    tiles = [t for t in tiles if stages[t] >= PERSISTENT_MATMUL_STAGES]

    def number(tile):
        return triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])

    def cost(tile):
        rounds = triton.cdiv(number(tile), multiprocessors)
        edges = PERSISTENT_MATMUL_EDGE * (tile[0] + tile[1])
        return rounds * (tile[0] * tile[1] + edges)

    tile = min(tiles, key=cost)
    return min(multiprocessors, number(tile)), tile, stages[tile]


def _persistent_matmul_check(a, b, input_precision):
    """Raise for what the op does not take, as far as no address tells."""
    if a.dtype != b.dtype or a.dtype not in PERSISTENT_MATMUL_ACC:
        raise TypeError(
            "persistent_matmul takes two float matrices of one dtype, not "
            f"{a.dtype} and {b.dtype}"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            "persistent_matmul takes matrices of shapes (M, K) and (K, N), not "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(
            "persistent_matmul takes two matrices on one device, not on "
            f"{a.device} and {b.device}"
        )
    if input_precision not in ("ieee", "tf32", "tf32x3"):
        raise ValueError(
            "persistent_matmul takes ieee, tf32 or tf32x3 as input_precision, "
            f"not {input_precision}"
        )


def _persistent_matmul_padded(length, itemsize):
    """Return the elements of a row, and what lies before the next one."""
    unit = 16 // itemsize
    return (length + unit - 1) // unit * unit


def _persistent_matmul_rows(M, N, like):
    """Return a new matrix whose rows begin at multiples of 16 bytes."""
    stride = _persistent_matmul_padded(N, like.element_size())
    # The engine stores 16 bytes at a time, so the last row has its padding too.
    return like.new_empty(M, stride)[:, :N]


def _persistent_matmul_side(x, begin):
    """Return x or x.T, with rows that the engine takes, and whether it is x.T.

    If it takes neither, a copy is returned. ``begin`` is the address of x, or
    how far it begins from one that 16 divides.
    """
    for side in (x, x.T):
        (rows, length), (stride, step) = side.shape, side.stride()
        # Rows that overlap, as those of an expanded tensor, it does not take.
        apart = stride >= length and stride * x.element_size() % 16 == 0
        if step == 1 and (apart or rows == 1) and begin % 16 == 0:
            return side, side is not x
    # Adjacent elements stay adjacent: a copy that transposes is slower.
    turned = x.stride(0) == 1 and x.stride(1) != 1
    side = x.T if turned else x
    return _persistent_matmul_rows(*side.shape, side).copy_(side), turned


def _persistent_matmul_descriptor(side, block_shape):
    rows, length = side.shape
    # The stride of an only row may be anything.
    only = _persistent_matmul_padded(length, side.element_size())
    strides = [side.stride(0) if rows > 1 else only, 1]
    return TensorDescriptor(side, [rows, length], strides, block_shape)


def _persistent_matmul_launch(a, b, input_precision="ieee"):
    _persistent_matmul_check(a, b, input_precision)
    multiprocessors, shared = _persistent_matmul_gpu(a.device)
    (M, K), N = a.shape, b.shape[1]
    c = _persistent_matmul_rows(M, N, a)
    if M * N * K == 0:
        return c.zero_()
    side_a, A_T = _persistent_matmul_side(a, a.data_ptr())
    side_b, B_T = _persistent_matmul_side(b, b.data_ptr())
    size = a.element_size()
    precision = input_precision if a.dtype == torch.float32 else "ieee"
    plan = _persistent_matmul_plan(
        M, N, size, multiprocessors, shared, precision
    )
    programs, (m, n, k, num_warps, _), num_stages = plan
    describe = _persistent_matmul_descriptor
    # Triton launches on the current GPU, which may not be that of a.
    with torch.accelerator.device_index(a.device.index):
        if a.is_cuda and not hasattr(PERSISTENT_MATMUL_THREAD, "begun"):
            # No descriptor is made in a thread without CUDA's context. Autograd
            # has threads of its own. The first work of one may be ours.
            PERSISTENT_MATMUL_THREAD.begun = torch.zeros(1, device=a.device)
        _persistent_matmul_kernel[(programs,)](
            describe(side_a, [k, m] if A_T else [m, k]),
            describe(side_b, [n, k] if B_T else [k, n]),
            describe(c, [m, n // 2]),
            A_T=A_T,
            B_T=B_T,
            ACC=PERSISTENT_MATMUL_ACC[a.dtype],
            PRECISION=precision,
            num_warps=num_warps,
            num_stages=num_stages,
        )
    return c


@custom_op(f"{PERSISTENT_MATMUL_NAMESPACE}::persistent_matmul", mutates_args=())
def persistent_matmul(
    a: torch.Tensor, b: torch.Tensor, input_precision: str = "ieee"
) -> torch.Tensor:
    """Return the matrix product of a (M, K) and b (K, N), as a @ b.

    Takes float16, bfloat16, float32 and float64, both of one dtype, and sums in
    float32, or float64 for float64. They may lie in memory in any way. The
    engine takes a matrix with rows or columns of adjacent elements that begin
    at multiples of 16 bytes: so do those of a new contiguous matrix with rows
    of such a length, and of its transpose. Any other matrix is copied in each
    product, with less than 16 bytes of padding a row: 4096 x 2047 numbers of
    half precision are 16 MB to read and 16 MB to write. If you can, keep a
    weight of such a length with padded rows instead.

    ``input_precision`` is for float32, the other dtypes ignore it: "ieee"
    multiplies all 24 bits, without tensor cores; "tf32" gives 11 of them to the
    tensor cores, and "tf32x3" makes up for that with three products. What
    ``torch.backends.cuda.matmul`` says does not count.

    The result has the dtype of ``a`` and rows that begin at multiples of 16
    bytes: it is contiguous where 16 divides the bytes of a row. It is
    deterministic on one kind of GPU. Raises TypeError for other dtypes,
    ValueError for other shapes and precisions, and RuntimeError for GPUs
    without a copy engine, which NVIDIA's have from compute capability 9.0 on.
    Without a GPU, it needs Triton's interpreter, TRITON_INTERPRET=1. Has a
    gradient, in the same precision, which can be differentiated again.

    Rounding: products are summed in float32, or float64 for float64, and each
    result is rounded once.

    Under ``torch.autocast`` it casts a and b to autocast's dtype.
    """
    return _persistent_matmul_launch(a, b, input_precision)


@persistent_matmul.register_fake
def _persistent_matmul_fake(a, b, input_precision="ieee"):
    _persistent_matmul_check(a, b, input_precision)
    return _persistent_matmul_rows(a.shape[0], b.shape[1], a)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
PERSISTENT_MATMUL_LIBRARY = Library(PERSISTENT_MATMUL_NAMESPACE, "FRAGMENT")
PERSISTENT_MATMUL_LIBRARY.impl(
    "persistent_matmul", _persistent_matmul_launch, "CUDA"
)


def _persistent_matmul_autocast(kind, a, b, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    a, b = (t.to(dtype) if t.dtype in casts else t for t in (a, b))
    with torch.autocast(kind, enabled=False):
        return persistent_matmul(a, b, *options)


PERSISTENT_MATMUL_LIBRARY.impl(
    "persistent_matmul",
    partial(_persistent_matmul_autocast, "cpu"),
    "AutocastCPU",
)
PERSISTENT_MATMUL_LIBRARY.impl(
    "persistent_matmul",
    partial(_persistent_matmul_autocast, "cuda"),
    "AutocastCUDA",
)


def _persistent_matmul_setup(ctx, inputs, output):
    a, b, ctx.input_precision = inputs
    ctx.save_for_backward(a, b)


def _persistent_matmul_as(x, left, right, precision):
    """Return left @ right, by rows or by columns as x."""
    if x.stride(1) == 1:
        return persistent_matmul(left, right, precision)
    return persistent_matmul(right.T, left.T, precision).T


def _persistent_matmul_gradient(ctx, grad):
    a, b = ctx.saved_tensors
    # It may be an expanded number, or have rows of any length: one copy is for
    # both products. Whoever traces this knows no address.
    begin = grad.storage_offset() * grad.element_size()
    side, turned = _persistent_matmul_side(grad, begin)
    grad = side.T if turned else side
    d_a = d_b = None
    if ctx.needs_input_grad[0]:
        d_a = _persistent_matmul_as(a, grad, b.T, ctx.input_precision)
    if ctx.needs_input_grad[1]:
        d_b = _persistent_matmul_as(b, a.T, grad, ctx.input_precision)
    return d_a, d_b, None


persistent_matmul.register_autograd(
    _persistent_matmul_gradient, setup_context=_persistent_matmul_setup
)
