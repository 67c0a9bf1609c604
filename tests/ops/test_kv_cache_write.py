"""The op of the recipe Writing to a paged cache."""

# ruff: noqa: N806 - head dimensions have the recipe's names

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, compiled, graphs, stack
from device_key import at_cuda
from guard import Guard
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, layouts

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/kv_cache_write.py"
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = torch.float8_e4m3fn
Scales = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op(RECIPE)


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe(RECIPE)


def inputs(
    tokens: int,
    heads: tuple[int, int],
    D: int,
    R: int,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    of: Layout | None = None,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return heads in a layout, caches that hold something, slots of which each third is padding, and tables."""
    of_q, shared = heads
    of, plain = of or Layout("contiguous", seed), Layout("contiguous", seed)
    q, k, v = (of.make((tokens, count, D), dtype, DEVICE) for count in (of_q, shared, shared))
    generator = torch.Generator().manual_seed(seed)
    pages = tokens // page + 2
    caches = (Layout("contiguous", seed + i).make((pages, page, shared, D), dtype, DEVICE) for i in (1, 2))
    caches = [t.to(cache or dtype) for t in caches]
    slots = torch.randperm(pages * page, generator=generator)[:tokens].to(DEVICE)
    slots[2::3] = -1
    positions = torch.randint(0, 50, (tokens,), generator=generator).to(DEVICE)
    angles = plain.make((50, R // 2), torch.float64, DEVICE)
    tables = (angles.cos(), angles.sin()) if dtype == torch.float64 else (angles.cos().float(), angles.sin().float())
    return [q, k, v, *caches, slots, positions, *tables]


def by_complex(x: torch.Tensor, angle: torch.Tensor, R: int) -> torch.Tensor:
    """Return heads turned by a product of complex numbers, in float64."""
    x = x.double()
    points = torch.complex(x[..., : R // 2], x[..., R // 2 : R]) * angle
    return torch.cat([points.real, points.imag, x[..., R:]], dim=-1)


def assert_right(
    got: tuple[torch.Tensor, torch.Tensor], x: list[torch.Tensor], before: list[torch.Tensor], scales: Scales
) -> None:
    """Assert that results and caches are what they should be, slot by slot; `before` are the caches of before."""
    q, k, v, *caches, slots, positions, cos, sin = x
    angle = torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    eps, R = torch.finfo(q.dtype).eps, 2 * cos.shape[1]
    turning = 4 * max(min(eps, 2.0**-23), 2.0**-52)  # two products and a sum, in float32 or float64
    right = [by_complex(t, angle, R) for t in (q, k)]
    for out, expected, of in zip(got, right, (q, k), strict=True):
        assert (out.dtype, out.shape, out.device.type) == (of.dtype, of.shape, DEVICE.type)
        assert out.is_contiguous()
        atol = turning * of.double().abs().amax().item() if of.numel() else 0
        assert ((out.double() - expected).abs() <= eps * expected.abs() + atol).all()
    for cache, old, new, scale in zip(caches, before, (right[1], v.double()), scales, strict=True):
        (expected, size), small = (old.double(), cache.shape[1]), cache.dtype == FLOAT8
        allowed = torch.zeros_like(expected)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                row = new[token] / (1 if scale is None else scale.double()[:, None])
                limit = torch.finfo(cache.dtype).max
                at = slot // size, slot % size
                expected[at] = row.clamp(-limit, limit)
                allowed[at] = (2.0**-4 if small else 2 * eps) * expected[at].abs() + (2.0**-10 if small else 0)
                allowed[at] += turning * row.abs().amax(-1, keepdim=True)
        assert ((cache.double() - expected).abs() <= allowed).all()


def check(op: Callable[..., tuple[torch.Tensor, torch.Tensor]], x: list[torch.Tensor], *scales: torch.Tensor) -> None:
    """Call an op under guards, and compare all that it returns and changes; no other input may change."""
    before, guard = [t.clone() for t in x[3:5]], Guard()
    x = [t if i in (3, 4) else guard.place(t) for i, t in enumerate(x)]
    around = [torch.cat([torch.zeros_like(t[:1]), t, torch.zeros_like(t[:1])]) for t in x[3:5]]
    x[3:5] = [t[1:-1] for t in around]
    with guard:
        got = op(*x, *scales)
    assert_right(got, x, before, scales or (None, None))  # type: ignore[arg-type]
    assert not any(t[[0, -1]].double().any() for t in around), "a store before the cache or behind it"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20)
@given(
    tokens=st.integers(0, 9),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 3), (3, 3), (40, 5)]),
    rotary=st.sampled_from([(16, 16), (16, 8), (20, 20), (80, 32), (64, 64), (6, 2)]),
    page=st.sampled_from([1, 5, 16]),
    of=layouts(),
)
def test_value(
    taken: ModuleType,
    dtype: torch.dtype,
    tokens: int,
    heads: tuple[int, int],
    rotary: tuple[int, int],
    page: int,
    of: Layout,
) -> None:
    """The value is right for any number of tokens, heads, layouts and pages, turned in part or as a whole."""
    check(taken.kv_cache_write_, inputs(tokens, heads, *rotary, page, dtype, of=of, seed=of.seed % 1000))


CASES = [(dtype, dtype) for dtype in DTYPES] + [(dtype, FLOAT8) for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(("dtype", "cache"), CASES, ids=str)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("R", [24, 10])
def test_scales(taken: ModuleType, dtype: torch.dtype, cache: torch.dtype, many: bool, R: int) -> None:
    """One scale, or one for each head; in float8 without one, too."""
    scales = torch.tensor([[0.3, 2.0, 0.05], [0.7, 0.02, 1.0]], device=DEVICE)[:, : 3 if many else 1]
    check(taken.kv_cache_write_, inputs(8, (6, 3), 24, R, 16, dtype, cache), *scales)
    check(taken.kv_cache_write_, inputs(8, (6, 3), 24, R, 16, dtype, cache), *scales.T.contiguous().T)
    check(taken.kv_cache_write_, inputs(8, (6, 3), 24, R, 16, dtype, cache))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_numbers(taken: ModuleType, dtype: torch.dtype) -> None:
    """What is too large for float8 becomes its largest number; NaN stays NaN, and stays alone."""
    x = inputs(8, (2, 2), 16, 8, 16, dtype, FLOAT8)
    for t in (x[1], x[2]):
        t.mul_(1000)
        t[0, :, 10] = torch.tensor([6e4, -6e4])
    check(taken.kv_cache_write_, x)
    x[1][4, 1, 12] = x[2][3, 0, 5] = torch.nan
    taken.kv_cache_write_(*x)
    for cache, token, cell in ((x[3], 4, (1, 12)), (x[4], 3, (0, 5))):
        found = cache.float().isnan().view(-1, 2, 16).nonzero().tolist()
        assert found == [[x[5][token].item(), *cell]]


def test_rounds_once(taken: ModuleType) -> None:
    """A turned key goes from float32 to float8, not by way of float16."""
    x = inputs(1, (1, 1), 2, 2, 16, torch.float16, FLOAT8)
    x[1][:] = torch.tensor([1.0, 0.0])
    # 1.0625 is half way between two numbers of float8; float16 would round these to it.
    for near, right in ((1.0625 + 2.0**-14, 1.125), (1.0625 - 2.0**-14, 1.0)):
        x[7][:], x[8][:] = near, 0.0
        taken.kv_cache_write_(*x)
        assert x[3].float().view(-1, 2)[x[5][0], 0] == right


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_layouts(taken: ModuleType, dtype: torch.dtype) -> None:
    """Parts of one projection; caches whose keys and values, or heads, lie otherwise; tables of other strides."""
    q, k, v, k_cache, v_cache, *others, cos, sin = inputs(7, (4, 2), 24, 12, 16, dtype)
    joint = torch.cat([q, k, v], dim=1).split([4, 2, 2], dim=1)
    check(taken.kv_cache_write_, [*joint, k_cache, v_cache, *others, cos.mT.contiguous().mT, sin.repeat(1, 2)[:, :6]])
    for axis in (1, 2):
        side = torch.stack([k_cache, v_cache], dim=axis).unbind(axis)
        x = [q, k, v, *side, *others, cos, sin]
        before = [t.clone() for t in side]
        assert_right(taken.kv_cache_write_(*x), x, before, (None, None))
    apart = [torch.stack([t, t], dim=1)[:, 0] for t in others]
    check(taken.kv_cache_write_, [q, k, v, k_cache, v_cache, *apart, cos, sin])


def test_without_tokens(taken: ModuleType) -> None:
    """Nothing is turned, and nothing written; padding alone is turned."""
    check(taken.kv_cache_write_, inputs(0, (4, 2), 16, 16))
    x = inputs(3, (4, 2), 16, 16)
    x[5][:] = -1
    check(taken.kv_cache_write_, x)


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x = q, k, v, k_cache, v_cache, slots, positions, cos, sin = inputs(3, (4, 2), 16, 8, dtype=torch.float16)
    op, one = taken.kv_cache_write_, torch.ones(1, device=DEVICE)
    for place, wrong in (
        (0, q.int()),
        (1, k.float()),
        (2, v.bfloat16()),
        (3, k_cache.float()),
        (4, v_cache.to(FLOAT8)),
        (5, slots.int()),
        (6, positions.int()),
        (7, cos.int()),
    ):
        tensors = [wrong if i == place else t for i, t in enumerate(x)]
        found = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        with pytest.raises(TypeError, match=rf"^kv_cache_write_ takes q, k and v .*{re.escape(found)}$"):
            op(*tensors)
    with pytest.raises(TypeError, match=r"torch\.float64 on"):
        op(*x, one.double(), one)
    wide = [t.float() for t in x[:5]]
    with pytest.raises(TypeError, match="float8_e4m3fn"):
        op(*wide[:3], *(t.to(FLOAT8) for t in wide[3:]), slots, positions, cos, sin)
    for place, wrong in (
        (0, q[0]),
        (0, q[:2]),
        (0, q[..., :8]),
        (0, q[:, :3]),
        (1, k[:, :1]),
        (2, v[:, :1]),
        (3, k_cache[:1]),
        (4, v_cache[0]),
        (5, slots[:2]),
        (6, positions[:2]),
        (7, cos[:, :2]),
        (7, cos[0]),
    ):
        tensors = [wrong if i == place else t for i, t in enumerate(x)]
        found = ", ".join(str(tuple(t.shape)) for t in tensors)
        with pytest.raises(ValueError, match=rf"^kv_cache_write_ takes q of .*{re.escape(found)}$"):
            op(*tensors)
    for tables in ((cos[:, :0], sin[:, :0]), (cos.repeat(1, 3), sin.repeat(1, 3))):
        with pytest.raises(ValueError, match="R up to D"):
            op(*x[:7], *tables)
    for scales in ((one,), (None, one), (one, one.expand(3))):
        with pytest.raises(ValueError, match="no or two scales"):
            op(*x, *scales)
    for place in (3, 4):
        tensors = [t.mT.contiguous().mT if i == place else t for i, t in enumerate(x)]
        with pytest.raises(ValueError, match="contiguous along D"):
            op(*tensors)


def test_has_no_gradient(taken: ModuleType) -> None:
    """What requires grad is refused, and nothing is written then."""
    for place in (0, 1, 2, 3, 4, 7):
        x = inputs(3, (4, 2), 16, 8)
        before = x[3].clone()
        x[place] = x[place].requires_grad_()
        with pytest.raises(ValueError, match=r"^kv_cache_write_ has no gradient: detach"):
            taken.kv_cache_write_(*x)
        assert torch.equal(x[3], before)


def test_says_what_it_changes(taken: ModuleType) -> None:
    """Autograd counts the change of both caches, and of nothing else."""
    x = inputs(3, (4, 2), 16, 8)
    before = [t._version for t in x]
    taken.kv_cache_write_(*x)
    assert [t._version - old for t, old in zip(x, before, strict=True)] == [0, 0, 0, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_launcher_serves_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launcher; it does what the op does."""
    x, y = (inputs(5, (4, 2), 16, 8, dtype=dtype, cache=FLOAT8) for _ in range(2))
    scales = torch.tensor([[0.5], [2.0]], device=DEVICE)
    for got, right in zip(at_cuda(taken.kv_cache_write_, *x, *scales), taken.kv_cache_write_(*y, *scales), strict=True):
        assert torch.equal(got, right)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(x[3:5], y[3:5], strict=True))


def test_fake(taken: ModuleType) -> None:
    """Traced, the op has the same results' shapes, and refuses the same."""
    x = inputs(5, (4, 2), 16, 8, dtype=torch.float16)
    meta = [t.to("meta") for t in x]
    for got, right in zip(taken.kv_cache_write_(*meta), taken.kv_cache_write_(*x), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (right.shape, right.stride(), right.dtype)
    with pytest.raises(ValueError, match="no gradient"):
        taken.kv_cache_write_(meta[0].requires_grad_(), *meta[1:])


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so is PyTorch's."""
    for step in (recipe.first, recipe.kv_cache_write_, recipe.write_torch):
        x = recipe.problem(20, heads=8, D=16)
        before = [t.clone() for t in x[3:5]]
        got = tuple(t.contiguous() for t in step(*x))
        assert_right(got, list(x), before, (None, None))
    assert [recipe.statements(*step[1:]) for step in recipe.STEPS.values()] == [8, 60]
    q, k, v, k_cache, *_ = x
    assert recipe.floor_of(*x) == 2 * q.nbytes + 5 * k.nbytes
    assert recipe.floor_of(q, k, v, k_cache.to(FLOAT8)) == 2 * q.nbytes + 4 * k.nbytes


def at_launch(dtype: str, cache: str, D: int, R: int) -> dict[str, object]:
    """Return what the launcher passes on for strides that 16 divides, 32 heads and 8 of keys."""
    import triton.language as tl

    strides = [f"stride_{of}" for of in ("qt", "qh", "kt", "kh", "vt", "vh", "cos", "sin")]
    strides += [f"stride_{of}c{along}" for of in "kv" for along in "plh"]
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
    found = {}
    for dtype, cache in CACHES[::2]:
        text = compiled(taken._kv_cache_write_kernel, **at_launch(dtype, cache, 128, 128)).asm["ptx"]
        found[cache] = set(re.findall(r"(?:ld\.global\.v4|cvt\.\w+\.satfinite\.e4m3x2)", text))
    return found


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that a thread spills."""
    kernel = taken._kv_cache_write_kernel
    return {
        f"{dtype} {cache} {D} {R}": stack(kernel, **at_launch(dtype, cache, D, R))
        for dtype, cache in CACHES
        for D, R in ((64, 64), (128, 128), (128, 64), (256, 256))
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """A thread loads 16 bytes at once, and the GPU has an instruction for float8."""
    (found,) = on_h100(gallery / RECIPE, widths)
    assert found == {"fp16": {"ld.global.v4"}, "fp8e4nv": {"ld.global.v4", "cvt.rn.satfinite.e4m3x2"}}


@pytest.mark.thorough
def test_no_register_spills(gallery: Path, on_h100: Ask) -> None:
    """For no head in half precision."""
    (found,) = on_h100(gallery / RECIPE, spills)
    assert len(found) == 16
    assert not any(found.values())


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of a call."""
    q, k, v, k_cache, v_cache, *others = (t.float() if t.is_floating_point() else t for t in recipe.problem(4))
    return graphs(recipe.kv_cache_write_, q, k, v, k_cache, v_cache, *others)


def test_torch_compile_looks_not_into_it(gallery: Path, on_h100: Ask) -> None:
    """A compiled graph calls the op as it is."""
    ((graph,),) = on_h100(gallery / RECIPE, traced)
    assert not [call for call in graph if call.startswith("triton_kernel")]


@needs_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(taken: ModuleType, dtype: torch.dtype) -> None:
    """The op passes the whole of opcheck."""
    found = torch.library.opcheck(taken.kv_cache_write_, tuple(inputs(9, (4, 2), 32, 32, dtype=dtype)))
    assert set(found.values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, and other sizes, and the caches change."""
    torch.compiler.reset()
    op = torch.compile(lambda q, *x: taken.kv_cache_write_(q * 2, *x), fullgraph=True, dynamic=dynamic)
    for tokens in (4, 9, 300):
        q, *x = inputs(tokens, (4, 2), 32, 32, dtype=torch.float16)
        before = [t.clone() for t in x[2:4]]
        assert_right(op(q, *x), [q * 2, *x], before, (None, None))


@needs_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (128, 8), (64, 64)])
@pytest.mark.parametrize("rotary", [(64, 64), (80, 32), (128, 128), (256, 256)])
def test_many(taken: ModuleType, dtype: torch.dtype, heads: tuple[int, int], rotary: tuple[int, int]) -> None:
    """Heads as models have them."""
    check(taken.kv_cache_write_, inputs(70, heads, *rotary, dtype=dtype))


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(taken: ModuleType) -> None:
    """A cache of more than 2**31 elements: its last slot is written, and no other."""
    pages = 2**31 // (16 * 2 * 128) + 2
    x = inputs(1, (4, 2), 128, 128, dtype=torch.float16)
    x[3] = x[4] = torch.zeros(pages, 16, 2, 128, dtype=torch.float16, device=DEVICE)
    x[5][0] = pages * 16 - 1
    taken.kv_cache_write_(*x)
    assert torch.equal(x[4][-1, -1], x[2][0])
    assert not x[4][:-1].any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its inputs are, whichever GPU is the current one."""
    check(taken.kv_cache_write_, [t.to("cuda:1") for t in inputs(9, (4, 2), 32, 32)])


def some_tokens(normal: Callable[..., torch.Tensor], M: int, N: int) -> tuple[torch.Tensor, ...]:
    """Return inputs for the op: as many tokens, and a cache in pages of 16."""
    q, k, v = (normal(M, heads, 64) for heads in (4, 2, 2))
    caches, angles = normal(2, M // 16 + 1, 16, 2, 64), normal(N, 32)
    slots, positions = torch.arange(M, device=q.device).flip(0), torch.arange(M, device=q.device) % N
    return q, k, v, *caches, slots, positions, angles.cos(), angles.sin()


def both_turned(q: torch.Tensor, k: torch.Tensor, *x: torch.Tensor) -> list[torch.Tensor]:
    """Return what the op returns, through PyTorch."""
    *_, positions, cos, sin = x
    angle = torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    return [by_complex(t, angle, 64).float() for t in (q, k)]


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [("kv_cache_write_", some_tokens, both_turned)]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("padding is written", "offs_h < tl.where(slot >= 0", "offs_h < tl.where(slot >= -1"),
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
