"""The op of the recipe A mixture-of-experts layer: sorted or not, by copy engine or pointers, and its backward."""

# ruff: noqa: N806 - T, E, H and F are sizes, as in the recipe

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, assert_close, in_float64
from compiled import Ask, graphs
from device_key import at_cuda
from guard import guarded
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS
from torch.nn.functional import silu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RECIPE = Path("experts") / "moe_layer.py"
HALVES = FLOATS[:2]
ROOM = 227 * 1024  # bytes of shared memory

Choose = Callable[[int, int, int], torch.Tensor]


def drawn(T: int, E: int, k: int) -> torch.Tensor:
    """Return k different experts for each token."""
    generator = torch.Generator().manual_seed(T + 31 * E)
    return torch.rand(T, E, generator=generator).argsort(1)[:, :k]


def one(T: int, E: int, k: int) -> torch.Tensor:
    """Return the same experts for all tokens, the last ones."""
    return (E - 1 - torch.arange(k)).expand(T, k)


def some(T: int, E: int, k: int) -> torch.Tensor:
    """Return experts of which others are elsewhere: -1 and E are none of these."""
    return drawn(T, E + 3, k) - 1


def none(T: int, E: int, k: int) -> torch.Tensor:
    """Return no expert of these."""
    return torch.full((T, k), E)


def arguments(draw: Draw, T: int, E: int, k: int, H: int, F: int, choose: Choose = drawn) -> tuple[Any, ...]:
    """Make x, weights, experts, gate_up and down, with results of about 1."""
    x, weights = draw(T, H), draw(T, k, dtype=accumulator(draw.dtype))
    gate_up = draw(E, 2 * F, H, of=lambda t: t / max(H, 1) ** 0.5)
    down = draw(E, H, F, of=lambda t: t / max(F, 1) ** 0.5)
    return x, weights, choose(T, E, k).int().to(DEVICE), gate_up, down


def parts(x: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return gate and up of each choice, and the sums of magnitudes in both; of no expert they are zeros."""
    (T, k), E = experts.shape, gate_up.shape[0]
    known = ((experts >= 0) & (experts < E)).flatten()
    of = torch.where(known, experts.flatten(), 0).long()
    rows = x.repeat_interleave(k, 0)
    products = (torch.einsum("rh,rfh->rf", a, b[of]) for a, b in ((rows, gate_up), (rows.abs(), gate_up.abs())))
    gates = [(t * known[:, None]).view(T, k, gate_up.shape[1]).chunk(2, dim=2) for t in products]
    return *gates[0], *gates[1]


def by_experts(h: torch.Tensor, experts: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the products with down of each choice, (T, k, H)."""
    known = (experts >= 0) & (experts < down.shape[0])
    of = torch.where(known, experts, 0).long()
    return torch.einsum("tkf,tkhf->tkh", h, down[of]) * known[:, :, None]


def spread(gate: torch.Tensor, up: torch.Tensor, gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Return what is added up in silu(gate) * up, where a slope of silu is at most 1.1."""
    return silu(gate).abs() * ups + 1.1 * up.abs() * gates


def exact(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> list[Exact]:
    """Return the result: rounded to the dtype of x are what down multiplies, and what it makes."""
    gate, up, *sums = parts(x, experts, gate_up)
    h, known = silu(gate) * up, (experts >= 0) & (experts < len(down))

    def total(h: torch.Tensor, down: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (by_experts(h, experts, down) * weights.where(known, 0)[:, :, None]).sum(1)

    terms = total(spread(gate, up, *sums), down.abs(), weights.abs())
    narrow = 2 * total(h.abs(), down.abs(), weights.abs())
    roundings = x.shape[1] + down.shape[2] + 16
    return [Exact(total(h, down, weights), terms, narrow=narrow, roundings=roundings)]


def exact_kept(*given: Any) -> list[Exact]:
    """Return that, and gate and up in the order of experts."""
    x, _, experts, gate_up, _ = given
    gate, up, gates, ups = (t.flatten(0, 1) for t in parts(x, experts, gate_up))
    order = experts.flatten().sort(stable=True).indices
    values, terms = (torch.stack(pair)[:, order] for pair in ((gate, up), (gates, ups)))
    return [*exact(*given), Exact(values, terms, roundings=x.shape[1] + 1)]


def exact_gradients(grad: torch.Tensor, *given: Any) -> list[Exact]:
    """Return the gradients of x, weights, gate_up and down."""
    x, weights, experts, gate_up, down = given
    E = len(down)
    gate, up, gates, ups = parts(x, experts, gate_up)
    s, act = gate.sigmoid(), silu(gate)
    q = by_experts_back(grad, experts, down)
    q_terms = by_experts_back(grad.abs(), experts, down.abs())
    h, h_terms = act * up, spread(gate, up, gates, ups)
    w = weights[:, :, None]
    d_gate, d_up = w * q * up * s * (1 + gate * (1 - s)), w * q * act
    d = torch.cat((d_gate, d_up), 2)
    w_terms = w.abs() * q_terms
    d_terms = torch.cat(
        (w_terms * (1.1 * ups + 0.5 * up.abs() * gates), w_terms * (act.abs() + 1.1 * gates)), 2
    )  # 0.5 is the largest second derivative
    known = (experts >= 0) & (experts < E)
    one_hot = torch.nn.functional.one_hot(torch.where(known, experts, E).long(), E + 1)[..., :E].to(x.dtype)

    def gradients(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, d: torch.Tensor, h: Any, gate_up: Any) -> Any:
        to_x = torch.einsum("tke,tkf,efh->th", one_hot, d, gate_up)
        to_gate_up = torch.einsum("tke,tkf,th->efh", one_hot, d, x)
        return to_x, to_gate_up, torch.einsum("tke,th,tkf->ehf", one_hot, grad, w * h)

    values = gradients(grad, x, w, d, h, gate_up)
    terms = gradients(grad.abs(), x.abs(), w.abs(), d_terms, h_terms, gate_up.abs())
    made = [Exact(value, term) for value, term in zip(values, terms, strict=True)]
    d_weights = Exact((q * h).sum(2), (q_terms * h_terms).sum(2))
    return [made[0], d_weights, *made[1:]]


def by_experts_back(grad: torch.Tensor, experts: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return the gradients of what down multiplies, but for the weights, (T, k, F)."""
    known = (experts >= 0) & (experts < down.shape[0])
    of = torch.where(known, experts, 0).long()
    return torch.einsum("th,tkhf->tkf", grad, down[of]) * known[:, :, None]


def reference(*given: Any) -> torch.Tensor:
    """Return the result by PyTorch alone, in float64."""
    return exact(*in_float64(given))[0].value.to(given[0].dtype)


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make NaN and infinities, which spoil their token, or those of their expert, alone; and of a choice of none."""
    x, weights, _, gate_up, down = arguments(draw, 7, 5, 2, 24, 40)
    experts = torch.tensor([[0, 1], [1, 2], [2, 3], [-1, 3], [0, 3], [3, 4], [5, 0]], device=DEVICE).int()
    for t in (x, weights, gate_up, down):
        t.fill_(0.5)
    x[1, 3], x[2, 5], weights[5, 0], weights[3, 0], weights[6, 0] = (
        torch.nan,
        torch.inf,
        torch.nan,
        torch.nan,
        torch.inf,
    )
    gate_up[4, 50, 23], down[4, 3, 7] = torch.nan, torch.inf
    return [(x, weights, experts, gate_up, down)]


# Tokens, experts, choices, hidden sizes, and which experts: what the engine takes, and what it does not
SIZES: list[tuple[Any, ...]] = [(5, 4, 2, 24, 40), (40, 6, 3, 40, 136), (3, 4, 2, 17, 9), (1, 8, 8, 64, 16)]
SIZES += [(70, 3, 2, 72, 24, one), (33, 5, 3, 16, 70, some), (4, 7, 2, 8, 8, none), (0, 4, 2, 8, 8)]
SIZES += [(1, 1, 1, 1, 1), (9, 512, 10, 8, 16), (20, 16, 4, 130, 65), (2, 3, 1, 8, 0), (2, 3, 1, 0, 8)]
SIZES += [(3, 2, 0, 8, 8), (2, 4, 2, 1792, 8), (35, 2, 1, 8, 264, one), (18, 300, 3, 16, 8, some)]
SMALL = (3, 4, 2, 8, 5)
SHAPES = st.tuples(
    st.sampled_from([1, 2, 17, 40]),
    st.sampled_from([3, 8, 40]),
    st.integers(1, 3),
    st.sampled_from([1, 8, 17, 40, 72]),
    st.sampled_from([1, 8, 24, 65, 136]),
    st.sampled_from([drawn, one, some]),
)
KINDS = "moe_layer takes x, gate_up and down of one float dtype, not .*torch."
FORMS = r"moe_layer takes x \(T, H\), weights \(T, k\) and experts \(T, k\), not"
WEIGHTS = r"moe_layer takes gate_up \(E, 2 F, 8\) and down \(E, 8, F\), of 1 to 1024 experts, not"


def changed(place: int, value: Any) -> Any:
    """Return what makes arguments of which one is what a function makes of it."""

    def made(draw: Draw) -> tuple[Any, ...]:
        given = [*arguments(draw, *SMALL)]
        given[place] = value(given[place])
        return (*given,)

    return made


X, ROUTING, EXPERTS, GATE_UP, DOWN = range(5)
REFUSED = [
    Refused(changed(X, lambda t: t.int()), TypeError, f"{KINDS}int32"),
    Refused(changed(X, lambda t: t.half()), TypeError, f"{KINDS}float16"),
    Refused(changed(GATE_UP, lambda t: t.half()), TypeError, f"{KINDS}float16"),
    Refused(changed(DOWN, lambda t: t.half()), TypeError, f"{KINDS}float16"),
    Refused(changed(ROUTING, lambda t: t.int()), TypeError, r"moe_layer takes float weights, not torch\.int32"),
    Refused(
        changed(EXPERTS, lambda t: t.float()),
        TypeError,
        r"moe_layer takes experts of int32 or int64, not torch\.float32",
    ),
    Refused(changed(X, lambda t: t[1:]), ValueError, FORMS),
    Refused(changed(X, lambda t: t[None]), ValueError, FORMS),
    Refused(changed(ROUTING, lambda t: t[:, 1:]), ValueError, FORMS),
    Refused(changed(EXPERTS, lambda t: t.flatten()), ValueError, FORMS),
    Refused(changed(GATE_UP, lambda t: t[:, 1:]), ValueError, WEIGHTS),
    Refused(changed(GATE_UP, lambda t: t[1:]), ValueError, WEIGHTS),
    Refused(changed(GATE_UP, lambda t: t[..., 1:]), ValueError, WEIGHTS),
    Refused(changed(DOWN, lambda t: t[0]), ValueError, WEIGHTS),
    Refused(changed(DOWN, lambda t: t.mT), ValueError, WEIGHTS),
    Refused(
        lambda draw: (draw(3, 8), draw(3, 2), none(3, 0, 2).to(DEVICE), draw(0, 10, 8), draw(0, 8, 5)),
        ValueError,
        WEIGHTS,
    ),
    Refused(
        changed(EXPERTS, lambda t: t.to("meta")), ValueError, "moe_layer takes tensors on one device, not on .*meta"
    ),
]
LAYER = Case(
    "moe_layer",
    arguments,
    exact,
    autocast="asked",
    sizes=SIZES,
    small=SMALL,
    in_layouts=(9, 4, 2, 40, 24),
    many=(5003, 40, 3, 72, 136),
    shapes=SHAPES,
    reference=reference,
    special=special,
    gradients=exact_gradients,
    with_gradients=(X, ROUTING, GATE_UP, DOWN),
    plain=True,
    refused=REFUSED,
)
OLDER = {"_grouped_matmul_gpu": lambda device: (3, 64 * 1024, 0)}  # a GPU without an engine
FULL = [size for size in SIZES if size[-1] not in (some, none)]  # where all rows are written
CONTRACT = [
    LAYER,
    replace(
        LAYER,
        call="moe_layer_with_activations",
        exact=exact_kept,
        sizes=FULL,
        plain=False,
        reference=None,
        special=None,
        shapes=None,
    ),
    replace(LAYER, name="moe_layer, not sorted", settings={"MOE_LAYER_FEW": 1024}, refused=(), gradients=None),
    replace(LAYER, name="moe_layer, sorted", settings={"MOE_LAYER_FEW": 0}, refused=(), gradients=None),
    replace(
        LAYER,
        name="moe_layer, sorted and copied",
        settings={"MOE_LAYER_FEW": 0, "MOE_LAYER_GATHER": False},
        dtypes=HALVES,
        refused=(),
    ),
    replace(
        LAYER,
        name="moe_layer, through pointers",
        settings={"MOE_LAYER_FEW": 0, **OLDER},
        dtypes=HALVES,
        refused=(),
    ),
]


def assert_right(out: torch.Tensor, *given: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert_close(LAYER, out.dtype, out, *exact(*in_float64(given)))


def leaves_of(given: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the arguments that have gradients, and have them require some."""
    return [given[place].requires_grad_() for place in (X, ROUTING, GATE_UP, DOWN)]


LAUNCHED = "_moe_layer_few", "_moe_layer_engine_kernel", "_moe_layer_pointers_kernel"


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: f"{dtype}, its accumulator float32")
def test_ways(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Few choices are not sorted unless something is kept; the engine gets what it can address, pointers the rest."""
    if DEVICE.type == "cuda" and not taken._grouped_matmul_gpu(torch.device("cuda", 0))[2]:
        pytest.skip("no copy engine")
    asked: list[str] = []

    class Noted:
        def __init__(self, name: str) -> None:
            self.name, self.launched = name, getattr(taken, name)

        def __getitem__(self, grid: Any) -> Any:
            asked.append(self.name)
            return self.launched[grid]

        def __call__(self, *given: Any) -> Any:
            asked.append(self.name)
            return self.launched(*given)

    for name in LAUNCHED:
        monkeypatch.setattr(taken, name, Noted(name))
    monkeypatch.setattr(taken, "MOE_LAYER_FEW", 5)  # of each of four experts; there are 18
    x, weights, experts, gate_up, down = arguments(Draw(dtype), 9, 4, 2, 40, 24)
    assert_right(taken.moe_layer(x, weights, experts, gate_up, down), x, weights, experts, gate_up, down)
    assert asked == [LAUNCHED[0]] * 2
    asked.clear()
    monkeypatch.setattr(taken, "MOE_LAYER_FEW", 4)
    wide = Draw(dtype)(9, 48)[:, :40]
    longer = Draw(dtype)(5, 48, 48)[1:, :, :40]
    for some_x in (x, wide):
        for weight in (gate_up, longer):
            given = some_x, weights, experts, weight, down
            assert_right(taken.moe_layer(*given), *given)
    made = taken.moe_layer_with_activations(*given)
    for out, right in zip(made, exact_kept(*in_float64(given)), strict=True):
        assert_close(LAYER, dtype, out, right)
    assert asked == [LAUNCHED[1]] * 5
    asked.clear()
    odd = Draw(dtype)(9, 41)[:, :40]
    apart = Draw(dtype)(4, 40, 48).mT
    for some_x, weight in ((odd, gate_up), (x, apart), (x, gate_up[:1].expand(4, 48, 40))):
        given = some_x, weights, experts, weight, down
        assert_right(taken.moe_layer(*given), *given)
    given = x, weights, experts, gate_up[:, :46].contiguous(), down[:, :, :23]
    assert_right(taken.moe_layer(*given), *given)
    assert asked == [LAUNCHED[2]] * 4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_weights_of_any_dtype(taken: ModuleType, dtype: torch.dtype) -> None:
    """Routing weights may be narrow, as transformers casts them, or wide, and experts int64; so is the gradient."""
    given = arguments(Draw(torch.float32), 5, 4, 2, 24, 40)
    given = given[0], given[1].to(dtype), given[2].long(), *given[3:]
    assert_right(taken.moe_layer(*given), *given)
    x, weights, *_ = leaves_of(given)
    g = torch.randn_like(x)
    grad = torch.autograd.grad(taken.moe_layer(*given), weights, g)[0]
    right = exact_gradients(g.double(), *in_float64(given))[1].value
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), right, rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_kept(taken: ModuleType, dtype: torch.dtype) -> None:
    """Gate and up are, where a gradient may be asked for, and nothing else; without, asking for one is refused."""
    given = arguments(Draw(dtype), 5, 4, 2, 24, 40)
    leaves = leaves_of(given)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = taken.moe_layer(*given)
    new = [t for t in saved if all(t.data_ptr() != other.data_ptr() for other in given)]
    assert [tuple(t.shape) for t in new] == [(2, 10, 40)]
    assert out.requires_grad
    with torch.no_grad():
        assert not taken.moe_layer(*given).requires_grad
        assert taken.moe_layer_with_activations(*given, False)[1].numel() == 0
    with pytest.raises(RuntimeError, match="moe_layer has no gradient where nothing is kept"):
        taken.moe_layer_with_activations(*given, False)
    for leaf in leaves:
        leaf.requires_grad_(False)
    assert not taken.moe_layer(*given).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("place", [X, ROUTING, GATE_UP, DOWN])
def test_one_gradient_alone(taken: ModuleType, dtype: torch.dtype, place: int) -> None:
    """As where the experts are frozen: each is what it is among all, and the others are not made."""
    given = arguments(Draw(dtype), 9, 4, 2, 24, 40, some)
    leaves = leaves_of(given)
    grads = torch.autograd.grad(taken.moe_layer(*given).sum(), leaves)
    of_all = dict(zip((X, ROUTING, GATE_UP, DOWN), grads, strict=True))
    for leaf in leaves:
        leaf.requires_grad_(False)
    alone = given[place].requires_grad_()
    out = taken.moe_layer(*given)
    (grad,) = torch.autograd.grad(out.sum(), alone)
    assert torch.equal(grad, of_all[place])
    needs = [place == p for p in (X, ROUTING, GATE_UP, DOWN)]
    kept = taken.moe_layer_with_activations(*given)[1].detach()
    made = at_cuda(taken.moe_layer_backward, torch.ones_like(out), *(t.detach() for t in given), kept, needs)
    assert [t.numel() > 0 for t in made] == needs
    assert torch.equal(made[needs.index(True)], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_no_expert(taken: ModuleType, dtype: torch.dtype) -> None:
    """A choice that no expert here computes has a weight with the gradient 0, even if the weight is NaN."""
    given = arguments(Draw(dtype), 9, 4, 2, 24, 40, some)
    elsewhere = (given[2] < 0) | (given[2] >= 4)
    assert elsewhere.any()
    given[1][elsewhere] = torch.nan
    assert_right(guarded(taken.moe_layer, *given), *given)
    leaves = leaves_of(given)
    grads = torch.autograd.grad(taken.moe_layer(*given).sum(), leaves)
    assert not grads[1][elsewhere].any()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("few", [True, False])
def test_wide_accumulator(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, few: bool) -> None:
    """Sums of many ones are not the 2048 or 256 at which half precision stays, along H and along F, and of choices."""
    monkeypatch.setattr(taken, "MOE_LAYER_FEW", 1024 if few else 0)
    ones = {"dtype": dtype, "device": DEVICE}
    x, gate_up, down = (torch.ones(s, **ones) for s in ((3, 4608), (1, 16, 4608), (1, 8, 8)))
    gate_up[:, :8] /= 4608
    weights, experts = torch.ones(3, 1, device=DEVICE), torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    out = taken.moe_layer(x, weights, experts, gate_up, torch.ones(1, 4608, 8, **ones) / 8)
    share = torch.ones((), dtype=torch.float64).sigmoid().item()
    torch.testing.assert_close(out.double(), torch.full_like(out, share * 4608).double(), rtol=1e-2, atol=0)
    assert down.shape == (1, 8, 8)


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward."""
    from triton_gallery_ops.moe_layer import moe_layer

    tensors = (torch.randn(*s, requires_grad=True) for s in ((16, 24), (16, 2), (4, 32, 24), (4, 24, 16)))
    x, weights, gate_up, down = tensors
    return graphs(moe_layer, x, weights, drawn(16, 4, 2).int(), gate_up, down)


def test_graphs(gallery: Path, on_h100: Ask) -> None:
    """The op is one call, and its gradients are another."""
    ((forward, backward),) = on_h100(gallery / RECIPE, traced)
    assert forward == ["triton_gallery.moe_layer_with_activations.default"]
    assert [name for name in backward if "triton_gallery" in name] == ["triton_gallery.moe_layer_backward.default"]


def code(op: ModuleType, tile: tuple[int, ...], stages: int, gather: bool, keep: bool) -> dict[str, Any]:
    """Return what the compiler says of the kernel of the copy engine."""
    import triton
    from compiled import _said

    m, n, k, num_warps, _ = tile
    ragged = f"tensordesc<bf16[1, 1, {m}, {n // 2}]>"
    types = {"x_ptr": "*bf16", "weight_desc": f"tensordesc<bf16[1, 2, {n // 2}, {k}]>", "h_desc": ragged}
    types |= {"x_desc": f"tensordesc<bf16[{m}, {k}]>", "gate_desc": ragged, "up_desc": ragged}
    types |= {"order_ptr": "*i32", "offsets_ptr": "*i32"} | dict.fromkeys(("E", "R", "k", "stride_xt"), "i32")
    absent = ["x_desc" if gather else "x_ptr", *([] if keep else ["gate_desc", "up_desc"])]
    constants = {"VEC": 8, "BLOCK_E": 512} | dict.fromkeys(absent)
    types |= dict.fromkeys(constants, "constexpr")
    function = op._moe_layer_engine_kernel
    types = {name: types[name] for name in function.arg_names}
    by_16 = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind[0] == "*"}
    source = triton.compiler.ASTSource(function, types, constants, by_16)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": stages})
    usage = _said(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin=made.asm["cubin"])
    return {
        "spilled": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared": made.metadata.shared,
        "wgmma": re.findall(r"wgmma\.mma_async\S*?(m64n\d+k\d+)", made.asm["ptx"]),
        "loads": len(re.findall(r"cp\.async\.bulk\.tensor\S*global\.mbarrier", made.asm["ptx"])),
        "copies": len(re.findall(r"cp\.async\.cg", made.asm["ptx"])),
    }


def codes(taken: ModuleType) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return that for all tiles."""
    from triton_gallery_ops import grouped_matmul
    from triton_gallery_ops import moe_layer as op

    found = {}
    for tile in grouped_matmul.GROUPED_MATMUL_ENGINE:
        stages = grouped_matmul._grouped_matmul_stages(tile, 2, ROOM, False, 90)
        for gather in (True, False):
            for keep in (True, False):
                found[tile, stages, gather, keep] = code(op, tile, stages, gather, keep)
    return found


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Nothing spills, all fits, and loads are as many steps ahead as there are stages, gathered rows included."""
    (found,) = on_h100(gallery / RECIPE, codes)
    assert len(found) == 24
    for (tile, stages, gather, keep), known in found.items():
        assert known["spilled"] == 0, (tile, gather, keep)
        assert known["shared"] <= ROOM, (tile, gather, keep)
        count = tile[0] // 64 * tile[2] // 16 // (tile[3] // 4)
        assert known["wgmma"] == [f"m64n{tile[1]}k16"] * count, (tile, gather, keep)
        assert known["loads"] == (1 if gather else 2) * stages, (tile, gather, keep)
        each = tile[0] * tile[2] * 2 // 16 // (32 * tile[3])  # of 16 bytes, for a thread
        assert known["copies"] == (each * stages if gather else 0), (tile, gather, keep)


@needs_a_gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("T", [64, 1000, 9000])
def test_large(taken: ModuleType, dtype: torch.dtype, T: int) -> None:
    """Programs of many tiles each give the same again and again, gradients too, at odd sizes too."""
    for E, k, H, F in ((128, 8, 2048, 768), (60, 4, 1792, 1416), (9, 3, 130, 77)):
        given = arguments(Draw(dtype), T, E, k, H, F)
        with torch.no_grad():
            assert_in_parts(taken.moe_layer(*given), *given)
        leaves = leaves_of(given)
        g = torch.randn_like(given[0])
        first = None
        for _ in range(3):
            out = taken.moe_layer(*given)
            made = [out, *torch.autograd.grad(out, leaves, g)]
            first = first or made
            assert all(torch.equal(a, b) for a, b in zip(made, first, strict=True))


def assert_in_parts(out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, *rest: torch.Tensor) -> None:
    """Assert that the first and the last tokens of a result are right: for all, the exact result would not fit."""
    experts, gate_up, down = (t.detach() for t in rest)
    for tokens in (slice(0, 4), slice(-4, None)):
        chosen = experts[tokens].unique()
        among = torch.searchsorted(chosen, experts[tokens]).int()
        given = x[tokens].detach(), weights[tokens].detach(), among, gate_up[chosen], down[chosen]
        assert_right(out[tokens], *given)


@pytest.mark.needs_gpu_memory(20)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements of what down makes: the last tokens are right, and so is a gradient of them."""
    T, k, H = 2**17 + 8, 4, 4096 + 8
    given = arguments(Draw(torch.bfloat16), T, 5, k, H, 8)
    with torch.no_grad():
        assert_in_parts(taken.moe_layer(*given), *given)


@pytest.mark.needs_gpu_memory(16)
def test_weights_beyond_int32(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 2**31 elements of gate_up: the last expert's results are right, whichever way they are made."""
    given = arguments(Draw(torch.bfloat16), 20, 70, 2, 4096, 4096, one)
    for few in (1024, 0):
        monkeypatch.setattr(taken, "MOE_LAYER_FEW", few)
        assert_in_parts(taken.moe_layer(*given), *given)


@needs_a_gpu
@pytest.mark.needs_gpu_memory(12)
def test_memory(taken: ModuleType) -> None:
    """The forward has no sorted copy of x: beside results, gate and up, what down multiplies and what it makes."""
    T, E, k, H, F = 8192, 32, 8, 2048, 768
    given = arguments(Draw(torch.bfloat16), T, E, k, H, F)
    leaves_of(given)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    taken.moe_layer(*given)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 2 * (T * H + T * k * (3 * F + H)) + 2**24


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("the weight of a choice", "acc += tl.where(some, weight * y, 0.0)", "acc += tl.where(some, y, 0.0)"),
    ("the weight of no expert", "acc += tl.where(some, weight * y, 0.0)", "acc += weight * y"),
    (
        "sums of other rows",
        "place = tl.load(inverse_ptr + place).to(tl.int64)",
        "place = place.to(tl.int64)",
    ),
    (
        "rows of another token, gathered",
        "offs_x = (choice // k).to(tl.int64)[:, None] * stride_xt",
        "offs_x = (choice % k).to(tl.int64)[:, None] * stride_xt",
    ),
    (
        "rows of another token, by pointers",
        "x_rows = x_ptr + (choice // k).to(tl.int64)",
        "x_rows = x_ptr + (choice % k).to(tl.int64)",
    ),
    ("up for gate", "gate, up = tl.split(both)  #", "up, gate = tl.split(both)  #"),
    (
        "up kept as gate",
        "            up_desc.store([a, b, c, off_n], kept)",
        "            gate_desc.store([a, b, c, off_n], kept)",
    ),
    (
        "up kept elsewhere",
        "up_ptr = kept_ptr + tl.cast(R, tl.int64) * F_H",
        "up_ptr = kept_ptr + tl.cast(R, tl.int64) * 0",
    ),
    ("an expert's first choices alone", "(earlier % BLOCK_M == 0)", "(earlier == 0)"),
    ("the first choices again", "- earlier - 1  # (BLOCK_R,)", "- 1  # (BLOCK_R,)"),
    ("columns past F", "mask_m, mask_n = offs_m < rows, offs_n < F_H", "mask_m, mask_n = offs_m < rows, offs_n <= F_H"),
    ("the next expert's row", "mask_m, mask_n = offs_m < rows, ", "mask_m, mask_n = offs_m <= rows, "),
    ("a slope of SwiGLU", "s * (1 + gate * (1 - s))\n        d_ptrs", "s * (1 + gate)\n        d_ptrs"),
    ("gradients without weights", "        grad *= weight\n        d_gate", "        d_gate"),
    ("what down multiplied, without weights", "h = (weight * h).to(", "h = h.to("),
    ("gradients nobody needs", "        if needs[3]:\n            made", "        if True:\n            made"),
    (
        "no launcher for GPUs",
        'impl("moe_layer_with_activations", _moe_layer_launch, "CUDA")',
        'impl("moe_layer_with_activations", _moe_layer_launch, "XPU")',
    ),
]
