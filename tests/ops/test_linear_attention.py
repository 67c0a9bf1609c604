"""The op of the recipe Linear attention: outputs, final states and gradients."""

# ruff: noqa: N806 - lengths and dimensions have the recipe's names

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, compiled, graphs, narrow, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, amid, first_quickly, layouts, sizes

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/linear_attention.py"
KINDS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20, torch.float64: 2.0**-48}
NAMES = "out", "last", "dq", "dk", "dv", "dg", "dfirst"
each_dtype = pytest.mark.parametrize("dtype", KINDS, ids=str)
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op(RECIPE)


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe(RECIPE)


def by_token(tensors: Tensors, grads: Tensors, scale: float | None) -> Tensors:
    """Return outputs, the last state and all gradients in float64, by the recurrence and its own."""
    q, k, v, g, first = (t.double() for t in tensors)
    grad, back = (t.double() for t in grads)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    a, states = g.exp()[..., None, None], [first]
    for t in range(q.shape[1]):
        states.append(states[-1] * a[:, t] + k[:, t, :, :, None] * v[:, t, :, None, :])
    out, dq, dk, dv, dg = (torch.zeros_like(t) for t in (v, q, k, v, g))
    for t in reversed(range(q.shape[1])):
        out[:, t] = scale * (q[:, t, :, None] @ states[t + 1])[:, :, 0]
        dq[:, t] = scale * (states[t + 1] @ grad[:, t, :, :, None])[..., 0]
        back = back + scale * q[:, t, :, :, None] * grad[:, t, :, None, :]
        dk[:, t] = (back @ v[:, t, :, :, None])[..., 0]
        dv[:, t] = (k[:, t, :, None] @ back)[:, :, 0]
        back = back * a[:, t]
        dg[:, t] = (back * states[t]).sum((-1, -2))
    return out, states[-1], dq, dk, dv, dg, back


def assert_within(
    found: Sequence[torch.Tensor], tensors: Tensors, grads: Tensors, scale: float | None = None, looser: float = 1
) -> None:
    """Assert that results are as good as three roundings of what is added up."""
    q, k, v, g, first = tensors
    expected = by_token(tensors, grads, scale)
    grad, back = (t.abs() for t in grads)
    terms = [
        *by_token((q.abs(), k.abs(), v.abs(), g, first.abs()), (grad, back), None if scale is None else abs(scale))
    ]
    # Terms of the gradient of g cancel: pairs of two tokens that are both later.
    terms[5] = terms[5] + (terms[2] * q.abs()).sum(-1).flip(1).cumsum(1).flip(1)
    wide = torch.promote_types(q.dtype, torch.float32)
    # What keys have from later chunks cancels, too, but for its rounding in the registers.
    far = torch.finfo(wide).eps / KINDS[q.dtype] * (terms[3] * k.abs()).sum(-1)
    terms[5] = terms[5] + far.flip(1).cumsum(1).flip(1)
    decays = g.double().abs().clamp(max=850).sum(1).max().item() if g.numel() else 0.0
    # Numbers below 2**-14 lose bits in float16: weights as well as results.
    lost = by_token(
        (q.abs() + 1, k.abs() + 1, v.abs() + 1, torch.zeros_like(g), first.abs() + 1), (grad + 1, back + 1), 1.0
    )
    least = 2.0**-24 if q.dtype == torch.float16 else torch.finfo(wide).tiny
    eps = looser * (KINDS[q.dtype] + torch.finfo(wide).eps * decays)
    for name, one, right, size, few in zip(NAMES, found, expected, terms, lost, strict=True):
        assert one.shape == right.shape
        assert one.dtype == (wide if name in ("last", "dg", "dfirst") else q.dtype)
        assert one.is_contiguous()
        allowed = 3 * eps * size + least * few
        assert ((one.double() - right).abs() <= allowed).all(), (
            f"{name} is off by {((one.double() - right).abs() / allowed).max():.1f}"
        )


def assert_right(
    taken: ModuleType,
    tensors: Tensors,
    grads: Tensors,
    scale: float | None = None,
    started: bool = True,
    looser: float = 1,
) -> Tensors:
    """Assert that both ops are right and store nowhere else; return what they return."""
    q, k, v, g, first = tensors
    if not started:
        tensors = q, k, v, g, torch.zeros_like(first)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, *first: torch.Tensor) -> Tensors:
        result: Tensors = taken.linear_attention(q, k, v, g, scale, *first)
        return result

    def backward(*all_of_them: torch.Tensor) -> Tensors:
        grads, tensors, first = all_of_them[:2], all_of_them[2:6], all_of_them[6:] or (None,)
        result: Tensors = taken.linear_attention_backward(*grads, *tensors, scale, *first)
        return result

    state = (first,) if started else ()
    found = *guarded(forward, q, k, v, g, *state), *guarded(backward, *grads, q, k, v, g, *state)
    assert_within(found, tensors, grads, scale, looser)
    return found


def problem(
    dtype: torch.dtype,
    batch: int,
    T: int,
    heads: int,
    K: int,
    V: int,
    gate: float = 2.0,
    of: Sequence[Layout] = tuple(Layout("contiguous", seed) for seed in range(5)),
) -> tuple[Tensors, Tensors]:
    """Return what the op takes, and gradients of its results; queries, keys, values, gates, gradients in layouts."""
    wide = torch.promote_types(dtype, torch.float32)
    shapes = [(batch, T, heads, K)] * 2 + [(batch, T, heads, V), (batch, T, heads), (batch, T, heads, V)]
    kinds = dtype, dtype, dtype, wide, dtype
    q, k, v, g, grad = (layout.make(shape, kind, DEVICE) for layout, shape, kind in zip(of, shapes, kinds, strict=True))
    g = torch.nn.functional.logsigmoid(g + gate)
    first, last = (Layout("contiguous", seed).make((batch, heads, K, V), wide, DEVICE) for seed in (7, 8))
    return (q, k, v, g, first), (grad, last)


@each_dtype
@settings(max_examples=12)
@given(
    T=sizes(64, 140),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    K=st.sampled_from([1, 16, 20, 64]),
    V=st.sampled_from([1, 16, 40, 64]),
    started=st.booleans(),
    of=st.tuples(*[layouts()] * 5),
)
def test_results(
    taken: ModuleType,
    dtype: torch.dtype,
    T: int,
    heads: tuple[int, int],
    K: int,
    V: int,
    started: bool,
    of: tuple[Layout, ...],
) -> None:
    """All results are right for any lengths, dimensions and layouts."""
    assert_right(taken, *problem(dtype, heads[0], T, heads[1], K, V, of=of), started=started)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (100, 200), (16, 256), (128, 32)], ids=str)
@pytest.mark.parametrize("T", [1, 32, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_tile(taken: ModuleType, dtype: torch.dtype, T: int, dims: tuple[int, int]) -> None:
    """Several blocks of the state, at lengths around the edges of chunks."""
    assert_right(taken, *problem(dtype, 1, T, 1, *dims))


@each_dtype
@pytest.mark.parametrize("T", first_quickly(600, 256, 257))
def test_segments(taken: ModuleType, dtype: torch.dtype, T: int) -> None:
    """A sequence of up to three segments, with states that last."""
    assert taken._linear_attention_cut(torch.empty(1, T, 2, 32))["segments"] == -(-T // 256)
    assert_right(taken, *problem(dtype, 1, T, 2, 32, 32, gate=5.0))


def test_cut(taken: ModuleType) -> None:
    """Segments are as many as there is room for, all of them have tokens, and chunks do not cross their borders."""
    chunks = {tile[0] for tiles in taken.LINEAR_ATTENTION_TILES.values() for tile in tiles[:2]}
    for batch, heads, T in itertools.product((1, 3, 64), (1, 16, 200), (1, 255, 256, 257, 8192, 65536, 100_001)):
        cut = taken._linear_attention_cut(torch.empty(batch, T, heads, 128, device="meta"))
        assert (cut["segments"] - 1) * cut["length"] < T <= cut["segments"] * cut["length"]
        assert cut["segments"] == 1 or cut["segments"] * batch * heads <= 128
        assert all(cut["length"] % chunk == 0 for chunk in chunks)
    assert taken._linear_attention_cut(torch.empty(1, 8192, 16, 128, device="meta")) == {"segments": 8, "length": 1024}


@each_dtype
def test_scale(taken: ModuleType, dtype: torch.dtype) -> None:
    """A scale of one's own; with zero, all that is left is what the last state was given."""
    for scale in (0.0, -0.3, 1.0):
        assert_right(taken, *problem(dtype, 1, 70, 2, 16, 32), scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gate", [30.0, -10.0, -60.0, -300.0])
def test_strong_and_weak_gates(taken: ModuleType, dtype: torch.dtype, gate: float) -> None:
    """States that grow, and decays that overflow where an exponent is positive."""
    assert_right(taken, *problem(dtype, 1, 100, 2, 32, 32, gate=gate))


@each_dtype
@pytest.mark.parametrize("T", [40, 64, 100])
def test_gates_of_zero(taken: ModuleType, dtype: torch.dtype, T: int) -> None:
    """A log decay of -inf ends what was before: all results are finite, and right."""
    (q, k, v, g, first), grads = problem(dtype, 1, T, 2, 16, 32)
    g[:, [0, 7, T - 1], 0] = -torch.inf
    g[:, 20:, 1] = -torch.inf
    found = assert_right(taken, (q, k, v, g, first), grads)
    assert all(t.isfinite().all() for t in found)
    assert not found[-1][:, 0].any()


def test_a_nan_gate_stays_nan_float32(taken: ModuleType) -> None:
    """It is not taken for a strong decay."""
    (q, k, v, g, first), _ = problem(torch.float32, 1, 100, 1, 16, 16)
    g[0, 50] = torch.nan
    out, last = taken.linear_attention(q, k, v, g, None, first)
    assert out[:, 64:].isnan().all()
    assert last.isnan().all()
    assert not out[:, :32].isnan().any()


@each_dtype
def test_who_gets_what(taken: ModuleType, dtype: torch.dtype) -> None:
    """A gradient of one output alone reaches its query, and keys and values up to it."""
    tensors, (grad, last) = problem(dtype, 1, 130, 1, 16, 16, gate=5.0)
    for token in (0, 63, 64, 100, 129):
        alone = torch.zeros_like(grad)
        alone[:, token] = grad[:, token]
        found = assert_right(taken, tensors, (alone, torch.zeros_like(last)))
        _, _, dq, dk, dv, dg, _ = found
        assert dq[:, token].any()
        assert not dq[:, :token].any()
        for gradient in (dq, dk, dv, dg):
            assert not gradient[:, token + 1 :].any()
        assert dk[:, : token + 1].any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around contiguous inputs stays there."""
    tensors, grads = problem(dtype, 1, 75, 1, 20, 40)
    assert_right(taken, tuple(map(amid, tensors)), (amid(grads[0]), amid(grads[1])))


@each_dtype
def test_no_tokens(taken: ModuleType, dtype: torch.dtype) -> None:
    """The state stays, and so does its gradient."""
    tensors, grads = problem(dtype, 2, 0, 3, 16, 32)
    *tensors, turned = tensors
    tensors = *tensors, turned.mT.contiguous().mT  # a state of other strides
    found = assert_right(taken, tensors, grads)
    assert torch.equal(found[1], tensors[4])
    assert found[1].data_ptr() != tensors[4].data_ptr()
    assert torch.equal(found[6], grads[1])
    assert not taken.linear_attention(*tensors[:4])[1].any()
    for batch, heads in ((0, 2), (2, 0)):
        assert_right(taken, *problem(dtype, batch, 5, heads, 16, 32))


@each_dtype
def test_parts(taken: ModuleType, dtype: torch.dtype) -> None:
    """Parts of a sequence, each with the state of the one before, end as the whole does."""
    (q, k, v, g, state), _ = problem(dtype, 1, 350, 2, 16, 32)
    whole, end = taken.linear_attention(q, k, v, g, None, state)
    for part in (slice(0, 270), slice(270, 271), slice(271, 350)):
        out, state = taken.linear_attention(*(t[:, part] for t in (q, k, v, g)), None, state)
        atol = 16 * KINDS[dtype] * whole.abs().max().item()
        torch.testing.assert_close(out, whole[:, part], rtol=0, atol=atol)
    torch.testing.assert_close(state, end, rtol=0, atol=16 * KINDS[dtype] * end.abs().max().item())


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_gradcheck(taken: ModuleType, fast: bool) -> None:
    """Differences agree with the gradients, over several chunks, in one direction or in each."""
    (q, k, v, g, first), _ = problem(torch.float64, 1, 17, 1, 2, 2)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, g, first)]

    def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, first: torch.Tensor) -> Tensors:
        return taken.linear_attention(q, k, v, g, 0.7, first)

    assert torch.autograd.gradcheck(op, leaves, fast_mode=fast)


@each_dtype
def test_autograd(taken: ModuleType, dtype: torch.dtype) -> None:
    """Autograd hands over what the backward op returns, and asks it as it was asked, for either result."""
    tensors, grads = problem(dtype, 1, 40, 2, 16, 32)
    leaves = [t.clone().requires_grad_() for t in tensors]
    results = taken.linear_attention(*leaves[:4], 0.3, leaves[4])
    for which in ((0, 1), (0,), (1,)):
        got = torch.autograd.grad([results[i] for i in which], leaves, [grads[i] for i in which], retain_graph=True)
        given_to = [grads[i] if i in which else torch.zeros_like(grads[i]) for i in range(2)]
        expected = taken.linear_attention_backward(*given_to, *tensors[:4], 0.3, tensors[4])
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    out, _ = taken.linear_attention(*leaves[:4])
    got = torch.autograd.grad(out, leaves[:4], grads[0])
    expected = taken.linear_attention_backward(grads[0], torch.zeros_like(grads[1]), *tensors[:4], None, None)
    assert all(torch.equal(*pair) for pair in zip(got, expected[:4], strict=True))


def test_gradient_has_no_gradient(taken: ModuleType) -> None:
    """A second derivative is refused, not zero."""
    tensors, _ = problem(torch.float64, 1, 5, 1, 16, 16)
    q = tensors[0].clone().requires_grad_()
    (d,) = torch.autograd.grad(taken.linear_attention(q, *tensors[1:4])[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    (q, k, v, g, first), _ = problem(torch.float16, 2, 5, 3, 16, 32)
    with pytest.raises(TypeError, match=r"^linear_attention takes float16, .* not torch\.int32"):
        taken.linear_attention(q.int(), k, v, g)
    for tensors in ((q, k.bfloat16(), v, g), (q, k, v, g.half()), (q, k, v, g, None, first.half())):
        with pytest.raises(
            TypeError, match=r"^linear_attention takes q, .* of torch\.float32, .* not q torch\.float16"
        ):
            taken.linear_attention(*tensors)
    for tensors in (
        (q[0], k[0], v[0], g[0]),
        (q, k[:, :4], v, g),
        (q, k, v[:, :4], g),
        (q, k, v[:, :, :2], g),
        (q, k, v, g[..., None]),
        (q[..., :8], k, v, g),
        (q[..., :0], k[..., :0], v, g),
        (q, k, v[..., :0], g),
        (q.repeat(1, 1, 1, 9), k.repeat(1, 1, 1, 9), v, g),
        (q, k, v.repeat(1, 1, 1, 9), g),
        (q, k, v, g, None, first.mT),
        (q, k, v, g, None, first[:1]),
    ):
        names = "q", "k", "v", "g", "", "initial_state"
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(names, tensors, strict=False) if t is not None)
        with pytest.raises(
            ValueError, match=rf"^linear_attention takes q and k of .* to 256, not {re.escape(shapes)}$"
        ):
            taken.linear_attention(*tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_launchers_serve_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launchers; they do what the ops do."""
    (q, k, v, g, first), grads = problem(dtype, 1, 40, 2, 16, 32)
    found, expected = at_cuda(taken.linear_attention, q, k, v, g), taken.linear_attention(q, k, v, g)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    inputs = *grads, q, k, v, g, 0.3, first
    found, expected = at_cuda(taken.linear_attention_backward, *inputs), taken.linear_attention_backward(*inputs)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_guards_reach_into_the_ops(taken: ModuleType) -> None:
    """What the ops allocate lies between guards in the tests above."""
    tensors, grads = problem(torch.float32, 1, 40, 1, 16, 16)
    with Guard() as guard:
        found = *taken.linear_attention(*tensors[:4]), *taken.linear_attention_backward(*grads, *tensors[:4], 1.0, None)
    places = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {t.untyped_storage().data_ptr() for t in found} <= places


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so are the page's references."""
    (q, k, v, g, first), grads = problem(torch.float16, 1, 128, 2, 64, 64)
    tensors = q, k, v, g, torch.zeros_like(first)
    expected = by_token(tensors, grads, None)
    terms = by_token((q.abs(), k.abs(), v.abs(), g, tensors[4]), grads, None)
    ops = {name: step[0] for name, step in recipe.STEPS.items()} | {"PyTorch": recipe.linear_attention_torch}
    for op in ops.values():
        found = op(q, k, v, g)
        assert found.dtype == torch.float16
        assert ((found.double() - expected[0]).abs() <= 4 * 2.0**-11 * terms[0]).all()
    doubles = [t.double() for t in (q, k, v, g, first)]
    found = recipe.results_of(recipe.recurrence, doubles, [t.double() for t in grads], 0.3)
    for one, right in zip(found, by_token((q, k, v, g, first), grads, 0.3), strict=True):
        torch.testing.assert_close(one, right)


KERNELS = {
    "out": {"STARTED": True},
    "ends": {"REVERSE": False, "STARTED": False, "ENDS": True},
    "ends, reverse": {"REVERSE": True, "STARTED": False, "ENDS": True},
    "states": {"REVERSE": False, "STARTED": False, "ENDS": False},
    "states, reverse": {"REVERSE": True, "STARTED": True, "ENDS": False},
    "dq": {"REVERSE": False, "GATES": True},
    "dk": {"REVERSE": True, "GATES": True},
    "dv": {"REVERSE": True, "GATES": False},
}
SIZES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


def at_launch(taken: ModuleType, which: str, dtype: str, K: int, V: int) -> tuple[object, dict[str, object]]:
    """Return a kernel, and what the launchers pass on to it, for lengths and heads that 16 divides."""
    import triton.language as tl

    block = functools.partial(taken._linear_attention_block, itemsize=SIZES[dtype])
    forward, states, tokens = taken.LINEAR_ATTENTION_TILES[SIZES[dtype]]
    wide = "fp64" if dtype == "fp64" else "fp32"
    of_wide = "g_ptr", "first_ptr", "last_ptr", "ends_ptr", "sums_ptr", "flow_ptr", "reads_ptr", "dg_ptr"
    known = {"SCALE": K**-0.5, "ACC": getattr(tl, {"fp64": "float64", "fp32": "float32"}[wide]), "CHUNK": states[0]}
    if which == "out":
        kernel, (chunk, most_v, num_warps, num_stages) = taken._linear_attention_kernel, forward
        known |= {"K": K, "V": V, "BLOCK_K": block(128, K), "BLOCK_V": block(most_v, V), "CHUNK": chunk}
    elif "ENDS" in KERNELS[which]:
        kernel, (_, most_k, most_v, num_warps, num_stages) = taken._linear_attention_states_kernel, states
        known |= {"K": K, "V": V, "BLOCK_K": block(most_k, K), "BLOCK_V": block(most_v, V)}
    else:
        kernel, (most_x, most_z, num_warps, num_stages) = taken._linear_attention_tokens_kernel, tokens
        X, Z = (V, K) if KERNELS[which]["GATES"] else (K, V)
        blocks = -(-K // block(states[1], K)) * -(-V // block(states[2], V))
        known |= {"X": X, "Z": Z, "BLOCK_X": block(most_x, X), "BLOCK_Z": block(most_z, Z)}
        known["BLOCKS"] = blocks if KERNELS[which]["GATES"] else 1
    pointers = dict.fromkeys((name for name in of_wide if name in kernel.arg_names), wide)
    options = {"dtype": dtype, "num_warps": num_warps, "num_stages": num_stages, "multiples": ["T", "HEADS", "length"]}
    return kernel, options | known | KERNELS[which] | pointers


def codes(taken: ModuleType) -> dict[tuple[int, str], tuple[set[str], bool, bool]]:
    """Return, for heads and kernels, the matrix instructions, whether exp2 is one, and whether anything is atomic."""
    found = {}
    for D, which in itertools.product((64, 128), KERNELS):
        kernel, known = at_launch(taken, which, "bf16", D, D)
        text = compiled(kernel, **known).asm["ptx"]
        matrix = set(re.findall(r"(wgmma|mma)\.\S*?m\d+n\d+", text))
        found[D, which] = matrix, "ex2.approx" in text, bool(re.search(r"\b(atom|red)\.global", text))
    return found


@pytest.mark.thorough
def test_narrow_heads_read_nothing_unwritten(gallery: Path, on_h100: Ask) -> None:
    """On an H100, tiles as narrow as these heads had wrong results: `compiled` looks for the cause."""
    on_h100(gallery / RECIPE, functools.partial(narrow, at_launch=at_launch, kernels=tuple(KERNELS)))


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Hopper's instruction in all products, one instruction for an exponential, and no additions to memory."""
    (found,) = on_h100(gallery / RECIPE, codes)
    assert set(found) == set(itertools.product((64, 128), KERNELS))
    assert set(map(repr, found.values())) == {repr(({"wgmma"}, True, False))}


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that a thread spills, for every kernel."""
    found = {}
    for dtype, (K, V), which in itertools.product(SIZES, [(64, 64), (128, 128), (96, 256)], KERNELS):
        kernel, known = at_launch(taken, which, dtype, K, V)
        found[f"{which} {dtype} {K} {V}"] = stack(kernel, **known)
    return found


@pytest.mark.thorough
def test_no_register_spills(gallery: Path, on_h100: Ask) -> None:
    """But for two numbers in float32, in Triton 3.6 in float64, and some of the forward, which has the whole state."""
    (found,) = on_h100(gallery / RECIPE, spills)
    assert len(found) == 4 * 3 * 8
    some = ("fp32", "fp64") if version("triton").startswith("3.6.") else ("fp32",)
    forward = {"fp16": 64, "bf16": 64, "fp32": 8, "fp64": 96}
    most = {
        name: forward[name.split()[1]] if name.startswith("out ") else 8 * any(dtype in name for dtype in some)
        for name in found
    }
    assert {name: size for name, size in found.items() if size > most[name]} == {}


def rooms(taken: ModuleType) -> list[int]:
    """Return the bytes of shared memory that the largest dimensions take."""
    return [
        compiled(kernel, **known).metadata.shared
        for dtype, which in itertools.product(SIZES, KERNELS)
        for kernel, known in [at_launch(taken, which, dtype, 128, 256)]
    ]


@pytest.mark.thorough
def test_fits(gallery: Path, on_h100: Ask) -> None:
    """A GPU whose programs may have 99 KiB of shared memory has room for the largest dimensions."""
    (found,) = on_h100(gallery / RECIPE, rooms)
    assert len(found) == 32
    assert max(found) <= 99 * 1024


def traced(recipe: ModuleType, T: int) -> list[list[str]]:
    """Return the graphs of a call with so many tokens, forward and backward."""
    q, k, v = (torch.randn(2, T, 3, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    g = torch.randn(2, T, 3, requires_grad=True)
    first = torch.randn(2, 3, 64, 64, requires_grad=True)
    return graphs(lambda q, k, v, g, first: recipe.linear_attention(q, k, v, g, 0.3, first), q, k, v, g, first)


def test_torch_compile_looks_into_it(gallery: Path, on_h100: Ask) -> None:
    """It sees a kernel forward and five backward; with segments, one more for each direction of a state."""
    looks = (functools.partial(traced, T=T) for T in (40, 300))
    for pair, numbers in zip(on_h100(gallery / RECIPE, *looks), ((1, 5), (2, 7)), strict=True):
        for graph, number in zip(pair, numbers, strict=True):
            assert sum(call.startswith("triton_kernel_wrapper") for call in graph) == number
            assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


@pytest.mark.needs_gpu_memory(30)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last tokens are right."""
    T = 2**18 + 3
    q = torch.zeros(1, T, 65, 128, dtype=torch.float16, device=DEVICE)
    g = torch.zeros(1, T, 65, device=DEVICE)
    g[:, -70] = -torch.inf
    q[:, -70:] = torch.randn(70, 65, 128, device=DEVICE)
    out, last = taken.linear_attention(q, q, q, g)
    few = q[:, -70:], g[:, -70:]
    expected, end = taken.linear_attention(*[few[0]] * 3, few[1])
    torch.testing.assert_close(out[:, -70:], expected, rtol=2.0**-8, atol=2.0**-5)
    torch.testing.assert_close(last, end, rtol=2.0**-8, atol=2.0**-5)


@needs_a_gpu
def test_same_bits(taken: ModuleType) -> None:
    """Each time, for many chunks."""
    tensors, grads = problem(torch.bfloat16, 2, 3000, 4, 128, 128)
    first, *others = (taken.linear_attention_backward(*grads, *tensors[:4], None, tensors[4]) for _ in range(5))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@needs_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@settings(max_examples=8)
@given(T=st.integers(1, 1200), dims=st.sampled_from([(64, 64), (128, 128), (128, 256), (96, 80)]))
def test_long(taken: ModuleType, dtype: torch.dtype, T: int, dims: tuple[int, int]) -> None:
    """Many chunks."""
    assert_right(taken, *problem(dtype, 1, T, 3, *dims))


@needs_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_opcheck(taken: ModuleType, dtype: torch.dtype) -> None:
    """Both ops pass the whole of opcheck."""
    tensors, grads = problem(dtype, 1, 70, 2, 64, 64)
    leaves = [t.clone().requires_grad_() for t in tensors]
    for first in (leaves[4], None):
        found = torch.library.opcheck(taken.linear_attention, (*leaves[:4], None, first))
        assert set(found.values()) == {"SUCCESS"}
    found = torch.library.opcheck(taken.linear_attention_backward, (*grads, *tensors[:4], None, tensors[4]))
    assert set(found.values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradients, and other sizes."""
    torch.compiler.reset()
    op = torch.compile(lambda q, k, v, g: taken.linear_attention(q * 2, k, v, g), fullgraph=True, dynamic=dynamic)
    for T in (40, 70, 300):
        (q, k, v, g, first), grads = problem(torch.float16, 1, T, 2, 64, 64)
        leaves = [t.clone().requires_grad_() for t in (q, k, v, g)]
        found = op(*leaves)
        dq, *others = torch.autograd.grad(found, leaves, grads)
        _, _, *expected = by_token((q * 2, k, v, g, torch.zeros_like(first)), grads, None)
        for one, right in zip((dq / 2, *others), expected, strict=False):
            torch.testing.assert_close(one.double(), right, rtol=0, atol=2.0**-7 * right.abs().max().item())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The ops run where their inputs are, whichever GPU is the current one."""
    tensors, grads = problem(torch.float16, 1, 50, 2, 64, 64)
    assert_right(taken, tuple(t.to("cuda:1") for t in tensors), tuple(t.to("cuda:1") for t in grads))


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("attention/linear_attention")
    assert re.search(r"(?m)^ 8192 tokens: +17\.2 GB in +8192 steps, floor 0\.13 GB$", out)
    assert re.search(r"(?m)^largest error \d\.\de-04, allowed 2\.0e-03$", out)
    assert re.search(r"(?m)^ 8192 tokens: 64 programs of +128 steps; +2048 chunks in all heads$", out)
    shares = re.findall(r"(?m)^torch\.\w+: at most (\d\.\d\d) of what is allowed$", out)
    assert len(shares) == 4
    assert all(0 < float(share) <= 1 for share in shares)
    assert re.findall(r"(?m)^(TypeError|ValueError): linear_attention takes", out) == [*["TypeError"] * 2, "ValueError"]
    assert re.findall(r"(?m)^log decay (-\d\.\d), split: error nan$", out) == ["-2.0"]


def some_tokens(normal: Callable[..., torch.Tensor], M: int, N: int) -> tuple[torch.Tensor, ...]:
    """Return inputs for the op: a batch of two sequences of up to 300 tokens."""
    T = N % 300
    shape = 2, T, 1 + M % 3, 32
    return *(0.3 * normal(*shape) for _ in range(3)), -normal(*shape[:3]).abs() / 8


def by_pairs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> Tensors:
    """Return what the op does, by all pairs of tokens."""
    decay = g.cumsum(1).transpose(1, 2)
    since = (decay[..., :, None] - decay[..., None, :]).tril()
    weights = torch.einsum("bihd,bjhd->bhij", q, k) * since.exp().tril() * q.shape[-1] ** -0.5
    left = (decay[..., -1:] - decay).exp()
    return torch.einsum("bhij,bjhd->bihd", weights, v), torch.einsum("bhj,bjhk,bjhd->bhkd", left, k, v)


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [("linear_attention", some_tokens, by_pairs)]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "the state does not decay",
        "            v,\n            state * tl.exp2(total),\n",
        "            v,\n            state,\n",
    ),
    (
        "backward the state does not decay",
        "            b,\n            state * tl.exp2(total),\n",
        "            b,\n            state,\n",
    ),
    ("forward a token does not decay", "(v * tl.exp2(total - decay)[:, None])", "v"),
    (
        "forward the state has no scale",
        "out = out * (tl.exp2(decay) * SCALE)[:, None]",
        "out = out * tl.exp2(decay)[:, None]",
    ),
    (
        "forward no token reads itself",
        "        seen = offs_t[:, None] >= offs_t[None, :]\n        since = tl.where",
        "        seen = offs_t[:, None] > offs_t[None, :]\n        since = tl.where",
    ),
    ("what a token writes does not decay", "weight = tl.exp2(total - decay)\n", "weight = tl.exp2(total - total)\n"),
    (
        "no token reads itself",
        "(CHUNK, CHUNK)\n    seen = offs_t[:, None] >= offs_t[None, :]\n",
        "(CHUNK, CHUNK)\n    seen = offs_t[:, None] > offs_t[None, :]\n",
    ),
    (
        "no token is read by itself",
        "        seen = offs_t[:, None] <= offs_t[None, :]\n",
        "        seen = offs_t[:, None] < offs_t[None, :]\n",
    ),
    ("in reverse a decay grows", "        since = -since\n", "        since = since\n"),
    (
        "tokens past the end decay",
        "g = tl.load(g_ptr + rows, mask=inside, other=0.0) *",
        "g = tl.load(g_ptr + rows, mask=inside, other=-1.0) *",
    ),
    (
        "the first state is forgotten",
        "            STARTED=first is not None,\n            CHUNK",
        "            STARTED=False,\n            CHUNK",
    ),
    (
        "the backward forgets the first state",
        "        STARTED=first is not None,\n        REVERSE",
        "        STARTED=False,\n        REVERSE",
    ),
    ("segments forget earlier ones", "state * tl.exp2(tl.load(sums_ptr + slot)) + end", "end"),
    ("the state of a segment does not decay", "state * tl.exp2(tl.load(sums_ptr + slot)) + end", "state + end"),
    ("a segment has no log decay", "        passed += total\n", ""),
    (
        "the last state is that of the first segment",
        "    if segment == segments - 1:\n        tl.store(last",
        "    if segment == 0:\n        tl.store(last",
    ),
    (
        "the reverse's ends go forward",
        "        REVERSE=reverse,\n        ENDS=True,",
        "        REVERSE=False,\n        ENDS=True,",
    ),
    ("the flow through a chunk does not decay", "tl.sum(state * other) * tl.exp2(total)", "tl.sum(state * other)"),
    ("the flow is that of one block", "for block in range(BLOCKS):", "for block in range(1):"),
    ("a gate acts on its own token", "tl.cumsum(far, axis=0) - far", "tl.cumsum(far, axis=0)"),
    ("what goes behind the chunk counts twice", "near = reads - far\n", "near = reads\n"),
    ("no bound", "    g = tl.where(g < LOWEST, LOWEST, g)  # and NaN stays NaN\n", ""),
    ("NaN is bounded", "tl.where(g < LOWEST, LOWEST, g)", "tl.where(g >= LOWEST, g, LOWEST)"),
    ("the reverse goes forward", "chunk = chunks - 1 - step if REVERSE else step", "chunk = step"),
    ("tokens past the end are stored", "    inside = offs_t < T\n    rows", "    inside = offs_t < T + 9\n    rows"),
    (
        "padding of values is stored",
        "    mask = inside[:, None] & (offs_z[None, :] < Z)\n",
        "    mask = inside[:, None] & (offs_z[None, :] < Z + 8)\n",
    ),
    (
        "padding of keys is read",
        "own_mask = inside[:, None] & (offs_x[None, :] < X)",
        "own_mask = inside[:, None] & (offs_x[None, :] < X + 4)",
    ),
    ("queries do not weigh by the scale", "weight = tl.exp2(decay) * SCALE\n", "weight = tl.exp2(decay)\n"),
    ("what comes from the state has no scale", "else tl.exp2(decay) * SCALE\n", "else tl.exp2(decay)\n"),
    (
        "without tokens the state is lost",
        "first.clone(memory_format=torch.contiguous_format)",
        "torch.zeros_like(first)",
    ),
    (
        "without tokens the gradient of the state is lost",
        "grad_last.clone(memory_format=torch.contiguous_format)",
        "torch.zeros_like(grad_last)",
    ),
]
