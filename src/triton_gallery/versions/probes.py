"""Probes of Triton's features: each is one call, made in a process of its own.

`python -m triton_gallery.versions.probes NAME` makes one; it ends with an error if this Triton lacks the feature. Those
whose name ends in `interpreted` want TRITON_INTERPRET=1 and compare with PyTorch; the others compile for a GPU that
need not be here.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HOPPER, BLACKWELL = 90, 100
PROBES: dict[str, Callable[[], None]] = {}


def probe(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """List a function as the probe of a feature."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        PROBES[name] = function
        return function

    return add


def compiled(kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: int = HOPPER) -> Any:
    """Return a kernel compiled for a compute capability; 90 is 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(kind(kernel, signature, places), target=GPUTarget("cuda", capability, 32))


@triton.jit
def through_descriptor(x, out, rows, columns, BLOCK: tl.constexpr):
    """Double a matrix, tile by tile, through tensor descriptors."""
    tile = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    into = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    at = [tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK]
    into.store(at, 2 * tile.load(at))


@triton.jit
def through_block_pointer(x, out, rows, columns, BLOCK: tl.constexpr):
    """Double a matrix, tile by tile, through block pointers."""
    at = (tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK)
    tile = tl.make_block_ptr(x, (rows, columns), (columns, 1), at, (BLOCK, BLOCK), (1, 0))
    into = tl.make_block_ptr(out, (rows, columns), (columns, 1), at, (BLOCK, BLOCK), (1, 0))
    tl.store(into, 2 * tl.load(tile, boundary_check=(0, 1)), boundary_check=(0, 1))


@triton.jit
def product(x, y, out, columns, BLOCK: tl.constexpr, SPECIALIZE: tl.constexpr):
    """Multiply rows of tiles by columns of tiles; the loop may have warps of its own for the loads."""
    left = tl.make_tensor_descriptor(x, [BLOCK, columns], [columns, 1], [BLOCK, BLOCK])
    right = tl.make_tensor_descriptor(y, [BLOCK, columns], [columns, 1], [BLOCK, BLOCK])
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for at in tl.range(0, columns, BLOCK, warp_specialize=SPECIALIZE):
        total = tl.dot(left.load([0, at]), right.load([0, at]).T, total)
    place = tl.arange(0, BLOCK)
    tl.store(out + place[:, None] * BLOCK + place[None, :], total)


@triton.jit
def gathered(x, index, out, BLOCK: tl.constexpr):
    """Return the elements of a vector in another order."""
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.gather(tl.load(x + place), tl.load(index + place), 0))


@triton.jit
def scaled_product(x, x_scale, y, y_scale, out, BLOCK: tl.constexpr):
    """Multiply two square tiles of float8, of which 32 elements each have one scale."""
    place, scales = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 32)
    square, narrow = place[:, None] * BLOCK + place[None, :], place[:, None] * (BLOCK // 32) + scales[None, :]
    left, right = tl.load(x + square), tl.load(y + square)
    total = tl.dot_scaled(left, tl.load(x_scale + narrow), "e4m3", right, tl.load(y_scale + narrow), "e4m3")
    tl.store(out + square, total)


@triton.jit
def polled(flag, out):
    """Wait until a flag is 1."""
    tl.store(out, tl.atomic_poll(flag, 1))


@gluon.jit
def in_gluon(x, out, BLOCK: gl.constexpr):
    """Double a vector in a layout that is given."""
    place = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out + place, 2 * gl.load(x + place))


MATRIX = {"x": "*fp32", "out": "*fp32", "rows": "i32", "columns": "i32"}
PRODUCT = {"x": "*fp16", "y": "*fp16", "out": "*fp32", "columns": "i32"}
SCALED = {"x": "*fp8e4nv", "x_scale": "*u8", "y": "*fp8e4nv", "y_scale": "*u8", "out": "*fp32"}


def doubled(kernel: Any) -> None:
    """Assert that a kernel doubles a matrix in the interpreter."""
    x = torch.arange(40.0 * 24).reshape(40, 24)
    out = torch.zeros_like(x)
    kernel[3, 2](x, out, *x.shape, BLOCK=16)
    torch.testing.assert_close(out, 2 * x)


@probe("tensor descriptors, interpreted")
def _() -> None:
    doubled(through_descriptor)


@probe("tensor descriptors, for an H100")
def _() -> None:
    compiled(through_descriptor, MATRIX, {"BLOCK": 32})


@probe("block pointers, interpreted")
def _() -> None:
    doubled(through_block_pointer)


@probe("block pointers, for an H100")
def _() -> None:
    compiled(through_block_pointer, MATRIX, {"BLOCK": 32})


def specialized(capability: int) -> None:
    """Assert that the compiler gives the loads of a loop warps of their own."""
    made = compiled(product, PRODUCT, {"BLOCK": 128, "SPECIALIZE": True}, capability)
    assert "ttg.warp_specialize" in made.asm["ttgir"], "it compiles, but all warps do the same"


@probe("warp specialisation, for an H100")
def _() -> None:
    specialized(HOPPER)


@probe("warp specialisation, for a B200")
def _() -> None:
    specialized(BLACKWELL)


@probe("Gluon, for an H100")
def _() -> None:
    compiled(in_gluon, {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 128})


@probe("tl.gather, interpreted")
def _() -> None:
    x, index = torch.randn(16), torch.randperm(16)
    out = torch.zeros_like(x)
    gathered[1,](x, index, out, BLOCK=16)
    assert torch.equal(out, x[index])


@probe("tl.gather, for an H100")
def _() -> None:
    compiled(gathered, {"x": "*fp32", "index": "*i32", "out": "*fp32"}, {"BLOCK": 128})


@probe("tl.dot_scaled, interpreted")
def _() -> None:
    x, y = torch.randn(2, 64, 64).to(torch.float8_e4m3fn)
    scales, out = torch.randint(126, 129, (2, 64, 2), dtype=torch.uint8), torch.zeros(64, 64)
    scaled_product[1,](x, scales[0], y, scales[1], out, BLOCK=64)
    left, right = (
        t.double() * 2.0 ** (s.double() - 127).repeat_interleave(32, 1) for t, s in zip((x, y.T), scales, strict=True)
    )
    torch.testing.assert_close(out.double(), left @ right.T, rtol=1e-5, atol=1e-5)


@probe("tl.dot_scaled, for an H100")
def _() -> None:
    compiled(scaled_product, SCALED, {"BLOCK": 64})


@probe("tl.atomic_poll, interpreted")
def _() -> None:
    flag, out = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    polled[1,](flag, out)
    assert out.item() == 1


@probe("tl.atomic_poll, for an H100")
def _() -> None:
    compiled(polled, {"flag": "*i32", "out": "*i32"}, {})


@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"])
@triton.jit
def tuned(x, out, n, BLOCK: tl.constexpr):
    """Double a vector; the block is tuned."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, 2 * tl.load(x + place, place < n), place < n)


@probe("triton.autotune under torch.compile, on a GPU")
def _() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        tuned[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
        return out + 1

    x = torch.randn(100, device="cuda")
    torch.testing.assert_close(torch.compile(double, fullgraph=True)(x), 2 * x + 1)


if __name__ == "__main__":
    PROBES[sys.argv[1]]()
