"""The ops of the recipe RoPE, in place and not, in both pairings and in any layout."""

# ruff: noqa: N806 - H heads have D numbers each, as in the recipe

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused
from compiled import Ask, graphs, ptx
from hypothesis import strategies as st
from inputs import DEVICE, Layout
from tolerance import assert_within

pairings = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, ...]:
    """Return the first and the second number of each pair."""
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.tensor_split(2, -1)


def whole(first: torch.Tensor, second: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return heads of pairs."""
    return torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x turned pair by pair, by the formula of the paper."""
    a, b = pairs(x, interleaved)
    return whole(a * cos - b * sin, b * cos + a * sin, interleaved)


def rows_of_tokens(
    table: torch.Tensor,
    shape: torch.Size,
    positions: torch.Tensor | None = None,
    seqlen_offsets: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    mrope_section: list[int] | None = None,
) -> torch.Tensor:
    """Return a row for each token of queries of some shape; one whose position the table lacks is NaN."""
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        starts = seqlen_offsets.tolist() if seqlen_offsets is not None else [0] * (len(ends) - 1)
        lengths = [end - begin for begin, end in pairwise(ends)]
        parts = [torch.arange(length) + start for start, length in zip(starts, lengths, strict=True)]
        positions = torch.cat(parts)[None].to(table.device)
    elif seqlen_offsets is not None:
        positions = seqlen_offsets[:, None] + torch.arange(shape[2], device=table.device)
    if positions is not None:
        missing = (positions < 0) | (positions >= len(table))
        table = table[positions.long().masked_fill(missing, 0)].masked_fill(missing[..., None], torch.nan)
    if mrope_section is not None:
        table = torch.cat([part[axis] for axis, part in enumerate(table.split(mrope_section, -1))], -1)
    return table[:, None] if table.ndim == 3 else table


def exact(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    conjugate: bool = False,
    *places: Any,
) -> list[Exact]:
    """Return queries and keys turned, or turned back."""
    cos, sin = (rows_of_tokens(table, q.shape, *places) for table in (cos, -sin if conjugate else sin))
    results = []
    for x in (q, q[:, :0] if k is None else k):
        a, b = (part.abs() for part in pairs(x, interleaved))
        terms = whole(a * cos.abs() + b * sin.abs(), b * cos.abs() + a * sin.abs(), interleaved)
        results.append(Exact(turned(x, cos, sin, interleaved), terms))
    return results


def exact_gradients(dq: torch.Tensor, dk: torch.Tensor, *arguments: Any) -> list[Exact]:
    """Return the gradients of queries and keys: what came in, turned the other way."""
    _, k, cos, sin, interleaved, conjugate, *places = arguments
    return exact(dq, dk, cos, sin, interleaved, not conjugate, *places)[: 1 if k is None else 2]


def reference(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> Any:
    """Return what PyTorch makes of queries and keys, rounded once."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    return tuple(turned(x.to(dtype), cos.to(dtype), sin.to(dtype), interleaved).to(x.dtype) for x in (q, k))


def arguments(
    draw: Draw, B: int, Hq: int, Hk: int, T: int, D: int, interleaved: int, conjugate: int, inside: int
) -> tuple[Any, ...]:
    """Make queries and keys, with heads inside as attention layers have them or outside, and tables."""
    shapes = [(B, T, H, D) if inside else (B, H, T, D) for H in (Hq, Hk)]
    q, k = (draw(*shape).transpose(1, 2) if inside else draw(*shape) for shape in shapes)
    cos, sin = (draw(T, D // 2, of=lambda x, turn=turn: turn(7 * x)) for turn in (torch.cos, torch.sin))
    return q, k, cos, sin, bool(interleaved), bool(conjugate)


def placed(draw: Draw, kind: str, B: int, Hq: int, Hk: int, T: int, D: int, *flags: int) -> tuple[Any, ...]:
    """Make the same with positions of tokens in tables of 50 rows."""
    q, k, _, _, *ways = arguments(draw, B, Hq, Hk, T, D, *flags)

    def numbers(*shape: int) -> torch.Tensor:
        return draw(*shape, dtype=torch.int64, of=lambda t: torch.floor(t / 2**40).remainder(50 - T))

    shapes = {"positions": (B, T), "shared": (T,), "axes": (3, B, T), "queries": (B, T)}
    section, table, indices = None, (50, D // 2), [None, None, None]
    if "axes" in kind:
        section = [D // 8, D // 4, D // 2 - D // 8 - D // 4]
    if kind in shapes:
        indices[0] = numbers(*shapes[kind])
    elif kind == "tables of axes":
        table = (3, B, T, D // 2)
    elif "packed" in kind:
        indices[2] = torch.tensor([0, T // 3, T // 3, T], device=q.device)
    if "offsets" in kind:
        indices[1] = numbers(3 if "packed" in kind else B).int()
    cos, sin = (draw(*table, of=lambda x, turn=turn: turn(7 * x)) for turn in (torch.cos, torch.sin))
    return q, None if kind == "queries" else k, cos, sin, *ways, *indices, section


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make pairs of NaN, infinities, zeros and the lowest and highest numbers, in both pairings."""
    large = torch.finfo(draw.dtype).max
    numbers = torch.tensor([0.0, -0.0, 1.0, large, -large, torch.inf, -torch.inf, torch.nan], dtype=draw.dtype)
    both = torch.cartesian_prod(numbers, numbers).to(DEVICE)  # (64, 2)
    tables = angles(3, 128, draw.dtype, DEVICE)
    heads = [(x.flatten().expand(1, 1, 3, 128).contiguous(), way) for x, way in ((both.T, False), (both, True))]
    return [(q, q[:, :0], *tables, way) for q, way in heads]


def angles(T: int, D: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return tables of cosines and sines of random angles."""
    angle = 7 * torch.randn(T, D // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def partly_turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return what PyTorch makes of heads of which a part may be turned, by tables that sequences may share."""
    cos, sin = (table[:, None] if table.ndim == 3 else table for table in (cos, sin))
    part, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    x1, x2 = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    pair = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return torch.cat((torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "of each sequence"])
@pytest.mark.parametrize(("T", "D", "R"), [(5, 16, 16), (7, 24, 8), (4, 10, 6), (3, 8, 0)])
def test_part_of_a_head_and_tables_of_each_sequence(
    recipe: ModuleType, interleaved: bool, shared: bool, T: int, D: int, R: int
) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, device=recipe.DEVICE)

    q, k = draw(2, 4, T, D).requires_grad_(), draw(2, 2, T, D).requires_grad_()
    angle = draw(*(() if shared else (2,)), T, R // 2)
    tables = angle.cos(), angle.sin()
    out = recipe.rope(q, k, *tables, interleaved)
    expected = tuple(partly_turned(x, *tables, interleaved) for x in (q, k))
    torch.testing.assert_close(out, expected)
    grads = tuple(draw(*x.shape) for x in (q, k))
    torch.testing.assert_close(torch.autograd.grad(out, (q, k), grads), torch.autograd.grad(expected, (q, k), grads))
    in_place = q.detach().clone(), k.detach().clone()
    recipe.rope_(*in_place, *tables, interleaved)
    torch.testing.assert_close(in_place, tuple(x.detach() for x in out))


def misfits() -> list[Callable[..., tuple[torch.Tensor, ...]]]:
    """Return what makes, of arguments that fit each other, some of shapes that do not."""
    return [
        lambda q, k, cos, sin: (q[0], k, cos, sin),
        lambda q, k, cos, sin: (q, k[0, 0, 0], cos, sin),
        lambda q, k, cos, sin: (q[:1], k, cos, sin),
        lambda q, k, cos, sin: (q, k[:, :, :2], cos, sin),
        lambda q, k, cos, sin: (q, k[..., :4], cos, sin),
        lambda q, k, cos, sin: (q, k, cos[:2], sin),
        lambda q, k, cos, sin: (q, k, cos, sin[:, :2]),
        lambda q, k, cos, sin: (q, k, cos, torch.cat([sin, sin], -1)),
        lambda q, k, cos, sin: (q, k, cos[None], sin[None]),
        lambda q, k, cos, sin: (q[..., :5], k[..., :5], cos[:, :2], sin[:, :2]),
    ]


def fitting(draw: Draw) -> tuple[torch.Tensor, ...]:
    """Make arguments that fit each other."""
    return draw(2, 4, 3, 6), draw(2, 2, 3, 6), draw(3, 3), draw(3, 3)


def refused(name: str, *further: tuple[Callable[..., tuple[torch.Tensor, ...]], str]) -> list[Refused]:
    """Return the calls of an op that raise: what is made of arguments that fit, and what is said of it."""

    def call(way: Callable[..., tuple[torch.Tensor, ...]], error: type[Exception], text: str) -> Refused:
        return Refused(lambda draw: way(*fitting(draw)), error, f"{name} {text}")

    kinds = "takes q and k of one float dtype.*"
    return [
        call(lambda q, k, cos, sin: (q.int(), k.int(), cos, sin), TypeError, kinds + "int32"),
        call(lambda q, k, cos, sin: (q, k.double(), cos, sin), TypeError, kinds + "float64"),
        call(lambda q, k, cos, sin: (q, k, cos.long(), sin), TypeError, kinds + "int64"),
        call(lambda q, k, cos, sin: (q, k, cos, sin.to("meta")), TypeError, "takes tensors on one device"),
        *(call(way, ValueError, r"takes q \(B, Hq, T, D\) and k ") for way in misfits()),
        *(call(way, error, text) for way, error, text in misplaced()),
        *(call(way, ValueError, text) for way, text in further),
    ]


def misplaced() -> list[tuple[Callable[..., tuple[Any, ...]], type[Exception], str]]:
    """Return what gives arguments that fit each other positions that do not, and what is said of it."""

    def index(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)

    def call(*places: Any, B: int = 2) -> Callable[..., tuple[Any, ...]]:
        return lambda q, k, cos, sin: (q[:B], k[:B], cos, sin, False, False, *places)

    integers = "takes positions, seqlen_offsets and cu_seqlens of int32 or int64"
    forms = r"takes positions \(T,\), \(B, T\) or"
    return [
        (call(index(3, dtype=torch.float32)), TypeError, integers),
        (call(index(3).to("meta")), TypeError, "takes tensors on one device"),
        (call(index(2)), ValueError, forms),
        (call(index(3, 2, 3)), ValueError, forms),
        (call(index(3), index(2)), ValueError, forms),
        (call(None, index(3)), ValueError, forms),
        (call(None, None, index(3)), ValueError, forms),
        (call(None, index(3), index(3), B=1), ValueError, forms),
        (call(index(2, 3), None, None, [1, 1, 1]), ValueError, forms),
        (
            call(index(3, 2, 3), None, None, [1, 1, 2]),
            ValueError,
            "takes a mrope_section of 3 numbers whose sum is the 3",
        ),
        (call(index(3, 2, 3), None, None, [1, 2]), ValueError, "takes a mrope_section of 3 numbers whose sum is the 3"),
        (call(None, None, None, [1, 1, 1]), ValueError, r"takes q \(B, Hq, T, D\) and k "),
        (
            lambda q, k, cos, sin: (q, k, cos[None], sin[None], False, False, index(2, 3)),
            ValueError,
            r"takes q \(B, Hq, T, D\) and k ",
        ),
    ]


def with_gradient(place: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return what has one of the arguments require a gradient."""
    return lambda *fit: tuple(x.requires_grad_() if i == place else x for i, x in enumerate(fit))


def shared(place: int) -> list[Callable[..., tuple[torch.Tensor, ...]]]:
    """Return what makes queries or keys of which elements share memory, or do not lie side by side."""
    ways = [
        lambda x: x[:1].expand(x.shape),
        lambda x: x[:, :1].expand(x.shape),
        lambda x: x.mT.contiguous().mT,
    ]
    return [lambda *fit, way=way: tuple(way(x) if i == place else x for i, x in enumerate(fit)) for way in ways]


def overlapping(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Make queries of which each token begins one number after the one before it."""
    q, k = torch.zeros(14, device=DEVICE).unfold(0, 6, 1)[None, None], torch.zeros(1, 1, 9, 6, device=DEVICE)
    return q, k, *angles(9, 6, torch.float32, DEVICE)


# B, Hq, Hk, T, D; then whether pairs are interleaved, are turned back, and heads lie inside
SIZES = [(2, 5, 2, 17, 16, 0, 0, 1), (1, 5, 2, 17, 16, 1, 0, 0), (2, 4, 9, 33, 6, 0, 1, 1), (2, 1, 0, 1, 2, 1, 1, 0)]
SIZES += [(0, 3, 2, 5, 8, 0, 0, 0), (1, 9, 3, 16, 130, 1, 0, 1), (1, 2, 5, 15, 80, 0, 1, 0), (1, 3, 2, 2, 62, 0, 0, 1)]
SIZES += [(1, 0, 3, 2, 4, 0, 0, 0), (1, 2, 2, 0, 4, 0, 0, 1), (1, 2, 2, 3, 0, 1, 0, 1), (1, 4, 4, 65, 128, 1, 1, 0)]
HEADS = st.integers(0, 9)
POSITIONS = st.sampled_from([0, 1, 2, 15, 16, 17, 33])
DIMENSIONS = st.sampled_from([0, 2, 4, 6, 16, 20, 62, 64, 80, 128, 130])
FLAG = st.integers(0, 1)
SHAPES = st.tuples(st.integers(0, 2), HEADS, HEADS, POSITIONS, DIMENSIONS, FLAG, FLAG, FLAG)
KINDS = ["positions", "seqlen_offsets", "packed with offsets", "axes", "tables of axes", "queries", "shared", "packed"]
PLACED = [
    (kind, 1 if "packed" in kind else 2, 5, 2, 17, 16, turn % 2, turn // 2 % 2, turn // 4)
    for turn, kind in enumerate(KINDS)
]
PLACED += [
    ("axes", 2, 3, 4, 7, 130, 0, 1, 1),
    ("positions", 0, 3, 2, 5, 8, 0, 0, 0),
    ("packed", 1, 2, 2, 0, 4, 0, 0, 1),
]
CONTRACT = [
    Case(
        "rope",
        arguments,
        exact,
        sizes=SIZES,
        small=(1, 2, 1, 2, 4, 0, 0, 0),
        many=(2, 8, 3, 1031, 64, 0, 0, 0),
        shapes=SHAPES,
        roundings=4,  # two products and a sum
        contiguous=False,
        reference=reference,
        special=special,
        gradients=exact_gradients,
        with_gradients=2,
        second_gradients=True,
        refused=refused(
            "rope",
            (with_gradient(2), "has no gradients for cos and sin"),
            (with_gradient(3), "has no gradients for cos and sin"),
        ),
    ),
    Case(
        "rope_",
        arguments,
        exact,
        sizes=SIZES,
        small=(1, 2, 1, 2, 4, 0, 0, 0),
        many=(2, 8, 3, 1031, 64, 0, 0, 0),
        shapes=SHAPES,
        layouts=["contiguous", "apart", "offset", "padded"],
        roundings=4,
        launcher=False,
        changes=2,
        contiguous=False,
        refused=refused(
            "rope_",
            *((with_gradient(place), "has no backward: use rope") for place in range(4)),
            *((way, ".* side by side and share no memory") for place in range(2) for way in shared(place)),
            (overlapping, ".* share no memory"),
        ),
    ),
    *(
        Case(
            call,
            placed,
            exact,
            sizes=[size for size in PLACED if call == "rope" or size[0] != "queries"],
            small=("packed with offsets", 1, 2, 1, 4, 8, 0, 0, 0),
            many=("positions", 2, 8, 3, 31, 64, 0, 0, 0),
            roundings=4,
            contiguous=False,
            name=f"{call} of tokens at positions",
            **others,
        )
        for call, others in (
            ("rope", {"gradients": exact_gradients, "with_gradients": (0, 1), "second_gradients": True}),
            ("rope_", {"launcher": False, "changes": 2, "layouts": ["contiguous", "apart", "offset", "padded"]}),
        )
    ),
]


def assert_turned(
    out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> None:
    """Assert that a tensor was turned, as well as its accumulator and its dtype allow."""
    (right,) = exact(*(t.detach().double() for t in (x, x[:, :0], cos, sin)), interleaved)[:1]
    assert (out.dtype, out.shape, out.device) == (x.dtype, x.shape, x.device)
    assert_within(out, right.value, right.terms, roundings=4)


def test_queries_alone_in_place(taken: ModuleType) -> None:
    """Without keys it turns the queries, as the op that is not in place does."""
    q, tables = torch.randn(2, 3, 5, 8, device=DEVICE), angles(5, 8, torch.float32, DEVICE)
    expected, none = taken.rope(q, None, *tables)
    taken.rope_(q, None, *tables)
    assert torch.equal(q, expected)
    assert none.shape == (2, 0, 5, 8)


@pairings
def test_position_that_the_tables_lack(taken: ModuleType, interleaved: bool) -> None:
    """It makes its own token NaN, however far away it is, and no other; what is not turned stays."""
    q, k = torch.ones(2, 3, 5, 8, device=DEVICE), torch.ones(2, 1, 5, 8, device=DEVICE)
    tables = angles(9, 6, q.dtype, DEVICE)
    positions = torch.tensor([[0, 8, 9, 2**40, 1], [3, -1, -(2**40), 4, 5]], device=DEVICE)
    wrong = (positions < 0) | (positions > 8)
    for out in taken.rope(q, k, *tables, interleaved, positions=positions):
        assert torch.equal(out[..., :6].isnan(), wrong[:, None, :, None].expand(out[..., :6].shape))
        assert (out[..., 6:] == 1).all()


def test_one_element_shares_no_memory(taken: ModuleType) -> None:
    """In place, too, a stride of one element is none."""
    q, k = torch.ones(1, 1, 1, 6, device=DEVICE), torch.ones(1, 2, 1, 6, device=DEVICE)
    tables = angles(1, 6, q.dtype, DEVICE)
    expected = taken.rope(q, k, *tables)
    taken.rope_(q.as_strided(q.shape, (0, 0, 0, 1)), k, *tables)
    torch.testing.assert_close((q, k), expected)


def test_gradient_of_one_result(taken: ModuleType) -> None:
    """The gradient of queries or of keys alone is right, and autograd keeps the tables only."""
    q, k, cos, sin, *flags = arguments(Draw(torch.float64), 2, 3, 1, 5, 8, 0, 0, 1)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = taken.rope(q.requires_grad_(), k.requires_grad_(), cos, sin, *flags)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]
    grads = [torch.randn_like(x) for x in out]
    for i in range(2):
        actual = torch.autograd.grad(out[i], (q, k), grads[i], retain_graph=True)
        ways = [grad if j == i else torch.zeros_like(grad) for j, grad in enumerate(grads)]
        right = [result.value for result in exact_gradients(*ways, q, k, cos, sin, *flags)]
        torch.testing.assert_close([*actual], right)


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
        torch.testing.assert_close(out, turned(x, cos, sin, interleaved=False))
    for interleaved in (False, True):
        out = recipe.rope_complex(q, cos, sin, interleaved)
        torch.testing.assert_close(out, turned(q, cos, sin, interleaved))


@pairings
def test_products_know_distances_only(taken: ModuleType, recipe: ModuleType, interleaved: bool) -> None:
    """What RoPE is for: the product of a query and a key is that of any two at the same distance."""
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64).expand(1, 1, 20, 16) for _ in range(2))
    q, k = taken.rope(q.to(DEVICE), k.to(DEVICE), *recipe.tables(20, 16), interleaved)
    scores = (q @ k.mT)[0, 0]
    for distance in range(-19, 20):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


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


@pytest.mark.parametrize("T", [40, 200, 300])
def test_programs_along_positions(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, T: int) -> None:
    """Where positions lie inside, programs go along some tiles with each group of heads; the last ones are fewer."""
    monkeypatch.setattr(taken, "ROPE_NEAR", 3 * 32 * 32 * 4)  # three tiles of 32 positions
    q, k = (Layout("contiguous", H).make((2, H, T, 32), torch.float32, DEVICE) for H in (9, 3))
    tables = angles(T, 32, torch.float32, DEVICE)
    for y, x in zip(taken.rope(q, k, *tables), (q, k), strict=True):
        assert_turned(y, x, *tables)


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The first kernel is right for any number of heads, and so is every step of the ladder."""
    for H in (1, 5, 8):
        x = Layout("contiguous", H).make((2, 9, H, 16), torch.float32, DEVICE).transpose(1, 2)
        for y in recipe.turn_tokens(x, x, *angles(9, 16, torch.float32, DEVICE)):
            assert_turned(y, x, *angles(9, 16, torch.float32, DEVICE))
    for inside in (True, False):
        calls = recipe.ladder(inside, B=2, T=9, D=64)
        assert len(calls) == 5 + inside
        for call in calls.values():
            for y, x in zip(call(), call.args, strict=False):
                assert_turned(y, x, *call.args[2:])


def test_traced_in_place(taken: ModuleType, recipe: ModuleType) -> None:
    """Traced, the op turns parts of what was computed before it, or of an argument, and refuses to lose a gradient."""
    cos, sin = recipe.tables(17, 8)

    def computed(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        before = x * 2
        taken.rope_(x[:, :3], x[:, 3:], cos, sin)
        return torch.cat([x, before])

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
KNOWN = {"CONJUGATE": False, "INTERLEAVED": False, "BLOCK_H": 4, "STARTS": False}
KNOWN |= dict.fromkeys(["positions_ptr", "P", "FIRST", "BOTH", "stride_cos_a", "stride_sin_a"])
KNOWN |= dict.fromkeys(["stride_pa", "stride_pb", "stride_pt"])
ALIGNED = {"multiples": [*STRIDES, "stride_cos", "stride_sin"]}


def stores(taken: ModuleType) -> dict[tuple[int, bool, bool], Counter[str]]:
    """Return how often the kernel stores, by the size of a head, the pairing, and whether 16 divides the strides."""
    results = {}
    for D, interleaved, aligned in product((128, 80), (False, True), (True, False)):
        half = 1 << (D // 2 - 1).bit_length()
        known = KNOWN | {"D": D, "BLOCK_D": half, "BLOCK_T": 512 // half, "ACC": taken.tl.float32}
        text = ptx(taken._rope_kernel, "bf16", **known | {"INTERLEAVED": interleaved}, **ALIGNED if aligned else {})
        results[D, interleaved, aligned] = Counter(re.findall(r"st\.global\S*", text))
    return results


def launches(taken: ModuleType) -> list[list[int]]:
    """Return how many launches, results and copies the graphs of the op have."""
    q, k = (torch.randn(2, h, 33, 48, requires_grad=True) for h in (5, 2))
    words = ("triton_kernel", "empty_like", "clone", "copy")
    made = graphs(taken.rope, q, k, *torch.randn(2, 33, 24))
    positions = torch.zeros(2, 33, dtype=torch.int64)
    made += graphs(
        lambda *tensors: taken.rope(*tensors[:4], positions=tensors[4]), q, k, *torch.randn(2, 60, 24), positions
    )
    return [[sum(word in name for name in graph) for word in words] for graph in made]


def test_compiled(gallery: Path, on_h100: Ask) -> None:
    """Where 16 divides the strides, accesses have 16 bytes, in either pairing; sizes may stay symbols in a graph."""
    counts, seen = on_h100(gallery / "fusion" / "rope.py", stores, launches)
    # 4 heads of 8 tokens in 128 threads are 4 stores of 8 elements for each of q and k.
    for D, interleaved in product((128, 80), (False, True)):
        assert counts[D, interleaved, True] == {"st.global.v4.b32": 8}
    for interleaved in (False, True):
        assert counts[128, interleaved, False].total() > 8
    # One launch each, forward and backward, with two results, with and without positions.
    assert seen == [[1, 2, 0, 0]] * 4


@pytest.mark.needs_gpu_memory(12)
@pairings
def test_beyond_int32(taken: ModuleType, interleaved: bool) -> None:
    """The last of more than 2**31 elements are right, in either order of heads and tokens, in place and not."""
    tokens = 2**31 // 1024 + 3
    tables = [t.expand(tokens, 64).contiguous() for t in angles(1, 128, torch.float32, DEVICE)]
    last = torch.randn(1, 8, 1, 128, device=DEVICE).bfloat16()
    expected = turned(last.double(), *(t[:1].double() for t in tables), interleaved)
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
def test_undeclared_change_is_found(recipe: ModuleType) -> None:
    """The op that hides what it changes does not pass opcheck."""
    from torch.testing._internal.optests import OpCheckError  # which imports Triton

    given = arguments(Draw(torch.float32), 2, 4, 2, 19, 16, 0, 0, 1)[:4]
    with pytest.raises(OpCheckError):
        torch.library.opcheck(recipe.rope_undeclared, given)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
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
    ("sines of another position", "sin_ptr + row * stride_sin", "sin_ptr + row * stride_cos"),
    ("one sequence for all", "b, pid = pid // (tiles * groups), pid", "b, pid = pid * 0, pid"),
    ("positions past the tables", "        mask &= (row >= 0) & (row < P)\n", ""),
    ("positions of one sequence", "b * stride_pb + t * stride_pt", "t * stride_pt"),
    ("tokens all at the first one's position", "            row += t\n", ""),
    ("two axes of three", "(offs_d >= BOTH).to(tl.int64)", "0"),
    ("positions of one axis", "            positions_ptr += axis * stride_pa\n", ""),
    ("tables of one axis", "            cos_ptr += axis * stride_cos_a\n", ""),
    ("packed sequences as one", "positions = tokens - cu_seqlens[sequence]", "positions = tokens"),
    ("as many tiles at the end", "near = tl.minimum(tiles - first, NEAR)", "near = NEAR"),
]
