"""Workloads of experts/grouped_matmul: beside PyTorch's grouped products, a loop over the groups, and one product."""

# ruff: noqa: N806 - E, R, K and N are sizes, as in the recipe

from functools import partial
from typing import Any

from triton_gallery.libraries.workload import Bytes, Function, Product, Workload

# Groups, rows of all, K and N: experts of Switch-like models, of Qwen3-30B-A3B, and of DeepSeek-V3 on eight GPUs, with
# 256 rows an expert and with more
LAYERS = [(8, 32768, 768, 2048), (8, 32768, 2048, 768)]
LAYERS += [(128, 262144, 2048, 1536), (128, 262144, 768, 2048)]
LAYERS += [(32, 8192, 7168, 2048), (32, 65536, 7168, 2048), (32, 65536, 2048, 7168)]
# All experts of a layer on one GPU, or few rows an expert: reading the weights takes most of the time. Skewed ones
# have the skew last.
SKEWED = [(64, 8192, 4096, 14336, 1), (64, 2048, 4096, 14336, 1)]
FEW = [(128, 128, 2048, 1536), (128, 1024, 2048, 1536), (256, 256, 7168, 2048), (64, 512, 4096, 14336)]
FEW += [(256, 65536, 7168, 2048)]
# Sizes that no model has, drawn at random
DRAWN = [(99, 49674, 3520, 408), (67, 33507, 4056, 3392), (78, 31235, 3008, 4856), (56, 33076, 1216, 2384)]
DRAWN += [(36, 49533, 856, 5144), (65, 59622, 4440, 5856), (38, 20326, 888, 6056), (19, 58907, 2784, 3944)]
DRAWN += [(16, 20_000, 1792, 5000), (32, 9_999, 2880, 2880), (8, 5000, 1792, 5000)]
# In float8: DeepSeek-V3's experts, from above and with eight and four groups; then few rows
FP8_LAYERS = [(16, 20_000, 1792, 5008), *LAYERS[4:]]
FP8_LAYERS += [(E, 32768, K, N) for E in (8, 4) for K, N in ((2048, 7168), (7168, 4096))]
FP8_FEW = [(32, 32, 7168, 4096), (32, 512, 7168, 4096), (256, 256, 7168, 2048), (256, 4096, 7168, 2048)]
SQUARE = 128


def lengths(shape: tuple[int, ...]) -> Any:
    """Return how many rows each group has: drawn at random, the same for a shape each time."""
    import torch

    E, R, _, _, *skew = shape
    generator = torch.Generator().manual_seed(0)
    chances = torch.arange(1, E + 1, dtype=torch.float64) ** -sum(skew)
    return torch.multinomial(chances, R, replacement=True, generator=generator).bincount(minlength=E)


def inputs(random: Function, shape: tuple[int, ...], transposed: bool = True) -> tuple[Any, ...]:
    """Return x, the weight, as linear layers have it or not, and where groups end."""
    E, R, K, N = shape[:4]
    weight = random((E, N, K)).mT if transposed else random((E, K, N))
    x = random((R, K))
    return x, weight, lengths(shape).cumsum(0).int().to(x.device)


def grouped(torch: Any) -> Function:
    """Return PyTorch's grouped product, given `torch`."""
    return lambda x, weight, offsets: torch.nn.functional.grouped_mm(x, weight, offs=offsets)


def loop(torch: Any) -> Function:
    """Return a loop over the groups, given `torch`: it waits for the GPU to know them."""

    def product(x: Any, weight: Any, offsets: Any) -> Any:
        ends = offsets.tolist()
        parts = zip([0, *ends], ends, weight.unbind(0), strict=False)
        return torch.cat([x[start:end] @ matrix for start, end, matrix in parts])

    return product


def operations(shape: tuple[int, ...], itemsize: int, times: int = 1) -> Product:
    """Return the operations of so many products."""
    _, R, K, N = shape[:4]
    return Product(M=R, N=N, K=times * K)


def moved(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return what has to move: the weights of groups that have rows, x, and the result."""
    _, R, K, N = shape[:4]
    some = int((lengths(shape) > 0).sum())
    return Bytes(itemsize * (some * K * N + R * K), itemsize * R * N)


def fp8_inputs(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return what `inputs` does, in float8, and scales of rows; PyTorch takes K and N that are multiples of 16."""
    import torch

    E, R, K, N = shape[:4]
    x, weight, offsets = inputs(random, (E, R, -(-K // 16) * 16, -(-N // 16) * 16))
    scales = (torch.rand(*t.shape[:-1], device=x.device) + 0.5 for t in (x, weight.mT))
    return *(t.detach().to(torch.float8_e4m3fn) for t in (x, weight.mT)), offsets, *scales


def fp8_block_inputs(random: Function, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return that with scales of blocks, and last those of the first weight as PyTorch's dense product takes them.

    It takes scales by columns, those of the weight with a multiple of four in each column.
    """
    import torch

    E, R, K, N = shape[:4]
    squares = -(-K // SQUARE)
    x, weight, offsets, *_ = fp8_inputs(random, (E, R, squares * SQUARE, N))
    scale_x = (torch.rand(squares, R, device=x.device) + 0.5).T
    scale_weight = torch.rand(E, -(-weight.shape[1] // SQUARE), squares, device=x.device) + 0.5
    first = torch.nn.functional.pad(scale_weight[0], (0, -squares % 4)).T
    return x, weight, offsets, scale_x, scale_weight, first


def fp8_grouped(torch: Any) -> Function:
    """Return PyTorch's grouped product of float8, which a GPU has, or else one of what the matrices stand for."""

    def product(x: Any, weight: Any, offsets: Any, scale_x: Any, scale_weight: Any) -> Any:
        if not x.is_cuda:
            wide = (weight.float() * scale_weight[..., None]).mT
            return loop(torch)(x.float() * scale_x[:, None], wide, offsets).bfloat16()
        row = torch.nn.functional.ScalingType.RowWise
        scales = scale_x, row, scale_weight, row
        return torch.nn.functional.scaled_grouped_mm(x, weight.mT, *scales, offs=offsets, use_fast_accum=True)

    return product


def fp8_dense(torch: Any) -> Function:
    """Return PyTorch's product of all rows with the first weight: it has none of groups with scales of blocks."""

    def product(x: Any, weight: Any, offsets: Any, scale_x: Any, scale_weight: Any, first: Any) -> Any:
        if not x.is_cuda:
            squares = scale_weight[0].repeat_interleave(SQUARE, 0)[: weight.shape[1]]
            pairs = (x, scale_x), (weight[0], squares)
            rows, matrix = (t.float() * scale.repeat_interleave(SQUARE, 1) for t, scale in pairs)
            return (rows @ matrix.T).bfloat16()
        kinds = torch.nn.functional.ScalingType
        scales = scale_x, kinds.BlockWise1x128, first, kinds.BlockWise128x128
        return torch.nn.functional.scaled_mm(x, weight[0].T, *scales)

    return product


def fp8_moved(shape: tuple[int, ...], itemsize: int) -> Bytes:
    """Return what has to move: float8 is read, and a result of 16 bits is written."""
    moves = moved(shape, 1)
    return Bytes(moves.read, 2 * moves.written)


WORKLOADS = [
    Workload(
        "experts/grouped_matmul",
        ours=lambda op: op.grouped_matmul,
        torch=product,
        compiles=False,
        shapes=shapes,
        inputs=partial(inputs, transposed=transposed),
        forward=forward,
        backward=partial(operations, times=2) if backward else None,
        variant=variant,
    )
    for variant, product, shapes, transposed, forward, backward in (
        ("", grouped, LAYERS, True, operations, True),
        ("weights (E, K, N)", grouped, LAYERS[:4], False, operations, True),
        ("skewed", grouped, SKEWED, True, moved, False),
        ("few rows", grouped, FEW, True, moved, False),
        ("drawn", grouped, DRAWN, True, operations, True),
        ("beside a loop", loop, [*LAYERS[:1], *LAYERS[3:5], *FEW[1:2]], True, operations, False),
    )
]
WORKLOADS += [
    Workload(
        "experts/grouped_matmul",
        ours=lambda op: lambda *given: op.grouped_matmul_fp8(*given[:5]),
        torch=product,
        compiles=False,
        shapes=shapes,
        inputs=made,
        forward=forward,
        backward=None,
        variant=variant,
        alike=alike,
    )
    for variant, product, shapes, made, forward, alike in (
        ("float8", fp8_grouped, FP8_LAYERS, fp8_inputs, operations, lambda *results: results),
        ("float8, few rows", fp8_grouped, FP8_FEW, fp8_inputs, fp8_moved, lambda *results: results),
        # The first row is of the first group.
        (
            "float8 blocks beside a dense product",
            fp8_dense,
            FP8_LAYERS,
            fp8_block_inputs,
            operations,
            lambda output, ours: (output[:1], ours[:1]),
        ),
    )
]
