"""The op of the recipe Decode attention with a paged cache."""

# ruff: noqa: N806 - head dimensions have the recipe's names

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, compiled, graphs, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, layouts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/decode_attention.py"
KINDS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18, torch.float64: 2.0**-45}
FLOAT8 = torch.float8_e4m3fn
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op(RECIPE)


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe(RECIPE)


def inputs(
    lengths: list[int],
    page: int = 16,
    queries: int = 1,
    heads: tuple[int, int] = (4, 2),
    D: int = 32,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    seed: int = 0,
) -> Inputs:
    """Return queries, caches with two pages that belong to nobody, a shuffled table and lengths.

    What no sequence may read is NaN: those pages, and the slots past the end of the last page of each. Where a sequence
    has no page, the table holds a number that is no page.
    """
    (of_q, shared), wide = heads, torch.float16 if cache == FLOAT8 else dtype
    width = max(1, max((math.ceil(n / page) for n in lengths), default=1)) + 1
    count = len(lengths) * width + 2
    generator = torch.Generator().manual_seed(seed)
    q = Layout("contiguous", seed).make((len(lengths), queries, of_q, D), dtype, DEVICE)
    k, v = (Layout("contiguous", seed + i).make((count, page, shared, D), wide, DEVICE) for i in (1, 2))
    table = torch.randperm(count, generator=generator)[: len(lengths) * width].view(-1, width).int().to(DEVICE)
    written = torch.zeros(count, page, dtype=torch.bool, device=DEVICE)
    for row, length in zip(table, lengths, strict=True):
        for start in range(0, length, page):
            written[row[start // page].item(), : min(page, length - start)] = True
        row[math.ceil(length / page) :] = -(2**30)
    k[~written] = v[~written] = torch.nan
    k, v = (t.to(cache or dtype) for t in (k, v))
    return q, k, v, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention by its formula, key by key of the table, in float64, and the sums of magnitudes."""
    outs, sums = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(q, dtype=torch.float64)
    page, group = k_cache.shape[1], q.shape[2] // k_cache.shape[2]
    caches = [
        cache.double() * (1 if factor is None else factor.double()[:, None])
        for cache, factor in ((k_cache, k_scale), (v_cache, v_scale))
    ]
    for b, length in enumerate(seq_lens.tolist()):
        keys = torch.arange(length, device=q.device)
        rows = block_table[b, keys // page].long()
        k, v = (cache[rows, keys % page].repeat_interleave(group, dim=1) for cache in caches)  # (keys, heads, D)
        for i in range(q.shape[1]):
            seen = length - q.shape[1] + i + 1
            if seen <= 0:
                continue
            s = torch.einsum("hd,khd->hk", q[b, i].double(), k[:seen])
            s = s * (q.shape[3] ** -0.5 if scale is None else scale)
            p = (s - s.amax(-1, keepdim=True)).exp()
            p = p / p.sum(-1, keepdim=True)
            outs[b, i], sums[b, i] = (torch.einsum("hk,khd->hd", p, t[:seen]) for t in (v, v.abs()))
    return outs, sums


def assert_right(out: torch.Tensor, x: Inputs, roundings: float = 2, **options: object) -> None:
    """Assert that a result is as good as the roundings of probabilities and of itself."""
    assert (out.dtype, out.shape, out.device.type) == (x[0].dtype, x[0].shape, DEVICE.type)
    assert out.is_contiguous()
    expected, terms = attention(*x, **options)  # type: ignore[arg-type]
    smallest = torch.finfo(out.dtype).smallest_normal
    allowed = roundings * KINDS[out.dtype] * (terms + expected.abs() + smallest)
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 128, 200]), min_size=1, max_size=3),
    page=st.sampled_from([1, 5, 16, 32, 64, 256]),
    queries=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3), (6, 2)]),
    D=st.sampled_from([16, 24, 32, 64]),
    bound=st.sampled_from([None, 1, 10**6]),
    seed=st.integers(0, 2**31 - 3),
)
def test_value(
    taken: ModuleType,
    dtype: torch.dtype,
    lengths: list[int],
    page: int,
    queries: int,
    heads: tuple[int, int],
    D: int,
    bound: int | None,
    seed: int,
) -> None:
    """The value is right for any lengths, pages and heads, whatever bound of the lengths is given."""
    x = inputs(lengths, page, queries, heads, D, dtype, seed=seed)
    out = guarded(partial(taken.decode_attention, max_seq_len=bound), *x)
    assert torch.equal(taken.decode_attention(*x, bound), out)
    assert_right(out, x)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 16])
def test_parts(taken: ModuleType, dtype: torch.dtype, parts: int) -> None:
    """Any number of parts gives the same; some are empty, and some end within a page."""
    x = inputs([0, 1, 130, 301], 48, 2, (4, 2), 32, dtype)
    call = partial(taken._decode_attention_launch, parts=parts)
    assert_right(guarded(call, *x), x)


@pytest.mark.parametrize("D", [1, 16, 40, 64, 128, 200, 256])
@pytest.mark.parametrize("rows", [(1, 1), (16, 1), (5, 3), (8, 4), (16, 4)], ids=str)
def test_every_tile(taken: ModuleType, D: int, rows: tuple[int, int]) -> None:
    """Each tile, at lengths around its steps: a group of heads, and queries."""
    group, queries = rows
    for length in (32, 129):
        x = inputs([length], 16, queries, (group, 1), D, torch.float16)
        assert_right(taken.decode_attention(*x), x)


def test_float8(taken: ModuleType) -> None:
    """A cache of float8 gives what its numbers give."""
    for dtype in (torch.float16, torch.bfloat16):
        x = inputs([150, 33], 16, 2, (6, 3), 40, dtype, FLOAT8)
        assert_right(guarded(taken.decode_attention, *x), x)


CASES = [(dtype, dtype) for dtype in KINDS] + [(dtype, FLOAT8) for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(("dtype", "cache"), CASES, ids=str)
@pytest.mark.parametrize("many", [False, True])
def test_scales(taken: ModuleType, dtype: torch.dtype, cache: torch.dtype, many: bool) -> None:
    """A cache with one scale, or with one for each head, in one part or in several."""
    x = inputs([150, 33], 16, 2, (6, 3), 40, dtype, cache)
    scales = [torch.tensor([0.3, 2.0, 0.05][: 3 if many else 1], device=DEVICE) * i for i in (1, 3)]
    between = torch.stack(scales, dim=1).unbind(1)
    for parts, (k_scale, v_scale) in ((1, scales), (3, between)):
        out = taken._decode_attention_launch(*x, k_scale=k_scale, v_scale=v_scale, parts=parts)
        assert_right(out, x, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@settings(max_examples=10)
@given(layout=layouts())
def test_layouts(taken: ModuleType, dtype: torch.dtype, layout: Layout) -> None:
    """Queries in any layout; caches whose keys and values, heads or pages lie otherwise."""
    q = layout.make((2, 2, 4, 24), dtype, DEVICE)
    _, k, v, table, lens = inputs([40, 21], 16, 2, (4, 2), 24, dtype)
    side = torch.stack([k, v], dim=1).unbind(1)
    heads = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    wide = (torch.nn.functional.pad(t, (3, 5), value=torch.nan)[..., 3:27] for t in (k, v))
    for caches in ((k, v), side, heads, wide):
        x = (q, *caches, table, lens)
        assert_right(guarded(taken.decode_attention, *x), x)
    wider = torch.full((2, 2 * table.shape[1]), -1, dtype=torch.int32, device=DEVICE)
    wider[:, ::2] = table
    lengths = torch.stack([lens, -lens], dim=1)[:, 0]
    assert_right(taken.decode_attention(q, k, v, wider[:, ::2], lengths), (q, k, v, table, lens))


def test_scale(taken: ModuleType) -> None:
    """A scale of one's own: zero gives the mean, a negative one turns the order round."""
    x = inputs([70, 20], dtype=torch.float64)
    for scale in (0.0, -0.3, 1, 2.5):
        assert_right(taken.decode_attention(*x, scale=scale), x, scale=scale)


@pytest.mark.parametrize("order", ["rising", "falling"])
@pytest.mark.parametrize("parts", [1, 4])
def test_large_scores(taken: ModuleType, order: str, parts: int) -> None:
    """Scores in the thousands that rise or fall along the keys: the weights of all parts but one vanish."""
    x = inputs([300], 16, 2, (1, 1), 16, torch.float64)
    steps = torch.arange(304, dtype=torch.float64, device=DEVICE)
    steps = steps if order == "rising" else steps.flip(0)
    x[0].fill_(1)
    x[1][x[3][0, :19].long()] = (steps * 8).view(19, 16, 1, 1).expand(-1, -1, -1, 16)
    assert_right(taken._decode_attention_launch(*x, parts=parts), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_parts_have_weights(taken: ModuleType, dtype: torch.dtype) -> None:
    """One key that matters more than all others, in any part."""
    for key in (0, 70, 299):
        x = inputs([300], 16, 1, (1, 1), 16, dtype)
        x[1][x[3][0, key // 16].long(), key % 16] = x[0][0, 0] * 8
        assert_right(taken._decode_attention_launch(*x, parts=3), x)


def test_few_keys_for_many_queries(taken: ModuleType) -> None:
    """Queries before the first key see nothing and give 0."""
    x = inputs([0, 1, 3], queries=4)
    out = taken.decode_attention(*x)
    assert_right(out, x)
    assert [row.any(-1).any(-1).tolist() for row in out] == [[False] * 4, [False] * 3 + [True], [False] + [True] * 3]


def test_rule_of_parts(taken: ModuleType) -> None:
    """Enough programs, twice as many with float8, but not more parts than pay, and at least one."""
    small = torch.empty(1, dtype=torch.float8_e4m3fn)
    parts, of_small = (partial(taken._decode_attention_parts, cache=cache) for cache in (torch.empty(1), small))
    assert [parts(programs, 100_000) for programs in (1, 2, 5, 16, 17, 1000)] == [16, 8, 3, 1, 1, 1]
    assert [of_small(programs, 100_000) for programs in (1, 2, 5, 16, 17, 1000)] == [32, 16, 6, 2, 1, 1]
    least = taken.DECODE_ATTENTION_KEYS
    assert [parts(1, longest) for longest in (0, 1, least, 2 * least - 1, 2 * least)] == [1, 1, 1, 1, 2]


def test_without_sequences(taken: ModuleType) -> None:
    """No sequence, no query and no head give an empty result."""
    q, k, v, table, lens = inputs([5])
    for x in ((q[:0], k, v, table[:0], lens[:0]), (q[:, :0], k, v, table, lens), (q[:, :, :0], k, v, table, lens)):
        assert taken.decode_attention(*x).shape == x[0].shape


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x = q, k, v, table, lens = inputs([5, 3], dtype=torch.float16)
    op, one = taken.decode_attention, torch.ones(1, device=DEVICE)
    for wrong in (
        (q.int(), k, v, table, lens),
        (q.bfloat16(), k, v, table, lens),
        (q, k, v.to(FLOAT8), table, lens),
        (q, k.float(), v.float(), table, lens),
        (q, k, v, table.long(), lens),
        (q, k, v, table, lens.long()),
    ):
        named = zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), wrong, strict=True)
        found = ", ".join(f"{who} {t.dtype} on {t.device}" for who, t in named)
        with pytest.raises(TypeError, match=rf"^decode_attention takes a float q, .*{re.escape(found)}$"):
            op(*wrong)
    with pytest.raises(TypeError, match=r"torch\.float64 on"):
        op(*x, k_scale=one.double(), v_scale=one)
    for wrong in (
        (q[0], k, v, table, lens),
        (q, k[:, :8], v, table, lens),
        (q, k[:, :0], v[:, :0], table, lens),
        (q, k[:, :, :0], v[:, :, :0], table, lens),
        (q[..., :8], k, v, table, lens),
        (q[..., :0], k[..., :0], v[..., :0], table, lens),
        (q[:, :, :3], k, v, table, lens),
        (q, k, v, table[0], lens),
        (q, k, v, table[:1], lens),
        (q, k, v, table, lens[:1]),
    ):
        named = zip(("q", "k_cache", "v_cache", "block_table", "seq_lens"), wrong, strict=True)
        found = ", ".join(f"{who} {tuple(t.shape)}" for who, t in named)
        with pytest.raises(ValueError, match=rf"^decode_attention takes q of .*{re.escape(found)}$"):
            op(*wrong)
    for scales in ({"k_scale": one}, {"v_scale": one}, {"k_scale": one, "v_scale": one.expand(3)}):
        with pytest.raises(
            ValueError, match=rf"no or two scales.*{', '.join(scales)}" if len(scales) == 1 else "no or two"
        ):
            op(*x, **scales)
    with pytest.raises(ValueError, match="up to 64 queries times heads of a group, not 66"):
        op(q.repeat(1, 33, 1, 1), k, v, table, lens)
    with pytest.raises(ValueError, match="contiguous along D"):
        op(q, k.mT.contiguous().mT, v, table, lens)
    with pytest.raises(ValueError, match="contiguous along D"):
        op(q, k, v.mT.contiguous().mT, table, lens)


def test_has_no_gradient(taken: ModuleType) -> None:
    """What requires grad is refused at once, not in a backward."""
    x = inputs([5])
    for i in range(3):
        wrong = [t.clone().requires_grad_() if i == j else t for j, t in enumerate(x)]
        with pytest.raises(ValueError, match=r"^decode_attention has no gradient: detach"):
            taken.decode_attention(*wrong)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_launcher_serves_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launcher; it does what the op does."""
    x = inputs([600, 40], dtype=dtype)
    assert torch.equal(at_cuda(taken.decode_attention, *x), taken.decode_attention(*x))
    scales = torch.tensor([0.5], device=DEVICE), torch.tensor([2.0], device=DEVICE)
    out = at_cuda(taken.decode_attention, *x, 600, 0.3, *scales)
    assert_right(out, x, scale=0.3, k_scale=scales[0], v_scale=scales[1])


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    x = inputs([600])
    with Guard() as guard:
        out = taken.decode_attention(*x)
    assert out.untyped_storage().data_ptr() in {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so is PyTorch's."""
    x = recipe.problem([200, 17, 64], heads=8, D=64)
    for step, *_ in recipe.STEPS.values():
        assert_right(step(*x), x)
    assert_right(recipe.attention_torch(*x).contiguous(), x)
    assert [recipe.statements(*step[1:]) for step in recipe.STEPS.values()] == [25, 53, 67]
    for one, right in zip(recipe.reference(*x), attention(*x), strict=True):
        torch.testing.assert_close(one, right)
    x = recipe.problem([40, 40], heads=8, D=16)
    q, k, v = recipe.unpaged(*x)
    out = torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :40], v[:, :, :40], enable_gqa=True)
    assert_right(out.transpose(1, 2).contiguous(), x)


def test_bytes_of_the_variants(recipe: ModuleType) -> None:
    """The page's rates count the bytes of the keys that a sequence has."""
    call, size = recipe.variant(lengths=(40, 5), dtype=FLOAT8, heads=8, D=16, queries=2)
    assert size == 2 * 45 * 2 * 16
    assert call().shape == (2, 2, 8, 16)
    assert sum(recipe.UNEQUAL) == 32 * 8192
    assert recipe.moved(1) == 2 * 8 * 128 * 2e-6


def at_launch(taken: ModuleType, dtype: str, cache: str, D: int, rows: int, split: bool) -> dict[str, object]:
    """Return what the launcher passes on for strides that 16 divides."""
    import triton.language as tl

    BLOCK_D = max(16, 1 << (D - 1).bit_length())
    BLOCK_M = max(16, 1 << (rows - 1).bit_length())
    strides = [f"stride_{of}" for of in ("qb", "ql", "qh", "kp", "kl", "kh", "vp", "vl", "vh", "tb")]
    return {
        "dtype": "fp32",
        "num_warps": 8 if BLOCK_M == 64 else 4,
        "multiples": strides,
        "q_ptr": dtype,
        "k_ptr": cache,
        "v_ptr": cache,
        "table_ptr": "i32",
        "lens_ptr": "i32",
        "out_ptr": "fp32" if split and dtype != "fp64" else dtype,
        "QUERIES": max(1, rows // 4),
        "HEADS": 32,
        "GROUP": 4,
        "PAGE": 16,
        "D": D,
        "SCALE": D**-0.5 * math.log2(math.e),
        "SCALED": cache != dtype,
        "SPLIT": split,
        "DOT": {"fp16": tl.float16, "bf16": tl.bfloat16, "fp64": tl.float64}[dtype],
        "ACC": tl.float64 if dtype == "fp64" else tl.float32,
        "LOWEST": torch.finfo(torch.float32).min,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": 16 if dtype == "fp64" else taken.DECODE_ATTENTION_STEPS[BLOCK_D],
        "BLOCK_D": BLOCK_D,
    }


CACHES = [("fp16", "fp16"), ("bf16", "bf16"), ("fp16", "fp8e4nv"), ("bf16", "fp8e4nv")]


def codes(taken: ModuleType) -> dict[str, tuple[set[str], set[str], bool]]:
    """Return the bytes of asynchronous copies, the matrix instructions, and whether exp2 is one instruction."""
    found = {}
    for dtype, cache in CACHES[::2]:
        for rows in (4, 64):
            text = compiled(taken._decode_attention_kernel, **at_launch(taken, dtype, cache, 128, rows, True)).asm[
                "ptx"
            ]
            widths = set(re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", text))
            kinds = set(re.findall(r"(wgmma|mma)\.\S*?m\d+", text))
            found[f"{cache} {rows}"] = widths, kinds, "ex2.approx.ftz" in text
    return found


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that a thread spills, for every tile."""
    kernel = taken._decode_attention_kernel
    return {
        f"{dtype} {cache} {D} {rows}": stack(kernel, **at_launch(taken, dtype, cache, D, rows, True))
        for dtype, cache in (CACHES[0], CACHES[3])
        for D in (64, 128, 256)
        for rows in (4, 64)
    }


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Keys come in copies of 16 bytes; few rows take the instruction of earlier GPUs, 64 rows that of Hopper."""
    (found,) = on_h100(gallery / RECIPE, codes)
    assert {name: kinds for name, (_, kinds, _) in found.items()} == {
        "fp16 4": {"mma"},
        "fp16 64": {"wgmma"},
        "fp8e4nv 4": {"mma"},
        "fp8e4nv 64": {"wgmma"},
    }
    assert all("0x10" in widths and power for widths, _, power in found.values())


def constants(taken: ModuleType) -> list[float]:
    """Return the constants between 0 and 1 of the kernel for float64."""
    made = compiled(taken._decode_attention_kernel, **at_launch(taken, "fp64", "fp64", 64, 4, False))
    found = re.findall(r"arith\.constant (?:dense<)?([\d.E+-]+)>? : \S*f64", made.asm["ttir"])
    return [number for number in map(float, found) if 0 < number < 1]


def test_float64_stays(gallery: Path, on_h100: Ask) -> None:
    """The scale is not rounded to float32 first, which the interpreter would not show."""
    (found,) = on_h100(gallery / RECIPE, constants)
    assert found
    assert found == [pytest.approx(0.125 * math.log2(math.e), rel=1e-15)] * len(found)


@pytest.mark.thorough
def test_no_register_spills(gallery: Path, on_h100: Ask) -> None:
    """For no head in half precision; float32 and float64 are for proofs."""
    (found,) = on_h100(gallery / RECIPE, spills)
    assert len(found) == 12
    assert {name: size for name, size in found.items() if size} == {}


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of a call."""
    q, cache = torch.randn(2, 1, 4, 64).half(), torch.randn(2, 40, 16, 2, 64).half()
    table, lens = torch.zeros(2, 20, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    return graphs(recipe.decode_attention, q, *cache, table, lens)


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """It is one kernel or two, which copy no cache."""
    ((graph,),) = on_h100(gallery / RECIPE, traced)
    assert [call for call in graph if call.startswith("triton_kernel")]
    assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]


@pytest.mark.needs_gpu_memory(14)
def test_beyond_int32(taken: ModuleType) -> None:
    """A cache of more than 2**31 elements: a page at its end is right."""
    pages = 2**31 // (16 * 2 * 128) + 2
    k, v = (torch.zeros(pages, 16, 2, 128, dtype=torch.float16, device=DEVICE) for _ in range(2))
    k[-1], v[-1] = (torch.randn(16, 2, 128, device=DEVICE).half() for _ in range(2))
    table = torch.tensor([[0, pages - 1]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([30], dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, 1, 4, 128, device=DEVICE).half()
    small = torch.stack([k[0], k[-1]]), torch.stack([v[0], v[-1]])
    near = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    assert torch.equal(taken.decode_attention(q, k, v, table, lens), taken.decode_attention(q, *small, near, lens))


@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("D", [64, 80, 128, 256])
@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    page=st.sampled_from([16, 64, 256]),
    queries=st.integers(1, 8),
    heads=st.sampled_from([(8, 1), (8, 2), (32, 8)]),
)
def test_long(
    taken: ModuleType,
    dtype: torch.dtype,
    D: int,
    lengths: list[int],
    page: int,
    queries: int,
    heads: tuple[int, int],
) -> None:
    """Many keys, in many parts."""
    x = inputs(lengths, page, queries, heads, D, dtype)
    assert_right(taken.decode_attention(*x), x, roundings=4)
    if dtype.itemsize == 2 and torch.cuda.get_device_capability() >= (8, 9):
        x = inputs(lengths, page, queries, heads, D, dtype, FLOAT8)
        assert_right(taken.decode_attention(*x), x, roundings=4)


@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_opcheck(taken: ModuleType, dtype: torch.dtype) -> None:
    """The op passes the whole of opcheck."""
    x = inputs([700, 40], dtype=dtype)
    found = torch.library.opcheck(taken.decode_attention, (*x, 700))
    assert set(found.values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, and other sizes."""
    torch.compiler.reset()
    op = torch.compile(lambda q, *x: taken.decode_attention(q * 2, *x), fullgraph=True, dynamic=dynamic)
    for lengths in ([40, 3], [700, 600, 5], [2000]):
        q, *x = inputs(lengths, dtype=torch.float16)
        assert_right(op(q, *x), (q * 2, *x))  # type: ignore[arg-type]


@needs_a_gpu
def test_cuda_graph(taken: ModuleType) -> None:
    """A recorded call reads the lengths at each replay: the CPU never asks for them."""
    x = inputs([900, 900], dtype=torch.float16)
    taken.decode_attention(*x, 900)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = taken.decode_attention(*x, 900)
    for lengths in ([900, 1], [0, 333]):
        x[4].copy_(torch.tensor(lengths))
        graph.replay()
        assert_right(out, x)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its inputs are, whichever GPU is the current one."""
    x = tuple(t.to("cuda:1") for t in inputs([700], dtype=torch.float16))
    assert_right(taken.decode_attention(*x), x)  # type: ignore[arg-type]


def some_pages(normal: Callable[..., torch.Tensor], M: int, N: int) -> tuple[torch.Tensor, ...]:
    """Return inputs for the op: two sequences in pages of 16, and four heads that share two."""
    q, cache = normal(2, 1, 4, 32), normal(2, 80, 16, 2, 32)
    table = torch.arange(80, dtype=torch.int32, device=q.device).flip(0).view(2, 40)
    return q, *cache, table, torch.tensor([M % 600, N % 600], dtype=torch.int32, device=q.device)


def gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lens: torch.Tensor
) -> torch.Tensor:
    """Return the same through PyTorch."""
    k, v = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k, v))
    seen = (torch.arange(k.shape[2], device=q.device) < lens[:, None])[:, None, None]
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q.transpose(1, 2), k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [("decode_attention", some_pages, gathered)]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("sums of before not rescaled", "        acc = acc * rescale\n", "        acc = acc * 1.0\n"),
    ("keys past the last are seen", "offs_n[None, :] <= last, s *", "offs_n[None, :] <= last + 1, s *"),
    ("queries all see the same", "last = length - QUERIES + query  #", "last = length - 1 + query * 0  #"),
    ("a slot of the next page", "slot = (offs_n % PAGE)[:, None]", "slot = ((offs_n + 1) % PAGE)[:, None]"),
    ("pages by a wrong stride", "k_page = k_ptrs + page * stride_kp", "k_page = k_ptrs + page * stride_vp * 2"),
    (
        "parts end late",
        "end = tl.minimum((part + 1) * keys, length)",
        "end = tl.minimum((part + 1) * keys + 1, length)",
    ),
    ("heads mixed up", "head * GROUP + rows % GROUP", "head * GROUP + rows // QUERIES"),
    ("parts without weights", "weight = tl.exp2(lse - m)  #", "weight = tl.exp2((lse - m) * 0)  #"),
    ("a row of nothing is divided by 0", "some = tl.where(total == 0, 1.0, total)  #", "some = total  #"),
    ("scale of the values left out", "acc * (v_factor / some)", "acc * (1.0 / some)"),
    ("scale of the first head for all", "k_scale_ptr + head * stride_ks", "k_scale_ptr"),
    (
        "padding of a head is read",
        "there = inside[:, None] & (offs_d < D)",
        "there = inside[:, None] & (offs_d < D + 8)",
    ),
]
