"""Matrix product (matmul) in Gluon with specialized warps, for Hopper only.

Computes a @ b in float16 or bfloat16 on NVIDIA GPUs of compute capability 9.0:
H100 and H200. One warp loads tiles through the copy engine (TMA), two groups of
four warps multiply, and a program loads its next tile while it stores the last.
The engine takes contiguous rows or columns that begin at multiples of 16 bytes;
a matrix without them is copied in each call, and the result's rows are padded
to such multiples. All tiles are 128 x 256, which
leaves multiprocessors idle at some sizes: ``persistent_matmul`` chooses among
tiles, and has a backward. ``matmul`` takes other dtypes, strides and GPUs.
Deterministic, without a backward.
"""

import threading
from functools import cache, partial

import torch
import triton
from torch.library import Library, custom_op
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import (
    TensorDescriptor as GluonDescriptor,
)

GLUON_MATMUL_NAMESPACE = "triton_gallery"
GLUON_MATMUL_THREAD = threading.local()
GLUON_MATMUL_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# Rows of a consumer, columns and depth of a tile, columns of a stored piece
GLUON_MATMUL_TILE = (64, 256, 64, 64)
GLUON_MATMUL_STAGES = 4
# Triton 3.8 renamed the two copies, and 3.9 refuses the older names.
_gluon_matmul_load = (
    getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
)
_gluon_matmul_store = (
    getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
)


@gluon.jit
def _gluon_matmul_place(tile, M, N, BLOCK_M, BLOCK_N):
    """Return where a tile begins: column by column, in groups of rows."""
    # Eight rows of tiles together: what is read again is still in L2.
    tiles_n = gl.cdiv(N, BLOCK_N)
    first = tile // (8 * tiles_n) * 8
    rows = gl.minimum(gl.cdiv(M, BLOCK_M) - first, 8)
    within = tile % (8 * tiles_n)
    # Rows and columns fit int32, whatever their product is.
    return (first + within % rows) * BLOCK_M, within // rows * BLOCK_N


@gluon.jit
def _gluon_matmul_produce(
    a_desc, b_desc, sizes, ring, A_T: gl.constexpr, B_T: gl.constexpr
):
    tiles, M, N, K = sizes
    a, b, full, empty = ring
    STAGES: gl.constexpr = b.shape[0]
    ROWS: gl.constexpr = a_desc.block_shape[1 if A_T else 0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0 if B_T else 1]
    BLOCK_K: gl.constexpr = b_desc.block_shape[1 if B_T else 0]
    nbytes: gl.constexpr = a_desc.block_type.nbytes
    n = 0  # steps of all tiles
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        off_m, off_n = _gluon_matmul_place(tile, M, N, 2 * ROWS, BLOCK_N)
        for k in range(0, K, BLOCK_K):
            stage = n % STAGES
            # Both consumers have arrived for step n - STAGES. A new barrier
            # counts the phase before its first one as ended.
            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)
            # The one arrival at full. The phase ends with the last byte;
            # those that the engine fills with zeros count as well.
            bar = full.index(stage)
            mbarrier.expect(bar, 2 * nbytes + b_desc.block_type.nbytes)
            for half in gl.static_range(2):
                row = off_m + half * ROWS
                _gluon_matmul_load(
                    a_desc,
                    [k, row] if A_T else [row, k],
                    bar,
                    a.index(2 * stage + half),
                )
            _gluon_matmul_load(
                b_desc, [off_n, k] if B_T else [k, off_n], bar, b.index(stage)
            )
            n += 1


@gluon.jit
def _gluon_matmul_halves(x):
    """Return the left and the right half of a tile's columns."""
    # split takes the last dimension apart. No number changes its thread.
    parts = x.reshape([x.shape[0], 2, x.shape[1] // 2])
    return parts.permute(0, 2, 1).split()


@gluon.jit
def _gluon_matmul_consume(
    HALF: gl.constexpr,
    c_desc,
    c,
    sizes,
    ring,
    A_T: gl.constexpr,
    B_T: gl.constexpr,
):
    tiles, M, N, K = sizes
    a, b, full, empty = ring
    STAGES: gl.constexpr = b.shape[0]
    ROWS: gl.constexpr = c_desc.block_shape[0]
    PIECE: gl.constexpr = c_desc.block_shape[1]
    BLOCK_N: gl.constexpr = b.shape[1 if B_T else 2]
    BLOCK_K: gl.constexpr = b.shape[2 if B_T else 1]
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_N, 16]
    )
    n = 0  # steps of all tiles, as the producer counts them
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        off_m, off_n = _gluon_matmul_place(tile, M, N, 2 * ROWS, BLOCK_N)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, sums)
        for k in range(0, K, BLOCK_K):
            stage = n % STAGES
            mbarrier.wait(full.index(stage), n // STAGES & 1)
            left, right = a.index(2 * stage + HALF), b.index(stage)
            acc = warpgroup_mma(
                left.permute([1, 0]) if A_T else left,
                right.permute([1, 0]) if B_T else right,
                acc,
                is_async=True,
            )
            # One product may be in flight, this one. The one before has read
            # its buffers, and the compiler has all warps of this consumer meet
            # before the one arrival of this consumer.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            before = empty.index((n + STAGES - 1) % STAGES)
            mbarrier.arrive(before, pred=k > 0)
            n += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        # The tile's last step: so each step has one arrival of each consumer.
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))
        left, right = _gluon_matmul_halves(acc.to(c_desc.dtype))
        pieces = _gluon_matmul_halves(left) + _gluon_matmul_halves(right)
        for i in gl.static_range(4):
            # Two buffers take turns. The store before the last one has read
            # the buffer; the last one may go on.
            tma.store_wait(1)
            piece = c.index(2 * HALF + i % 2)
            piece.store(pieces[i])
            fence_async_shared()  # what threads wrote, the engine reads
            _gluon_matmul_store(
                c_desc, [off_m + HALF * ROWS, off_n + i * PIECE], piece
            )
    tma.store_wait(0)  # the shared memory is another program's soon


@gluon.jit
def _gluon_matmul_kernel(
    a_desc,
    b_desc,
    c_desc,
    A_T: gl.constexpr,  # a_desc is of a's transpose
    B_T: gl.constexpr,
    STAGES: gl.constexpr,
):
    M, N = c_desc.shape
    SUM: gl.constexpr = 0 if A_T else 1
    K = a_desc.shape[SUM]
    ROWS: gl.constexpr = c_desc.block_shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_shape[0 if B_T else 1]
    dtype: gl.constexpr = c_desc.dtype
    gl.static_assert(4 * c_desc.block_shape[1] == BLOCK_N)
    a_shape: gl.constexpr = [2 * STAGES] + a_desc.block_shape
    b_shape: gl.constexpr = [STAGES] + b_desc.block_shape
    c_shape: gl.constexpr = [4] + c_desc.block_shape
    a = gl.allocate_shared_memory(dtype, a_shape, a_desc.layout)
    b = gl.allocate_shared_memory(dtype, b_shape, b_desc.layout)
    c = gl.allocate_shared_memory(dtype, c_shape, c_desc.layout)
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], kind)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)  # the producer's expect
        mbarrier.init(empty.index(stage), count=2)  # one of each consumer
    tiles = gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, BLOCK_N)
    sizes, ring = (tiles, M, N, K), (a, b, full, empty)
    gl.warp_specialize(
        [
            (_gluon_matmul_consume, (0, c_desc, c, sizes, ring, A_T, B_T)),
            (_gluon_matmul_consume, (1, c_desc, c, sizes, ring, A_T, B_T)),
            (_gluon_matmul_produce, (a_desc, b_desc, sizes, ring, A_T, B_T)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and registers of their threads
    )


@cache
def _gluon_matmul_gpu(device):
    """Return how many multiprocessors there are."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        if not torch.version.hip and (gpu.major, gpu.minor) == (9, 0):
            return gpu.multi_processor_count
    raise RuntimeError(
        "gluon_matmul takes tensors on NVIDIA GPUs of compute capability 9.0 "
        f"alone, whose instructions it names, not on {device}: matmul takes any"
    )


def _gluon_matmul_check(a, b):
    """Raise for what the op does not take, as far as no address tells."""
    if a.dtype != b.dtype or a.dtype not in GLUON_MATMUL_DTYPES:
        raise TypeError(
            "gluon_matmul takes two matrices of float16 or of bfloat16, not "
            f"{a.dtype} and {b.dtype}: matmul takes others"
        )
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            "gluon_matmul takes matrices of shapes (M, K) and (K, N), not "
            f"{tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.device != b.device:
        raise ValueError(
            "gluon_matmul takes two matrices on one device, not on "
            f"{a.device} and {b.device}"
        )


def _gluon_matmul_rows(M, N, like):
    """Return a new matrix whose rows begin at multiples of 16 bytes."""
    # The engine stores 16 bytes at a time, so the last row has its padding too.
    return like.new_empty(M, triton.cdiv(N, 8) * 8)[:, :N]


def _gluon_matmul_side(x):
    """Return x or x.T, with rows that the engine takes, and whether it is x.T.

    If it takes neither, a copy is returned.
    """
    for side in (x, x.T):
        (rows, length), (stride, step) = side.shape, side.stride()
        # Rows that overlap, as those of an expanded tensor, it does not take.
        apart = stride >= length and stride % 8 == 0
        if step == 1 and (apart or rows == 1) and x.data_ptr() % 16 == 0:
            return side, side is not x
    # Adjacent elements stay adjacent: a copy that transposes is slower.
    turned = x.stride(0) == 1 and x.stride(1) != 1
    side = x.T if turned else x
    return _gluon_matmul_rows(*side.shape, side).copy_(side), turned


def _gluon_matmul_descriptor(side, block):
    rows, length = side.shape
    # The stride of an only row may be anything.
    stride = side.stride(0) if rows > 1 else triton.cdiv(length, 8) * 8
    kind = GLUON_MATMUL_DTYPES[side.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind)
    return GluonDescriptor(side, [rows, length], [stride, 1], block, layout)


def _gluon_matmul_launch(a, b):
    _gluon_matmul_check(a, b)
    multiprocessors = _gluon_matmul_gpu(a.device)
    (M, K), N = a.shape, b.shape[1]
    c = _gluon_matmul_rows(M, N, a)
    if M * N * K == 0:
        return c.zero_()
    side_a, A_T = _gluon_matmul_side(a)
    side_b, B_T = _gluon_matmul_side(b)
    m, n, k, piece = GLUON_MATMUL_TILE
    tiles = triton.cdiv(M, 2 * m) * triton.cdiv(N, n)
    # Triton launches on the current GPU, which may not be that of a.
    with torch.accelerator.device_index(a.device.index):
        if not hasattr(GLUON_MATMUL_THREAD, "begun"):
            # A thread has no context until torch uses it, and no descriptor
            # is made without one. Autograd has threads of its own.
            GLUON_MATMUL_THREAD.begun = torch.zeros(1, device=a.device)
        _gluon_matmul_kernel[(min(tiles, multiprocessors),)](
            _gluon_matmul_descriptor(side_a, [k, m] if A_T else [m, k]),
            _gluon_matmul_descriptor(side_b, [n, k] if B_T else [k, n]),
            _gluon_matmul_descriptor(c, [m, piece]),
            A_T=A_T,
            B_T=B_T,
            STAGES=GLUON_MATMUL_STAGES,
            num_warps=4,  # of the first consumer
            maxnreg=168,  # of all three warpgroups, before they are moved
        )
    return c


@custom_op(f"{GLUON_MATMUL_NAMESPACE}::gluon_matmul", mutates_args=())
def gluon_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the matrix product of a (M, K) and b (K, N), as a @ b.

    Takes float16 and bfloat16, both of one dtype, and sums in float32. They may
    lie in memory in any way. The engine takes a matrix with rows or columns of
    adjacent elements that begin at multiples of 16 bytes: so do those of a new
    contiguous matrix with rows of a length that 8 divides, and of its
    transpose. Any other matrix is copied in each call, with less than 16 bytes
    of padding a row: 4096 x 2047 numbers are 16 MB to read and 16 MB to write.
    If you can, keep a weight of such a length with padded rows instead.

    The result has the dtype of ``a``, and rows that begin at multiples of 16
    bytes: it is contiguous where 8 divides N. It is deterministic. Raises
    TypeError for other dtypes, ValueError for other shapes, and RuntimeError on
    devices other than NVIDIA's GPUs of compute capability 9.0. Has no gradient:
    a backward raises RuntimeError.

    Rounding: products are summed in float32, and each result is rounded once.

    Under ``torch.autocast`` it casts a and b to autocast's dtype.
    """
    return _gluon_matmul_launch(a, b)


@gluon_matmul.register_fake
def _gluon_matmul_fake(a, b):
    _gluon_matmul_check(a, b)
    return _gluon_matmul_rows(a.shape[0], b.shape[1], a)


# On a GPU a call goes to the launcher; all else goes on to the custom_op.
GLUON_MATMUL_LIBRARY = Library(GLUON_MATMUL_NAMESPACE, "FRAGMENT")
GLUON_MATMUL_LIBRARY.impl("gluon_matmul", _gluon_matmul_launch, "CUDA")


def _gluon_matmul_autocast(kind, a, b, *options):
    """Compute in the dtype of torch.autocast, as PyTorch's products do."""
    dtype = torch.get_autocast_dtype(kind)
    casts = torch.float16, torch.bfloat16, torch.float32
    a, b = (t.to(dtype) if t.dtype in casts else t for t in (a, b))
    with torch.autocast(kind, enabled=False):
        return gluon_matmul(a, b, *options)


GLUON_MATMUL_LIBRARY.impl(
    "gluon_matmul", partial(_gluon_matmul_autocast, "cpu"), "AutocastCPU"
)
GLUON_MATMUL_LIBRARY.impl(
    "gluon_matmul", partial(_gluon_matmul_autocast, "cuda"), "AutocastCUDA"
)
