"""The op of the recipe Gated delta rule: outputs, final states and gradients."""

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
from inputs import DEVICE, Layout, amid, layouts, like, sizes

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/gated_delta_rule.py"
KINDS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-20, torch.float64: 2.0**-48}
NAMES = "out", "last", "dq", "dk", "dv", "dg", "dbeta", "dfirst"
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


def by_token(tensors: Tensors, grads: Tensors, scale: float | None) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Return outputs, the last state and all gradients in float64, by the recurrence and its own.

    Also return, of what is a sum or difference that may cancel, the largest sum of its terms' magnitudes.
    """
    q, k, v, g, beta, first = (t.double() for t in tensors)
    grad, back = (t.double() for t in grads)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    a, states, errors = g.exp()[..., None, None], [first], []
    for t in range(q.shape[1]):
        decayed = states[-1] * a[:, t]
        errors.append(v[:, t] - (k[:, t, :, None] @ decayed)[:, :, 0])
        states.append(decayed + k[:, t, :, :, None] * (beta[:, t, :, None] * errors[-1])[:, :, None])
    out, dq, dk, dv, dg, dbeta = (torch.zeros_like(t) for t in (v, q, k, v, g, beta))
    of_keys, of_betas, added = torch.zeros_like(k), torch.zeros_like(beta), torch.zeros_like(first)
    of_queries = torch.zeros_like(q)
    if q.shape[1]:
        added = decayed.abs() + (states[-1] - decayed).abs()
    for t in reversed(range(q.shape[1])):
        decayed = states[t] * a[:, t]
        out[:, t] = scale * (q[:, t, :, None] @ states[t + 1])[:, :, 0]
        dq[:, t] = scale * (states[t + 1] @ grad[:, t, :, :, None])[..., 0]
        of_queries[:, t] = abs(scale) * (states[t + 1].abs() @ grad[:, t, :, :, None].abs())[..., 0]
        back = back + scale * q[:, t, :, :, None] * grad[:, t, :, None, :]
        written = (k[:, t, :, None] @ back)[:, :, 0]
        dbeta[:, t] = (written * errors[t]).sum(-1)
        of_betas[:, t] = (written * errors[t]).abs().sum(-1)
        dv[:, t] = beta[:, t, :, None] * written
        one, other = back * (beta[:, t, :, None] * errors[t])[:, :, None], decayed * dv[:, t, :, None]
        dk[:, t] = (one - other).sum(-1)
        of_keys[:, t] = (one.abs() + other.abs()).sum(-1)
        back = back - k[:, t, :, :, None] * dv[:, t, :, None, :]
        dg[:, t] = (back * decayed).sum((-1, -2))
        back = back * a[:, t]
    # Terms of the gradient of g: pairs of two tokens that are both later.
    of_gates = (dq * q).abs().sum(-1) + (dk * k).abs().sum(-1)
    terms = {"last": added, "dq": of_queries, "dk": of_keys, "dg": of_gates, "dbeta": of_betas}
    return (out, states[-1], dq, dk, dv, dg, dbeta, back), {
        name: t.max() if t.numel() else torch.zeros(()) for name, t in terms.items()
    }


def assert_within(
    found: Sequence[torch.Tensor], tensors: Tensors, grads: Tensors, scale: float | None = None, looser: float = 1
) -> None:
    """Assert that results are as good as a few roundings of the largest."""
    q, _, _, g, *_ = tensors
    expected, terms = by_token(tensors, grads, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    decays = g.double().abs().clamp(max=850).sum(1).max().item() if g.numel() else 0.0
    eps = looser * (KINDS[q.dtype] + torch.finfo(wide).eps * decays)
    # Numbers below 2**-14 lose bits in float16.
    least = 2.0**-17 if q.dtype == torch.float16 else 1e-30
    for name, one, right in zip(NAMES, found, expected, strict=True):
        assert one.shape == right.shape
        assert one.dtype == (wide if name in ("last", "dg", "dbeta", "dfirst") else q.dtype)
        assert one.is_contiguous()
        if not one.numel():
            continue
        size = right.abs().max() + terms.get(name, 0.0)
        if name == "dfirst" and q.numel():  # tokens shrink what comes from later ones, and not its rounding
            size = size + q.abs().max() * grads[0].abs().max() * (q.shape[3] ** -0.5 if scale is None else abs(scale))
        off = (one.double() - right).abs().max() / (4 * eps * size + least)
        assert off <= 1, f"{name} is off by {off:.1f}"


def assert_right(
    taken: ModuleType,
    tensors: Tensors,
    grads: Tensors,
    scale: float | None = None,
    started: bool = True,
    looser: float = 1,
) -> Tensors:
    """Assert that both ops are right and store nowhere else; return what they return."""
    *tokens, first = tensors
    if not started:
        tensors = *tokens, torch.zeros_like(first)

    def forward(*inputs: torch.Tensor) -> Tensors:
        result: Tensors = taken.gated_delta_rule(*inputs[:5], inputs[5] if started else None, scale)
        return result

    def backward(*inputs: torch.Tensor) -> Tensors:
        state = inputs[7] if started else None
        result: Tensors = taken.gated_delta_rule_backward(*inputs[:7], state, scale)
        return result

    state = (first,) if started else ()
    found = *guarded(forward, *tokens, *state), *guarded(backward, *grads, *tokens, *state)
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
    of: Sequence[Layout] = tuple(Layout("contiguous", seed) for seed in range(6)),
) -> tuple[Tensors, Tensors]:
    """Return what the op takes, and gradients of its results; queries, keys, values, gates, gradients in layouts."""
    wide = torch.promote_types(dtype, torch.float32)
    shapes = [(batch, T, heads, K)] * 2 + [(batch, T, heads, V)] + [(batch, T, heads)] * 2 + [(batch, T, heads, V)]
    kinds = dtype, dtype, dtype, wide, wide, dtype
    q, k, v, g, beta, grad = (
        layout.make(shape, kind, DEVICE) for layout, shape, kind in zip(of, shapes, kinds, strict=True)
    )
    k = like(k, torch.nn.functional.normalize(k.double(), dim=-1))
    g = torch.nn.functional.logsigmoid(g + gate)
    beta = like(beta, beta.sigmoid())
    first, last = (Layout("contiguous", seed).make((batch, heads, K, V), wide, DEVICE) for seed in (7, 8))
    return (q, k, v, g, beta, first), (grad, last)


@each_dtype
@settings(max_examples=12)
@given(
    T=sizes(64, 140),
    heads=st.sampled_from([(1, 1), (2, 1), (1, 3)]),
    K=st.sampled_from([1, 16, 20, 64]),
    V=st.sampled_from([1, 16, 40, 64]),
    started=st.booleans(),
    of=st.tuples(*[layouts()] * 6),
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


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (100, 200), (16, 256)], ids=str)
@pytest.mark.parametrize("T", [1, 64, 70])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_every_tile(taken: ModuleType, dtype: torch.dtype, T: int, dims: tuple[int, int]) -> None:
    """Several blocks of the state, at lengths around the edges of chunks."""
    assert_right(taken, *problem(dtype, 1, T, 1, *dims))


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
    (q, k, v, g, beta, first), grads = problem(dtype, 1, T, 2, 16, 32)
    g[:, [0, 7, T - 1], 0] = -torch.inf
    g[:, 20:, 1] = -torch.inf
    found = assert_right(taken, (q, k, v, g, beta, first), grads)
    assert all(t.isfinite().all() for t in found)
    assert not found[-1][:, 0].any()


def test_a_nan_gate_stays_nan_float32(taken: ModuleType) -> None:
    """It is not taken for a strong decay."""
    (q, k, v, g, beta, first), _ = problem(torch.float32, 1, 100, 1, 16, 16)
    g[0, 50] = torch.nan
    out, last = taken.gated_delta_rule(q, k, v, g, beta, first)
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
        _, _, dq, dk, dv, dg, dbeta, _ = found
        assert dq[:, token].any()
        assert not dq[:, :token].any()
        for gradient in (dq, dk, dv, dg, dbeta):
            assert not gradient[:, token + 1 :].any()
        assert dk[:, token].any()


@each_dtype
def test_beta_of_zero(taken: ModuleType, dtype: torch.dtype) -> None:
    """Such a token writes nothing, and its beta has a gradient all the same."""
    (q, k, v, g, beta, first), grads = problem(dtype, 1, 70, 2, 16, 32)
    beta[:, 20:50] = 0
    found = assert_right(taken, (q, k, v, g, beta, first), grads)
    assert found[6][:, 20:50].all()
    assert not found[4][:, 20:50].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_keys(taken: ModuleType, dtype: torch.dtype) -> None:
    """A sequence that repeats one token, without decays: no step of the solve leaves the range."""
    (q, k, v, g, beta, first), grads = problem(dtype, 1, 130, 1, 32, 32)
    k = k[:, :1].expand(k.shape)
    assert_right(taken, (q, k, v, torch.zeros_like(g), torch.ones_like(beta), first), grads, looser=8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around contiguous inputs stays there."""
    tensors, grads = problem(dtype, 1, 75, 1, 20, 40)
    assert_right(taken, tuple(map(amid, tensors)), (amid(grads[0]), amid(grads[1])))


@each_dtype
def test_no_tokens(taken: ModuleType, dtype: torch.dtype) -> None:
    """The state stays, and so does its gradient."""
    tensors, grads = problem(dtype, 2, 0, 3, 16, 32)
    found = assert_right(taken, tensors, grads)
    assert torch.equal(found[1], tensors[5])
    assert found[1].data_ptr() != tensors[5].data_ptr()
    assert torch.equal(found[7], grads[1])
    assert not taken.gated_delta_rule(*tensors[:5])[1].any()
    for batch, heads in ((0, 2), (2, 0)):
        assert_right(taken, *problem(dtype, batch, 5, heads, 16, 32))


@each_dtype
def test_parts(taken: ModuleType, dtype: torch.dtype) -> None:
    """Parts of a sequence, each with the state of the one before, end as the whole does."""
    (*tokens, state), _ = problem(dtype, 1, 150, 2, 16, 32)
    whole, end = taken.gated_delta_rule(*tokens, state)
    for part in (slice(0, 70), slice(70, 71), slice(71, 150)):
        out, state = taken.gated_delta_rule(*(t[:, part] for t in tokens), state)
        atol = 16 * KINDS[dtype] * whole.abs().max().item()
        torch.testing.assert_close(out, whole[:, part], rtol=0, atol=atol)
    torch.testing.assert_close(state, end, rtol=0, atol=16 * KINDS[dtype] * end.abs().max().item())


@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_gradcheck(taken: ModuleType, fast: bool) -> None:
    """Differences agree with the gradients, over several chunks, in one direction or in each."""
    tensors, _ = problem(torch.float64, 1, 17, 1, 2, 2)
    leaves = [t.clone().requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda *x: taken.gated_delta_rule(*x, 0.7), leaves, fast_mode=fast)


@each_dtype
def test_autograd(taken: ModuleType, dtype: torch.dtype) -> None:
    """Autograd hands over what the backward op returns, and asks it as it was asked, for either result."""
    tensors, grads = problem(dtype, 1, 40, 2, 16, 32)
    leaves = [t.clone().requires_grad_() for t in tensors]
    results = taken.gated_delta_rule(*leaves, 0.3)
    for which in ((0, 1), (0,), (1,)):
        got = torch.autograd.grad([results[i] for i in which], leaves, [grads[i] for i in which], retain_graph=True)
        given_to = [grads[i] if i in which else torch.zeros_like(grads[i]) for i in range(2)]
        expected = taken.gated_delta_rule_backward(*given_to, *tensors, 0.3)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    out, _ = taken.gated_delta_rule(*leaves[:5])
    got = torch.autograd.grad(out, leaves[:5], grads[0])
    expected = taken.gated_delta_rule_backward(grads[0], torch.zeros_like(grads[1]), *tensors[:5], None, None)
    assert all(torch.equal(*pair) for pair in zip(got, expected[:5], strict=True))


def test_gradient_has_no_gradient(taken: ModuleType) -> None:
    """A second derivative is refused, not zero."""
    tensors, _ = problem(torch.float64, 1, 5, 1, 16, 16)
    q = tensors[0].clone().requires_grad_()
    (d,) = torch.autograd.grad(taken.gated_delta_rule(q, *tensors[1:5])[0].square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    (q, k, v, g, beta, first), _ = problem(torch.float16, 2, 5, 3, 16, 32)
    with pytest.raises(TypeError, match=r"^gated_delta_rule takes float tensors, not torch\.int32"):
        taken.gated_delta_rule(q.int(), k, v, g, beta)
    for tensors in (
        (q, k.bfloat16(), v, g, beta),
        (q, k, v, g.half(), beta),
        (q, k, v, g, beta.half()),
        (q, k, v, g, beta, first.half()),
    ):
        with pytest.raises(TypeError, match=r"^gated_delta_rule takes q, k and v of one .*, not q torch\.float16 on "):
            taken.gated_delta_rule(*tensors)
    for tensors in (
        (q[0], k[0], v[0], g[0], beta[0]),
        (q, k[:, :4], v, g, beta),
        (q, k, v[:, :4], g, beta),
        (q, k, v[:, :, :2], g, beta),
        (q, k, v, g[..., None], beta),
        (q, k, v, g, beta[:, :4]),
        (q[..., :8], k, v, g, beta),
        (q[..., :0], k[..., :0], v, g, beta),
        (q, k, v[..., :0], g, beta),
        (q.repeat(1, 1, 1, 9), k.repeat(1, 1, 1, 9), v, g, beta),
        (q, k, v.repeat(1, 1, 1, 9), g, beta),
        (q, k, v, g, beta, first.mT),
        (q, k, v, g, beta, first[:1]),
        tuple(t[:, :, :1].expand(2, 5, 65536, *t.shape[3:]) for t in (q, k, v, g, beta)),
    ):
        names = "q", "k", "v", "g", "beta", "initial_state"
        found = ", ".join(f"{who} {tuple(t.shape)}" for who, t in zip(names, tensors, strict=False))
        with pytest.raises(
            ValueError, match=rf"^gated_delta_rule takes q and k of .* V up to 256, not {re.escape(found)}$"
        ):
            taken.gated_delta_rule(*tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_launchers_serve_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launchers; they do what the ops do."""
    tensors, grads = problem(dtype, 1, 40, 2, 16, 32)
    inputs = tensors[:5]
    found, expected = at_cuda(taken.gated_delta_rule, *inputs), taken.gated_delta_rule(*inputs)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    inputs = *grads, *tensors, 0.3
    found, expected = at_cuda(taken.gated_delta_rule_backward, *inputs), taken.gated_delta_rule_backward(*inputs)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_guards_reach_into_the_ops(taken: ModuleType) -> None:
    """What the ops allocate lies between guards in the tests above."""
    tensors, grads = problem(torch.float32, 1, 40, 1, 16, 16)
    with Guard() as guard:
        found = *taken.gated_delta_rule(*tensors), *taken.gated_delta_rule_backward(*grads, *tensors, 1.0)
    places = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {t.untyped_storage().data_ptr() for t in found} <= places


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so are the page's references."""
    tensors, grads = problem(torch.float16, 1, 128, 2, 64, 64)
    *tokens, first = tensors
    expected = by_token((*tokens, torch.zeros_like(first)), grads, None)[0][0]
    ops = {name: step[0] for name, step in recipe.STEPS.items()} | {"PyTorch": recipe.delta_rule_torch}
    for op in ops.values():
        found = op(*tokens)
        assert found.dtype == torch.float16
        assert (found.double() - expected).abs().max() <= 4 * 2.0**-11 * expected.abs().max()
    doubles = [t.double() for t in tensors]
    found = recipe.results_of(recipe.recurrence, doubles, [t.double() for t in grads], 0.3)
    for one, right in zip(found, by_token(tensors, grads, 0.3)[0], strict=True):
        torch.testing.assert_close(one, right)


def test_inverses_of_the_page(recipe: ModuleType) -> None:
    """Both inverses of the page are inverses, where the product has no large numbers."""
    M = torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril(-1).to(DEVICE) / 16
    expected = torch.linalg.inv(torch.eye(32, device=DEVICE) + M)
    for inverse in (recipe.doubled, recipe.powers):
        torch.testing.assert_close(inverse(M), expected)


KERNELS = {
    "solve": (0, {}),
    "states": (1, {"STARTED": True}),
    "outputs": (2, {"BACKWARD": False}),
    "outputs, backward": (2, {"BACKWARD": True}),
    "flows": (3, {}),
    "pairs": (4, {}),
    "gradients": (5, {}),
}
SIZES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
OF_WIDE = [f"{of}_ptr" for of in ["g", "decay", "beta", "first", "last", "grad_last", "dfirst", "dg", "dbeta"]]


def at_launch(taken: ModuleType, which: str, dtype: str, K: int, V: int) -> tuple[object, dict[str, object]]:
    """Return a kernel, and what the launchers pass on to it on an H100, for lengths and heads that 16 divides."""
    import triton
    import triton.language as tl

    number, constants = KERNELS[which]
    kernel = taken.GATED_DELTA_RULE_KERNELS[number]
    half = SIZES[dtype] == 2
    (CHUNK, PRECISION), *tiles = taken.GATED_DELTA_RULE_TILES[SIZES[dtype]]
    most_k, most_v, num_warps, num_stages = (taken.GATED_DELTA_RULE_HOPPER if half else tiles)[number]
    least = 64 if half else 16
    wide = "fp64" if dtype == "fp64" else "fp32"
    known = {
        "SCALE": K**-0.5,
        "K": K,
        "V": V,
        "ACC": getattr(tl, {"fp64": "float64", "fp32": "float32"}[wide]),
        "PRECISION": PRECISION,
        "CHUNK": CHUNK,
        "BLOCK_K": min(most_k, max(least, triton.next_power_of_2(K))),
        "BLOCK_V": min(most_v, max(least, triton.next_power_of_2(V))),
    } | constants
    known = {name: value for name, value in known.items() if name in kernel.arg_names}
    pointers = dict.fromkeys((name for name in OF_WIDE if name in kernel.arg_names), wide)
    options = {"dtype": dtype, "num_warps": num_warps, "num_stages": num_stages, "multiples": ["T", "HEADS"]}
    return kernel, options | known | pointers


def codes(taken: ModuleType) -> dict[str, tuple[set[str], bool, bool]]:
    """Return, for each kernel, the types of matrix instructions, whether exp2 is one, and whether any is atomic."""
    found = {}
    for which in KERNELS:
        kernel, known = at_launch(taken, which, "bf16", 128, 128)
        text = compiled(kernel, **known).asm["ptx"]
        matrix = set(re.findall(r"wgmma\.mma_async\S*?m\d+n\d+k\d+\.f32\.(\w+)", text))
        found[which] = matrix, "ex2.approx" in text, bool(re.search(r"\b(atom|red)\.global", text))
    return found


@pytest.mark.thorough
def test_narrow_heads_read_nothing_unwritten(gallery: Path, on_h100: Ask) -> None:
    """On an H100, tiles as narrow as these heads had wrong results: `compiled` looks for the cause."""
    on_h100(gallery / RECIPE, functools.partial(narrow, at_launch=at_launch, kernels=tuple(KERNELS)))


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Hopper's instruction in all products, in TF32 for inverses, one for an exponential, no additions to memory."""
    (found,) = on_h100(gallery / RECIPE, codes)
    assert set(found) == set(KERNELS)
    for which, code in found.items():
        assert code == ({"bf16", "tf32"} if which == "solve" else {"bf16"}, True, False), which


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that a thread spills, for every kernel."""
    found = {}
    for dtype, (K, V), which in itertools.product(["bf16", "fp32", "fp64"], [(64, 64), (128, 128)], KERNELS):
        kernel, known = at_launch(taken, which, dtype, K, V)
        found[f"{which} {dtype} {K} {V}"] = stack(kernel, **known)
    return found


@pytest.mark.thorough
def test_no_register_spills(gallery: Path, on_h100: Ask) -> None:
    """In none of the kernels, but two registers in the last: its tiles are as wide as registers allow.

    Triton 3.6 spills two in another dtype, and ten in float32.
    """
    (found,) = on_h100(gallery / RECIPE, spills)
    assert len(found) == 3 * 2 * 7
    older = version("triton").startswith("3.6.")
    most = {name: 8 if name in ("gradients bf16 128 128", "outputs fp64 128 128") else 0 for name in found}
    most |= {name: 40 for name in found if older and "gradients fp32" in name}
    assert {name: size for name, size in found.items() if size > most[name]} == {}


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of a call, forward and backward."""
    q, k, v = (torch.randn(2, 40, 3, 64, dtype=torch.float16, requires_grad=True) for _ in range(3))
    g, beta = (torch.randn(2, 40, 3, requires_grad=True) for _ in range(2))
    first = torch.randn(2, 3, 64, 64, requires_grad=True)
    return graphs(lambda *x: recipe.gated_delta_rule(*x, 0.3), q, k, v, g, beta, first)


def test_torch_compile_looks_into_it(gallery: Path, on_h100: Ask) -> None:
    """It sees three kernels forward and six backward."""
    ((forward, backward),) = on_h100(gallery / RECIPE, traced)
    for graph, number in ((forward, 3), (backward, 6)):
        assert sum(call.startswith("triton_kernel_wrapper") for call in graph) == number
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


@pytest.mark.needs_gpu_memory(40)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last tokens are right."""
    T = 2**18 + 3
    q = torch.zeros(1, T, 65, 128, dtype=torch.float16, device=DEVICE)
    g, beta = (torch.zeros(1, T, 65, device=DEVICE) for _ in range(2))
    g[:, -70] = -torch.inf
    beta[:, -70:] = 0.5
    q[:, -70:] = torch.nn.functional.normalize(torch.randn(70, 65, 128, device=DEVICE), dim=-1)
    out, last = taken.gated_delta_rule(q, q, q, g, beta)
    few = q[:, -70:], g[:, -70:], beta[:, -70:]
    expected, end = taken.gated_delta_rule(*[few[0]] * 3, *few[1:])
    torch.testing.assert_close(out[:, -70:], expected, rtol=2.0**-8, atol=2.0**-5)
    torch.testing.assert_close(last, end, rtol=2.0**-8, atol=2.0**-5)


@needs_a_gpu
def test_same_bits(taken: ModuleType) -> None:
    """Each time, for many chunks."""
    tensors, grads = problem(torch.bfloat16, 2, 3000, 4, 128, 128)
    first, *others = (taken.gated_delta_rule_backward(*grads, *tensors, None) for _ in range(5))
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
    for first in (leaves[5], None):
        found = torch.library.opcheck(taken.gated_delta_rule, (*leaves[:5], first, None))
        assert set(found.values()) == {"SUCCESS"}
    found = torch.library.opcheck(taken.gated_delta_rule_backward, (*grads, *tensors, None))
    assert set(found.values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradients, and other sizes."""
    torch.compiler.reset()
    op = torch.compile(lambda q, *x: taken.gated_delta_rule(q * 2, *x), fullgraph=True, dynamic=dynamic)
    for T in (40, 70, 300):
        (q, *others, first), grads = problem(torch.float16, 1, T, 2, 64, 64)
        leaves = [t.clone().requires_grad_() for t in (q, *others)]
        found = op(*leaves)
        dq, *rest = torch.autograd.grad(found, leaves, grads)
        _, _, *expected = by_token((q * 2, *others, torch.zeros_like(first)), grads, None)[0]
        for one, right in zip((dq / 2, *rest), expected, strict=False):
            torch.testing.assert_close(one.double(), right, rtol=0, atol=2.0**-7 * right.abs().max().item())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The ops run where their inputs are, whichever GPU is the current one."""
    tensors, grads = problem(torch.float16, 1, 50, 2, 64, 64)
    assert_right(taken, tuple(t.to("cuda:1") for t in tensors), tuple(t.to("cuda:1") for t in grads))


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("attention/gated_delta_rule")
    assert re.search(r"(?m)^ 8192 tokens: +17\.2 GB in +8192 steps, floor 0\.14 GB$", out)
    assert re.search(r"(?m)^largest error \d\.\de-0\d, allowed \d\.\de-0\d$", out)
    shares = re.findall(r"(?m)^torch\.\w+: at most (\d\.\d\d) of what is allowed$", out)
    assert len(shares) == 4
    assert all(0 < float(share) <= 1 for share in shares)
    assert re.findall(r"(?m)^(TypeError|ValueError): gated_delta_rule takes", out) == [*["TypeError"] * 2, "ValueError"]
    errors = re.findall(r"(?m)^alike (\d\.\d), (\w+): error (\S+)$", out)
    assert [(alike, how) for alike, how, error in errors if float(error) > 1] == [("0.9", "powers"), ("1.0", "powers")]


def some_tokens(normal: Callable[..., torch.Tensor], M: int, N: int) -> tuple[torch.Tensor, ...]:
    """Return inputs for the op: a batch of two sequences of up to 300 tokens."""
    T = N % 300
    shape = 2, T, 1 + M % 3, 32
    q, k, v = (normal(*shape) for _ in range(3))
    return (
        0.3 * q,
        torch.nn.functional.normalize(k, dim=-1),
        0.3 * v,
        -normal(*shape[:3]).abs() / 8,
        normal(*shape[:3]).sigmoid(),
    )


def one_by_one(*inputs: torch.Tensor) -> Tensors:
    """Return what the op does, token by token."""
    q, k, v, g, beta = inputs
    state, outs = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = v[:, t] - (k[:, t, :, None] @ state)[:, :, 0]
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[:, :, None]
        outs.append((q[:, t, :, None] @ state)[:, :, 0] * q.shape[3] ** -0.5)
    return torch.stack(outs, dim=1), state


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [("gated_delta_rule", some_tokens, one_by_one)]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("the state does not decay", "        state *= tl.exp2(total)\n", ""),
    ("its gradient does not decay", "        flow *= tl.exp2(total)\n", ""),
    ("what a token writes does not decay", "(tl.exp2(total - decay) * beta)", "beta"),
    ("what a token writes has no beta", "(tl.exp2(total - decay) * beta)", "tl.exp2(total - decay)"),
    (
        "the system has no beta",
        "_gated_delta_rule_weights(decay, CHUNK) * beta[None, :]",
        "_gated_delta_rule_weights(decay, CHUNK)",
    ),
    ("the system has beta in rows", "(decay, CHUNK) * beta[None, :]", "(decay, CHUNK) * beta[:, None]"),
    ("a doubling is left out", "for level in range(1, 6):", "for level in range(1, 4):"),
    ("the first doubling is left out", "    inverse -= tl.where(apart == 1, pairs, 0.0)\n", ""),
    ("outputs have no beta", "        p *= tl.load(beta_ptr + begin + rows, mask=inside, other=0.0)[None, :]\n", ""),
    ("no token reads itself", "seen = offs[:, None] >= offs[None, :]", "seen = offs[:, None] > offs[None, :]"),
    (
        "a key reads its own token",
        "tl.where(offs[:, None] > offs[None, :], errors, 0.0)",
        "tl.where(offs[:, None] >= offs[None, :], errors, 0.0)",
    ),
    ("errors do not come from the state", "x = y - tl.dot(w, read,", "x = y - 0 * tl.dot(w, read,"),
    ("the backward forgets what keys read", "f = (-f).to(k.dtype)", "f = (0 * f).to(k.dtype)"),
    ("the system is not transposed", "tl.dot(inverse.T, f,", "tl.dot(inverse, f,"),
    (
        "the gradient of beta is that of a key",
        "dbeta += tl.sum((written + near) * k, axis=1)",
        "dbeta += tl.sum(written * k, axis=1)",
    ),
    ("near has no beta", "        near *= beta[:, None]\n", ""),
    ("the first state is forgotten", "STARTED=first is not None,", "STARTED=False,"),
    ("the flow through a chunk does not decay", "tl.sum(through, axis=0) * tl.exp2(total)", "tl.sum(through, axis=0)"),
    ("the flow is that of one block", "through += tl.sum(", "through = tl.sum("),
    ("a gate acts on its own token", "tl.cumsum(far, axis=0) - far", "tl.cumsum(far, axis=0)"),
    (
        "what a key reads has no gate",
        "dg += tl.sum(dq * q + read * k, axis=1)",
        "dg += tl.sum(dq * q, axis=1)",
    ),
    ("no bound", "    g = tl.where(g < LOWEST, LOWEST, g)  # and NaN stays NaN\n", ""),
    ("NaN is bounded", "tl.where(g < LOWEST, LOWEST, g)", "tl.where(g >= LOWEST, g, LOWEST)"),
    (
        "tokens past the end are stored",
        "return begin, rows, tl.arange(0, CHUNK) < T - start",
        "return begin, rows, tl.arange(0, CHUNK) < T - start + 1",
    ),
    ("queries do not weigh by the scale", "(tl.exp2(decay) * SCALE)[:, None]).to", "tl.exp2(decay)[:, None]).to"),
    ("without tokens the state is lost", "g.new_zeros(shape) if first is None else first\n", "g.new_zeros(shape)\n"),
    ("without tokens the gradient of the state is lost", "grad_last.clone()", "torch.zeros_like(grad_last)"),
]
