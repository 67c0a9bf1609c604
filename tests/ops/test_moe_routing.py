"""The op of the recipe Route tokens to experts: every option of the choice, and every way to sort."""

# ruff: noqa: N806 - T tokens, E experts and R choices, as in the recipe

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator
from compiled import Ask, ptx, stack
from device_key import at_cuda
from guard import Guard
from hypothesis import strategies as st
from inputs import DEVICE, LAYOUTS, Layout

RECIPE = "experts/moe_routing.py"
Options = dict[str, Any]
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor] | None] = {
    "any": None,
    "ties": lambda x: (2 * x).round(),
    "equal": torch.zeros_like,
    "integers": lambda x: (3 * x).round().clamp(-4, 4),
}


def arguments(draw: Draw, T: int, E: int, k: int, kind: str = "any", **options: Any) -> tuple[Any, ...]:
    """Make logits, and a bias where one is asked for, then all options in order.

    Scores of integers are apart by other numbers than biases are, in quarters. So two sums are equal, or not nearly so.
    """
    logits = draw(T, E, of=KINDS[kind])
    bias = None
    if options.pop("biased", False):
        dtype = accumulator(draw.dtype)
        bias = draw(E, dtype=dtype, of=(lambda x: x.round() / 4) if kind == "integers" else None)
    given = {"score": "softmax", "groups": 1, "top_groups": None, "renormalize": True, "scale": 1.0} | options
    return logits, k, given["score"], bias, *(given[name] for name in [*given][1:])


def scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    """Return the scores of all experts."""
    wide = logits.to(accumulator(logits.dtype))
    return wide.softmax(-1) if score == "softmax" else wide.sigmoid()


def best(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return where the k largest of each row are: NaN first, of equals the lowest."""
    return x.cpu().sort(dim=-1, descending=True, stable=True).indices[..., :k].to(x.device)


def choose(
    logits: torch.Tensor,
    k: int,
    score: str,
    bias: torch.Tensor | None,
    groups: int,
    top_groups: int | None,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and experts."""
    of_all = scores(logits, score)
    keys = logits if bias is None else of_all + bias
    if top_groups is not None:
        by_group = keys.unflatten(1, (groups, -1))
        of_groups = by_group.amax(-1) if bias is None else by_group.topk(2).values.sum(-1)
        dropped = torch.ones_like(of_groups, dtype=torch.bool).scatter(1, best(of_groups, top_groups), False)
        keys = by_group.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    experts = best(keys, k)
    weights = of_all.gather(1, experts)
    if renormalize and score == "softmax":
        weights = logits.to(weights.dtype).gather(1, experts).softmax(-1)
    elif renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, experts.int()


def exact(*given: Any) -> list[Exact]:
    """Return weights and experts."""
    weights, experts = choose(*given)
    return [Exact(weights, dtype=accumulator), Exact(experts, dtype=torch.int32)]


def sort(experts: torch.Tensor, E: int) -> tuple[torch.Tensor, ...]:
    """Return order, inverse and offsets; what is no expert comes last."""
    keys = experts.flatten().long()
    keys = torch.where((keys >= 0) & (keys < E), keys, E)
    order = keys.sort(stable=True).indices
    offsets = torch.bincount(keys, minlength=E + 1)[:E].cumsum(0)
    return order.int(), order.argsort().int(), offsets.int()


def exact_sorted(*given: Any) -> list[Exact]:
    """Return weights and experts, and how these are sorted."""
    places = sort(choose(*given)[1], given[0].shape[1])
    return [*exact(*given), *(Exact(t, dtype=torch.int32) for t in places)]


def gradient(grad: torch.Tensor, *given: Any) -> list[Exact]:
    """Return the gradient of the logits."""
    logits, _, score, *_, renormalize, scale = given
    experts = choose(*given)[1].long()
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    of_all = scores(logits, score)
    if score == "softmax":
        shares = scores(logits.masked_fill(~chosen, -torch.inf), score) if renormalize else of_all
        slope = shares
    else:
        shares = of_all * chosen
        shares = shares / shares.sum(-1, keepdim=True) if renormalize else shares
        slope = shares * (1 - of_all)

    def of(grad: torch.Tensor, combine: Callable[..., torch.Tensor]) -> torch.Tensor:
        at_expert = torch.zeros_like(logits).scatter(1, experts, grad)
        if score == "softmax" or renormalize:
            at_expert = combine(at_expert, (at_expert * shares).sum(-1, keepdim=True))
        return slope * at_expert * scale

    return [Exact(of(grad, torch.sub), of(grad.abs(), torch.add))]


def special(draw: Draw, **options: Any) -> list[tuple[Any, ...]]:
    """Make NaN, infinities, zeros of either sign, and rows with little or nothing but -inf."""
    x = torch.linspace(-3, -1, 7 * 40, dtype=torch.float64, device=DEVICE).view(7, 40)
    x[0, 9::16], x[1, 30], x[1, 34], x[2, 36] = -0.0, torch.nan, -torch.nan, torch.inf
    x[0, 4::16], x[3, :36], x[4, ::2], x[5] = 0.0, -torch.inf, -torch.nan, -torch.inf
    x[6, 20:30] = torch.finfo(draw.dtype).max / 2
    _, *rest = arguments(draw, 7, 40, 6, **options)
    return [(x.to(draw.dtype), *rest), (x[:, ::2].to(draw.dtype), *rest)]


def shapes(**options: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    """Sizes of all kinds; experts are a multiple of 4."""
    return st.tuples(st.integers(0, 9), st.sampled_from([8, 12, 60, 64, 100, 256]), st.integers(1, 6), st.just(options))


def case(
    options: Options, sizes: list[Any], name: str, call: str = "moe_routing", kind: str = "any", **more: Any
) -> Case:
    """Return a case: the same options at all sizes."""

    def made(draw: Draw, T: int, E: int, k: int, of: Any = None) -> tuple[Any, ...]:
        return arguments(draw, T, E, k, **{"kind": of if isinstance(of, str) else kind, **options})

    return Case(
        call,
        name=f"{call}, {name}",
        arguments=made,
        sizes=sizes,
        small=(3, 8, 2, "any"),
        many=(20_011, 60, 6),
        gradients=gradient,
        reference=choose,
        **{"exact": exact, "floor": lambda dtype: torch.finfo(dtype).tiny, **more},
    )


# Experts of models: 8, 16, 60, 64, 128, 256, 384 and 512; a power of two or not, and one alone
SIZES = [
    (5, 60, 6),
    (3, 12, 12),
    (3, 8, 2, "ties"),
    (7, 256, 8, "ties"),
    (2, 512, 10),
    (1, 384, 8),
    (4, 33, 4, "equal"),
    (0, 8, 2),
]
SIZES += [(1, 1, 1), (40, 16, 4), (3, 32, 32, "ties"), (2, 1000, 32), (9, 128, 1), (17, 2, 2), (300, 64, 6)]
GROUPED = [(5, 64, 4), (3, 160, 6, "ties"), (2, 256, 8), (1, 24, 3, "equal"), (0, 16, 4), (9, 40, 2)]
DEEPSEEK = {"score": "sigmoid", "biased": True, "groups": 8, "top_groups": 4, "scale": 2.5}
SORTED = [(5, 60, 6), (1, 256, 8), (2, 8, 2, "equal"), (0, 8, 2), (17, 33, 3, "ties"), (1, 1, 1), (20, 64, 6)]
REFUSED = [
    Refused(lambda draw: (draw(2, 8).int(), 2), TypeError, r"moe_routing takes float logits, not torch\.int32"),
    *(
        Refused(lambda draw, s=s: (draw(*s), 1), ValueError, r"moe_routing takes logits of \(tokens, experts\), of up")
        for s in [(8,), (2, 3, 8), (2, 0), (2, 1025)]
    ),
    *(
        Refused(lambda draw, k=k: (draw(2, 40), k), ValueError, f"moe_routing takes k from 1 to 32 here, not {k}")
        for k in (-1, 0, 33)
    ),
    Refused(lambda draw: (draw(2, 8), 9), ValueError, "moe_routing takes k from 1 to 8 here, not 9"),
    Refused(
        lambda draw: (draw(2, 8), 5, "softmax", None, 4, 2), ValueError, "moe_routing takes k from 1 to 4 here, not 5"
    ),
    Refused(
        lambda draw: (draw(2, 8), 2, "relu"), ValueError, "moe_routing takes the scores softmax and sigmoid, not relu"
    ),
    *(
        Refused(
            lambda draw, groups=groups: (draw(2, 8), 2, "softmax", None, *groups),
            ValueError,
            "moe_routing takes groups that divide 8 experts, and top_groups from 1 to all, not",
        )
        for groups in [(3, 1), (0, None), (-2, 1), (4, 0), (4, 5)]
    ),
    *(
        Refused(
            lambda draw, bias=bias: (draw(2, 8), 2, "sigmoid", bias(draw)),
            ValueError,
            r"moe_routing takes a float bias of \(8,\) on",
        )
        for bias in (lambda draw: draw(7), lambda draw: draw(8, 1), lambda draw: draw(8).int())
    ),
    Refused(
        lambda draw: (draw(2, 8), 2, "sigmoid", draw(8), 8, 4), ValueError, "moe_routing scores a group by its best two"
    ),
]
WITH = "moe_routing_with_permutation"
CONTRACT = [
    case({}, SIZES, "softmax of the chosen", special=special, refused=REFUSED, shapes=shapes()),
    case(
        {"renormalize": False, "scale": 16.0, "groups": 4, "top_groups": 3},
        [size for size in GROUPED if size[2] <= size[1] // 4 * 3],
        "softmax, best of groups",
        special=lambda draw: special(draw, renormalize=False, groups=4, top_groups=3),
        shapes=shapes(),
    ),
    case(
        {"score": "sigmoid", "renormalize": False},
        SIZES[:6],
        "sigmoid",
        special=lambda draw: special(draw, score="sigmoid", renormalize=False),
        shapes=shapes(),
    ),
    case({"score": "sigmoid", "biased": True}, SIZES, "sigmoid with a bias", kind="integers", shapes=shapes()),
    case({"biased": True}, GROUPED[:3], "softmax with a bias"),
    case(
        {"score": "sigmoid", "biased": True, "groups": 3, "top_groups": 2},
        [(5, 12, 3), (4, 60, 6), (2, 384, 8)],
        "three groups with a bias",
    ),
    case(
        DEEPSEEK,
        [(5, 256, 8), (3, 64, 6), (2, 160, 8), (1, 512, 10), (0, 16, 4), (9, 40, 2)],
        "as DeepSeek-V3",
    ),
]
CONTRACT[-2] = replace(CONTRACT[-2], small=(3, 12, 2), many=(20_011, 60, 6))
CONTRACT[-1] = replace(CONTRACT[-1], small=(3, 16, 2), many=(20_011, 256, 8))
CONTRACT += [
    case({}, SORTED, "one launch", call=WITH, exact=exact_sorted),
    case(
        {"score": "sigmoid"},
        SORTED,
        "few choices",
        call=WITH,
        exact=exact_sorted,
        settings={"MOE_ROUTING_ONE": 0},
    ),
    case(
        {"renormalize": False},
        SORTED,
        "many choices",
        call=WITH,
        exact=exact_sorted,
        settings={"MOE_ROUTING_ONE": 0, "MOE_ROUTING_FEW": 0, "MOE_ROUTING_BLOCKS": 3, "MOE_ROUTING_CHUNK": 16},
    ),
]
CONTRACT = [
    replace(case, reference=None) if case.call == WITH else case  # its results are compared to the bit
    for case in CONTRACT
]


def drawn(shape: tuple[int, ...], E: int, dtype: torch.dtype = torch.int32, name: str = "contiguous") -> torch.Tensor:
    """Return choices of E experts, and some of none, before and after them."""
    experts = Layout(name, E).make(shape, torch.int16, DEVICE)
    return experts.copy_(experts.remainder(E + 3) - 2).to(dtype) if name != "expanded" else experts.to(dtype) % E


def check_order(taken: ModuleType, experts: torch.Tensor, E: int) -> None:
    """Assert that choices are sorted as PyTorch sorts them, and no byte is written elsewhere."""
    guard = Guard()
    placed = guard.place(experts)
    with guard:
        made = taken.moe_routing_permutation(placed, E)
    for out, right in zip(made, sort(experts, E), strict=True):
        assert out.dtype == torch.int32
        assert out.is_contiguous()
        assert torch.equal(out, right)
    again = taken.moe_routing_permutation(experts, E)
    assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))


WAYS: dict[str, Options] = {
    "compared": {},
    "counted": {"MOE_ROUTING_FEW": 0},
    "counted in few blocks": {"MOE_ROUTING_FEW": 0, "MOE_ROUTING_BLOCKS": 2, "MOE_ROUTING_CHUNK": 32},
}


@pytest.mark.parametrize("way", WAYS)
def test_permutation_float32(load_op: Callable[..., ModuleType], way: str) -> None:
    """Of any number of choices and experts, with experts without choices, and choices without an expert."""
    taken = load_op(RECIPE, purpose=way)
    for name, value in WAYS[way].items():
        setattr(taken, name, value)
    for R, E in [(1, 1), (1, 256), (33, 5), (128, 60), (129, 7), (700, 256), (1100, 3), (300, 1000)]:
        check_order(taken, drawn((R,), E), E)
    check_order(taken, torch.full((70, 4), 5, device=DEVICE), 8)  # all to one
    check_order(taken, torch.full((70, 4), -1, device=DEVICE), 8)  # none to any
    check_order(taken, torch.tensor([3, 2**40, -(2**40), 1, 2**32 + 1], device=DEVICE), 4)
    check_order(taken, torch.empty(0, 4, dtype=torch.int32, device=DEVICE), 6)
    for layout in LAYOUTS:
        check_order(taken, drawn((20, 6), 12, name=layout if layout != "unfolded" else "strided"), 12)


def test_permutation_is_an_op_float32(taken: ModuleType) -> None:
    """On a GPU a call goes to the launcher; a fake call has the shapes; what it does not take, it names."""
    experts = drawn((9, 4), 16)
    made = at_cuda(taken.moe_routing_permutation, experts, 16)
    assert all(torch.equal(a, b) for a, b in zip(made, sort(experts, 16), strict=True))
    fake = taken.moe_routing_permutation(torch.empty(9, 4, dtype=torch.int32, device="meta"), 16)
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in made]
    with pytest.raises(TypeError, match=r"^moe_routing_permutation takes experts of int32 or int64, not torch\.int16"):
        taken.moe_routing_permutation(experts.short(), 16)
    for count in (0, 1025):
        with pytest.raises(ValueError, match=f"^moe_routing_permutation takes from 1 to 1024 experts, not {count}"):
            taken.moe_routing_permutation(experts, count)
    large = torch.empty(1, dtype=torch.int32, device="meta").expand(2**30 + 1)
    with pytest.raises(ValueError, match=r"^moe_routing_permutation takes up to 2\*\*30 choices, not 1073741825"):
        taken.moe_routing_permutation(large, 16)
    with pytest.raises(ValueError, match=r"^moe_routing_with_permutation takes k from 1 to 8 here, not 9"):
        taken.moe_routing_with_permutation(torch.zeros(2, 8, device=DEVICE), 9)


def test_offsets_serve_a_grouped_product_float32(taken: ModuleType) -> None:
    """Rows in the order, with the offsets as they are, and back by the inverse: each choice gets its expert's rows."""
    T, E, k, K, N = 20, 5, 2, 16, 32
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, K, generator=generator).to(DEVICE, torch.bfloat16)
    w = torch.randn(E, K, N, generator=generator).to(DEVICE, torch.bfloat16)
    logits = torch.randn(T, E, generator=generator).to(DEVICE)
    _, experts, order, inverse, offsets = taken.moe_routing_with_permutation(logits, k)
    rows = torch.nn.functional.grouped_mm(x[order // k], w, offs=offsets)
    made = rows[inverse].view(T, k, N)
    expected = torch.einsum("tk,tjkn->tjn", x.float(), w.float()[experts.long()])
    torch.testing.assert_close(made.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, of infinities, in the interpreter
def test_experts_with_special_values_float32(taken: ModuleType) -> None:
    """Whatever the logits are, a token's experts are different and there, and groups are as many as asked for."""
    for dtype in (torch.float32, torch.float16):
        (x, *_), _ = special(Draw(dtype))
        bias = torch.linspace(-1, 1, 40, device=DEVICE)
        bias[7], bias[20] = -torch.inf, torch.nan
        for given in ((None,), (bias,)):
            for score in ("softmax", "sigmoid"):
                _, experts = taken.moe_routing(x, 6, score, *given, 4, 2)
                assert ((experts >= 0) & (experts < 40)).all()
                assert all(len({*row}) == 6 for row in experts.tolist())
                assert all(len({e // 10 for e in row}) <= 2 for row in experts.tolist())
                if given == (bias,):
                    assert (experts[0] == 20).any()  # NaN is the largest
                    assert not (experts[0] == 7).any()


def test_bias_changes_the_choice_alone_float32(taken: ModuleType) -> None:
    """A weight is the score of its expert without the bias."""
    logits = torch.zeros(3, 8, device=DEVICE)
    logits[:, 1] = 1
    bias = torch.tensor([0.0, 0, 0, 9, 0, 0, 8, 0], device=DEVICE, requires_grad=True)
    weights, experts = taken.moe_routing(logits.requires_grad_(), 3, "sigmoid", bias, renormalize=False)
    assert experts.tolist() == [[3, 6, 1]] * 3
    expected = torch.tensor([0.5, 0.5, 1 / (1 + 2.718281828**-1)], device=DEVICE).expand(3, 3)
    torch.testing.assert_close(weights, expected)
    _, of_bias = torch.autograd.grad(weights.sum(), [logits, bias], allow_unused=True)
    assert of_bias is None


def test_group_of_two_equals_float32(taken: ModuleType) -> None:
    """Where there is a bias, a group's best two may be equal, and count twice."""
    logits = torch.tensor([[1.0, -9, -9, -9, 0.5, 0.5, -9, -9]], device=DEVICE)
    bias = torch.zeros(8, device=DEVICE)
    assert taken.moe_routing(logits, 2, "sigmoid", bias, 2, 1)[1].tolist() == [[4, 5]]
    assert taken.moe_routing(logits, 2, "sigmoid", None, 2, 1)[1].tolist() == [[0, 1]]


def test_halves_choose_as_float32(taken: ModuleType) -> None:
    """In 16 bits a logit and its expert are one word: of equals the lower expert is chosen there, too."""
    for dtype in (torch.float16, torch.bfloat16):
        for T, E, k in [(9, 256, 8), (3, 60, 6), (5, 1000, 10)]:
            x = Draw(dtype)(T, E, of=lambda x: (2 * x).round() / 2)
            for made, right in zip(taken.moe_routing(x, k), taken.moe_routing(x.float(), k), strict=True):
                assert torch.equal(made, right)


@pytest.mark.needs_gpu_memory(5)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 logits: the last token's experts are found."""
    x = torch.zeros(2**21 + 1, 1024, dtype=torch.bfloat16, device=DEVICE)
    x[-1, 1000], x[-1, 5] = 3, 2
    weights, experts = taken.moe_routing(x, 2)
    assert experts[-1].tolist() == [1000, 5]
    assert (experts[:-1] == torch.arange(2, device=x.device)).all()
    grad = taken.moe_routing_backward(torch.ones_like(weights).cumsum(1), x, experts, "softmax", True, 1.0)
    assert grad[-1].nonzero().flatten().tolist() == [5, 1000]


ROUTING = {"E": 256, "k": 8, "K": 8, "SIGMOID": False, "RENORMALIZE": True, "SCALE": 1.0}
ROUTING |= {"GROUPS": 1, "TOP": 1, "BLOCK_G": 1, "BLOCK_S": 256}
TYPES = {"weights_ptr": "fp32", "experts_ptr": "i32"}


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill."""
    one = dict.fromkeys(("order_ptr", "inverse_ptr", "offsets_ptr"), "i32")
    results = {}
    for dtype in ("bf16", "fp32"):
        plain = {"bias_ptr": None, **TYPES, **ROUTING}
        biased = plain | {"bias_ptr": "fp32", "GROUPS": 8, "TOP": 4, "BLOCK_G": 8, "BLOCK_S": 32, "SIGMOID": True}
        for name, known in (("plain", plain), ("biased", biased)):
            results[f"{name} {dtype}"] = stack(taken._moe_routing_kernel, dtype, num_warps=1, BLOCK_T=2, **known)
            results[f"{name} {dtype}, 16 tokens"] = stack(
                taken._moe_routing_one_kernel, dtype, num_warps=8, BLOCK_T=16, BLOCK_E=256, **one, **known
            )
    known = {"BLOCK_R": 128, "BLOCK_E": 256, "BLOCK_B": 32}
    results["place"] = stack(taken._moe_routing_place_kernel, "i32", **known)
    results["few"] = stack(taken._moe_routing_few_kernel, "i32", num_warps=8, BLOCK_R=1024, BLOCK_Q=32)
    return results


def reductions(taken: ModuleType) -> tuple[int, int]:
    """Return how often a warp of one token has a maximum found by one instruction, and how often it shuffles."""
    known = {"bias_ptr": None, **TYPES, **ROUTING}
    text = ptx(taken._moe_routing_kernel, "bf16", num_warps=1, multiples=("stride",), BLOCK_T=1, **known)
    return text.count("redux.sync.max"), text.count("shfl.sync")


@pytest.mark.thorough
def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Next to nothing is spilled, and each maximum of a token is one instruction."""
    spilled, (found, shuffled) = on_h100(gallery / RECIPE, spills, reductions)
    # Eight bytes with Triton 3.9, of the biased one
    assert max(spilled.values()) <= 8, spilled
    assert found == 8
    assert shuffled == 0


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    lines = printed("experts/moe_routing").splitlines()
    assert lines[0].startswith("6 operators, ")
    assert "order   [1, 2, 0, 4, 3, 5]" in lines
    assert "offsets [2, 2, 4, 6]" in lines
    assert "sorted as PyTorch does, all choices of one expert too" in lines
    assert lines[-4:] == ["not solved yet", "not solved yet", "right", "right"]


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("padding that is chosen", "    key = tl.where(there, key, LOWEST)\n", ""),
    (
        "the higher of equals",
        "first = tl.where(key == best, place,",
        "first = tl.where(key == best, BLOCK_S - 1 - place,",
    ),
    ("equal words", "(key << 16) | (0xFFFF - place)", "(key << 16) | 0xFFFF"),
    ("an expert twice", "        key = tl.where(place == first, LOWEST, key)\n", ""),
    ("a sum that has padding", 'wide = tl.where(offs_k < k, y, -float("inf"))', "wide = y"),
    ("a softmax that overflows", "weights = tl.exp(y - largest)", "weights = tl.exp(y)"),
    ("tokens past the last", "    offs_t = tl.minimum(offs_t, T - 1)\n    weights,", "    weights,"),
    ("an expert's place in the tile", "    chosen = chosen // BLOCK_S * SIZE + chosen % BLOCK_S\n", ""),
    ("two equals in a group", "        second = tl.where(twice, best, second)\n", ""),
    (
        "a group that is not there",
        "tl.where(best == LOWEST, LOWEST, _moe_routing_key(total))",
        "_moe_routing_key(total)",
    ),
    ("the later of equal groups", "group[None, :] < group[:, None]", "group[None, :] > group[:, None]"),
    ("no order within an expert", "tl.where(mask, chosen * R + pair, E * R)", "tl.where(mask, chosen * R, E * R)"),
    ("ends of the expert before", "(query - R + 1) * R", "(query - R) * R"),
    ("an expert below zero", "(e >= 0) & (e < E), e, E", "e < E, e, E"),
    ("blocks before, with this one", "tl.where(block < pid, counts, 0)", "tl.where(block <= pid, counts, 0)"),
    ("each chunk from the start", "        next_place += counts\n", ""),
    ("choices of no expert in one place", "        outside += BLOCK_R - tl.sum(counts)\n", ""),
    (
        "a gradient of the chosen alone",
        '        x = tl.where(chosen, x, -float("inf"))\n    if SIGMOID',
        "        x = x\n    if SIGMOID",
    ),
    ("a sigmoid's slope", "out = grad * weights * (1 - score)", "out = grad * weights"),
]
