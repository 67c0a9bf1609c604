"""The op of the recipe Cumulative sum and its gradient, for rows of all lengths, layouts and dtypes."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused
from compiled import TRITON, Ask, ptx
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, sizes


def reverse(x: torch.Tensor) -> torch.Tensor:
    """Return the sums from each element to the end of its row."""
    return torch.cumsum(x.flip(-1), -1).flip(-1) if x.ndim else x


SCAN = {"cumsum": lambda x: torch.cumsum(x, -1), "cumsum_backward": reverse}


def rows(draw: Draw, *shape: int) -> tuple[torch.Tensor]:
    """Make rows."""
    return (draw(*shape),)


def special(draw: Draw) -> list[tuple[torch.Tensor]]:
    """Make rows of one block and several with NaN and infinities; what comes before them, and other rows, stays."""
    N = 3000
    x = torch.zeros(8, N, dtype=draw.dtype, device=DEVICE)
    x[0, 5], x[1, N - 1], x[2, 1500], x[3, 7], x[3, 2900] = torch.nan, torch.inf, -torch.inf, torch.inf, -torch.inf
    x[4, :], x[5, ::2], x[6, 0], x[6, 2000] = torch.nan, torch.inf, torch.inf, torch.nan
    x[7, ::7] = -0.0
    return [(part,) for part in (x, x[:, :5], x[:, 1024:2900])]


def roundings(out: torch.Tensor) -> int:
    """Return the additions in a block, one after another: NumPy, in the interpreter, makes no tree of them."""
    N = out.shape[-1:].numel()
    if out.dtype == torch.float64:  # in which the carry rounds too, and so does the reference
        return 48 + N
    return 96 if DEVICE.type == "cuda" else 16 + min(N, 4 * 1024)


def case(name: str, other: str) -> Case:
    """Return the case of a direction; the gradient is a scan in the other."""
    scan, back = SCAN[name], SCAN[other]
    refused = [
        Refused(lambda draw, to=dtype: (draw(2, 3).to(to),), TypeError, rf"{name} takes floating dtypes, not {dtype}")
        for dtype in (torch.int32, torch.bool, torch.complex64)
    ]
    long = rf"{name} takes rows of up to {2**30} elements, not {2**30 + 1}"
    return Case(
        name,
        rows,
        lambda x: [Exact(scan(x), scan(x.abs()))],
        sizes=SIZES,
        small=(2, 5),
        in_layouts=(3, 1025),
        settings={"CUMSUM_SHARED": 0},  # a program a row
        shapes=st.tuples(LEADS, sizes(1024, 4500)).map(lambda drawn: (*drawn[0], drawn[1])),
        roundings=roundings,
        floor=lambda dtype: torch.finfo(dtype).tiny,
        reference=scan,
        special=special,
        gradients=lambda grad, x: [Exact(back(grad), back(grad.abs()))],
        second_gradients=True,
        autocast=torch.float32 if name == "cumsum" else None,
        refused=[*refused, Refused(lambda draw: (draw(1).expand(2**30 + 1),), ValueError, long)],
    )


LEADS = st.sampled_from([(), (1,), (0,), (5,), (2, 3), (3, 1, 2)])
# Lengths of each block and their neighbours, more rows than a program has; a number is a row of one.
SIZES = [(3, 1), (129, 8), (3, 1025), (5, 0), (17, 64), (3, 3000), (), (3, 4097)]
SIZES += [(1024 // N + 1, N) for N in (2, 3, 4, 16, 32, 100, 128, 256, 512, 1023, 1024)]
SIZES += [(3, N) for N in (2048, 4096, 8192, 8200, 20_001)]
CONTRACT = [case("cumsum", "cumsum_backward"), case("cumsum_backward", "cumsum")]
CONTRACT += [
    replace(one, name=f"{one.name}, few long rows", settings={}, sizes=[(3, 4097), (2, 20_001), (1, 9000)], refused=[])
    for one in CONTRACT
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", [8, 40, 1024, 1025, 2050, 5000])
def test_exact(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Small integers leave nothing to rounding: every sum is exact, in more rows than a program has."""
    rows = 2100 // N + 2
    x = torch.randint(-2, 3, (rows, N + 8), device=DEVICE).to(dtype)[:, 8:]
    x = x * (torch.arange(N, device=DEVICE) % 8 == 3)  # half precision has integers up to 256
    for name in SCAN:
        expected = SCAN[name](x.double())
        assert expected.abs().max() <= 256
        assert torch.equal(getattr(taken, name)(x).double(), expected)


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 1000, 2500):
        x = torch.randn(9, N, generator=torch.Generator().manual_seed(N)).to(DEVICE)
        backward = False
        for name, step in recipe.STEPS.items():
            y = torch.full_like(x, torch.nan)
            step(x, y)
            backward |= name.startswith("backward")
            if not name.startswith("backward"):  # which makes its own
                torch.testing.assert_close(y, reverse(x) if backward else x.cumsum(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(recipe.cumsum_rows(x), x.cumsum(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(recipe.cumsum_torch(x)[0], x.cumsum(-1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [0, 128])
def test_wide_accumulator(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shared: int) -> None:
    """Adding up ones does not stand still at the 2048 or 256 where half precision does."""
    monkeypatch.setattr(taken, "CUMSUM_SHARED", shared)
    x = torch.ones(2, 9000, dtype=dtype, device=DEVICE)
    counts = torch.arange(1, 9001, device=DEVICE).double()
    rtol = torch.finfo(dtype).eps
    torch.testing.assert_close(taken.cumsum(x)[1].double(), counts, rtol=rtol, atol=0)
    torch.testing.assert_close(taken.cumsum_backward(x)[1].double(), counts.flip(0), rtol=rtol, atol=0)


@pytest.mark.parametrize("shared", [0, 128])
def test_carry_accumulator(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, shared: int) -> None:
    """The error does not grow along a row: float32 sums of a large number and ones, far behind the large number."""
    monkeypatch.setattr(taken, "CUMSUM_SHARED", shared)
    x = torch.zeros(200, 1024, device=DEVICE)
    x[0, 0], x[1:, 5] = 2**26, 1  # which float32 cannot add one by one
    out = taken.cumsum(x.view(1, -1)).view(200, 1024)[:, -1]
    torch.testing.assert_close(out.double(), 2**26 + torch.arange(200, device=x.device).double(), rtol=2**-22, atol=0)


@pytest.mark.parametrize(
    ("rows", "N", "shared"), [(40, 100_277, True), (127, 4097, True), (127, 4096, False), (128, 100_277, False)]
)
def test_few_long_rows_float32(
    taken: ModuleType, monkeypatch: pytest.MonkeyPatch, rows: int, N: int, shared: bool
) -> None:
    """Fewer rows than a GPU has multiprocessors are shared by programs, in both directions."""
    launched = []

    def wrap(kernel: Any) -> Any:
        launched.append(kernel)
        return defaultdict(lambda: lambda *_, **__: None)

    monkeypatch.setattr(taken, "_cumsum_long_launch_either", lambda *_: None)
    x = torch.empty(rows, N, device=DEVICE)
    for launch in (taken._cumsum_launch, taken._cumsum_backward_launch):
        launch(x, wrap)
    assert launched == 2 * [taken._cumsum_long_kernel if shared else taken._cumsum_kernel]


@pytest.mark.needs_gpu_memory(11)
@pytest.mark.parametrize(("rows", "N"), [(2**17 + 1, 2**14), (2**25 + 1, 2**6)])
def test_beyond_int32(taken: ModuleType, rows: int, N: int) -> None:
    """More than 2**31 elements: the last row is right."""
    x = torch.zeros(rows, N, dtype=torch.bfloat16, device=DEVICE)
    x[-1, :: max(1, N // 128)] = 1
    for name, expected in SCAN.items():
        out = getattr(taken, name)(x)
        assert torch.equal(out[-1], expected(x[-1].float()).bfloat16())
        assert not out[:-1].any()
        del out
    view = x[:, : N // 2 - 3]
    assert torch.equal(taken.cumsum(view)[-1], torch.cumsum(view[-1].float(), -1).bfloat16())


def facts(text: str) -> dict[str, Any]:
    """Return what is looked for in PTX."""
    return {
        "wide": set(re.findall(r"(?:ld|st)\.global\.(?:v4\.b32|b32)", text)),
        "shuffles": text.count("shfl.sync"),
        "barriers": text.count("bar.sync"),
    }


def both_ways(recipe: ModuleType) -> dict[str, list[dict[str, Any]]]:
    """Return the facts of the op's kernel and of one with `tl.cumsum` alone, each forward and backward."""
    tl = recipe.tl

    @recipe.triton.jit
    def language_kernel(x_ptr, BLOCK_N: tl.constexpr, REVERSE: tl.constexpr):
        ptrs = x_ptr + tl.arange(0, BLOCK_N)
        tl.store(ptrs, tl.cumsum(tl.load(ptrs), 0, reverse=REVERSE))

    rows = {"ACC": tl.float32, "VEC": 4, "BLOCK_M": 1, "BLOCK_N": 4096, "num_warps": 4}
    heads = rows | {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 2}
    kernels = {
        "rows": (recipe._cumsum_kernel, rows),
        "heads": (recipe._cumsum_kernel, heads),
        "language": (language_kernel, {"BLOCK_N": 1024, "num_warps": 1}),
    }
    return {
        name: [facts(ptx(kernel, "fp32", REVERSE=way, **options)) for way in (False, True)]
        for name, (kernel, options) in kernels.items()
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Backwards costs nothing but where tl.cumsum does it, and loads are wide."""
    (results,) = on_h100(gallery / "fusion" / "cumsum.py", both_ways)
    for name in ("rows", "heads"):
        forward, backward = results[name]
        assert forward == backward
        assert forward["wide"] == {"ld.global.v4.b32", "st.global.v4.b32"}
    forward, backward = (facts["shuffles"] for facts in results["language"])
    assert backward > (2 if TRITON >= (3, 9) else 5) * forward


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "sums stored without a mask",
        "tl.store(y_rows + offs, y, mask=mask)",
        "tl.store(y_rows + offs, y)",
    ),
    ("rows behind the last", "mask = (offs_m < M) & (", "mask = (offs_m < M + 1) & ("),
    ("rows taken for adjacent", "x_ptr + offs_m * stride_xm", "x_ptr + offs_m * N"),
    (
        "a carry that forgets",
        "carry += tl.sum(x, axis=1, keep_dims=True)",
        "carry = carry * 0 + tl.sum(x, axis=1, keep_dims=True)",
    ),
    (
        "a carry rounded to float32",
        "carry = tl.zeros((BLOCK_M, 1), dtype=tl.float64)",
        "carry = tl.zeros((BLOCK_M, 1), dtype=tl.float32)",
    ),
    ("vectors that are not turned", "            x = _cumsum_long_turn(x, VEC)\n", "            x += 0\n"),
    ("sums that are not turned back", "            y = _cumsum_long_turn(y, VEC)\n", "            y += 0\n"),
    ("few rows that are not shared", "CUMSUM_SHARED = 128", "CUMSUM_SHARED = 0"),
    ("short rows that are shared", "if N > 4 * CUMSUM_BLOCK and", "if N > 0 and"),
    ("vectors across rows", "VEC = math.gcd(N, stride, 16 // size)", "VEC = math.gcd(stride, 16 // size)"),
    (
        "a gradient from left to right",
        'return _cumsum_launch_either("cumsum_backward", grad, wrap, True)',
        'return _cumsum_launch_either("cumsum_backward", grad, wrap, False)',
    ),
]
