"""The ops of the recipe LayerNorm: values and gradients in any dtype, shape and layout, and the sum under a lock."""

# ruff: noqa: N806 - a row has N elements, as in the recipe

import re
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
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
    return load_op("fusion/layer_norm.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/layer_norm.py")


def longest(dtype: torch.dtype) -> int:
    """Return how many elements the longest row has that the op takes."""
    return 64 * 1024 // max(4, dtype.itemsize)


def assert_right(
    taken: ModuleType, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor, few: int = 0
) -> None:
    """Assert that value and gradients are right, and the ops store nowhere else and leave nothing out.

    The op computes gradients in one launch or in two. The other way is tried too: two for few rows, and one for more if
    so many rows for each multiprocessor are to be `few`.
    """
    y, stats = guarded(partial(taken.layer_norm_with_stats, eps=EPS), x, weight, bias)
    ways = [taken.layer_norm_backward]
    is_few = 0 < x.numel() <= x.shape[-1] * taken.LAYER_NORM_FEW * taken._layer_norm_gpu(DEVICE)[0]
    if is_few or few:
        ways.append(partial(taken._layer_norm_backward_launch, few=0 if is_few else few))
    gradients = [guarded(backward, dy, x, weight, stats) for backward in ways]
    assert all(out.dtype == x.dtype and out.is_contiguous() for outs in ((y,), *gradients) for out in outs)
    assert stats.dtype == torch.promote_types(x.dtype, torch.float32)
    x, weight, bias, dy = (t.double() for t in (x, weight, bias, dy))
    assert {out.shape for out in (y, *(dx for dx, *_ in gradients))} == {x.shape}
    if x.numel() == 0:
        assert not any(out.any() for out in gradients[0])
        return
    N = x.shape[-1]
    mean = x.mean(-1, keepdim=True)
    d = x - mean
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + EPS)
    # Where a row is nearly constant, or cancels, what is left of x are the roundings of its mean.
    loss = x.abs().amax(-1, keepdim=True) * r
    size = d.abs() * r + loss
    # Sums in trees, which the interpreter may add up term by term
    close = partial(assert_within, roundings=64 + N)
    close(stats[0], mean.flatten(), x.abs().amax(-1).flatten())
    close(stats[1], r.flatten(), (r * (1 + loss)).flatten())
    close(y, d * r * weight + bias, (size * weight).abs() + bias.abs())
    g = dy * weight
    c, most = (d * r * g).mean(-1, keepdim=True), (size * g.abs()).mean(-1, keepdim=True)
    dx_size = (g.abs() + g.abs().mean(-1, keepdim=True) + most * size) * r * (1 + loss)
    across = partial(assert_within, roundings=64 + N + x.numel() // N)
    for dx, dw, db in gradients:
        close(dx, (g - g.mean(-1, keepdim=True) - d * r * c) * r, dx_size)
        across(dw, (dy * d * r).reshape(-1, N).sum(0), (dy.abs() * size).reshape(-1, N).sum(0))
        across(db, dy.reshape(-1, N).sum(0), dy.abs().reshape(-1, N).sum(0))


def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return a random tensor of each shape."""
    return [Layout("contiguous", k).make(shape, dtype, DEVICE) for k, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(lead=LEADS, N=sizes(64, 600), of=st.tuples(layouts(), layouts(), layouts(), layouts()))
def test_value_and_gradients(
    taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], N: int, of: tuple[Layout, ...]
) -> None:
    """They are right for any length and layout."""
    x, dy = (layout.make((*lead, N), dtype, DEVICE) for layout in of[:2])
    weight, bias = (layout.make((N,), dtype, DEVICE) for layout in of[2:])
    assert_right(taken, x, weight, bias, dy)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_autograd(taken: ModuleType, dtype: torch.dtype) -> None:
    """Autograd hands each input the gradient that the backward op has."""
    x, dy, weight, bias = make((3, 4, 50), (3, 4, 50), (50,), (50,), dtype=dtype)
    _, stats = taken.layer_norm_with_stats(x, weight, bias, EPS)
    expected = taken.layer_norm_backward(dy, x, weight, stats)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    got = torch.autograd.grad(taken.layer_norm(*leaves, EPS), leaves, dy)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


# A length for every tile, those beside them, two blocks of all kinds, and one that 8 divides and 16 does not.
LENGTHS = [*(2**k for k in range(15)), 3, 100, 257, 1000, 2049, 3000, 4097, 5120, 6145, 8191, 8200, 12288, 12289]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("N", LENGTHS)
def test_every_length(taken: ModuleType, dtype: torch.dtype, N: int) -> None:
    """Rows of all lengths, more of them than a tile has, with a gap between them."""
    if longest(dtype) < N:
        pytest.skip("a longer row than the op takes")
    rows = 2 if N > 1024 else 4096 // N + 1
    # Rows of an odd length begin, too, at addresses that 16 divides.
    width = -(-N // 8) * 8
    x, dy, weight, bias = make((rows, width + 8), (rows, width + 8), (N,), (N,), dtype=dtype)
    assert_right(taken, x[:, 8 : N + 8], weight, bias, dy[:, 8 : N + 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_apart(taken: ModuleType, dtype: torch.dtype) -> None:
    """Rows that lie apart, differently in x and in its gradient, and NaN between them."""
    rows = 9
    x, dy, weight, bias = make((rows, 1500), (rows, 1500), (1500,), (1500,), dtype=dtype)
    for x_from, dy_from in ((100, 50), (0, 96), (104, 0)):
        wide = torch.cat([x.new_full((rows, x_from), torch.nan), x], 1)[:, x_from:]
        assert x_from == 0 or not wide.is_contiguous()
        grad = torch.cat([dy, dy.new_full((rows, dy_from), torch.nan)], 1)[:, :1500]
        assert_right(taken, wide, weight, bias, grad)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("N", [100, 5000, 9000])
def test_many_rows_for_each_program(taken: ModuleType, N: int, dtype: torch.dtype) -> None:
    """The backward's programs go on to further rows, and sum their gradients with the same bits each time."""
    plan = taken._layer_norm_plan_backward(torch.empty(10**6, N, dtype=dtype, device="meta"), N)[1]
    rows = 1 + 2 * plan["BLOCK_M"] * taken._layer_norm_gpu(DEVICE)[0] * 4
    rows = min(rows, 2**22 // N) if DEVICE.type == "cuda" else min(rows, 40_000 // N + 9)
    x, dy, weight, bias = make((rows, N), (rows, N), (N,), (N,), dtype=dtype)
    assert_right(taken, x, weight, bias, dy, few=rows)
    _, stats = taken.layer_norm_with_stats(x, weight, bias, EPS)
    first, *others = (
        taken.layer_norm_backward(dy, x, weight, stats) for _ in range(20 if DEVICE.type == "cuda" else 3)
    )
    assert all(torch.equal(*pair) for again in others for pair in zip(first, again, strict=True))


def test_plans(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers ask for what the page says."""
    for dtype in FLOATS:
        size = max(4, dtype.itemsize)
        for N in (*range(1, longest(dtype), 61), 5120, 8192, longest(dtype)):
            x = torch.empty(10**6, N, dtype=dtype, device="meta")
            for tile, plan in (
                (16 * 1024, taken._layer_norm_plan(x, N)),
                (8 * 1024, taken._layer_norm_plan_backward(x, N)[1]),
            ):
                block, rest = plan["BLOCK_N"], plan["REST"]
                assert block + rest >= N
                assert block + rest < 2 * N
                assert not rest or block < N
                assert not rest or block * size >= 16 * 1024 // 2
                assert plan["BLOCK_M"] == 1 or plan["BLOCK_M"] * block * size == tile
                assert N % plan["VEC"] == 0
            assert taken._layer_norm_plan(x, N)["num_warps"] in (4, 8)
            programs, plan = taken._layer_norm_plan_backward(x[:1], N)
            assert programs == 1
            assert plan["num_warps"] in (4, 8, 16)
            assert plan["STAGES"] in (1, 3)
    rows = torch.empty(10**6, 12288, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(taken, "_layer_norm_gpu", lambda device: (2, 227 * 1024))  # an H100's shared memory
    for N, stages in {128: 1, 512: 1, 768: 3, 4096: 3, 12288: 3, 16384: 1}.items():
        row = torch.empty(1000, N, dtype=torch.bfloat16, device="meta")
        assert taken._layer_norm_plan_backward(row, N)[1]["STAGES"] == stages
    assert taken._layer_norm_plan_backward(rows.float(), 12288)[1]["STAGES"] == 1
    assert taken._layer_norm_plan_backward(rows, 12288)[0] == 2
    assert [taken._layer_norm_plan(rows[:M], 12288)["EARLY"] for M in (1, 2, 3)] == [True, True, False]
    assert taken._layer_norm_plan(rows[:, :4096], 12288)["EARLY"]
    for N, stride, vec in ((1000, 1000, 8), (1000, 1004, 4), (1000, 1001, 1), (1001, 1000, 1)):
        assert taken._layer_norm_plan(rows[:1, :N], stride)["VEC"] == vec


def test_gpu_that_does_not_tell_its_shared_memory(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of AMD's, torch has no such property."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=304))
    assert taken._layer_norm_gpu.__wrapped__(torch.device("cuda")) == (304, 64 * 1024)


@pytest.mark.parametrize("early", [True, False], ids="float32-{}".format)
@pytest.mark.parametrize("N", [100, 5000])
def test_weight_early_and_late(recipe: ModuleType, N: int, early: bool) -> None:
    """The result is the same wherever weight and bias are loaded."""
    x, y = (t.to(recipe.DEVICE) for t in make((3, N), (3, N)))
    recipe.tiles(x, y, EARLY=early)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (N,), x[0], x[1], EPS))


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for N in (5, 1000, 5000):
        (x,) = (t.to(recipe.DEVICE) for t in make((9, N)))
        expected = torch.nn.functional.layer_norm(x, (N,), x[0], x[1], EPS)
        for name, (step, _) in recipe.STEPS.items():
            y = torch.full_like(x, torch.nan)
            step(x, y)
            if "backward" not in name:
                torch.testing.assert_close(y, expected)
        for kernel in (recipe.row_kernel, recipe.one_pass_kernel):
            torch.testing.assert_close(recipe.norm_rows(x, x[0], x[1], kernel), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("N", "mean"), [(1000, 1e4), (513, 1e6), (12_000, 1e4)], ids="float32-{}".format)
def test_large_mean(taken: ModuleType, N: int, mean: float) -> None:
    """Of a variance of 1 beside it, E[x * x] has no bit left in float32, and the mean is rounded to a part of it."""
    x = torch.randn(16, N, generator=torch.Generator().manual_seed(0)).to(DEVICE) + mean
    one, zero = torch.ones(N, device=DEVICE), torch.zeros(N, device=DEVICE)
    out = taken.layer_norm(x, one, zero, EPS).double()
    expected = torch.nn.functional.layer_norm(x.double(), (N,), eps=EPS)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=4)
@given(N=st.integers(1, 9), M=st.integers(1, 3))
def test_gradcheck(taken: ModuleType, N: int, M: int) -> None:
    """Differences agree with the gradients."""
    leaves = [t.requires_grad_() for t in make((M, N), (N,), (N,), dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *leaves: taken.layer_norm(*leaves, 0.1), leaves)


def test_gradient_has_no_gradient(taken: ModuleType) -> None:
    """A second derivative is refused, not zero."""
    x, weight, bias = make((3, 7), (7,), (7,), dtype=torch.float64)
    y = taken.layer_norm(x.requires_grad_(), weight, bias, EPS)
    (d,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()


def test_statistics_have_no_gradient(taken: ModuleType) -> None:
    """The op's second result is for the backward only."""
    x, weight, bias = make((3, 5), (5,), (5,))
    y, stats = taken.layer_norm_with_stats(x.requires_grad_(), weight, bias, EPS)
    assert y.requires_grad
    assert not stats.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """The square of 300 is infinite in float16, and so is the sum of many."""
    x = torch.full((2, 1000), 300.0, dtype=dtype, device=DEVICE)
    x[:, ::2] *= -1
    one = torch.ones_like(x[0])
    torch.testing.assert_close(taken.layer_norm(x, one, 0 * one, EPS), x.sign())
    x = 301 + x.sign()
    x[:, 0] = 0  # The sum of the differences from it is infinite in float16.
    expected = torch.nn.functional.layer_norm(x.double(), one.shape, eps=EPS).to(dtype)
    torch.testing.assert_close(taken.layer_norm(x, one, 0 * one, EPS), expected, rtol=1e-3, atol=1e-3)


def test_constant_rows(taken: ModuleType) -> None:
    """A row without a variance becomes the bias, and its gradient is finite."""
    x = torch.full((3, 50), 7.0, device=DEVICE)
    leaves = x.requires_grad_(), *make((50,), (50,))
    y = taken.layer_norm(*leaves, EPS)
    assert torch.equal(y, leaves[2].expand(3, 50))
    assert torch.autograd.grad(y, x, x)[0].isfinite().all()


@pytest.mark.parametrize("N", [37, 12_000])
def test_special_values_stay_in_their_row(taken: ModuleType, N: int) -> None:
    """As in PyTorch, NaN and infinity make their own row NaN, and no other."""
    x = torch.ones(5, N, device=DEVICE)
    x[1, N - 1], x[2, 0], x[3, 5] = torch.nan, torch.inf, -torch.inf
    one = torch.ones(N, device=DEVICE)
    expected = torch.nn.functional.layer_norm(x, (N,), one, one, EPS)
    out = taken.layer_norm(x, one, one, EPS)
    assert torch.equal(out.isnan(), expected.isnan())
    # Rows without a variance: half a rounding of the mean is divided by the root of EPS.
    torch.testing.assert_close(out[::4], expected[::4], rtol=0, atol=2**-24 / EPS**0.5 * 2)


def test_refuses(taken: ModuleType) -> None:
    """What the ops do not take, they name."""
    x, one = torch.ones(2, 3, device=DEVICE), torch.ones(3, device=DEVICE)
    with pytest.raises(TypeError, match=r"^layer_norm takes one float dtype .*float64"):
        taken.layer_norm(x, one.double(), one, EPS)
    with pytest.raises(TypeError, match=r"^layer_norm takes .*float16"):
        taken.layer_norm(x, one, one.half(), EPS)
    with pytest.raises(TypeError, match=r"^layer_norm takes a weight and a bias: give ones"):
        taken.layer_norm(x, one, None, EPS)
    with pytest.raises(TypeError, match=r"^layer_norm takes .*torch\.int32"):
        taken.layer_norm(x.int(), one.int(), one.int(), EPS)
    for bad in ((one[:2], one), (one, x), (one, one[:1]), (one[0], one)):
        with pytest.raises(ValueError, match=r"^layer_norm takes shapes \(\.\.\., N\) and \(N,\), not \[\(2, 3\)"):
            taken.layer_norm(x, *bad, EPS)
    with pytest.raises(ValueError, match=r"^layer_norm takes shapes "):
        taken.layer_norm(x[0, 0], one, one, EPS)
    _, stats = taken.layer_norm_with_stats(x, one, one, EPS)
    with pytest.raises(ValueError, match=r"^layer_norm_backward takes shapes "):
        taken.layer_norm_backward(x[:1], x, one, stats)
    with pytest.raises(ValueError, match=r"^layer_norm_backward takes the stats .*\(2, 1\)"):
        taken.layer_norm_backward(x, x, one, stats[:, :1])
    with pytest.raises(TypeError, match=r"^layer_norm_backward takes .*float16"):
        taken.layer_norm_backward(x.half(), x, one, stats)
    for dtype in FLOATS:
        most = longest(dtype)
        row = one[0].to(dtype).expand(most + 1)
        with pytest.raises(
            ValueError, match=rf"^layer_norm takes rows of up to {most} .*{dtype}, not {most + 1}: norms_long"
        ):
            taken.layer_norm(row, row, row, EPS)


def test_launchers_are_what_a_call_reaches(taken: ModuleType) -> None:
    """On a GPU, without the triton_op in between."""
    x, dy, stats = make((3, 40), (3, 40), (2, 3))
    for op, inputs in (
        (taken.layer_norm_with_stats, (x, x[0], x[1], EPS)),
        (taken.layer_norm_backward, (dy, x, x[0], stats)),
    ):
        out, expected = at_cuda(op, *inputs), op(*inputs)
        assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))


@pytest.mark.parametrize(("programs", "N"), [(20, 256), (7, 300)])
def test_sum_under_a_lock(recipe: ModuleType, programs: int, N: int) -> None:
    """With its barrier, the lock loses nothing (only a GPU runs many programs at a time)."""
    programs *= 1 if recipe.DEVICE.type == "cpu" else 50
    sums = torch.randint(-9, 9, (programs, N), device=recipe.DEVICE).float()
    total = guarded(lambda sums: recipe.add_under_lock(sums), sums)
    assert torch.equal(total, sums.sum(0))


@pytest.mark.needs_gpu_memory(14)
def test_beyond_int32(taken: ModuleType) -> None:
    """A tensor may have more than 2**31 elements."""
    x = torch.ones(2**19 + 1, 2**12, dtype=torch.float16, device=DEVICE)
    x[:, ::2] = -1
    x[-1] *= 2
    one = torch.ones_like(x[0])
    y, stats = taken.layer_norm_with_stats(x, one, 0 * one, EPS)
    assert torch.equal(y[-1].sign(), x[-1].sign())
    assert y.abs_().sub_(1).abs_().max() < 1e-3
    del y
    dx, _, _ = taken.layer_norm_backward(x, x, one, stats)
    assert dx.abs_().max() < 1e-2


@needs_a_gpu
@pytest.mark.parametrize("N", [100, 5000, 16384])
def test_opcheck(taken: ModuleType, N: int) -> None:
    """Both ops pass the whole of opcheck."""
    x, dy, weight, bias = make((3, N), (3, N), (N,), (N,))
    _, stats = taken.layer_norm_with_stats(x, weight, bias, EPS)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    for op, inputs in (
        (taken.layer_norm_with_stats, (*leaves, EPS)),
        (taken.layer_norm_backward, (dy, x, weight, stats)),
    ):
        assert set(torch.library.opcheck(op, inputs).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradients, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, weight, bias: taken.layer_norm(x * 2, weight, bias, EPS), fullgraph=True, dynamic=dynamic
    )
    for shape in ((4, 100), (6, 100), (3, 16384), (2, 5000)):
        *leaves, dy = make(shape, shape[-1:], shape[-1:], shape)
        leaves = [t.requires_grad_() for t in leaves]
        x, weight, bias = leaves
        out, expected = compiled(*leaves), torch.nn.functional.layer_norm(x * 2, x.shape[-1:], weight, bias, EPS)
        torch.testing.assert_close(out, expected)
        for a, b in zip(*(torch.autograd.grad(t, leaves, dy) for t in (out, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its inputs are, whichever GPU is the current one."""
    x, weight, bias = (t.to("cuda:1") for t in make((5, 100), (100,), (100,)))
    y = taken.layer_norm(x.requires_grad_(), weight, bias, EPS)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (100,), weight, bias, EPS))
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, for blocks of all sizes."""
    found = {}
    for dtype, of in ((torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float64, "fp64")):
        for N in (64, 2048, 4096, 5120, 8192, 12288, 16384):
            x = torch.empty(10**4, N, dtype=dtype, device="meta")
            if longest(dtype) >= N:
                wide = {"stats_ptr": "fp64" if dtype == torch.float64 else "fp32"}
                forward = taken._layer_norm_plan(x, N) | wide | {"EPS": EPS}
                backward = taken._layer_norm_plan_backward(x, N)[1] | wide | {"sums_ptr": wide["stats_ptr"]}
                found[f"{of} {N}"] = stack(taken._layer_norm_kernel, dtype=of, **forward)
                found[f"{of} {N}, backward"] = stack(taken._layer_norm_backward_kernel, dtype=of, **backward)
                few = taken._layer_norm_plan_few(x, N) | {"stats_ptr": wide["stats_ptr"]}
                found[f"{of} {N}, few"] = stack(taken._layer_norm_few_kernel, dtype=of, **few)
    return found


@pytest.mark.thorough
def test_register_spills(gallery: Path, on_h100: Ask) -> None:
    """None but for the gradients of the longest rows, and few there; a number more in float64, and in Triton 3.6."""
    (found,) = on_h100(gallery / "fusion" / "layer_norm.py", spills)
    assert len(found) == 3 * (7 + 7 + 5)
    spilled = {name: bytes_ for name, bytes_ in found.items() if bytes_}
    long = {"bf16": [16384], "fp32": [12288, 16384], "fp64": [5120, 8192]}
    if version("triton").startswith("3.6."):
        long = {"bf16": [16384], "fp32": [64, 12288, 16384], "fp64": [4096, 5120, 8192]}
    some = {f"{of} {N}, backward" for of, lengths in long.items() for N in lengths} | {"fp64 4096, few"}
    assert spilled.keys() <= some, spilled
    assert all(bytes_ <= 384 for bytes_ in spilled.values()), spilled


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/layer_norm")
    moved, error, *means, long, integers, shapes = out.splitlines()
    assert moved == "11 operators: 30.0 times the bytes of x"
    assert re.fullmatch(r"largest error \d\.\de-0[67], allowed 2\.0e-06", error)
    assert len(means) == 4
    for line in means:
        assert abs(float(re.findall(r"two passes +([\d.]+)", line)[0]) - 1) < 1e-3
    one_pass = re.findall(r"one pass +([\d.]+|nan)", means[-1])
    assert not abs(float(one_pass[0]) - 1) < 0.1
    assert long.startswith("ValueError: layer_norm takes rows of up to 16384 elements")
    assert integers.startswith("TypeError: ")
    assert shapes.endswith("not [(3, 5), (4,), (4,)]")


def _norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    ("layer_norm", lambda normal, M, N: (normal(M, N), normal(N), normal(N), 1e-5), _norm),
    ("layer_norm_backward", lambda normal, M, N: (normal(M, N), normal(M, N), normal(N), normal(2, M))),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "differences behind the end of a row",
        "d = x - mean if REST else tl.where(mask, x - mean, 0)",
        "d = x - mean",
    ),
    (
        "differences behind the end of a second block",
        "d_rest = tl.where(rest < N, x_rest - mean, 0)",
        "d_rest = x_rest - mean",
    ),
    ("a mean without the second block", "        total += tl.sum(x_rest", "        tl.sum(x_rest"),
    ("a variance without the second block", "        var += tl.sum(d_rest", "        tl.sum(d_rest"),
    ("a rounded mean", "first = tl.load(x_rows).to(ACC)", "first = 0 * tl.load(x_rows).to(ACC)"),
    ("elements behind the end of a row", "tl.where(mask, x - first, 0)", "x - first"),
    ("elements behind the end of a second block", "tl.where(rest < N, x_rest - first, 0)", "x_rest - first"),
    (
        "a variance in one pass",
        "var = tl.sum(d * d, axis=1, keep_dims=True) / N",
        "var = tl.sum(x * x, axis=1, keep_dims=True) / N - mean * mean",
    ),
    ("a norm stored without a mask", "tl.store(y_rows + offs_n, y, mask=mask)", "tl.store(y_rows + offs_n, y)"),
    (
        "rows behind the last",
        "    # Rows past the last one are the last one again.\n    offs_m = tl.minimum(offs_m, M - 1)\n",
        "",
    ),
    ("a load without a mask", "tl.load(ptrs, mask=mask, other=0)", "tl.load(ptrs)"),
    ("vectors across rows", "math.gcd(N, stride, 16 // x", "math.gcd(stride, 16 // x"),
    (
        "x read with the stride of dy",
        "x_ptr + offs_m * stride_xm  # (BLOCK_M, 1)\n        rows",
        "x_ptr + offs_m * N\n        rows",
    ),
    (
        "dx stored without a mask",
        "tl.store(dx_ptr + rows + offs_n, dx, mask=mask)",
        "tl.store(dx_ptr + rows + offs_n, dx)",
    ),
    ("a mean without a gradient", "dx = (dy * weight - sum_g / N - h", "dx = (dy * weight - h"),
    ("a gradient without the second block", "            sum_gh += tl.sum(", "            tl.sum("),
    ("a weight gradient of the last rows", "        dw += dy * h\n", "        dw = dy * h\n"),
    (
        "a weight gradient of the last rest",
        "            dw_rest += dy_rest * h_rest",
        "            dw_rest = dy_rest * h_rest",
    ),
    ("a bias gradient of the last rest", "            db_rest += dy_rest\n", "            db_rest = dy_rest\n"),
    (
        "rows counted twice",
        "        mask = None if REST else (offs_m < M) & (offs_n < N)\n",
        "        offs_m = tl.minimum(offs_m, M - 1)\n        mask = None if REST else offs_n < N\n",
    ),
    ("partial sums over each other", "db_rows = dw_rows + programs.to(tl.int64) * N", "db_rows = dw_rows + N"),
    ("sums in half precision", "torch.float16: tl.float32", "torch.float16: tl.float16"),
    ("few rows, read with the stride of dy", "(x_ptr + row * stride_xm + offs", "(x_ptr + row * N + offs"),
    ("few rows, columns of the last", "    for start in range(0, M, BLOCK_M):", "    for start in range(0, 1):"),
    ("few rows, a mean without a gradient", "dx = (g - sum_g / N - h * (sum_gh", "dx = (g - h * (sum_gh"),
    ("few rows, columns past the end", "(dw_ptr + offs_n, dw, mask=offs_n < N)", "(dw_ptr + offs_n, dw)"),
]
