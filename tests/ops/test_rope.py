"""The ops of the recipe RoPE, in place and not, in both pairings and in any layout."""

# ruff: noqa: N806 - H heads have D numbers each, as in the recipe

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, graphs, ptx, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts
from tolerance import assert_within

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
Shape = tuple[int, int, int, int, int]  # B, Hq, Hk, T, D


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/rope.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/rope.py")


def shapes() -> st.SearchStrategy[Shape]:
    """Shapes with ragged heads, positions and dimensions, empty ones among them, of at most some dozen programs."""
    heads, positions = st.integers(0, 9), st.sampled_from([0, 1, 2, 15, 16, 17, 33])
    dimensions = st.sampled_from([0, 2, 4, 6, 16, 20, 62, 64, 80, 128, 130])
    return st.tuples(st.integers(0, 2), heads, heads, positions, dimensions)


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x in float64, turned pair by pair, by the formula of the paper."""
    x, cos, sin = x.detach().double(), cos.double(), sin.double()
    half, out = x.shape[-1] // 2, torch.empty_like(x)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b, c, s = x[..., first], x[..., second], cos[:, i], sin[:, i]
        out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def magnitude(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return what the terms of each sum may amount to."""
    x = x.detach().double().abs()
    if interleaved:
        return (x[..., ::2] + x[..., 1::2]).repeat_interleave(2, -1)
    return (x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]).repeat(1, 1, 1, 2)


def assert_turned(
    out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, most: float = 1.0
) -> None:
    """Assert that a tensor was turned, as well as its accumulator and its dtype allow."""
    assert (out.dtype, out.shape, out.device) == (x.dtype, x.shape, x.device)
    # Two products and a sum, with a rounded sine.
    assert_within(out, reference(x, cos, sin, interleaved), most * magnitude(x, interleaved), roundings=4)


def angles(T: int, D: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return tables of cosines and sines of random angles."""
    angle = 7 * torch.randn(T, D // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def leaves(B: int, Hq: int, Hk: int, T: int, D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return queries and keys that want gradients, as attention layers have them."""
    made = [Layout("contiguous", H).make((B, T, H, D), dtype, DEVICE) for H in (Hq, Hk)]
    return [x.transpose(1, 2).requires_grad_() for x in made]


def heads(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return heads in some layout: as attention layers have them, for every other seed that is not transposed."""
    if layout.seed % 2 and layout.name != "transposed":
        b, h, t, d = shape
        return layout.make((b, t, h, d), dtype, device).transpose(1, 2)
    return layout.make(shape, dtype, device)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(shape=shapes(), of_q=layouts(), of_k=layouts(), interleaved=st.booleans(), conjugate=st.booleans())
@example((1, 5, 2, 17, 16), Layout("contiguous", 1), Layout("contiguous", 0), True, False)
@example((2, 4, 9, 33, 6), Layout("contiguous", 0), Layout("contiguous", 1), False, True)
def test_value(
    taken: ModuleType,
    dtype: torch.dtype,
    shape: Shape,
    of_q: Layout,
    of_k: Layout,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """Queries and keys are turned, each in its layout, by the angles or back, and nothing else is changed."""
    b, hq, hk, t, d = shape
    q = heads(of_q, (b, hq, t, d), dtype, DEVICE)
    k = heads(of_k, (b, hk, t, d), dtype, DEVICE)
    cos, sin = angles(t, d, dtype, DEVICE, of_q.seed)
    sin = torch.cat([sin, sin], -1)[:, : d // 2]  # rows farther apart than those of cos
    op = partial(taken.rope, interleaved=interleaved, conjugate=conjugate)
    outs = guarded(op, q, k, cos, sin)
    for out, x in zip(outs, (q, k), strict=True):
        assert_turned(out, x, cos, -sin if conjugate else sin, interleaved)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(shape=shapes(), between=st.booleans(), interleaved=st.booleans(), conjugate=st.booleans(), inner=st.booleans())
@example((2, 5, 2, 17, 16), True, True, False, True)
def test_in_place(
    taken: ModuleType,
    dtype: torch.dtype,
    shape: Shape,
    between: bool,
    interleaved: bool,
    conjugate: bool,
    inner: bool,
) -> None:
    """In place the op writes what the other returns, and not a byte beside it, to slices of something larger too."""
    b, hq, hk, t, d = shape
    more = 3 if between else 0
    wide = [Layout("contiguous", seed).make((b, t, h, d + more), dtype, DEVICE) for seed, h in ((0, hq), (1, hk))]
    views = [x.transpose(1, 2) if inner else x.transpose(1, 2).contiguous() for x in wide]
    before = [x.clone() for x in views]
    cos, sin = angles(t, d, dtype, DEVICE)
    slices = [[x[..., :d] for x in pair] for pair in (before, views)]
    expected = taken.rope(*slices[0], cos, sin, interleaved, conjugate)
    assert taken.rope_(*slices[1], cos, sin, interleaved, conjugate) is None
    for changed, old, new in zip(views, before, expected, strict=True):
        assert torch.equal(changed[..., d:], old[..., d:])
        # Strides differ where there is something between, so the compiler may fuse other products with a sum. Turned
        # numbers are no longer than what was turned, so the error is relative to that.
        size = magnitude(old[..., :d], interleaved)
        error = (changed[..., :d].double() - new.double()).abs()
        assert (error <= 4 * torch.finfo(dtype).eps * size).all()
        if not between:
            assert torch.equal(changed, new)


def test_nothing_beside_is_written_in_place(taken: ModuleType) -> None:
    """Queries and keys lie between guards when they are turned in place."""
    cos, sin = angles(17, 6, torch.float32, DEVICE)
    with Guard() as guard:
        q = torch.zeros(2, 17, 5, 6, device=DEVICE).transpose(1, 2)
        k = torch.zeros(2, 3, 17, 6, device=DEVICE)
        taken.rope_(q, k, cos, sin)
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {x.untyped_storage().data_ptr() for x in (q, k)} <= guards


def test_result_lies_as_its_argument(taken: ModuleType) -> None:
    """Results have the layout of the arguments, without their gaps."""
    x = torch.ones(2, 3, 7, 16, device=DEVICE)
    q, k = x.transpose(1, 2), x[:, :, :, :8].transpose(1, 2)
    tables = angles(3, 16, x.dtype, DEVICE)
    out, _ = taken.rope(q, x.transpose(1, 2).contiguous(), *tables)
    assert out.stride() == q.stride()
    _, out = taken.rope(k, k, *angles(3, 8, x.dtype, DEVICE))
    assert out.transpose(1, 2).is_contiguous()


@pairings
def test_tables(taken: ModuleType, interleaved: bool) -> None:
    """Tables of another dtype or layout, and halves of double ones, give what contiguous tables give."""
    q, k = (Layout("contiguous", H).make((1, H, 19, 12), torch.float32, DEVICE) for H in (3, 2))
    cos, sin = angles(19, 12, torch.float64, DEVICE)
    expected = taken.rope(q, k, cos.float(), sin.float(), interleaved)
    double = [torch.cat([t, t], -1).float()[:, :6] for t in (cos, sin)]
    for tables in ((cos, sin), double, [t.float().T.contiguous().T for t in (cos, sin)], (double[0], sin.float())):
        assert all(map(torch.equal, taken.rope(q, k, *tables, interleaved), expected))
    half = taken.rope(q, k, cos.half(), sin.half(), interleaved)
    for out, x in zip(half, (q, k), strict=True):
        assert_turned(out, x, cos.half(), sin.half(), interleaved)


def test_formulas_of_the_page(recipe: ModuleType) -> None:
    """The plain versions agree with the formula, and the tables with the paper's angles."""
    q, k = (Layout("contiguous", H).make((2, H, 5, 8), torch.float64, DEVICE) for H in (3, 1))
    cos, sin = recipe.tables(5, 8)
    theta = torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64)
    torch.testing.assert_close(cos.cpu(), (torch.arange(5)[:, None] * theta).cos())
    torch.testing.assert_close(sin.cpu(), (torch.arange(5)[:, None] * theta).sin())
    double = [torch.cat([t, t], -1) for t in (cos, sin)]
    for out, x in zip(recipe.rope_torch(q, k, *double), (q, k), strict=True):
        torch.testing.assert_close(out, reference(x, cos, sin, interleaved=False))
    for interleaved in (False, True):
        out = recipe.rope_complex(q, cos, sin, interleaved)
        torch.testing.assert_close(out, reference(q, cos, sin, interleaved))


@pairings
def test_products_know_distances_only(taken: ModuleType, recipe: ModuleType, interleaved: bool) -> None:
    """What RoPE is for: the product of a query and a key is that of any two at the same distance."""
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64).expand(1, 1, 20, 16) for _ in range(2))
    q, k = taken.rope(q.to(DEVICE), k.to(DEVICE), *recipe.tables(20, 16), interleaved)
    scores = (q @ k.mT)[0, 0]
    for distance in range(-19, 20):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@pairings
def test_back_again(taken: ModuleType, recipe: ModuleType, interleaved: bool) -> None:
    """The conjugate undoes the op."""
    q, k = (Layout("contiguous", H).make((2, H, 18, 10), torch.float64, DEVICE) for H in (3, 1))
    tables = recipe.tables(18, 10)
    turned = taken.rope(q, k, *tables, interleaved)
    torch.testing.assert_close(taken.rope(*turned, *tables, interleaved, conjugate=True), (q, k))
    taken.rope_(*turned, *tables, interleaved, conjugate=True)
    torch.testing.assert_close(turned, (q, k))


@pairings
def test_gradcheck(taken: ModuleType, recipe: ModuleType, interleaved: bool) -> None:
    """First and second derivatives are right, and those of one result alone."""
    q, k = leaves(1, 2, 1, 2, 4, torch.float64)
    op = partial(taken.rope, interleaved=interleaved)
    tables = recipe.tables(2, 4)
    assert torch.autograd.gradcheck(op, (q, k, *tables))
    assert torch.autograd.gradgradcheck(op, (q, k, *tables))
    assert torch.autograd.gradcheck(partial(op, conjugate=True), (q, k, *tables), fast_mode=True)
    assert torch.autograd.gradcheck(lambda q: op(q, k.detach(), *tables)[0], q, fast_mode=True)
    for i in (0, 1):
        assert torch.autograd.gradcheck(lambda q, k, i=i: op(q, k, *tables)[i], (q, k), fast_mode=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_through_autograd(taken: ModuleType, dtype: torch.dtype) -> None:
    """Gradients are those of the reference, for an expanded gradient too, and autograd keeps the tables only."""
    q, k = (Layout("contiguous", h).make((2, h, 17, 12), dtype, DEVICE).requires_grad_() for h in (3, 2))
    cos, sin = angles(17, 12, dtype, DEVICE)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = taken.rope(q, k, cos, sin)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]
    dq, dk = torch.autograd.grad(out[0].sum() + out[1].sum(), (q, k))
    for x, dx in ((q, dq), (k, dk)):
        assert_turned(dx, torch.ones_like(x), cos, -sin, interleaved=False)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pairings
def test_special_values(taken: ModuleType, recipe: ModuleType, interleaved: bool) -> None:
    """NaN and infinities come out as from PyTorch's formula, and reach no other pair."""
    special = [0.0, -0.0, 1.0, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]
    pairs = torch.cartesian_prod(torch.tensor(special), torch.tensor(special)).to(DEVICE)  # (64, 2)
    x = pairs.flatten() if interleaved else pairs.T.flatten()
    q = x.expand(1, 1, 3, 128).contiguous()
    cos, sin = (t.float() for t in recipe.tables(3, 128))
    out, _ = taken.rope(q, q[:, :0], cos, sin, interleaved)
    x1, x2 = (q[..., ::2], q[..., 1::2]) if interleaved else q.chunk(2, -1)
    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    expected = torch.stack([y1, y2], -1).flatten(-2) if interleaved else torch.cat([y1, y2], -1)
    torch.testing.assert_close(out, expected, equal_nan=True)


def test_declaration(taken: ModuleType, recipe: ModuleType) -> None:
    """Autograd learns of what the op in place changes, and not of what an op changes that says nothing."""
    tables = recipe.tables(3, 2)

    def gradient(op: Callable[..., None]) -> torch.Tensor:
        x = torch.zeros(1, 1, 3, 2, device=DEVICE, requires_grad=True)
        y = x.exp()
        op(y.detach(), y.detach()[:, :0], *tables)
        return torch.autograd.grad(y.sum(), x)[0]

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(taken.rope_)
    assert not torch.allclose(gradient(recipe.rope_undeclared), torch.ones(1, 1, 3, 2, device=DEVICE))
    with pytest.raises(RuntimeError, match="non-functional operator"):
        taken.rope_.register_autograd(taken._rope_gradient, setup_context=taken._rope_setup)


def test_refuses(taken: ModuleType) -> None:
    """What the ops do not take, they name."""
    q, k = torch.ones(2, 4, 3, 6, device=DEVICE), torch.ones(2, 2, 3, 6, device=DEVICE)
    cos, sin = angles(3, 6, q.dtype, DEVICE)
    for op in (taken.rope, taken.rope_):
        with pytest.raises(TypeError, match=r"^rope_? takes q and k of one float dtype.*int32"):
            op(q.int(), k.int(), cos, sin)
        with pytest.raises(TypeError, match=r"^rope_? takes q and k of one float dtype.*float64"):
            op(q, k.double(), cos, sin)
        with pytest.raises(TypeError, match=r"^rope_? takes q and k of one float dtype.*int64"):
            op(q, k, cos.long(), sin)
        for wrong in (
            (q[0], k, cos, sin),
            (q, k[0, 0, 0], cos, sin),
            (q[:1], k, cos, sin),
            (q, k[:, :, :2], cos, sin),
            (q, k[..., :4], cos, sin),
            (q, k, cos[:2], sin),
            (q, k, cos, sin[:, :2]),
            (q, k, cos, torch.cat([sin, sin], -1)),
            (q, k, cos[None], sin[None]),
            (q[..., :5], k[..., :5], cos[:, :2], sin[:, :2]),
        ):
            with pytest.raises(ValueError, match=r"^rope_? takes q \(B, Hq, T, D\) and k "):
                op(*wrong)
    for op in (taken.rope, taken.rope_):
        with pytest.raises(TypeError, match=r"^rope_? takes tensors on one device"):
            op(q, k, cos, sin.to("meta"))
    with pytest.raises(ValueError, match="no gradients for cos and sin"):
        taken.rope(q, k, cos, sin.clone().requires_grad_())
    for i in range(4):
        arguments = [q, k, cos, sin]
        arguments[i] = arguments[i].clone().requires_grad_()
        with pytest.raises(ValueError, match="has no backward: use rope"):
            taken.rope_(*arguments)
    for wrong in (q[:1].expand(2, 4, 3, 6), q[:, :1].expand(2, 4, 3, 6), q.mT.contiguous().mT):
        for pair in ((wrong, k), (k, wrong)):
            with pytest.raises(ValueError, match="side by side and share no memory"):
                taken.rope_(*pair, cos, sin)
    with pytest.raises(ValueError, match="share no memory"):  # each token begins one number after the one before it
        taken.rope_(
            torch.zeros(14, device=DEVICE).unfold(0, 6, 1)[None, None],
            torch.zeros(1, 1, 9, 6, device=DEVICE),
            *angles(9, 6, torch.float32, DEVICE),
        )
    taken.rope_(q[:1, :1, :1].expand(1, 1, 1, 6), k[:1, :, :1], cos[:1], sin[:1])  # a stride of one element is none


def test_launcher_is_what_a_call_reaches(taken: ModuleType) -> None:
    """On a GPU, without the triton_op in between."""
    q, k = (x.detach() for x in leaves(1, 5, 2, 9, 16, torch.float32))
    tables = angles(9, 16, torch.float32, DEVICE)
    out, expected = at_cuda(taken.rope, q, k, *tables), taken.rope(q, k, *tables)
    assert all(torch.equal(*pair) for pair in zip(out, expected, strict=True))


@pytest.mark.parametrize("T", [40, 200, 300])
def test_programs_along_positions(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, T: int) -> None:
    """Where positions lie inside, programs go along some tiles with each group of heads; the last ones are fewer."""
    monkeypatch.setattr(taken, "ROPE_NEAR", 3 * 32 * 32 * 4)  # three tiles of 32 positions
    q, k = (Layout("contiguous", H).make((2, H, T, 32), torch.float32, DEVICE) for H in (9, 3))
    tables = angles(T, 32, torch.float32, DEVICE)
    for y, x in zip(taken.rope(q, k, *tables), (q, k), strict=True):
        assert_turned(y, x, *tables, False)


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The first kernel is right for any number of heads, and so is every step of the ladder."""
    for H in (1, 5, 8):
        x = Layout("contiguous", H).make((2, 9, H, 16), torch.float32, DEVICE).transpose(1, 2)
        for y in recipe.turn_tokens(x, x, *angles(9, 16, torch.float32, DEVICE)):
            assert_turned(y, x, *angles(9, 16, torch.float32, DEVICE), False)
    for inside in (True, False):
        calls = recipe.ladder(inside, B=2, T=9, D=64)
        assert len(calls) == 5 + inside
        for call in calls.values():
            for y, x in zip(call(), call.args, strict=False):
                assert_turned(y, x, *call.args[2:], False)


def test_traced_in_place(taken: ModuleType, recipe: ModuleType) -> None:
    """Traced, the op turns parts of what was computed before it, or of an argument, and refuses to lose a gradient."""
    cos, sin = recipe.tables(17, 8)

    def computed(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        taken.rope_(x[:, :3], x[:, 3:], cos, sin)
        return x

    def given(x: torch.Tensor) -> torch.Tensor:
        taken.rope_(x[:, :3], x[:, 3:], cos, sin)
        return x * 2

    for f in (computed, given):
        x = Layout("contiguous", 0).make((2, 5, 17, 8), torch.float64, DEVICE)
        before = x.clone()
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), f(before))
        assert torch.equal(x, before)
        with pytest.raises(RuntimeError, match="has no backward: use rope"):
            compiled(x.clone().requires_grad_())


STRIDES = [f"stride_{x}{axis}" for x in ("q", "k", "q_out_", "k_out_") for axis in "bht"]
KNOWN = {"CONJUGATE": False, "INTERLEAVED": False, "BLOCK_H": 4}
ALIGNED = {"multiples": [*STRIDES, "stride_cos", "stride_sin"]}


def stores(taken: ModuleType) -> dict[tuple[int, bool, bool], Counter[str]]:
    """Return how often the kernel stores, by the size of a head, the pairing, and whether 16 divides the strides."""
    found = {}
    for D, interleaved, aligned in product((128, 80), (False, True), (True, False)):
        half = 1 << (D // 2 - 1).bit_length()
        known = KNOWN | {"D": D, "BLOCK_D": half, "BLOCK_T": 512 // half, "ACC": taken.tl.float32}
        text = ptx(taken._rope_kernel, "bf16", **known | {"INTERLEAVED": interleaved}, **ALIGNED if aligned else {})
        found[D, interleaved, aligned] = Counter(re.findall(r"st\.global\S*", text))
    return found


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, for heads of all sizes."""
    found = {}
    for D, interleaved, kind in product((2, 16, 64, 80, 128, 256), (False, True), ("bf16", "fp32", "fp64")):
        half = 1 << (D // 2 - 1).bit_length()
        known = KNOWN | {"D": D, "BLOCK_D": half, "BLOCK_T": max(1, 512 // half), "INTERLEAVED": interleaved}
        known |= {"ACC": taken.tl.float64 if kind == "fp64" else taken.tl.float32}
        found[f"{D} {interleaved} {kind}"] = stack(taken._rope_kernel, kind, **known)
    return found


def launches(taken: ModuleType) -> list[list[int]]:
    """Return how many launches, results and copies the graphs of the op have."""
    q, k = (torch.randn(2, h, 33, 48, requires_grad=True) for h in (5, 2))
    words = ("triton_kernel", "empty_like", "clone", "copy")
    made = graphs(taken.rope, q, k, *torch.randn(2, 33, 24))
    return [[sum(word in name for name in graph) for word in words] for graph in made]


def test_compiled(gallery: Path, on_h100: Ask) -> None:
    """Where 16 divides the strides, accesses have 16 bytes, in either pairing; sizes may stay symbols in a graph."""
    found, seen = on_h100(gallery / "fusion" / "rope.py", stores, launches)
    # 4 heads of 8 tokens in 128 threads are 4 stores of 8 elements for each of q and k.
    for D, interleaved in product((128, 80), (False, True)):
        assert found[D, interleaved, True] == {"st.global.v4.b32": 8}
    for interleaved in (False, True):
        assert found[128, interleaved, False].total() > 8
    # One launch each, forward and backward, with two results.
    assert seen == [[1, 2, 0, 0]] * 2


@pytest.mark.thorough
def test_register_spills(gallery: Path, on_h100: Ask) -> None:
    """None, for heads of any size."""
    (found,) = on_h100(gallery / "fusion" / "rope.py", spills)
    assert len(found) == 6 * 2 * 3
    assert not any(found.values())


@pytest.mark.needs_gpu_memory(12)
@pairings
def test_beyond_int32(taken: ModuleType, interleaved: bool) -> None:
    """The last of more than 2**31 elements are right, in either order of heads and tokens, in place and not."""
    tokens = 2**31 // 1024 + 3
    tables = [t.expand(tokens, 64).contiguous() for t in angles(1, 128, torch.float32, DEVICE)]
    last = torch.randn(1, 8, 1, 128, device=DEVICE).bfloat16()
    expected = reference(last, *(t[:1] for t in tables), interleaved)
    for inside in (False, True):
        shape = (1, tokens, 8, 128) if inside else (1, 8, tokens, 128)
        q = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
        q = q.transpose(1, 2) if inside else q
        q[:, :, -1:] = last
        k = q[:, -1:].contiguous()
        for out in taken.rope(q, k, *tables, interleaved):
            torch.testing.assert_close(out[:, :, -1:].double(), expected[:, -out.shape[1] :], rtol=2**-8, atol=1e-5)
            assert not out[:, :, :-1].any()
            del out
        taken.rope_(q, k, *tables, interleaved)
        torch.testing.assert_close(q[:, :, -1:].double(), expected, rtol=2**-8, atol=1e-5)
        assert not q[:, :, :-1].any()


@gpu
@pairings
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_opcheck(taken: ModuleType, recipe: ModuleType, dtype: torch.dtype, interleaved: bool) -> None:
    """Both ops pass the whole of opcheck, and the one that hides what it changes does not."""
    q, k = leaves(2, 4, 2, 19, 16, dtype)
    tables = angles(19, 16, dtype, DEVICE)
    assert set(torch.library.opcheck(taken.rope, (q, k, *tables, interleaved)).values()) == {"SUCCESS"}
    q, k = q.detach(), k.detach()
    assert set(torch.library.opcheck(taken.rope_, (q, k, *tables, interleaved)).values()) == {"SUCCESS"}
    with pytest.raises(torch.testing._internal.optests.OpCheckError):
        torch.library.opcheck(recipe.rope_undeclared, (q, k, *tables))


@gpu
def test_compile(taken: ModuleType) -> None:
    """Compiled, both ops give the same, in place of what somebody reads later too."""
    q, k = (x.detach() for x in leaves(2, 4, 2, 130, 64, torch.float32))
    tables = angles(130, 64, torch.float32, DEVICE)

    def both(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.cat([q, k], 1) + 1
        old = x * 2
        turned = taken.rope(x[:, :4], x[:, 4:], *tables)
        taken.rope_(x[:, :4], x[:, 4:], *tables)
        return (*taken.rope(q, k, *tables), *turned, x, old)

    for out, expected in zip(torch.compile(both, fullgraph=True)(q, k), both(q, k), strict=True):
        torch.testing.assert_close(out, expected)

    def loss(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return sum(x.square().sum() * n for n, x in enumerate(taken.rope(q * 2, k, *tables), 1))

    wanted = [q.requires_grad_(), k.requires_grad_()]
    for d, expected in zip(
        *(torch.autograd.grad(f(*wanted), wanted) for f in (torch.compile(loss, fullgraph=True), loss)), strict=True
    ):
        torch.testing.assert_close(d, expected)


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    (
        "rope",
        lambda normal, M, N: (*(normal(2, H, M // 2, 64) for H in (8, 3)), normal(M // 2, 32), normal(M // 2, 32)),
        lambda q, k, cos, sin: tuple(reference(x, cos, sin, interleaved=False).to(x.dtype) for x in (q, k)),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "half a rotation stored without a mask",
        "tl.store(y_ptrs + offs_d, x1 * cos - x2 * sin, mask=mask)",
        "tl.store(y_ptrs + offs_d, x1 * cos - x2 * sin)",
    ),
    ("pairs stored without a mask", "tl.reshape(y, x.shape), mask=mask)", "tl.reshape(y, x.shape))"),
    ("turned the other way", "    if CONJUGATE:", "    if not CONJUGATE:"),
    ("the gradient turned on", "ctx.interleaved, not ctx.conjugate", "ctx.interleaved, ctx.conjugate"),
    ("keys counted as queries", "rows = (h < HEADS_K) & (t < T)", "rows = (h < HEADS_Q) & (t < T)"),
    ("keys behind the queries", "h -= groups_q * BLOCK_H", "h -= groups_q"),
    (
        "heads taken for positions",
        "x_ptrs = k_ptr + b * stride_kb + h * stride_kh + t * stride_kt",
        "x_ptrs = k_ptr + b * stride_kb + h * stride_kt + t * stride_kh",
    ),
    ("sines of another position", "sin_ptr + t * stride_sin", "sin_ptr + t * stride_cos"),
    ("one sequence for all", "b, pid = pid // (tiles * groups), pid", "b, pid = pid * 0, pid"),
    ("as many tiles at the end", "near = tl.minimum(tiles - first, NEAR)", "near = NEAR"),
]
