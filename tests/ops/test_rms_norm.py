"""The ops of the recipe RMSNorm: values and gradients in any dtype, shape and layout, with a residual and without."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from compiled import Ask, stack
from device_key import at_cuda
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, sizes
from tolerance import assert_within

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EPS = 1e-5
LEADS = st.sampled_from([(), (0,), (1,), (5,), (2, 0, 3), (2, 3)])


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/rms_norm.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/rms_norm.py")


def longest(dtype: torch.dtype) -> int:
    """Return how many elements the longest row has that the ops take."""
    return 64 * 1024 // max(4, dtype.itemsize)


def assert_forward(taken: ModuleType, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Assert that both ops are right and store nowhere else; return h."""
    outputs = guarded(partial(taken.rms_norm_residual, eps=EPS), x, residual, weight)
    y, h = outputs
    assert all(out.dtype == x.dtype and out.is_contiguous() and out.shape == x.shape for out in outputs)
    assert_within(h, x.double() + residual.double(), x.double().abs() + residual.double().abs(), roundings=2)
    alone = guarded(partial(taken.rms_norm, eps=EPS), h, weight)
    for of, out in ((h, y), (h, alone)):
        wide = of.double()
        r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) if of.numel() else wide
        expected = wide * r * weight.double()
        assert_within(out, expected, expected.abs(), roundings=64)  # sums in trees
    return h


def assert_backward(
    taken: ModuleType, dy: torch.Tensor, dh: torch.Tensor | None, h: torch.Tensor, weight: torch.Tensor
) -> None:
    """Assert that the gradients are right, and the op stores nowhere else."""
    dx, dw = guarded(
        lambda *t: taken.rms_norm_backward(t[0], None if dh is None else t[1], t[-2], t[-1], EPS),
        *(t for t in (dy, dh, h, weight) if t is not None),
    )
    assert dx.dtype == dw.dtype == h.dtype
    wide, g, w = h.double(), dy.double(), weight.double()
    more = torch.zeros_like(wide) if dh is None else dh.double()
    if h.numel() == 0:
        assert not dw.any()
        return
    N = h.shape[-1]
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    c = (g * w * wide).mean(-1, keepdim=True) * r * r
    most = (g * w * wide).abs().mean(-1, keepdim=True) * r * r
    magnitude = ((g * w).abs() + most * wide.abs()) * r + more.abs()
    assert_within(dx, (g * w - c * wide) * r + more, magnitude, roundings=64)
    terms = (g * wide * r).reshape(-1, N)
    assert_within(dw, terms.sum(0), terms.abs().sum(0), roundings=64 + len(terms))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(64, 600), of=st.tuples(layouts(), layouts(), layouts()))
def test_value(
    taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of: tuple[Layout, Layout, Layout]
) -> None:
    """The values are right for any length and layout."""
    x, residual = (layout.make((*lead, N), dtype, DEVICE) for layout in of[:2])
    assert_forward(taken, x, residual, of[2].make((N,), dtype, DEVICE))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(64, 600), of=st.tuples(*[layouts()] * 4), more=st.booleans())
def test_gradient(
    taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of: tuple[Layout, ...], more: bool
) -> None:
    """The gradients are right for any length and layout, with a gradient of h and without."""
    dy, dh, h = (layout.make((*lead, N), dtype, DEVICE) for layout in of[:3])
    assert_backward(taken, dy, dh if more else None, h, of[3].make((N,), dtype, DEVICE))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_autograd(taken: ModuleType, dtype: torch.dtype) -> None:
    """Autograd hands each input the gradient that the backward op has, whichever results were used."""
    x, residual, dy, dh = (Layout("contiguous", k).make((3, 4, 50), dtype, DEVICE) for k in range(4))
    weight = Layout("contiguous", 4).make((50,), dtype, DEVICE)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    y, h = taken.rms_norm_residual(*leaves, EPS)
    h_alone = h.detach()
    for used, grads, given_ in (((y, h), (dy, dh), (dy, dh)), ((y,), (dy,), (dy, None)), ((h,), (dh,), (dy * 0, dh))):
        got = torch.autograd.grad(used, leaves, grads, retain_graph=True)
        dx, dw = taken.rms_norm_backward(*given_, h_alone, weight.detach(), EPS)
        for one, expected in zip(got, (dx, dx, dw), strict=True):
            assert torch.equal(one, expected)
    got = torch.autograd.grad(taken.rms_norm(x, weight, EPS), (x, weight), dy)
    expected = taken.rms_norm_backward(dy, None, x.detach(), weight.detach(), EPS)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


# A length for every tile, those beside them, two blocks of all kinds, and one that 8 divides and 16 does not.
LENGTHS = [*(2**k for k in range(15)), 3, 100, 257, 1000, 2049, 3000, 4097, 5120, 6145, 8191, 8200, 12288, 12289]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths, more of them than a tile has, with a gap between them."""
    if longest(dtype) < N:
        pytest.skip("a longer row than the ops take")
    rows = 2 if N > 1024 else 4096 // N + 1
    x, residual, dy, dh = (Layout("contiguous", k).make((rows, N + 8), dtype, DEVICE)[:, 8:] for k in range(4))
    weight = Layout("contiguous", 4).make((N,), dtype, DEVICE)
    h = assert_forward(taken, x, residual, weight)
    assert_backward(taken, dy, dh, h, weight)
    assert_backward(taken, dy, None, x, weight)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("N", [100, 5000, 9000])
def test_many_rows_for_each_program(taken: ModuleType, N: int, dtype: torch.dtype) -> None:
    """The backward's programs go on to further rows, and sum their gradients."""
    plan = taken._rms_norm_plan_backward(torch.empty(10**6, N, dtype=dtype, device="meta"), EPS, N, False)[1]
    rows = 1 + 2 * plan["BLOCK_M"] * taken._rms_norm_gpu(DEVICE)[0] * 4
    rows = min(rows, 2**22 // N) if DEVICE.type == "cuda" else min(rows, 40_000 // N + 9)
    h, dy = (Layout("contiguous", k).make((rows, N), dtype, DEVICE) for k in range(2))
    weight = Layout("contiguous", 4).make((N,), dtype, DEVICE)
    assert_backward(taken, dy, None, h, weight)
    first, again = (taken.rms_norm_backward(dy, None, h, weight, EPS) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True)), "the same bits each time"


def test_plans(taken: ModuleType) -> None:
    """The launchers ask for what the page says."""
    for dtype in FLOATS:
        size = max(4, dtype.itemsize)
        for N in (*range(1, longest(dtype), 61), 5120, 8192, longest(dtype)):
            x = torch.empty(1, N, dtype=dtype, device="meta")
            for backward in (False, True):
                plan = taken._rms_norm_plan(x, EPS, N, backward=backward)
                block, rest = plan["BLOCK_N"], plan["REST"]
                assert block + rest >= N
                assert block + rest < 2 * N
                assert not rest or (block + rest) * 3 <= N * 4 or backward
                assert not rest or block * size >= 16 * 1024 // 2
                assert plan["BLOCK_M"] == 1 or plan["BLOCK_M"] * block * size in (8 * 1024, 16 * 1024)
                assert plan["num_warps"] in ((4, 8, 16) if backward else (4, 8))
                assert N % plan["VEC"] == 0
            programs, options = taken._rms_norm_plan_backward(x, EPS, N, True)
            assert programs == 1
            assert options["STAGES"] in (1, 2, 3)
    rows = torch.empty(10**6, 12288, dtype=torch.bfloat16, device="meta")
    for dtype, stages in ((torch.bfloat16, 2), (torch.float32, 1)):
        assert taken._rms_norm_plan_backward(rows.to(dtype), EPS, 12288, False)[1]["STAGES"] == stages
    assert taken._rms_norm_plan_backward(rows, EPS, 12288, False)[0] == 2
    for N, stride, vec in ((1000, 1000, 8), (1000, 1004, 4), (1000, 1001, 1), (1001, 1000, 1)):
        assert taken._rms_norm_plan(rows[:1, :N], EPS, stride)["VEC"] == vec


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 1000, 5000):
        x, residual = (torch.randn(9, N, generator=torch.Generator().manual_seed(k)).to(recipe.DEVICE) for k in (0, 1))
        for name, (step, _) in recipe.STEPS.items():
            y = torch.full_like(x, torch.nan)
            step(x, y, residual)
            if "with" not in name and "backward" not in name:
                h = x + residual if "residual" in name else x
                torch.testing.assert_close(y, torch.nn.functional.rms_norm(h, (N,), h[0], 1e-6))
        torch.testing.assert_close(recipe.norm_rows(x, x[0]), torch.nn.functional.rms_norm(x, (N,), x[0], 1e-6))


def test_gradcheck(taken: ModuleType) -> None:
    """Differences agree with the gradients, of both results and of each."""
    leaves = [
        Layout("contiguous", k).make(shape, torch.float64, DEVICE) for k, shape in enumerate([(2, 5), (2, 5), (5,)])
    ]
    leaves = [t.requires_grad_() for t in leaves]
    for part in (slice(2), slice(1), slice(1, 2)):
        assert torch.autograd.gradcheck(lambda *t, part=part: taken.rms_norm_residual(*t, 0.1)[part], leaves)
    assert torch.autograd.gradcheck(lambda *t: taken.rms_norm(*t, 0.1), leaves[1:])


def test_gradient_has_no_gradient(taken: ModuleType) -> None:
    """A second derivative is refused, not zero."""
    x = Layout("contiguous", 0).make((3, 7), torch.float64, DEVICE).requires_grad_()
    y = taken.rms_norm(x, torch.ones_like(x[0]).detach(), EPS)
    (d,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """The square of 300 is infinite in float16."""
    x = torch.full((2, 100), 300.0, dtype=dtype, device=DEVICE)
    assert torch.equal(taken.rms_norm(x, torch.ones_like(x[0]), EPS), torch.ones_like(x))


def test_special_values_stay_in_their_row(taken: ModuleType) -> None:
    """NaN reaches its own row and no other."""
    x = torch.ones(5, 37, device=DEVICE)
    x[1, 36] = torch.nan
    assert taken.rms_norm(x, x[0], EPS).isnan().any(1).tolist() == [row == 1 for row in range(5)]


def test_refuses(taken: ModuleType) -> None:
    """What the ops do not take, they name."""
    x, weight = torch.ones(2, 3, device=DEVICE), torch.ones(3, device=DEVICE)
    with pytest.raises(TypeError, match=r"^rms_norm takes one float dtype .*float64"):
        taken.rms_norm(x, weight.double(), EPS)
    with pytest.raises(TypeError, match=r"^rms_norm takes .*torch\.int32"):
        taken.rms_norm(x.int(), weight.int(), EPS)
    with pytest.raises(TypeError, match=r"^rms_norm takes one float dtype and device, not .*, None\]"):
        taken.rms_norm(x, None, EPS)
    with pytest.raises(TypeError, match=r"^rms_norm_residual takes .*float16"):
        taken.rms_norm_residual(x, x.half(), weight, EPS)
    for bad in (weight[:2], x, weight[0]):
        with pytest.raises(ValueError, match=r"^rms_norm takes shapes \(\.\.\., N\) and \(N,\), not \[\(2, 3\)"):
            taken.rms_norm(x, bad, EPS)
    with pytest.raises(ValueError, match=r"^rms_norm takes shapes "):
        taken.rms_norm(weight[0], weight[0], EPS)
    with pytest.raises(ValueError, match=r"^rms_norm_residual takes .*\(1, 3\)"):
        taken.rms_norm_residual(x, x[:1], weight, EPS)
    for dy, dh in ((x[:1], None), (x, x[:1])):
        with pytest.raises(ValueError, match=r"^rms_norm_backward takes shapes "):
            taken.rms_norm_backward(dy, dh, x, weight, EPS)
    for dtype in FLOATS:
        most = longest(dtype)
        row = weight[0].to(dtype).expand(most + 1)
        refusal = rf"^rms_norm takes rows of up to {most} .*{dtype}, not {most + 1}: norms_long"
        with pytest.raises(ValueError, match=refusal):
            taken.rms_norm(row, row, EPS)


def test_launchers_are_what_a_call_reaches(taken: ModuleType) -> None:
    """On a GPU, without the triton_op in between."""
    x, residual, dy = (Layout("contiguous", k).make((3, 40), torch.float32, DEVICE) for k in range(3))
    for op, inputs in (
        (taken.rms_norm, (x, x[0])),
        (taken.rms_norm_residual, (x, residual, x[0])),
        (taken.rms_norm_backward, (dy, None, x, x[0])),
    ):
        out, expected = at_cuda(op, *inputs, EPS), op(*inputs, EPS)
        assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))


@pytest.mark.needs_gpu_memory(15)
def test_beyond_int32(taken: ModuleType) -> None:
    """A tensor may have more than 2**31 elements."""
    x = torch.ones(2**19 + 1, 2**12, dtype=torch.float16, device=DEVICE)
    x[-1] = 2
    ones = torch.ones_like(x[0])
    y, h = taken.rms_norm_residual(x, x, ones, EPS)
    assert y.sub_(1).abs_().max() < 1e-3
    assert (h[-1] == 4).all()
    del y, h
    dx, _ = taken.rms_norm_backward(x, None, x, ones, EPS)
    assert dx.abs_().max() < 1e-2


@needs_a_gpu
@pytest.mark.parametrize("N", [100, 5000, 16384])
def test_opcheck(taken: ModuleType, N: int) -> None:
    """All ops pass the whole of opcheck."""
    x, residual, weight = (torch.randn(shape, device=DEVICE) for shape in ((3, N), (3, N), (N,)))
    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
    for op, inputs in (
        (taken.rms_norm, (leaves[0], leaves[2])),
        (taken.rms_norm_residual, tuple(leaves)),
        (taken.rms_norm_backward, (x, residual, x, weight)),
        (taken.rms_norm_backward, (x, None, x, weight)),
    ):
        assert set(torch.library.opcheck(op, (*inputs, EPS)).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the ops, their gradients, and other sizes."""
    torch.compiler.reset()

    def plain(x, residual, weight):
        h = x * 2 + residual
        return torch.nn.functional.rms_norm(h, h.shape[-1:], weight, EPS), h

    def ours(x, residual, weight):
        y, h = taken.rms_norm_residual(x * 2, residual, weight, EPS)
        return (y + taken.rms_norm(h, weight, EPS)) / 2, h

    compiled = torch.compile(ours, fullgraph=True, dynamic=dynamic)
    for shape in ((4, 100), (6, 100), (3, 16384), (2, 5000)):
        leaves = [torch.randn(size, device=DEVICE, requires_grad=True) for size in (shape, shape, shape[-1:])]
        grads = [torch.randn(shape, device=DEVICE) for _ in range(2)]
        out, expected = compiled(*leaves), plain(*leaves)
        torch.testing.assert_close(out, expected)
        for a, b in zip(*(torch.autograd.grad(t, leaves, grads) for t in (out, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The ops run where their inputs are, whichever GPU is the current one."""
    x, weight = torch.randn(5, 100, device="cuda:1", requires_grad=True), torch.randn(100, device="cuda:1")
    y = taken.rms_norm(x, weight, EPS)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (100,), weight, EPS))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, for blocks of all sizes."""
    found = {}
    for dtype, of in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float64, "fp64")):
        for N in (64, 2048, 4096, 5120, 8192, 12288, 16384):
            x = torch.empty(10**4, N, dtype=dtype, device="meta")
            if longest(dtype) >= N:
                partials = {"partial_ptr": "fp64" if dtype == torch.float64 else "fp32"}
                forward = taken._rms_norm_plan(x, EPS, N) | {"ADD": True}
                backward = taken._rms_norm_plan_backward(x, EPS, N, True)[1] | partials
                found[f"{of} {N}"] = stack(taken._rms_norm_kernel, dtype=of, **forward)
                found[f"{of} {N}, backward"] = stack(taken._rms_norm_backward_kernel, dtype=of, **backward)
    return found


@pytest.mark.thorough
def test_register_spills(gallery: Path, on_h100: Ask) -> None:
    """None but for the longest row's gradients, and few there."""
    (found,) = on_h100(gallery / "fusion" / "rms_norm.py", spills)
    assert len(found) == 2 * (7 + 7 + 5)
    spilled = {name: bytes_ for name, bytes_ in found.items() if bytes_}
    assert spilled.keys() <= {"bf16 16384, backward", "fp32 16384, backward", "fp64 8192, backward"}
    assert all(bytes_ <= 256 for bytes_ in spilled.values())


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/rms_norm")
    *kernels, moved, two, error, long, integers, shapes, broken, ours = out.splitlines()
    assert len(kernels) == 8
    assert "20.0 times" in moved
    assert two.endswith(": 2.0")
    assert re.fullmatch(r"largest relative error \d\.\de-07, allowed 1\.0e-06", error)
    assert long.startswith("ValueError: rms_norm takes rows of up to 16384 elements")
    assert integers.startswith("TypeError: ")
    assert shapes.endswith("not [(3, 5), (4,)]")
    assert not any(map(float, re.findall(r"-?\d+\.\d+", broken)))
    assert "[2.0," in ours


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def _norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    return _norm(x + residual, weight, eps), x + residual


def _gradients(
    dy: torch.Tensor, dh: torch.Tensor, h: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    leaves = h.clone().requires_grad_(), weight.clone().requires_grad_()
    dx, dw = torch.autograd.grad(_norm(*leaves, eps), leaves, dy)
    return dx + dh, dw


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    ("rms_norm", lambda normal, M, N: (normal(M, N), normal(N), 1e-6), _norm),
    ("rms_norm_residual", lambda normal, M, N: (normal(M, N), normal(M, N), normal(N), 1e-6), _norm_residual),
    (
        "rms_norm_backward",
        lambda normal, M, N: (normal(M, N), normal(M, N), normal(M, N), normal(N), 1e-6),
        _gradients,
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.


def test_gpu_that_does_not_tell_its_shared_memory(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMD's, torch has no such property."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=304))
    assert taken._rms_norm_gpu.__wrapped__(torch.device("cuda")) == (304, 64 * 1024)


BREAKS = [
    (
        "a mean over the block",
        "r = tl.rsqrt(squares / N + EPS)\n    weight",
        "r = tl.rsqrt(squares / BLOCK_N + EPS)\n    weight",
    ),
    ("a second block without its squares", "tl.sum(x * x) + tl.sum(x_rest * x_rest)", "tl.sum(x * x)"),
    ("a first of two blocks without its squares", "tl.sum(x * x) + tl.sum(x_rest", "tl.sum(x_rest"),
    ("a second block without its weight", "x_rest * r * last, mask", "x_rest * r, mask"),
    ("norm stored without a mask", "y_rows + offs_n, x * r * weight, mask=mask)", "y_rows + offs_n, x * r * weight)"),
    ("a load without a mask", "tl.load(ptrs, mask=mask, other=0)", "tl.load(ptrs)"),
    ("a residual taken for adjacent", "residual_ptr + offs_m * stride_rm", "residual_ptr + offs_m * N"),
    (
        "rows behind the last",
        "    # Rows past the last one are the last one again.\n    offs_m = tl.minimum(offs_m, M - 1)\n",
        "",
    ),
    ("vectors across rows", "math.gcd(N, *strides, 16 // x", "math.gcd(*strides, 16 // x"),
    ("dx stored without a mask", "tl.store(dx_ptr + offs, dx, mask=mask)", "tl.store(dx_ptr + offs, dx)"),
    ("a weight gradient of the last rows", "        dw += _rms_norm_slope(", "        dw = _rms_norm_slope("),
    (
        "a weight gradient of the last rest",
        "            dw_rest += _rms_norm_slope(",
        "            dw_rest = _rms_norm_slope(",
    ),
    ("a slope without the second block", "            products += tl.sum(", "            tl.sum("),
    (
        "rows counted twice",
        "        mask = None if REST else (offs_m < M) & (offs_n < N)\n",
        "        offs_m = tl.minimum(offs_m, M - 1)\n        mask = None if REST else offs_n < N\n",
    ),
    ("half an accumulator, normed", "torch.float16: tl.float32", "torch.float16: tl.float16"),
    ("h read with the stride of dy", "h_ptr + offs_m * stride_hm", "h_ptr + offs_m * N"),
    ("no gradient of h", "    if ADD:\n        dx += ", "    if False:\n        dx += "),
    ("twice the gradient of the residual", "    return dx, dx, dw, None\n", "    return dx, 2 * dx, dw, None\n"),
]
