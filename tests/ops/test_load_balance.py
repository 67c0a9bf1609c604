"""The op of the recipe Load balancing of experts: beside transformers, and where sums of programs meet."""

# ruff: noqa: N806 - T tokens and E experts, as in the recipe

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator
from compiled import Ask, graphs, stack
from hypothesis import strategies as st
from inputs import DEVICE, Layout

RECIPE = "experts/load_balance.py"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter


def arguments(
    draw: Draw, T: int, E: int, k: int, layers: int = 0, sequences: int = 1, score: str = "softmax"
) -> tuple[Any, ...]:
    """Make logits, experts of which some are none, and a mask that serves so many layers; then the options."""
    logits = draw(T, E)
    experts = draw(T, k, dtype=torch.int32)
    experts = experts.copy_(experts % (E + 3) - 1) if experts.numel() == 0 or 0 not in experts.stride() else experts % E
    mask = None
    if layers:
        mask = draw(T // layers, dtype=torch.bool)
        if 0 not in mask.stride():
            mask[:: T // layers // sequences] = True  # a sequence has a token, or its loss is NaN
    return logits, experts, mask, score, sequences


def counted(logits: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return 1 for each token that counts, else 0."""
    if mask is None:
        return torch.ones(len(logits), dtype=torch.float64, device=logits.device)
    return (mask.flatten() != 0).double().repeat(len(logits) // max(1, mask.numel()))


def parts(
    logits: torch.Tensor, experts: torch.Tensor, mask: torch.Tensor | None, score: str, sequences: int
) -> tuple[torch.Tensor, ...]:
    """Return probabilities, slopes and whether a token counts, for sequences of some length each."""
    E = logits.shape[1]
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    scores = scores / scores.sum(-1, keepdim=True)
    counts = counted(logits, mask).unflatten(0, (sequences, -1))
    hot = (experts.long()[..., None] == torch.arange(E, device=logits.device)).sum(1).double()
    chosen = (hot.unflatten(0, (sequences, -1)) * counts[..., None]).sum(1)
    n = counts.sum(1, keepdim=True)
    return scores.unflatten(0, (sequences, -1)), E * chosen / n / n / sequences, counts[..., None]


def loss(*given: Any) -> torch.Tensor:
    """Return the loss."""
    p, slopes, counts = parts(*given)
    return (torch.where(counts > 0, p, 0).sum(1) * slopes).sum()


def exact(*given: Any) -> list[Exact]:
    """Return the loss, of terms that are all positive; PyTorch adds up its parts, of 32 experts each."""
    return [Exact(loss(*given), dtype=accumulator, made_by_torch=True)]


def gradient(grad: torch.Tensor, *given: Any) -> list[Exact]:
    """Return the gradient of the logits."""
    logits, *_, score, _ = given
    p, slopes, counts = parts(*given)
    factor = p if score == "softmax" else p * (1 - logits.sigmoid().view(p.shape))

    def of(grad: torch.Tensor, combine: Callable[..., torch.Tensor]) -> torch.Tensor:
        s = slopes[:, None]
        d = factor * combine(s, (p * s).sum(-1, keepdim=True)) * grad
        return torch.where(counts > 0, d, 0).flatten(0, 1)

    return [Exact(of(grad, torch.sub), of(grad.abs(), torch.add))]


def reference(*given: Any) -> torch.Tensor:
    """Return the same by PyTorch."""
    logits, *rest = given
    wide = accumulator(logits.dtype)
    return loss(logits.to(wide), *rest).to(wide)


def special(draw: Draw, score: str = "softmax") -> list[tuple[Any, ...]]:
    """Make rows that are NaN, alone or where nothing counts, and rows with -inf and extreme numbers."""
    x = torch.linspace(-3, 3, 7 * 40, dtype=torch.float64, device=DEVICE).view(7, 40)
    x[1, ::2], x[2, 5] = -torch.inf, torch.finfo(draw.dtype).max / 2
    experts = torch.arange(14, device=DEVICE).view(7, 2)
    masked = torch.tensor([True] * 4 + [False] * 3, device=DEVICE)
    wrong = x.clone()
    wrong[4], wrong[5], wrong[6, 3] = torch.nan, -torch.inf, torch.inf
    none = torch.zeros_like(masked)
    return [
        (x.to(draw.dtype), experts, None, score, 1),
        (wrong.to(draw.dtype), experts, masked, score, 1),
        (wrong.to(draw.dtype), experts, None, score, 1),
        (x.to(draw.dtype), experts, none, score, 1),
        (x[:0].to(draw.dtype), experts[:0], None, score, 1),
    ]


def refused(**wrong: Any) -> Callable[[Draw], tuple[Any, ...]]:
    """Return what makes arguments of which one is wrong."""

    def made(draw: Draw) -> tuple[Any, ...]:
        given = {"logits": draw(6, 8), "experts": torch.zeros(6, 2, dtype=torch.int32, device=DEVICE)}
        given |= {"mask": None, "score": "softmax", "sequences": 1}
        return tuple({**given, **{name: make(draw) for name, make in wrong.items()}}.values())

    return made


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Callable[[Draw], torch.Tensor]:
    """Return what makes zeros."""
    return lambda draw: torch.zeros(shape, dtype=dtype, device=DEVICE)


OP = "load_balance_loss takes"
REFUSED = [
    Refused(refused(logits=zeros(6, 8)), TypeError, rf"{OP} float logits, not torch\.int32"),
    *(
        Refused(refused(logits=zeros(*s, dtype=torch.float32)), ValueError, rf"{OP} logits of \(tokens, experts\)")
        for s in [(6,), (2, 3, 8), (6, 0), (6, 1025)]
    ),
    *(
        Refused(refused(experts=zeros(6, 2, dtype=d)), TypeError, f"{OP} experts of int32 or int64 on")
        for d in (torch.int16, torch.float32)
    ),
    *(
        Refused(refused(experts=zeros(*s)), ValueError, rf"{OP} experts of \(tokens, k\), not")
        for s in [(6,), (5, 2), (6, 0), (2, 3, 2)]
    ),
    Refused(
        refused(experts=lambda draw: zeros(6, 2)(draw).to("meta")), TypeError, f"{OP} experts of int32 or int64 on"
    ),
    Refused(refused(mask=zeros(6, dtype=torch.float32)), TypeError, f"{OP} a mask of bool, uint8, int32 or int64 on"),
    *(
        Refused(refused(mask=zeros(*s)), ValueError, f"{OP} a mask whose size divides 6 tokens, not of")
        for s in [(4,), (12,), (0,)]
    ),
    Refused(refused(score=lambda draw: "relu"), ValueError, f"{OP} the scores softmax and sigmoid, not relu"),
    *(
        Refused(
            refused(sequences=lambda draw, n=n: n), ValueError, f"{OP} sequences of one length, not {n} of 6 tokens"
        )
        for n in (0, -1, 4)
    ),
]
# Few programs, which have several tiles each, and are added up in several turns
SMALL = {"LOAD_BALANCE_BLOCKS": 3, "LOAD_BALANCE_ROWS": 16, "LOAD_BALANCE_SUMS": 64}
SIZES: list[tuple[int, ...]] = [
    (5, 60, 6),
    (100, 8, 2),
    (17, 33, 3),
    (130, 16, 4),
    (3, 1000, 10),
    (33, 256, 8),
    (1, 1, 1),
    (0, 8, 2),
    (64, 2, 1),
    (70, 128, 1),
]
MASKED: list[tuple[int, ...]] = [(6, 60, 6, 1), (120, 8, 2, 3), (34, 33, 3, 2), (150, 16, 4, 1), (12, 300, 8, 12)]
ALONG: list[tuple[int, ...]] = [
    (6, 60, 6, 0, 3),
    (120, 8, 2, 1, 4),
    (34, 33, 3, 1, 2),
    (100, 16, 4, 0, 5),
    (9, 40, 2, 1, 9),
]


def shapes(*rest: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Sizes of all kinds; the tokens divide into three."""
    tokens = st.integers(1, 20).map(lambda n: 3 * n)
    return st.tuples(tokens, st.sampled_from([1, 3, 8, 60, 64, 100, 256]), st.integers(1, 7), *map(st.just, rest))


def case(name: str, sizes: list[tuple[int, ...]], score: str = "softmax", **more: Any) -> Case:
    """Return a case of one score."""
    return Case(
        "load_balance_loss",
        name=f"load_balance_loss, {name}",
        arguments=partial(arguments, score=score),
        exact=exact,
        sizes=sizes,
        gradients=gradient,
        reference=reference,
        floor=lambda dtype: torch.finfo(dtype).tiny,
        plain=True,
        **{"small": (6, 8, 2), "many": (200_003, 60, 6), "settings": SMALL, **more},
    )


CONTRACT = [
    case("softmax", SIZES, special=special, refused=REFUSED, shapes=shapes(), settings={}),
    case("softmax, few programs", SIZES, shapes=shapes()),
    case(
        "sigmoid",
        SIZES,
        "sigmoid",
        special=partial(special, score="sigmoid"),
        shapes=shapes(),
    ),
    case("masked", MASKED, shapes=shapes(1), small=(6, 8, 2, 2), many=(200_004, 60, 6, 3)),
    case("of sequences", ALONG, "sigmoid", shapes=shapes(1, 3), small=(6, 8, 2, 1, 3), many=(200_004, 60, 6, 1, 3)),
]


@pytest.mark.parametrize("masked", [False, True])
def test_number_of_transformers_float32(taken: ModuleType, masked: bool) -> None:
    """Of several layers and with padding, it is the number of transformers, and so is its gradient."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = [Layout("contiguous", seed).make((20, 8), torch.float32, DEVICE) for seed in range(3)]
    mask = torch.arange(20, device=DEVICE).view(2, 10) % 7 > 1 if masked else None
    logits = torch.cat(layers).requires_grad_()
    made = taken.load_balance_loss(logits, logits.topk(2).indices, mask)
    expected = mixtral.load_balancing_loss_func(logits.split(20), 8, 2, mask)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=0)
    grads = [torch.autograd.grad(value, logits)[0] for value in (made, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-7)


def test_balanced_float32(taken: ModuleType) -> None:
    """Where all experts are chosen equally often, the loss is k; where one takes all, and is sure of it, E."""
    logits = torch.zeros(16, 8, device=DEVICE)
    even = torch.arange(48, device=DEVICE).view(16, 3) % 8
    assert taken.load_balance_loss(logits, even).item() == 3
    logits[:, 5] = 100
    assert taken.load_balance_loss(logits, torch.full((16, 1), 5, device=DEVICE)).item() == 8


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
def test_masks_float32(taken: ModuleType, dtype: torch.dtype) -> None:
    """A mask of any dtype and shape leaves tokens out: the rest has the loss that it would have alone."""
    draw = Draw(torch.float32)
    logits, experts = draw(12, 20), draw(12, 3, dtype=torch.int64) % 20
    mask = torch.tensor([0, 3, 0, 1] * 3, device=DEVICE).to(dtype)
    made = taken.load_balance_loss(logits, experts, mask.view(3, 4).mT.contiguous().mT)
    expected = taken.load_balance_loss(logits[1::2], experts[1::2])
    torch.testing.assert_close(made, expected, rtol=1e-6, atol=0)


def test_experts_outside_float32(taken: ModuleType) -> None:
    """A choice of no expert is not counted, whatever its number is, and its token still is."""
    logits = Draw(torch.float32)(4, 8)
    experts = torch.tensor([[1, -1], [2**40, 3], [2**32 + 1, 8], [-(2**40), 1]], device=DEVICE)
    found = torch.tensor([0, 2, 0, 1, 0, 0, 0, 0], device=DEVICE)
    expected = 8 * (found / 4 * logits.softmax(-1).mean(0)).sum()
    torch.testing.assert_close(taken.load_balance_loss(logits, experts), expected)


def test_slopes_have_no_gradient_float32(taken: ModuleType) -> None:
    """They are constants, as counts are."""
    logits, experts = Draw(torch.float32)(4, 8).requires_grad_(), torch.zeros(4, 1, dtype=torch.int32, device=DEVICE)
    made, slopes = taken.load_balance_forward(logits, experts)
    assert made.requires_grad
    assert not slopes.requires_grad
    assert slopes.tolist() == [[2.0] + [0.0] * 7]


@pytest.mark.needs_gpu_memory(9)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 logits: the last tokens count, and have their gradient."""
    T = 2**21 + 2
    x = torch.zeros(T, 1024, dtype=torch.bfloat16, device=DEVICE)
    x[-1, 1000] = 100
    mask = torch.zeros(T, dtype=torch.bool, device=DEVICE)
    mask[-2:] = True
    experts = torch.full((T, 1), 1000, dtype=torch.int32, device=DEVICE)
    loss = taken.load_balance_loss(x.requires_grad_(), experts, mask)
    torch.testing.assert_close(loss.item(), 1024 * (1 + 1 / 1024) / 2)
    loss.backward()
    assert x.grad is not None
    assert x.grad[-2, 1000] > 0
    assert not x.grad[:-2].any()


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill."""
    results = {}
    types = {"experts_ptr": "i32", "mask_ptr": "i1", "counts_ptr": "i32", "tokens_ptr": "i32"}
    for dtype in ("bf16", "fp32"):
        for E in (8, 128, 256, 1024):
            x = torch.empty(1, E, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype], device="meta")
            plan = taken._load_balance_plan(x, "softmax")
            known = {"sums_ptr": "fp32", "k": 8, "CHUNK": 128 * plan["num_warps"], **types, **plan}
            results[f"{E} {dtype}"] = stack(taken._load_balance_kernel, dtype, multiples=("stride",), **known)
            backward = {"grad_ptr": "fp32", "slopes_ptr": "fp32", "mask_ptr": "i1", **plan}
            kernel = taken._load_balance_backward_kernel
            results[f"{E} {dtype}, backward"] = stack(kernel, dtype, multiples=("stride",), **backward)
    return results


@pytest.mark.thorough
def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Nothing is spilled."""
    (spilled,) = on_h100(gallery / RECIPE, spills)
    assert max(spilled.values()) == 0, spilled


def traced(taken: ModuleType) -> list[list[str]]:
    """Return the graphs of the op with a mask of bool, forward and backward."""
    experts, mask = torch.zeros(12, 2, dtype=torch.int32), torch.ones(6, dtype=torch.bool)
    return graphs(taken.load_balance_loss, torch.randn(12, 8, requires_grad=True), experts, mask)


def test_torch_compile_takes_a_mask_as_it_is(gallery: Path, on_h100: Ask) -> None:
    """A mask of bool costs no launch, and no view as another dtype, which Inductor of PyTorch 2.11 does not lower."""
    (forward_and_backward,) = on_h100(gallery / RECIPE, traced)
    for graph, kernels in zip(forward_and_backward, (2, 1), strict=True):
        assert sum(call.startswith("triton_kernel_wrapper") for call in graph) == kernels
        assert not [call for call in graph if re.match(r"aten\.(view\.dtype|clone|copy|_to_copy)", call)]


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    lines = printed("experts/load_balance").splitlines()
    assert lines[1].startswith("14 operators, ")
    by_way = {line.split(":")[0]: line for line in lines if " idle experts, loss " in line}
    assert [*by_way] == ["nothing", "auxiliary loss", "bias"]
    assert not by_way["nothing"].startswith("nothing: 0 idle")  # experts without tokens are what the page is about
    assert all(by_way[way].startswith(f"{way}: 0 idle") for way in ("auxiliary loss", "bias"))
    assert lines[-4:] == ["not solved yet", "not solved yet", "right", "right"]


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "padding that has a probability",
        'mask=offs < E, other=-float("inf")).to(ACC)',
        "mask=offs < E, other=0).to(ACC)",
    ),
    ("a softmax that overflows", "score = tl.exp(x - tl.max(x, axis=1, keep_dims=True))", "score = tl.exp(x)"),
    ("the last token twice", "        counted = row < rows\n", "        counted = row >= 0\n"),
    (
        "a mask of one layer",
        "tl.load(mask_ptr + token % M) != 0)\n        # In",
        "tl.load(mask_ptr + token) != 0)\n        # In",
    ),
    (
        "padding that counts",
        "        sums += tl.where(counted, p, 0)\n        tokens",
        "        sums += p\n        tokens",
    ),
    ("padding in the number of tokens", "tokens += counted.to(tl.int32)", "tokens += (row < rows).to(tl.int32)"),
    ("choices of padding", "counted = counted & (tl.load(ptrs, mask=counted, other=0) != 0)", "counted = counted"),
    ("an expert below zero", "counted & (e >= 0) & (e < E)", "counted & (e < E)"),
    ("an expert past the last", "counted & (e >= 0) & (e < E)", "counted & (e >= 0)"),
    ("each program the first sequence", "    begin += pid // blocks * S  # of all tokens\n", ""),
    ("tokens of the next sequence", "rows = tl.minimum(ROWS, S - begin)", "rows = ROWS"),
    ("the first programs alone", "for first in range(0, blocks, BLOCK_B)", "for first in range(0, 1, BLOCK_B)"),
    ("a sum in place of a mean", " / tl.num_programs(axis=0)\n", "\n"),
    ("slopes of the first sequence", "slopes_ptr + sequence.to(tl.int64) * E", "slopes_ptr + 0 * sequence"),
    ("a gradient of padding", "        d = tl.where(tl.load(mask_ptr + token % M) != 0, d, 0)\n", "        d = d\n"),
    ("a sigmoid's slope", "        d = d * (1 - score)\n", "        d = d\n"),
    ("the gradient of the loss", "    d = d * tl.load(grad_ptr)\n", ""),
    ("the mean of the slopes", "(slope - tl.sum(p * slope, axis=1, keep_dims=True))\n    if", "slope\n    if"),
]
