"""The op of the recipe Writing to a paged cache."""

# ruff: noqa: N806 - head dimensions have the recipe's names

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, accumulator, assert_close, check, in_float64
from compiled import Ask, compiled, graphs
from hypothesis import strategies as st
from inputs import DEVICE

RECIPE = "attention/kv_cache_write.py"
FLOAT8 = torch.float8_e4m3fn


def of_cache(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the smallest cache that the op takes."""
    return FLOAT8 if dtype.itemsize == 2 else dtype


def arguments(
    draw: Draw,
    tokens: int,
    heads: tuple[int, int],
    rotary: tuple[int, int],
    page: int = 16,
    scales: int = 0,
    lies: str = "",
    interleaved: bool = False,
    small: bool = False,
) -> tuple[Any, ...]:
    """Make heads, caches that hold something, slots, positions, tables and no scales, one, or one for each head.

    There are no positions and tables where R is 0.
    Each third token is padding, but no token alone; where all slots are to be one number, all are padding.
    """
    ((of_q, shared), (D, R)), dtype = (heads, rotary), accumulator(draw.dtype)
    pages = tokens // page + 2
    q, k, v = (draw(tokens, count, D) for count in (of_q, shared, shared))

    def shuffled(x: torch.Tensor) -> torch.Tensor:
        slots = x.argsort()
        slots[: tokens if tokens > 1 else 0 : 3] = -1
        return slots

    slots = draw(pages * page, dtype=torch.int64, of=shuffled)[:tokens]
    positions = draw(tokens, dtype=torch.int64, of=lambda x: (x / 2**44).floor() % 50)
    cos, sin = (draw(50, R // 2, dtype=dtype, of=function) for function in (torch.cos, torch.sin))
    both = [draw(shared if scales == 2 else 1, dtype=torch.float32, of=torch.exp2) for _ in range(2)]
    dtype = of_cache(draw.dtype) if small else draw.dtype
    if lies == "sides":
        caches = draw(pages, page, 2, shared, D, dtype=dtype).unbind(2)
    elif lies == "heads outside":
        caches = tuple(draw(pages, shared, page, D, dtype=dtype).transpose(1, 2) for _ in range(2))
    else:
        gaps = (3, 5) if lies == "apart" else (0, 0)  # so that their strides differ
        caches = tuple(draw(pages, page, shared, D + gap, dtype=dtype)[..., gap:] for gap in gaps)
    turn = (positions, cos, sin) if R else (None, None, None)
    options = (interleaved,) if interleaved else ()
    return q, k, v, *caches, slots, *turn, *(both if scales else (None, None)), *options


def turned(x: torch.Tensor, points: torch.Tensor, interleaved: bool, size: bool = False) -> torch.Tensor:
    """Return heads turned by a product of complex numbers, in float64; or the sizes of what that product adds up."""
    front, rest = x.tensor_split([2 * points.shape[-1]], dim=-1)
    a, b = (front[..., ::2], front[..., 1::2]) if interleaved else front.tensor_split(2, dim=-1)
    points = points[:, None]
    if size:
        a, b, rest, c, s = (t.abs() for t in (a, b, rest, points.real, points.imag))
        pair = a * c + b * s, b * c + a * s
    else:
        product = torch.complex(a, b) * points
        pair = product.real, product.imag
    return torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), rest], dim=-1)


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    interleaved: bool = False,
    small: bool = False,
) -> list[Exact]:
    """Return queries and keys turned, and both caches.

    Two products and a sum are rounded, and a quotient to two units, as GPUs divide.
    """
    points = q.new_zeros(len(q), 0, dtype=torch.complex128) if cos is None else torch.complex(cos, sin)[positions]
    results = [Exact(*(turned(x, points, interleaved, size) for size in (False, True))) for x in (q, k)]
    token, page = slots >= 0, k_cache.shape[1]
    place = slots[token] // page, slots[token] % page
    most = torch.finfo(FLOAT8).max if small else torch.inf
    for cache, new, scale in zip((k_cache, v_cache), (results[1], Exact(v, v.abs())), (k_scale, v_scale), strict=True):
        written, terms = cache.clone(), torch.zeros_like(cache)
        for into, rows in ((written, new.value), (terms, new.terms)):
            into[place] = (rows if scale is None else rows / scale[:, None])[token].clamp(-most, most)
        results.append(Exact(written, terms, of_cache if small else None, roundings=8))
    return results


def fitting(draw: Draw, D: int = 16, R: int = 8) -> tuple[Any, ...]:
    """Make arguments that fit each other, and no scales."""
    return arguments(draw, 3, (4, 2), (D, R))[:9]


def refused(error: type[Exception], text: str, *changes: tuple[int, Callable[[torch.Tensor], Any]]) -> list[Refused]:
    """Return calls that raise as one of their arguments was changed."""

    def make(draw: Draw, place: int, change: Callable[[torch.Tensor], Any]) -> tuple[Any, ...]:
        return tuple(change(x) if i == place else x for i, x in enumerate(fitting(draw)))

    return [Refused(partial(make, place=place, change=change), error, text) for place, change in changes]


KINDS = "kv_cache_write_ takes q, k and v of one float dtype, .*, not torch.*"
FORMS = r"kv_cache_write_ takes q of \(tokens, heads, D\), .* R up to D, and no or two scales .*, not \("
REFUSED = [
    *refused(TypeError, f"{KINDS}int32", *((place, torch.Tensor.int) for place in (0, 5, 6, 7))),
    *refused(TypeError, f"{KINDS}float64", *((place, torch.Tensor.double) for place in (1, 2, 3))),
    *refused(TypeError, f"{KINDS}float8_e4m3fn", (4, lambda v_cache: v_cache.to(FLOAT8))),
    Refused(
        lambda draw: tuple(x.to(FLOAT8) if i in (3, 4) else x for i, x in enumerate(fitting(draw))),
        TypeError,
        f"{KINDS}float8_e4m3fn",
    ),
    Refused(lambda draw: (*fitting(draw), draw(1).double(), draw(1)), TypeError, f"{KINDS}float64"),
    *refused(ValueError, FORMS, (0, lambda q: q[0]), (0, lambda q: q[:2]), (0, lambda q: q[..., :8])),
    *refused(ValueError, FORMS, (0, lambda q: q[:, :3]), (1, lambda k: k[:, :1]), (2, lambda v: v[:, :1])),
    *refused(ValueError, FORMS, (3, lambda cache: cache[:1]), (4, lambda cache: cache[0])),
    *refused(ValueError, FORMS, (5, lambda slots: slots[:2]), (6, lambda positions: positions[:2])),
    *refused(ValueError, FORMS, (7, lambda cos: cos[:, :2]), (7, lambda cos: cos[0])),
    Refused(lambda draw: fitting(draw, R=18), ValueError, FORMS),
    Refused(lambda draw: (*fitting(draw)[:7], draw(50, 0), draw(50, 0)), ValueError, FORMS),
    *refused(ValueError, FORMS, *((place, lambda _: None) for place in (6, 7, 8))),
    Refused(lambda draw: (*fitting(draw), draw(1)), ValueError, FORMS),
    Refused(lambda draw: (*fitting(draw), None, draw(1)), ValueError, FORMS),
    Refused(lambda draw: (*fitting(draw), draw(1), draw(3)), ValueError, FORMS),
    *refused(
        ValueError,
        "kv_cache_write_ takes caches that are contiguous along D",
        *((place, lambda cache: cache.mT.contiguous().mT) for place in (3, 4)),
    ),
    *refused(
        ValueError,
        "kv_cache_write_ has no gradient: detach",
        *((place, torch.Tensor.requires_grad_) for place in (0, 1, 2, 3, 4, 7)),
    ),
]

# Tokens, heads of queries and of keys, D and R, slots of a page, scales, and how caches lie
SIZES = [(7, (6, 3), (24, 16), 5, 2), (8, (4, 2), (20, 20), 16, 0, "sides"), (9, (3, 3), (6, 2), 16, 2, "apart")]
SIZES += [(5, (40, 5), (80, 72), 1, 1, "heads outside"), (1, (4, 1), (16, 8)), (0, (4, 2), (16, 16))]
SIZES += [(3, (1, 1), (64, 64), 5, 1), (4, (8, 8), (24, 10), 2, 2, "sides"), (2, (36, 36), (130, 128), 3)]
SIZES += [(5, (4, 2), (24, 0), 5, 2), (6, (0, 2), (16, 0)), (5, (6, 3), (24, 16), 5, 2, "", True)]
SIZES += [
    (8, (4, 2), (20, 20), 16, 0, "sides", True),
    (5, (40, 5), (80, 10), 1, 1, "heads outside", True),
]
SHAPES = st.tuples(
    st.integers(0, 9),
    st.sampled_from([(1, 1), (4, 1), (6, 3), (3, 3), (40, 5)]),
    st.sampled_from([(16, 16), (16, 8), (20, 20), (80, 32), (64, 64), (6, 2), (16, 0)]),
    st.sampled_from([1, 5, 16]),
    st.integers(0, 2),
    st.sampled_from(["", "sides", "heads outside", "apart"]),
    st.booleans(),
)
OF_DTYPE = Case(
    "kv_cache_write_",
    arguments,
    exact,
    sizes=SIZES,
    small=(5, (4, 2), (16, 8)),
    many=(1031, (64, 8), (128, 64), 16, 2),
    shapes=SHAPES,
    roundings=4,
    changes=2,
    changes_from=3,
    refused=REFUSED,
)
# With a cache of float8 where heads have 16 bits, and a few heads at a time
IN_FLOAT8 = replace(
    OF_DTYPE,
    name="kv_cache_write_ in float8",
    arguments=partial(arguments, small=True),
    exact=partial(exact, small=True),
    dtypes=[torch.float16, torch.bfloat16],
    small=(5, (4, 2), (16, 8), 16, 1),
    settings={"KV_CACHE_WRITE_TILE": 32},
    refused=(),
)
CONTRACT = [OF_DTYPE, IN_FLOAT8]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_numbers(taken: ModuleType, dtype: torch.dtype) -> None:
    """What is too large for float8 becomes its largest number; NaN stays NaN, and stays alone."""
    x = IN_FLOAT8.arguments(Draw(dtype), 8, (2, 2), (16, 8))
    for t in x[1:3]:
        t.mul_(1000)
        t[1, :, 10] = torch.tensor([6e4, -6e4])
    x[1][4, 1, 12] = x[2][5, 0, 5] = torch.nan
    check(IN_FLOAT8, taken, dtype, x)


def test_rounds_once(taken: ModuleType) -> None:
    """A turned key goes from float32 to float8, not by way of float16."""
    x = IN_FLOAT8.arguments(Draw(torch.float16), 1, (1, 1), (2, 2))
    x[1][:] = torch.tensor([1.0, 0.0])
    # 1.0625 is half way between two numbers of float8; float16 would round these to it.
    for near, right in ((1.0625 + 2.0**-14, 1.125), (1.0625 - 2.0**-14, 1.0)):
        x[7][:], x[8][:] = near, 0.0
        taken.kv_cache_write_(*x)
        assert x[3].float().view(-1, 2)[x[5][0], 0] == right


def test_says_what_it_changes(taken: ModuleType) -> None:
    """Autograd counts the change of both caches alone; a call that is refused, or traced, writes nothing."""
    q, *others = x = fitting(Draw(torch.float32))
    caches = [t.clone() for t in x[3:5]]
    taken.kv_cache_write_(*(t.to("meta") for t in x))
    for device in ("meta", DEVICE):
        with pytest.raises(ValueError, match="no gradient"):
            taken.kv_cache_write_(*(t.to(device) for t in (q.clone().requires_grad_(), *others)))
    assert all(map(torch.equal, x[3:5], caches))
    before = [t._version for t in x]
    taken.kv_cache_write_(*x)
    assert [t._version - old for t, old in zip(x, before, strict=True)] == [0, 0, 0, 1, 1, 0, 0, 0, 0]


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so is PyTorch's."""
    for step in (recipe.first, recipe.kv_cache_write_, recipe.write_torch):
        x = recipe.problem(20, heads=8, D=16)
        expected = exact(*in_float64(x))
        for out, right in zip((*step(*x), *x[3:5]), expected, strict=True):
            assert_close(OF_DTYPE, x[0].dtype, out, right)
    assert [recipe.statements(*step[1:]) for step in recipe.STEPS.values()] == [8, 78]
    q, k, v, k_cache, *_ = x
    assert recipe.floor_of(*x) == 2 * q.nbytes + 5 * k.nbytes
    assert recipe.floor_of(q, k, v, k_cache.to(FLOAT8)) == 2 * q.nbytes + 4 * k.nbytes


def at_launch(dtype: str, cache: str, D: int, R: int, interleaved: bool = False) -> dict[str, object]:
    """Return what the launcher passes on for strides that 16 divides, 32 heads and 8 of keys."""
    import triton.language as tl

    strides = [f"stride_{suffix}" for suffix in ("qt", "qh", "kt", "kh", "vt", "vh", "cos", "sin")]
    strides += [f"stride_{tensor}c{along}" for tensor in "kv" for along in "plh"]
    half, block = R // 2, 1 << (R // 2 - 1).bit_length()
    return {
        "dtype": dtype,
        "k_cache_ptr": cache,
        "v_cache_ptr": cache,
        "slots_ptr": "i64",
        "positions_ptr": "i64",
        **dict.fromkeys(("cos_ptr", "sin_ptr", "k_scale_ptr", "v_scale_ptr"), "fp32"),
        "multiples": strides,
        "HEADS": 32,
        "SHARED": 8,
        "D": D,
        "HALF": half,
        "INTERLEAVED": interleaved,
        "PAGE": 16,
        "SCALED": cache != dtype,
        "LARGEST": 448.0 if cache != dtype else 0.0,
        "ACC": tl.float32,
        "BLOCK_H": min(32, 2048 // block),
        "BLOCK_S": min(8, 2048 // block),
        "BLOCK_R": block,
        "BLOCK_D": 1 << (D - 1).bit_length(),
    }


CACHES = [("fp16", "fp16"), ("bf16", "bf16"), ("fp16", "fp8e4nv"), ("bf16", "fp8e4nv")]


def widths(taken: ModuleType) -> dict[str, set[str]]:
    """Return how many bits the loads of heads have at once, and the conversions to float8."""
    results = {}
    for dtype, cache in CACHES[::2]:
        text = compiled(taken._kv_cache_write_kernel, **at_launch(dtype, cache, 128, 128)).asm["ptx"]
        results[cache] = set(re.findall(r"(?:ld\.global\.v4|cvt\.\w+\.satfinite\.e4m3x2)", text))
    return results


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """A thread loads 16 bytes at once, and the GPU has an instruction for float8."""
    (results,) = on_h100(gallery / RECIPE, widths)
    assert results == {"fp16": {"ld.global.v4"}, "fp8e4nv": {"ld.global.v4", "cvt.rn.satfinite.e4m3x2"}}


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of a call."""
    q, k, v, k_cache, v_cache, *others = (t.float() if t.is_floating_point() else t for t in recipe.problem(4))
    return graphs(recipe.kv_cache_write_, q, k, v, k_cache, v_cache, *others)


def test_torch_compile_looks_not_into_it(gallery: Path, on_h100: Ask) -> None:
    """A compiled graph calls the op as it is."""
    ((graph,),) = on_h100(gallery / RECIPE, traced)
    assert not [call for call in graph if call.startswith("triton_kernel")]


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(taken: ModuleType) -> None:
    """A cache of more than 2**31 elements: its last slot is written, and no other."""
    pages = 2**31 // (2 * 16 * 2 * 128) + 2
    q, k, v, _, _, slots, *others = arguments(Draw(torch.float16), 1, (4, 2), (128, 128))
    both = torch.zeros(pages, 2, 16, 2, 128, dtype=torch.float16, device=DEVICE)
    slots[0] = pages * 16 - 1
    _, k = taken.kv_cache_write_(q, k, v, *both.unbind(1), slots, *others)
    assert torch.equal(both[-1, :, -1], torch.cat([k, v]))
    assert not both[:-1].any()


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("padding is written", "offs_h < tl.where(slot >= 0", "offs_h < tl.where(slot >= -1"),
    ("interleaved pairs turned the other way", "tl.join(x1 * cos - x2 * sin, x2", "tl.join(x1 * cos + x2 * sin, x2"),
    ("an interleaved pair too many", "both = offs_p < 2 * HALF", "both = offs_p < 2 * HALF + 2"),
    ("turned the other way", "y2 = x2 * cos + x1 * sin", "y2 = x2 * cos - x1 * sin"),
    ("the next position", "positions_ptr + token)", "positions_ptr + token) // 2"),
    ("keys are written as they came", "cells + offs_r, y1, k_scale", "cells + offs_r, y1 * 0 + y2, k_scale"),
    ("the rest of a key is not written", "slotted & rest,", "slotted & (rest & (offs_d < 0)),"),
    ("the rest of a query is not returned", "tl.store(out_ptrs + offs_d, q, mask=there & rest)", "pass"),
    ("multiplied by a scale", "x = x / scale", "x = x * scale"),
    ("scale of the first head for all", "v_scale_ptr + offs_h * stride_vs", "v_scale_ptr + offs_h * 0"),
    (
        "a slot in the wrong page",
        "v_cache_ptr + slot // PAGE * stride_vcp",
        "v_cache_ptr + slot // (PAGE + 1) * stride_vcp",
    ),
    ("heads past the last", "offs_h < SHARED", "offs_h <= SHARED"),
    ("heads of the last block left out", "there = offs_h < HEADS", "there = offs_h < HEADS - 1"),
]
