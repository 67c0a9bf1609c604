"""Matrix product of MXFP8, MXFP4 and NVFP4, with their block scales.

Computes ``x @ weight.T + bias`` for matrices whose blocks along K have a scale
each: 32 numbers and a power of two in MX, 16 numbers and a float8 in NVFP4.
Where the GPU has an instruction that takes the scales, a tile is one
``tl.dot_scaled``: MX and NVFP4 on NVIDIA's compute capability 10, pairs of the
same width on 12, MX on AMD's gfx950. Elsewhere each program turns its tiles
into bfloat16 first and multiplies these: slower than a product of bfloat16
matrices where there are many rows, and with fewer bytes to read where there are
few. Deterministic, without a gradient.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch.library import Library, triton_op, wrap_triton

MX_MATMUL_NAMESPACE = "triton_gallery"
# What tl.dot_scaled calls the numbers; a byte of uint8 is two of 4 bits, too.
MX_MATMUL_FORMATS = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float4_e2m1fn_x2: "e2m1",
    torch.uint8: "e2m1",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
# Numbers of a block, by the dtype of its scale; uint8 is the bytes of e8m0.
MX_MATMUL_GROUPS = {
    torch.float8_e8m0fnu: 32,
    torch.uint8: 32,
    torch.float8_e4m3fn: 16,
}
MX_MATMUL_OUTPUTS = torch.bfloat16, torch.float16, torch.float32
# BLOCK_M, BLOCK_N, BLOCK_K, warps and the most stages
MX_MATMUL_TILES = [
    (16, 32, 128, 4, 5),
    (64, 64, 64, 4, 4),
    (128, 128, 64, 8, 4),
]
MX_MATMUL_SCALED_TILE = 128, 128, 128, 8, 4
# Of so few rows, small tiles are more programs that load the weight.
MX_MATMUL_FEW = 64


@triton.jit
def _mx_matmul_load(ptr, offs, rows, start, columns, BLOCK: tl.constexpr):
    """Return a tile (rows of offs, BLOCK) of a matrix; 0 past its ends."""
    offs_k = start + tl.arange(0, BLOCK)  # (BLOCK,)
    mask = (offs < rows)[:, None] & (offs_k < columns)[None, :]
    # In int32 the offset of a row would overflow past element 2**31.
    ptrs = ptr + offs.to(tl.int64)[:, None] * columns + offs_k[None, :]
    return tl.load(ptrs, mask=mask, other=0)


@triton.jit
def _mx_matmul_decode(codes, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """Return the numbers of codes, as float32.

    CAST says that the GPU has an instruction for e4m3. Otherwise, the bits of a
    code become the first ones of a wider float. The exponent of that has
    another bias, which a multiplication by a power of two corrects.
    """
    if FORMAT == "e5m2":  # the first half of a float16
        bits = codes.to(tl.uint16) << 8
        number = bits.to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == "e4m3" and CAST:
        number = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif FORMAT == "e4m3":
        codes = codes.to(tl.uint32)
        bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
        number = bits.to(tl.float32, bitcast=True) * 2.0**120
        number = tl.where((codes & 0x7F) == 0x7F, float("nan"), number)
    else:
        codes = codes.to(tl.uint32)
        bits = ((codes & 8) << 28) | ((codes & 7) << 22)
        number = bits.to(tl.float32, bitcast=True) * 2.0**126
    return number


@triton.jit
def _mx_matmul_numbers(
    codes,
    scales,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT: tl.constexpr,
    CAST: tl.constexpr,
):
    """Return the numbers of a tile (BLOCK, BLOCK_K) times their scales."""
    BLOCK: tl.constexpr = codes.shape[0]
    if scales is None:
        numbers = codes.to(DOT)
    else:
        if FORMAT == "e2m1":  # two in a byte, the first in its low half
            codes = tl.join(codes & 15, codes >> 4)
            codes = tl.reshape(codes, (BLOCK, BLOCK_K))
        numbers = _mx_matmul_decode(codes, FORMAT, CAST)
        if GROUP == 16:
            scales = _mx_matmul_decode(scales, "e4m3", CAST)
        else:  # the exponent of a power of two
            bits = scales.to(tl.uint32) << 23
            # 2**-127 has no exponent of its own, and 255 is NaN.
            bits = tl.where(scales == 0, 0x00400000, bits)
            bits = tl.where(scales == 255, 0x7FC00000, bits)
            scales = bits.to(tl.float32, bitcast=True)
        numbers = tl.reshape(numbers, (BLOCK, BLOCK_K // GROUP, GROUP))
        numbers = tl.reshape(numbers * scales[:, :, None], (BLOCK, BLOCK_K))
        numbers = numbers.to(DOT)
    return numbers


@triton.jit
def _mx_matmul_kernel(
    x_ptr,
    weight_ptr,
    scale_x_ptr,  # or None
    scale_weight_ptr,
    tensor_x_ptr,  # or None
    tensor_weight_ptr,  # or None
    bias_ptr,  # or None
    y_ptr,
    M,
    N,
    groups,
    X: tl.constexpr,  # what the numbers are
    WEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    DOT: tl.constexpr,  # what they become; None where tl.dot_scaled takes them
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    PX: tl.constexpr = 2 if X == "e2m1" else 1  # numbers of a byte
    PW: tl.constexpr = 2 if WEIGHT == "e2m1" else 1
    FLOAT8: tl.constexpr = DOT is None and GROUP == 16  # scales of NVFP4
    # So the compiler knows that GROUP divides K, and loads more at once.
    K = groups * GROUP
    # Eight rows of tiles together: what is read again is still in L2.
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(axis=0)
    first = pid // (8 * tiles_n) * 8
    rows = tl.minimum(tl.cdiv(M, BLOCK_M) - first, 8)
    pid_m = first + pid % (8 * tiles_n) % rows
    pid_n = pid % (8 * tiles_n) // rows
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        # Bytes past the end are zeros, of which the scale does not matter.
        x = _mx_matmul_load(x_ptr, offs_m, M, k // PX, K // PX, BLOCK_K // PX)
        weight = _mx_matmul_load(
            weight_ptr, offs_n, N, k // PW, K // PW, BLOCK_K // PW
        )
        group = k // GROUP
        scale_x = None
        if scale_x_ptr is not None:
            scale_x = _mx_matmul_load(
                scale_x_ptr, offs_m, M, group, groups, BLOCK_K // GROUP
            )
            if FLOAT8:
                scale_x = scale_x.to(tl.float8e4nv, bitcast=True)
        scale_weight = _mx_matmul_load(
            scale_weight_ptr, offs_n, N, group, groups, BLOCK_K // GROUP
        )
        if FLOAT8:
            scale_weight = scale_weight.to(tl.float8e4nv, bitcast=True)
        if DOT is None:
            # The scales of the weight are not transposed.
            acc = tl.dot_scaled(
                x, scale_x, X, weight.T, scale_weight, WEIGHT, acc
            )
        else:
            x = _mx_matmul_numbers(x, scale_x, X, GROUP, BLOCK_K, DOT, CAST)
            weight = _mx_matmul_numbers(
                weight, scale_weight, WEIGHT, GROUP, BLOCK_K, DOT, CAST
            )
            acc = tl.dot(x, weight.T, acc)
    if tensor_x_ptr is not None:
        acc *= tl.load(tensor_x_ptr)
    if tensor_weight_ptr is not None:
        acc *= tl.load(tensor_weight_ptr)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)


@cache
def _mx_matmul_gpu(device):
    """Return what architecture this is, and a program's shared memory."""
    if device.type != "cuda":  # interpreted
        return 0, 227 * 1024
    gpu = torch.cuda.get_device_properties(device)
    shared = getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)
    if torch.version.hip:
        return gpu.gcnArchName.partition(":")[0], shared
    return 10 * gpu.major + gpu.minor, shared


def _mx_matmul_scaled(architecture, x, weight, GROUP):
    """Return whether the GPU has an instruction for such numbers and scales."""
    if x in ("bf16", "fp16"):
        return False
    if architecture in (100, 103):  # B200, B300
        return True
    if architecture in (120, 121):  # RTX 50
        return (x == "e2m1") == (weight == "e2m1")
    return architecture == "gfx950" and GROUP == 32  # MI350


def _mx_matmul_plan(M, x, weight, GROUP, device):
    """Return the tile, its warps and stages, and what tl.dot multiplies."""
    architecture, shared = _mx_matmul_gpu(device)
    if M > MX_MATMUL_FEW and _mx_matmul_scaled(architecture, x, weight, GROUP):
        DOT, tile = None, MX_MATMUL_SCALED_TILE
    else:
        DOT = tl.float16 if x == "fp16" else tl.bfloat16
        # The interpreter's arithmetic takes the bits of bfloat16 for integers.
        DOT = tl.float32 if triton.knobs.runtime.interpret else DOT
        fitting = (tile for tile in MX_MATMUL_TILES if tile[0] >= M)
        tile = next(fitting, MX_MATMUL_TILES[-1])
    m, n, k, num_warps, most = tile
    widths = {"e2m1": 0.5, "bf16": 2, "fp16": 2}
    stage = k * (m * widths.get(x, 1) + n * widths.get(weight, 1))
    stage += k // GROUP * (m + n)
    free = shared - 2 * k * (m + n) * (DOT is not None) - 4096
    num_stages = max(1, min(most, int(free // stage)))
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    return blocks | {
        "DOT": DOT,
        # An instruction of NVIDIA's, from the RTX 40 on
        "CAST": isinstance(architecture, int) and architecture >= 89,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _mx_matmul_check(x, weight, scale_x, scale_weight, bias, out_dtype, scales):
    """Raise for what the op does not take; return M, N, K and a block."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    given = [scale_weight] if half else [scale_x, scale_weight]
    kinds = [None if scale is None else scale.dtype for scale in given]
    if (
        x.dtype not in MX_MATMUL_FORMATS
        or weight.dtype not in MX_MATMUL_FORMATS
        or weight.dtype in (torch.bfloat16, torch.float16)
    ):
        raise TypeError(
            "mx_matmul takes float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2, and "
            "x of bfloat16 and float16, too, not "
            f"{x.dtype} and {weight.dtype}"
        )
    if half and scale_x is not None:
        raise TypeError(f"mx_matmul takes no scale_x for x of {x.dtype}")
    blocks = {MX_MATMUL_GROUPS.get(kind) for kind in kinds}
    if len(blocks) > 1 or None in blocks:
        raise TypeError(
            "mx_matmul takes scales of float8_e8m0fnu, or of float8_e4m3fn, "
            f"for both matrices, not {' and '.join(map(str, kinds))}"
        )
    (GROUP,) = blocks
    bits = {
        MX_MATMUL_FORMATS[t.dtype] for t in ((weight,) if half else (x, weight))
    }
    if GROUP == 16 and bits != {"e2m1"}:
        raise TypeError(
            "mx_matmul takes scales of float8_e4m3fn for float4_e2m1fn_x2, not "
            f"for {x.dtype} and {weight.dtype}"
        )
    if out_dtype not in MX_MATMUL_OUTPUTS or (
        bias is not None and bias.dtype not in MX_MATMUL_OUTPUTS
    ):
        raise TypeError(
            "mx_matmul returns bfloat16, float16 or float32, and takes a bias "
            f"of these, not {out_dtype} and {getattr(bias, 'dtype', None)}"
        )
    tensors = [x, weight, *given, bias, *scales]
    devices = {str(t.device) for t in tensors if t is not None}
    if len(devices) > 1:
        raise ValueError(
            "mx_matmul takes tensors on one device, not on "
            f"{', '.join(sorted(devices))}"
        )

    def length(t):
        return t.shape[-1] * (2 if MX_MATMUL_FORMATS[t.dtype] == "e2m1" else 1)

    if x.dim() < 1 or weight.dim() != 2 or length(x) != length(weight):
        raise ValueError(
            "mx_matmul takes x (..., K) and weight (N, K), half as wide where "
            "a byte has two numbers, not "
            f"{tuple(x.shape)} of {x.dtype} and {tuple(weight.shape)} of "
            f"{weight.dtype}"
        )
    N, K = weight.shape[0], length(weight)
    if K % GROUP:
        raise ValueError(
            f"mx_matmul takes K that is a multiple of {GROUP}, the numbers "
            f"that share a scale, not {K}"
        )
    shapes = [(*x.shape[:-1], K // GROUP), (N, K // GROUP)][-len(given) :]
    found = [tuple(scale.shape) for scale in given]
    if found != shapes:
        raise ValueError(
            f"mx_matmul takes scales of shape {' and '.join(map(str, shapes))}"
            f", not {' and '.join(map(str, found))}"
        )
    if bias is not None and tuple(bias.shape) != (N,):
        raise ValueError(
            f"mx_matmul takes a bias of shape ({N},), not {tuple(bias.shape)}"
        )
    for scale in scales:
        if scale is not None and (
            scale.numel() != 1 or scale.dtype != torch.float32
        ):
            raise ValueError(
                "mx_matmul takes tensor scales of one float32, not "
                f"{scale.dtype} of shape {tuple(scale.shape)}"
            )
    return math.prod(x.shape[:-1]), N, K, GROUP


def _mx_matmul_launch(
    x,
    weight,
    scale_x,
    scale_weight,
    bias=None,
    out_dtype=torch.bfloat16,
    tensor_scale_x=None,
    tensor_scale_weight=None,
    kernel=_mx_matmul_kernel,
):
    scales = tensor_scale_x, tensor_scale_weight
    given = x, weight, scale_x, scale_weight, bias, out_dtype, scales
    M, N, K, GROUP = _mx_matmul_check(*given)
    shape = *x.shape[:-1], N
    y = torch.empty(shape, dtype=out_dtype, device=x.device)
    if M * N == 0:
        return y
    X, WEIGHT = MX_MATMUL_FORMATS[x.dtype], MX_MATMUL_FORMATS[weight.dtype]

    def stored(t):
        """Return a tensor as the kernel reads it: contiguous, and bytes."""
        if t is None:
            return None
        return (t.view(torch.uint8) if t.itemsize == 1 else t).contiguous()

    plan = _mx_matmul_plan(M, X, WEIGHT, GROUP, x.device)
    tiles = triton.cdiv(M, plan["BLOCK_M"]) * triton.cdiv(N, plan["BLOCK_N"])
    # Triton launches on the current GPU, which may not be that of x.
    with torch.accelerator.device_index(x.device.index):
        kernel[(tiles,)](
            stored(x),
            stored(weight),
            stored(scale_x),
            stored(scale_weight),
            *scales,
            None if bias is None else bias.contiguous(),
            y,
            M,
            N,
            K // GROUP,
            X=X,
            WEIGHT=WEIGHT,
            GROUP=GROUP,
            **plan,
        )
    return y


@triton_op(f"{MX_MATMUL_NAMESPACE}::mx_matmul", mutates_args={})
def mx_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tensor_scale_x: torch.Tensor | None = None,
    tensor_scale_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias, for numbers with a scale for each block.

    Takes ``x`` (..., K) and ``weight`` (N, K) of float8_e4m3fn or float8_e5m2,
    or of float4_e2m1fn_x2, which has half as many columns, as a byte holds two
    numbers, the first in its low half; uint8 counts as that. Their scales are
    those of ``quantize_mx``, float8_e8m0fnu (or uint8, the same bytes) of
    shapes (..., K / 32) and (N, K / 32); or of ``quantize_nvfp4``,
    float8_e4m3fn of (..., K / 16) and (N, K / 16), with its scales of the
    tensors, of one float32. The two matrices may differ in their numbers, not
    in their kind of scales. ``x`` may also be bfloat16 or float16, with a
    ``scale_x`` of None. K is a multiple of 32, or of 16 with scales of
    float8_e4m3fn. ``bias`` (N,) is bfloat16, float16 or float32, or None.

    The result (..., N) is ``out_dtype``: bfloat16, float16 or float32, and is
    contiguous. Operands that are not contiguous are copied in each call.
    Deterministic on one kind of GPU; without a gradient: training multiplies
    the transposes of both matrices too, whose blocks are other ones. Raises
    TypeError for other dtypes and ValueError for other shapes.

    Rounding: products are summed and scaled in float32, the bias is added, and
    the result is rounded once. On GPUs without an instruction for the formats,
    a number times its scale is rounded to bfloat16, which is exact down to
    2**-126; or to float16, if ``x`` is, which is exact from 2**-14 to 65504.
    Formats: https://arxiv.org/abs/2310.10537.
    """
    given = x, weight, scale_x, scale_weight, bias, out_dtype
    return _mx_matmul_launch(
        *given,
        tensor_scale_x,
        tensor_scale_weight,
        wrap_triton(_mx_matmul_kernel),
    )


# On a GPU a call goes to the launcher; all else goes on to the triton_op.
MX_MATMUL_LIBRARY = Library(MX_MATMUL_NAMESPACE, "FRAGMENT")
MX_MATMUL_LIBRARY.impl("mx_matmul", _mx_matmul_launch, "CUDA")
