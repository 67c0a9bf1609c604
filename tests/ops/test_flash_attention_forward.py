"""The op of the recipe Flash attention, forward."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, compiled, graphs, ptx, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, layouts, sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/flash_attention_forward.py"
KINDS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18, torch.float64: 2.0**-45}
HEADS = [16, 32, 40, 64, 80, 96, 128]


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op(RECIPE)


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe(RECIPE)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """Return the attention by its formula, in float64; a query that sees nothing gives 0."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    p = (s - s.amax(-1, keepdim=True).clamp(min=-1e300)).exp() if s.shape[-1] else s
    total = p.sum(-1, keepdim=True)
    return p @ v / total.masked_fill(total == 0, 1)


def assert_close(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> None:
    """Assert that a result is as good as the roundings of probabilities and of itself."""
    assert (out.dtype, out.shape, out.device.type) == (q.dtype, q.shape, DEVICE.type)
    assert out.is_contiguous()
    expected, terms = attention(q, k, v, causal, scale), attention(q, k, v.double().abs(), causal, scale)
    smallest = torch.finfo(q.dtype).smallest_normal
    allowed = 2 * KINDS[q.dtype] * (terms + expected.abs() + smallest)
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@settings(max_examples=12)
@given(
    LQ=sizes(128, 140),
    LK=sizes(64, 140),
    D=st.sampled_from(HEADS),
    groups=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    causal=st.booleans(),
    of=st.tuples(layouts(), layouts(), layouts()),
)
def test_value(
    taken: ModuleType,
    dtype: torch.dtype,
    LQ: int,
    LK: int,
    D: int,
    groups: tuple[int, int],
    causal: bool,
    of: tuple[Layout, Layout, Layout],
) -> None:
    """The value is right for any lengths, heads and layouts."""
    heads, shared = groups
    shapes = (1, heads, LQ, D), (1, shared, LK, D), (1, shared, LK, D)
    q, k, v = (layout.make(shape, dtype, DEVICE) for layout, shape in zip(of, shapes, strict=True))
    out = guarded(partial(taken.flash_attention_forward, causal=causal), q, k, v)
    assert torch.equal(taken.flash_attention_forward(q, k, v, causal), out)
    assert_close(out, q, k, v, causal)


LENGTHS = [(1, 1), (1, 200), (64, 64), (127, 129), (129, 127), (200, 64), (256, 256), (33, 0), (0, 33)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [16, 64, 100, 128, 256])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_tile(taken: ModuleType, lengths: tuple[int, int], D: int, causal: bool) -> None:
    """Each tile, at lengths around its edges; heads side by side in memory, as a projection leaves them."""
    (LQ, LK), kind = lengths, torch.float16
    q = Layout("contiguous", 0).make((2, LQ, 2, D), kind, DEVICE).transpose(1, 2)
    k, v = Layout("contiguous", 1).make((2, LK, 2, 1, D), kind, DEVICE).permute(2, 0, 3, 1, 4).unbind(0)
    out = guarded(partial(taken.flash_attention_forward, causal=causal), q, k, v)
    assert_close(out, q, k, v, causal)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_scale(taken: ModuleType, dtype: torch.dtype) -> None:
    """A scale of one's own: zero gives the mean, a negative one turns the order round."""
    q, k, v = (Layout("contiguous", seed).make((1, 2, 70, 32), dtype, DEVICE) for seed in range(3))
    for scale in (0.0, -0.3, 1, 2.5):
        assert_close(taken.flash_attention_forward(q, k, v, scale=scale), q, k, v, scale=scale)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_large_scores(taken: ModuleType, order: str) -> None:
    """Scores in the thousands that rise or fall along the keys: the maximum changes in every block, or never."""
    q = torch.ones(1, 1, 3, 64, dtype=torch.float64, device=DEVICE)
    steps = torch.arange(300, dtype=torch.float64, device=DEVICE)
    steps = steps if order == "rising" else steps.flip(0)
    k = (steps * 2)[None, None, :, None].expand(1, 1, 300, 64)
    v = Layout("contiguous", 0).make((1, 1, 300, 64), torch.float64, DEVICE)
    assert_close(taken.flash_attention_forward(q, k, v), q, k, v)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 3.3e38), (torch.float64, 1.7e308)], ids=str)
def test_equal_scores(taken: ModuleType, dtype: torch.dtype, most: float) -> None:
    """The mean of v, whatever the score: also where it is rounded by more than exp2 can take."""
    for score in (-most, -1e10, 1e10, most):
        q, k, v = (Layout("contiguous", seed).make((1, 1, 70, 32), dtype, DEVICE) for seed in range(3))
        q[:], k[:] = 0, 0
        q[..., 0], k[..., 0] = 1, score
        out = taken.flash_attention_forward(q, k, v, scale=1.0)
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_infinities(taken: ModuleType, dtype: torch.dtype, causal: bool) -> None:
    """A key of -inf has no weight; a query that sees none but such keys gives 0, and no other is touched."""
    q = Layout("contiguous", 0).make((1, 1, 150, 32), dtype, DEVICE).abs()
    k, v = (Layout("contiguous", seed).make((1, 1, 170, 32), dtype, DEVICE) for seed in (1, 2))
    for hidden in (slice(0, 90), slice(60, 140), slice(0, 170)):
        some = k.clone()
        some[:, :, hidden] = -torch.inf
        out = taken.flash_attention_forward(q, some, v, causal)
        assert_close(out, q, some, v, causal)
        if hidden.start == 0:
            assert not out[:, :, : hidden.stop if causal else 150].any() or (not causal and hidden.stop < 170)


def test_nan_goes_to_its_queries(taken: ModuleType) -> None:
    """A query with NaN gives NaN alone; a key with NaN goes to no query of earlier blocks."""
    q, k, v = (Layout("contiguous", seed).make((1, 1, 300, 32), torch.float16, DEVICE) for seed in range(3))
    q[0, 0, 7, 3] = torch.nan
    out = taken.flash_attention_forward(q, k, v, causal=True)
    assert out[0, 0].isnan().any(1).nonzero().flatten().tolist() == [7]
    q[0, 0, 7, 3], k[0, 0, 290, 5] = 0, torch.nan
    out = taken.flash_attention_forward(q, k, v, causal=True)
    assert out[0, 0, 290:].isnan().all()
    assert not out[0, 0, :256].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around the keys stays there."""
    around = torch.full((2, 100, 3, 96), torch.nan, dtype=dtype, device=DEVICE)
    around[:, 5:75, 1:, 8:88] = Layout("contiguous", 0).make((2, 70, 2, 80), dtype, DEVICE)
    x = around[:, 5:75, 1:, 8:88].transpose(1, 2)
    for causal in (False, True):
        assert_close(taken.flash_attention_forward(x, x, x, causal), x, x, x, causal)


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    q = torch.ones(2, 4, 3, 16, dtype=torch.float16, device=DEVICE)
    with pytest.raises(TypeError, match=r"^flash_attention_forward takes float tensors, not torch\.int32"):
        taken.flash_attention_forward(*[q.int()] * 3)
    with pytest.raises(TypeError, match=r"one dtype .*float16.*, torch\.bfloat16"):
        taken.flash_attention_forward(q, q.bfloat16(), q)
    for k, v in (
        (q[:, :3], q[:, :3]),
        (q[:, :0], q[:, :0]),
        (q, q[:, :2]),
        (q[..., :8], q[..., :8]),
        (q[:1], q[:1]),
        (q[0], q[0]),
        (q, q[:, :, :2]),
    ):
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        with pytest.raises(ValueError, match=rf"^flash_attention_forward takes q of .*{re.escape(found)}$"):
            taken.flash_attention_forward(q, k, v)
    for D in (0, 257):
        x = q.new_ones(1, 1, 3, D)
        with pytest.raises(ValueError, match="D up to 256"):
            taken.flash_attention_forward(x, x, x)


def test_has_no_gradient(taken: ModuleType) -> None:
    """A gradient is refused, not zero."""
    q = torch.ones(1, 1, 3, 16, dtype=torch.float64, device=DEVICE, requires_grad=True)
    with pytest.raises(RuntimeError, match="autograd"):
        taken.flash_attention_forward(q, q, q).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_launcher_serves_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launcher; it does what the op does."""
    q, k, v = (Layout("contiguous", seed).make((1, 2, 40, 32), dtype, DEVICE) for seed in range(3))
    inputs = q, k, v, True
    assert torch.equal(at_cuda(taken.flash_attention_forward, *inputs), taken.flash_attention_forward(*inputs))


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    q = torch.ones(1, 1, 5, 16, dtype=torch.float16, device=DEVICE)
    with Guard() as guard:
        out = taken.flash_attention_forward(q, q, q)
    assert out.untyped_storage().data_ptr() in {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right, and so is the loop in PyTorch."""
    q, k, v = (Layout("contiguous", seed).make((1, 2, 200, 64), torch.float16, DEVICE) for seed in range(3))
    for step, causal, *_ in recipe.STEPS.values():
        assert_close(step(q, k, v), q, k, v, causal)
    wide = [t.double() for t in (q, k, v)]
    out = recipe.attention_blocks(*wide, size=30, forget=False)
    torch.testing.assert_close(out, attention(*wide))
    assert [recipe.statements(*step[2:]) for step in recipe.STEPS.values()][::2] == [21, 48, 48]
    torch.testing.assert_close(recipe.reference(q, k, v, causal=True)[0], attention(q, k, v, causal=True))


def at_launch(taken: ModuleType, dtype: str, D: int, causal: bool) -> dict[str, object]:
    """Return what the launcher passes on for lengths and strides that 16 divides."""
    import triton.language as tl

    BLOCK_D = max(16, 1 << (D - 1).bit_length())
    BLOCK_M, BLOCK_N, num_warps, _ = taken.FLASH_ATTENTION_FORWARD_TILES[BLOCK_D]
    strides = [f"stride_{of}{along}" for of in "qkvo" for along in "bhl"]
    return {
        "dtype": dtype,
        "num_warps": num_warps,
        "multiples": ["LQ", "LK", *strides],
        "GROUP": 1,
        "D": D,
        "SCALE": D**-0.5 * math.log2(math.e),
        "CAUSAL": causal,
        "ACC": tl.float32,
        "LOWEST": torch.finfo(torch.float32).min,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
    }


def codes(taken: ModuleType) -> dict[int, tuple[set[str], set[str], bool]]:
    """Return, for some heads, the bytes of asynchronous copies, the matrix instructions, and whether exp2 is one."""
    found = {}
    for D in (64, 128, 256):
        kernel = taken._flash_attention_forward_kernel
        text = compiled(kernel, **at_launch(taken, "fp16", D, True)).asm["ptx"]
        widths = set(re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", text))
        found[D] = widths, set(re.findall(r"(wgmma|mma)\.\S*?m\d+", text)), "ex2.approx" in text
    return found


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that a thread spills, for every tile."""
    kernel = taken._flash_attention_forward_kernel
    return {
        f"{dtype} {D} {causal}": stack(kernel, **at_launch(taken, dtype, D, causal))
        for dtype in ("fp16", "bf16")
        for D in (16, 32, 64, 96, 128, 256)
        for causal in (False, True)
    }


def exponentials(recipe: ModuleType) -> list[set[str]]:
    """Return which instructions the exponentials of the page's kernels of base e and 2 become."""
    known = {"D": 64, "BLOCK_M": 128, "BLOCK_N": 64, "scale": 0.125}
    made = [(recipe.attention_kernel, known), (recipe.base2_kernel, known | {"CAUSAL": False})]
    return [set(re.findall(r"ex2\.[\w.]+", ptx(kernel, "fp16", num_warps=8, **of))) for kernel, of in made]


def test_exponentials(gallery: Path, on_h100: Ask) -> None:
    """That of base e keeps very small results, which takes more than the instruction; that of base 2 does not."""
    (found,) = on_h100(gallery / RECIPE, exponentials)
    assert found == [{"ex2.approx.f32"}, {"ex2.approx.ftz.f32"}]


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Copies of 16 bytes, Hopper's instruction in both products, and one instruction for an exponential."""
    (found,) = on_h100(gallery / RECIPE, codes)
    assert found == dict.fromkeys((64, 128, 256), ({"0x10"}, {"wgmma"}, True))


@pytest.mark.thorough
def test_no_register_spills(gallery: Path, on_h100: Ask) -> None:
    """For no head in half precision; float64 is for proofs."""
    (found,) = on_h100(gallery / RECIPE, spills)
    assert len(found) == 24
    assert not any(found.values())


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of a causal call."""
    x = torch.randn(2, 4, 40, 64, dtype=torch.float16)
    return graphs(lambda q, k, v: recipe.flash_attention_forward(q, k, v, True), x, x[:, :2], x[:, :2])


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """It is one kernel, which writes nothing but its result."""
    ((graph,),) = on_h100(gallery / RECIPE, traced)
    assert [call for call in graph if call.startswith("triton_kernel")] == ["triton_kernel_wrapper_functional"]
    assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]


@pytest.mark.needs_gpu_memory(18)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last head is right."""
    q = torch.zeros(1, 2**13 + 1, 2048, 128, dtype=torch.float16, device=DEVICE)
    q[0, -1] = torch.randn(2048, 128, device=DEVICE)
    k = torch.randn(1, 1, 100, 128, device=DEVICE).half()
    out = taken.flash_attention_forward(q, k, k)
    assert_close(out[:, -1:], q[:, -1:], k, k)
    torch.testing.assert_close(out[0, 0, 0], k[0, 0].float().mean(0).half(), rtol=0, atol=1e-3)


@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("D", [*HEADS, 256])
@settings(max_examples=6)
@given(LQ=st.integers(1, 1500), LK=st.integers(1, 1500), causal=st.booleans())
def test_long(taken: ModuleType, dtype: torch.dtype, D: int, LQ: int, LK: int, causal: bool) -> None:
    """Many blocks of any lengths."""
    q = torch.randn(1, 4, LQ, D, device=DEVICE).to(dtype)
    k, v = (torch.randn(1, 2, LK, D, device=DEVICE).to(dtype) for _ in range(2))
    assert_close(taken.flash_attention_forward(q, k, v, causal), q, k, v, causal)


@needs_a_gpu
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_opcheck(taken: ModuleType, dtype: torch.dtype) -> None:
    """The op passes the whole of opcheck."""
    q = torch.randn(2, 4, 70, 64, device=DEVICE).to(dtype)
    found = torch.library.opcheck(taken.flash_attention_forward, (q, q[:, :2], q[:, :2], True))
    assert set(found.values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, and other sizes."""
    torch.compiler.reset()
    op = torch.compile(
        lambda q, k, v: taken.flash_attention_forward(q * 2, k, v, True), fullgraph=True, dynamic=dynamic
    )
    for length in (40, 70, 300):
        q, k, v = (torch.randn(2, 3, length, 64, device=DEVICE).half() for _ in range(3))
        assert_close(op(q, k, v), q * 2, k, v, True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its inputs are, whichever GPU is the current one."""
    q = torch.randn(1, 2, 50, 64, device="cuda:1").half()
    assert_close(taken.flash_attention_forward(q, q, q), q, q, q)


def some_heads(normal: Callable[..., torch.Tensor], M: int, N: int) -> tuple[torch.Tensor, ...]:
    """Return inputs for the op: of so many queries and keys, but few, and two heads that share one."""
    return normal(1, 2, M % 300, 64), normal(1, 1, N % 300, 64), normal(1, 1, N % 300, 64)


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [
    (
        "flash_attention_forward",
        some_heads,
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("sums of before not rescaled", "acc = acc * rescale\n", "acc = acc * 1.0\n"),
    ("scores scaled before they are subtracted", "(s - m_new) * SCALE", "s * SCALE - m_new * SCALE"),
    ("keys past the end are seen", "seen = offs_n[None, :] < LK\n", "seen = offs_n[None, :] < LK + BLOCK_N\n"),
    ("queries see the next key", "seen & (offs_n[None, :] <= offs_m)", "seen & (offs_n[None, :] <= offs_m + 1)"),
    (
        "the diagonal begins a block late",
        "pid_m * BLOCK_M // BLOCK_N * BLOCK_N)",
        "pid_m * BLOCK_M // BLOCK_N * BLOCK_N + BLOCK_N)",
    ),
    ("heads do not share keys", "k_ptr + batch * stride_kb + head // GROUP * stride_kh", "k_ptr + batch * stride_kb"),
    ("a row of nothing is divided by 0", "tl.where(total == 0, 1.0, total)", "total"),
    ("padding of a head is read", "        mask = offs_d < D  # (1, BLOCK_D)\n", "        mask = offs_d < D + 8\n"),
]
