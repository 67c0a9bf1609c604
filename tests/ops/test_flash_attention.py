"""The op of the recipe Flash attention: values and gradients."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from compiled import Ask, compiled, graphs, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, first_quickly, layouts, sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = "attention/flash_attention.py"
KINDS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-18, torch.float64: 2.0**-45}
HEADS = [16, 32, 40, 64, 80, 128]
each_way = pytest.mark.parametrize("causal", [False, True])
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op(RECIPE)


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe(RECIPE)


def by_formula(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensors, Tensors]:
    """Return attention, its log-sum-exp in base 2 and its gradients in float64, and the sizes of what is added up."""
    least = torch.finfo(q.dtype).smallest_normal  # what is smaller has fewer bits
    q, k, v, grad = (t.detach().double() for t in (q, k, v, grad))
    scale, shared = q.shape[-1] ** -0.5 if scale is None else scale, k.shape[1]
    k, v = (t.repeat_interleave(q.shape[1] // shared, dim=1) for t in (k, v))
    s = q @ k.mT * scale
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    m = s.amax(-1, keepdim=True).clamp(min=-1e300) if s.shape[-1] else s.sum(-1, keepdim=True)
    total = (s - m).exp().sum(-1, keepdim=True)
    p = (s - m).exp() / total.masked_fill(total == 0, 1)
    out = p @ v
    lse = ((m + total.log()) * math.log2(math.e)).masked_fill(total == 0, torch.inf)[..., 0]
    ds = p * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
    size = p * (grad.abs() @ v.mT.abs() + (grad * out).abs().sum(-1, keepdim=True)) + least
    size = size * abs(scale)

    def of_group(t: torch.Tensor) -> torch.Tensor:
        """Return the sum over the heads of queries that share a head of keys."""
        return t.unflatten(1, (shared, -1)).sum(2)

    values = out, lse, ds @ k, of_group(ds.mT @ q), of_group(p.mT @ grad)
    terms = (p @ v.abs(), lse.abs() + 1, size @ k.abs(), of_group(size.mT @ q.abs()))
    return values, tuple(t + least for t in (*terms, of_group((p + least).mT @ grad.abs())))


def assert_within(found: Tensors, expected: Tensors, terms: Tensors, dtype: torch.dtype, looser: float = 1) -> None:
    """Assert that results are as good as two roundings of what is added up, and two of themselves."""
    for name, one, right, size in zip(("out", "lse", "dq", "dk", "dv"), found, expected, terms, strict=True):
        assert one.shape == right.shape
        kind = torch.promote_types(dtype, torch.float32) if name == "lse" else dtype
        assert one.dtype == kind
        allowed = 2 * KINDS[kind] * looser * (size + right.abs())
        good = ((one.double() - right).abs() <= allowed) | (one == right)
        assert good.all(), f"{name} is off by {((one.double() - right).abs() / allowed).nan_to_num().max():.1f}"


def assert_right(
    taken: ModuleType,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    looser: float = 1,
) -> Tensors:
    """Assert that both ops are right and store nowhere else; return what they return."""
    q, k, v, grad = (t.detach() for t in (q, k, v, grad))
    out, lse = guarded(partial(taken.flash_attention_with_lse, causal=causal, scale=scale), q, k, v)
    assert out.is_contiguous()
    grads = guarded(partial(taken.flash_attention_backward, causal=causal, scale=scale), grad, q, k, v, out, lse)
    found = out, lse, *grads
    assert_within(found, *by_formula(q, k, v, grad, causal, scale), q.dtype, looser)
    return found


def some(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Return random tensors."""
    return (Layout("contiguous", seed).make(shape, dtype, DEVICE) for seed, shape in enumerate(shapes))


def heads_of(heads: int, shared: int, LQ: int, LK: int, D: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Return queries, keys, values, and a gradient."""
    rows, keys = (1, heads, LQ, D), (1, shared, LK, D)
    return some([rows, keys, keys, rows], dtype)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@settings(max_examples=16)
@given(
    LQ=sizes(32, 70),
    LK=sizes(32, 70),
    D=st.sampled_from(HEADS),
    groups=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    causal=st.booleans(),
    of=st.tuples(*[layouts()] * 4),
)
def test_gradients(
    taken: ModuleType,
    dtype: torch.dtype,
    LQ: int,
    LK: int,
    D: int,
    groups: tuple[int, int],
    causal: bool,
    of: tuple[Layout, ...],
) -> None:
    """The values and gradients are right for any lengths, heads and layouts."""
    heads, shared = groups
    shapes = (1, heads, LQ, D), (1, shared, LK, D), (1, shared, LK, D), (1, heads, LQ, D)
    tensors = [layout.make(shape, dtype, DEVICE) for layout, shape in zip(of, shapes, strict=True)]
    assert_right(taken, *tensors, causal)


LENGTHS = [(1, 1), (1, 200), (64, 64), (127, 129), (129, 127), (200, 64), (33, 0), (0, 33)]


@each_way
@pytest.mark.parametrize("D", [16, 64, 100, 256])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_tile(taken: ModuleType, lengths: tuple[int, int], D: int, causal: bool) -> None:
    """Each tile, at lengths around its edges; heads side by side in memory, as a projection leaves them."""
    (LQ, LK), kind = lengths, torch.float16
    q, grad = (Layout("contiguous", k).make((1, LQ, 2, D), kind, DEVICE).transpose(1, 2) for k in range(2))
    k, v = Layout("contiguous", 2).make((1, LK, 2, 1, D), kind, DEVICE).permute(2, 0, 3, 1, 4).unbind(0)
    assert_right(taken, q, k, v, grad, causal)


@pytest.mark.parametrize("causal", first_quickly(True, False))
@pytest.mark.parametrize("tiles", ["FLASH_ATTENTION_TILES", "FLASH_ATTENTION_HOPPER", "FLASH_ATTENTION_SMALL"])
def test_tiles_of_gpus(taken: ModuleType, tiles: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Hopper, and of a GPU with little shared memory, at lengths around their edges."""
    taken._flash_attention_tiles.cache_clear()
    monkeypatch.setattr(taken, "FLASH_ATTENTION_TILES", taken.FLASH_ATTENTION_TILES | getattr(taken, tiles))
    for D, lengths in itertools.product((16, 64, 128, 200), [(70, 90), (129, 193), (256, 128)]):
        assert_right(taken, *heads_of(2, 1, *lengths, D, torch.float16), causal)
    taken._flash_attention_tiles.cache_clear()


# Shared memory of a program, in bytes, and the compute capability's first number
GPUS = {"A100": (166_912, 8), "H200": (232_448, 9), "B200": (232_448, 10), "RTX 4090": (101_376, 8), "MI300": (None, 9)}


@pytest.mark.parametrize("gpu", GPUS)
def test_which_tiles(taken: ModuleType, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's are for Hopper alone, and GPUs with little shared memory have small ones."""
    room, major = GPUS[gpu]
    found = {"major": major} | ({"shared_memory_per_block_optin": room} if room else {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**found))
    which = {"H200": taken.FLASH_ATTENTION_HOPPER, "RTX 4090": taken.FLASH_ATTENTION_SMALL}
    which["MI300"] = which["RTX 4090"]
    for BLOCK_D, tiles in (taken.FLASH_ATTENTION_TILES | which.get(gpu, {})).items():
        got = taken._flash_attention_tiles.__wrapped__(torch.device("cuda"), BLOCK_D, 2)
        assert [tuple(tile.values()) for tile in got] == tiles


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_scale(taken: ModuleType, dtype: torch.dtype) -> None:
    """A scale of one's own: zero gives the mean, a negative one turns the order round."""
    for scale in (0.0, -0.3, 1):
        assert_right(taken, *heads_of(2, 2, 40, 50, 32, dtype), scale=scale)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@each_way
def test_who_gets_what(taken: ModuleType, dtype: torch.dtype, causal: bool) -> None:
    """A gradient of one query alone reaches the keys that it sees, all of them, and no others."""
    q, k, v, grad = heads_of(1, 1, 80, 80, 16, dtype)
    for query in (0, 33, 79):
        alone = torch.zeros_like(grad)
        alone[:, :, query] = grad[:, :, query]
        _, _, dq, dk, dv = assert_right(taken, q, k, v, alone, causal)
        seen = query + 1 if causal else 80
        assert not dq[:, :, :query].any()
        assert not dq[:, :, query + 1 :].any()
        for gradient in (dk, dv) if seen > 1 else (dv,):  # a weight of 1 has no slope
            assert gradient[:, :, :seen].any(-1).all()
            assert not gradient[:, :, seen:].any()


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@each_way
def test_group(taken: ModuleType, dtype: torch.dtype, causal: bool) -> None:
    """The gradients of a shared head are sums over its group."""
    q, k, v, grad = heads_of(6, 2, 40, 40, 16, dtype)
    many = assert_right(taken, q, k, v, grad, causal)
    alone = [
        assert_right(taken, q[:, i : i + 1], k[:, i // 3][:, None], v[:, i // 3][:, None], grad[:, i : i + 1], causal)
        for i in range(6)
    ]
    for which in (3, 4):
        sums = torch.cat([one[which] for one in alone], 1).double().unflatten(1, (2, 3)).sum(2)
        atol = 8 * KINDS[dtype] * sums.abs().max().item()
        torch.testing.assert_close(many[which].double(), sums, rtol=0, atol=atol)


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_large_scores(taken: ModuleType, order: str) -> None:
    """Scores in the thousands that rise or fall along the keys."""
    q, grad = some([(1, 1, 3, 64)] * 2, torch.float64)
    steps = torch.arange(100, dtype=torch.float64, device=DEVICE)
    k = ((steps if order == "rising" else steps.flip(0)) * 2)[None, None, :, None].expand(1, 1, 100, 64)
    v = Layout("contiguous", 2).make((1, 1, 100, 64), torch.float64, DEVICE)
    q = q.abs() + 1
    out, lse = taken.flash_attention_with_lse(q, k, v)
    grads = taken.flash_attention_backward(grad, q, k, v, out, lse, False, None)
    assert_within((out, lse, *grads), *by_formula(q, k, v, grad), torch.float64, looser=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("scores", [1e3, -1e3])
@each_way
def test_past_the_end(taken: ModuleType, dtype: torch.dtype, scores: float, causal: bool) -> None:
    """What pads the last block has no part in a gradient, though its score of 0 is far from all others."""
    q, k, v, grad = heads_of(1, 1, 37, 45, 16, dtype)
    q, k = q * 0.01 + 1, k * 0.01 + scores / 16
    # The scores have 24 bits in float32, of which a thousand takes ten.
    assert_right(taken, q, k, v, grad, causal, scale=1.0, looser=2**10)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_infinities(taken: ModuleType, dtype: torch.dtype, causal: bool) -> None:
    """A key of -inf has no weight; a query that sees none but such keys gives 0, and a log-sum-exp of inf."""
    q, k, v, grad = heads_of(1, 1, 70, 60, 16, dtype)
    q, some_keys = q.abs() + 1, k.clone()
    some_keys[:, :, :35] = -torch.inf
    found = taken.flash_attention_with_lse(q, some_keys, v, causal)
    expected, terms = by_formula(q, some_keys, v, grad, causal)
    assert (expected[1][0, 0, :35] == torch.inf).all() == causal
    for one, right, size, kind in zip(found, expected, terms, (dtype, found[1].dtype), strict=False):
        allowed = 2 * KINDS[kind] * (size.nan_to_num(posinf=0) + right.abs().nan_to_num(posinf=0))
        assert (((one.double() - right).abs() <= allowed) | (one == right)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around the inputs stays there."""
    around = torch.full((1, 60, 4, 96), torch.nan, dtype=dtype, device=DEVICE)
    around[:, 5:45, 1:3, 8:88] = Layout("contiguous", 0).make((1, 40, 2, 80), dtype, DEVICE)
    x = around[:, 5:45, 1:3, 8:88].transpose(1, 2)
    for causal in (False, True):
        assert_right(taken, x, x, x, x, causal)


def test_layouts_of_gradients(taken: ModuleType) -> None:
    """Gradients lie in memory as their tensors do, where those are dense."""
    x = torch.randn(2, 9, 3, 16, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    leaves = [t.detach().requires_grad_() for t in (x, x, x.contiguous())]
    dq, dk, _ = torch.autograd.grad(taken.flash_attention(*leaves).sum(), leaves)
    assert dq.stride() == dk.stride() == x.stride()


@each_way
def test_gradcheck(taken: ModuleType, causal: bool) -> None:
    """Differences agree with the gradients."""
    leaves = [
        Layout("contiguous", i).make((1, heads, 3, 2), torch.float64, DEVICE).requires_grad_()
        for i, heads in enumerate((2, 1, 1))
    ]
    op = partial(taken.flash_attention, causal=causal, scale=0.7)
    assert torch.autograd.gradcheck(op, leaves)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_autograd(taken: ModuleType, dtype: torch.dtype) -> None:
    """Autograd hands over what the backward op returns, and asks it as it was asked."""
    q, k, v, grad = heads_of(2, 1, 40, 50, 16, dtype)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = taken.flash_attention_with_lse(*leaves, True, 0.3)
    assert not lse.requires_grad
    got = torch.autograd.grad(out, leaves, grad)
    saved = [t.detach() for t in (*leaves, out, lse)]
    expected = taken.flash_attention_backward(grad, *saved, True, 0.3)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@needs_a_gpu
@each_way
def test_same_bits(taken: ModuleType, causal: bool) -> None:
    """Each time, for many blocks of keys."""
    q, k, v, grad = heads_of(8, 4, 1500, 1500, 64, torch.float16)
    saved = q, k, v, *taken.flash_attention_with_lse(q, k, v, causal)
    first, *others = (taken.flash_attention_backward(grad, *saved, causal, None) for _ in range(5))
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
@each_way
def test_nothing_to_see(taken: ModuleType, dtype: torch.dtype, causal: bool) -> None:
    """Queries without keys, and keys without queries, have gradients of 0."""
    for lengths in ((9, 0), (0, 9)):
        *_, dq, dk, dv = assert_right(taken, *heads_of(2, 1, *lengths, 16, dtype), causal)
        assert not any(gradient.any() for gradient in (dq, dk, dv))


def test_gradient_has_no_gradient(taken: ModuleType) -> None:
    """A second derivative is refused, not zero."""
    q = torch.randn(1, 1, 3, 16, dtype=torch.float64, device=DEVICE, requires_grad=True)
    (d,) = torch.autograd.grad(taken.flash_attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    q = torch.ones(2, 4, 3, 16, dtype=torch.float16, device=DEVICE)
    with pytest.raises(TypeError, match=r"^flash_attention takes float tensors, not torch\.int32"):
        taken.flash_attention(*[q.int()] * 3)
    with pytest.raises(TypeError, match=r"one dtype .*float16.*, torch\.bfloat16"):
        taken.flash_attention(q, q.bfloat16(), q)
    for k, v in (
        (q[:, :3], q[:, :3]),
        (q[:, :0], q[:, :0]),
        (q, q[:, :2]),
        (q[..., :8], q[..., :8]),
        (q[:1], q[:1]),
        (q[0], q[0]),
    ):
        found = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        with pytest.raises(ValueError, match=rf"^flash_attention takes q of .*{re.escape(found)}$"):
            taken.flash_attention(q, k, v)
    for D in (0, 257):
        x = q.new_ones(1, 1, 3, D)
        with pytest.raises(ValueError, match="D up to 256"):
            taken.flash_attention(x, x, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@each_way
def test_launchers_serve_gpus(taken: ModuleType, dtype: torch.dtype, causal: bool) -> None:
    """On a GPU a call goes straight to the launchers; they do what the ops do."""
    q, k, v, grad = heads_of(2, 1, 40, 40, 32, dtype)
    saved = at_cuda(taken.flash_attention_with_lse, q, k, v, causal)
    expected = taken.flash_attention_with_lse(q, k, v, causal)
    assert all(torch.equal(*pair) for pair in zip(saved, expected, strict=True))
    inputs = grad, q, k, v, *saved, causal, None
    found, expected = at_cuda(taken.flash_attention_backward, *inputs), taken.flash_attention_backward(*inputs)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_guards_reach_into_the_ops(taken: ModuleType) -> None:
    """What the ops allocate lies between guards in the tests above."""
    q = torch.ones(1, 1, 5, 16, dtype=torch.float16, device=DEVICE)
    with Guard() as guard:
        saved = q, q, q, *taken.flash_attention_with_lse(q, q, q)
        grads = taken.flash_attention_backward(q, *saved, False, None)
    places = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {t.untyped_storage().data_ptr() for t in (*saved[3:], *grads)} <= places


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right."""
    q, k, v, grad = heads_of(2, 2, 200, 200, 64, torch.float16)
    for make, causal, *_ in recipe.STEPS.values():
        found = make(q, k, v, grad)()
        expected, terms = by_formula(q, k, v, grad, causal)
        for one, right, size in zip(found, expected[2:], terms[2:], strict=True):
            assert ((one.double() - right).abs() <= 2 * 2.0**-11 * (size + right.abs())).all()
    expected = recipe.expected_of(q, k, v, grad, is_causal=True)
    torch.testing.assert_close(expected, by_formula(q, k, v, grad, True)[0][2:])
    torch.testing.assert_close(tuple(recipe.terms_of(q, k, v, grad, True)), by_formula(q, k, v, grad, True)[1][2:])


KERNELS = ["_flash_attention_kernel", "_flash_attention_dkv_kernel", "_flash_attention_dq_kernel"]


def at_launch(taken: ModuleType, which: int, dtype: str, D: int, causal: bool, tiles: str) -> dict[str, object]:
    """Return what the launchers pass on, to the kernel of a number, for lengths and strides that 16 divides."""
    import triton.language as tl

    BLOCK_D = max(16, 1 << (D - 1).bit_length())
    if dtype in ("fp16", "bf16"):
        table = taken.FLASH_ATTENTION_TILES | getattr(taken, tiles)
        BLOCK_M, BLOCK_N, num_warps, num_stages, *maxnreg = table[BLOCK_D][which]
    else:
        tile = taken._flash_attention_tiles(torch.device("cpu"), BLOCK_D, 8)[which]
        BLOCK_M, BLOCK_N, num_warps, num_stages, *maxnreg = tile.values()
    names = getattr(taken, KERNELS[which]).arg_names
    wide, scale = "fp64" if dtype == "fp64" else "fp32", D**-0.5
    known = {
        "lse_ptr": wide,
        "delta_ptr": wide,
        "GROUP": 1,
        "D": D,
        "SCALE": scale,
        "SCALE_2": scale * math.log2(math.e),
        "CAUSAL": causal,
        "ACC": {"fp32": tl.float32, "fp64": tl.float64}[wide],
        "LOWEST": torch.finfo(torch.float32).min,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
    }
    strides = [name for name in names if name.startswith("stride_")]
    options = {
        "dtype": dtype,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "maxnreg": maxnreg[0] if maxnreg else None,
        "multiples": ["LQ", "LK", *strides],
    }
    return options | {name: value for name, value in known.items() if name in names}


def codes(taken: ModuleType) -> dict[tuple[int, int], tuple[set[str], bool, bool]]:
    """Return, for heads and kernels, the matrix instructions, whether exp2 is one, and whether anything is atomic."""
    found = {}
    for D, which in itertools.product((64, 128), range(3)):
        known = at_launch(taken, which, "fp16", D, True, "FLASH_ATTENTION_HOPPER")
        text = compiled(getattr(taken, KERNELS[which]), **known).asm["ptx"]
        matrix = set(re.findall(r"(wgmma|mma)\.\S*?m\d+n\d+", text))
        found[D, which] = matrix, "ex2.approx" in text, bool(re.search(r"\b(atom|red)\.global", text))
    return found


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Hopper's instruction in all products, one instruction for an exponential, and no additions to memory."""
    (found,) = on_h100(gallery / RECIPE, codes)
    assert set(found) == set(itertools.product((64, 128), range(3)))
    assert set(map(repr, found.values())) == {repr(({"wgmma"}, True, False))}


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that a thread spills, for every tile."""
    return {
        f"{which} {tiles[16:]} {dtype} {D} {causal}": stack(
            getattr(taken, KERNELS[which]), **at_launch(taken, which, dtype, D, causal, tiles)
        )
        for which in range(3)
        for tiles in ("FLASH_ATTENTION_TILES", "FLASH_ATTENTION_HOPPER")
        for dtype in ("fp16", "bf16")
        for D in (16, 32, 64, 96, 128)
        for causal in (False, True)
    }


@pytest.mark.thorough
def test_no_register_spills(gallery: Path, on_h100: Ask) -> None:
    """For no head of up to 128 in half precision, but for eight numbers where 96 is padded; float64 is for proofs."""
    (found,) = on_h100(gallery / RECIPE, spills)
    assert len(found) == 120
    assert {name: size for name, size in found.items() if size > 32 * (" 96 " in name)} == {}


def rooms(taken: ModuleType) -> list[int]:
    """Return the bytes of shared memory that float64 takes for the largest heads."""
    return [
        compiled(getattr(taken, KERNELS[which]), **at_launch(taken, which, "fp64", 256, causal, "")).metadata.shared
        for which in range(3)
        for causal in (False, True)
    ]


@pytest.mark.thorough
def test_float64_fits(gallery: Path, on_h100: Ask) -> None:
    """An A100's shared memory has room for the largest heads."""
    (found,) = on_h100(gallery / RECIPE, rooms)
    assert len(found) == 6
    assert max(found) <= 163 * 1024


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of a causal call, forward and backward."""
    x = torch.randn(2, 4, 40, 64, dtype=torch.float16, requires_grad=True)
    k = torch.randn(2, 2, 40, 64, dtype=torch.float16, requires_grad=True)
    return graphs(lambda q, k: recipe.flash_attention(q, k, k, True), x, k)


def test_torch_compile_looks_into_it(gallery: Path, on_h100: Ask) -> None:
    """It sees one kernel forward and three backward."""
    ((forward, backward),) = on_h100(gallery / RECIPE, traced)
    for graph, number in ((forward, 1), (backward, 3)):
        assert sum(call.startswith("triton_kernel_wrapper") for call in graph) == number
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


@pytest.mark.needs_gpu_memory(40)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last head is right."""
    q = torch.zeros(1, 2**13 + 1, 2048, 128, dtype=torch.float16, device=DEVICE)
    q[0, -1] = torch.randn(2048, 128, device=DEVICE)
    k = torch.randn(1, 1, 100, 128, device=DEVICE).half()
    out, lse = taken.flash_attention_with_lse(q, k, k)
    grad = torch.zeros_like(q)
    grad[0, -1] = torch.randn(2048, 128, device=DEVICE)
    last = q[:, -1:], k, k, grad[:, -1:]
    grads = taken.flash_attention_backward(grad, q, k, k, out, lse, False, None)
    found = out[:, -1:], lse[:, -1:], grads[0][:, -1:], *grads[1:]
    assert_within(found, *by_formula(*last), torch.float16)


@needs_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [*HEADS, 256])
@settings(max_examples=6)
@given(LQ=st.integers(1, 1500), LK=st.integers(1, 1500), causal=st.booleans())
def test_long(taken: ModuleType, dtype: torch.dtype, D: int, LQ: int, LK: int, causal: bool) -> None:
    """Many blocks of any lengths."""
    assert_right(taken, *heads_of(4, 2, LQ, LK, D, dtype), causal)


@needs_a_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_opcheck(taken: ModuleType, dtype: torch.dtype) -> None:
    """Both ops pass the whole of opcheck."""
    q, k, v, grad = heads_of(4, 2, 70, 50, 64, dtype)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    found = torch.library.opcheck(taken.flash_attention_with_lse, (*leaves, True, None))
    assert set(found.values()) == {"SUCCESS"}
    saved = q, k, v, *taken.flash_attention_with_lse(q, k, v, True)
    found = torch.library.opcheck(taken.flash_attention_backward, (grad, *saved, True, None))
    assert set(found.values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dynamic: bool) -> None:
    """torch.compile takes the op, its gradients, and other sizes."""
    torch.compiler.reset()
    op = torch.compile(lambda q, k, v: taken.flash_attention(q * 2, k, v, True), fullgraph=True, dynamic=dynamic)
    for length in (40, 70, 300):
        q, k, v, grad = heads_of(3, 3, length, length, 64, torch.float16)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        found = torch.autograd.grad(op(*leaves), leaves, grad)
        (_, _, *expected), (_, _, *terms) = by_formula(q * 2, k, v, grad, True)
        for one, right, size, factor in zip(found, expected, terms, (2, 1, 1), strict=True):
            assert ((one.double() - factor * right).abs() <= 2**-9 * factor * (size + right.abs())).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The ops run where their inputs are, whichever GPU is the current one."""
    x = torch.randn(1, 2, 50, 64, device="cuda:1").half()
    assert_right(taken, x, x, x, x)


def some_heads(normal: Callable[..., torch.Tensor], M: int, N: int) -> tuple[torch.Tensor, ...]:
    """Return inputs for the op: of so many queries and keys, but few, and two heads that share one."""
    return normal(1, 2, M % 300, 64), normal(1, 1, N % 300, 64), normal(1, 1, N % 300, 64)


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [
    (
        "flash_attention",
        some_heads,
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    ),
]

PASS_FOR_QUERIES = """
    if CAUSAL:
        full = tl.minimum(full, pid_m * BLOCK_M // BLOCK_N * BLOCK_N)
        end = tl.minimum(LK, (pid_m + 1) * BLOCK_M)
    for MASKED in tl.static_range(2):
        dq = _flash_attention_along_keys(
"""

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("no delta in the pass for keys", "(p * (dp - delta[None, :]))", "(p * dp)"),
    ("no delta in the pass for queries", "ds = (p * (dp - delta)).to(k.dtype)", "ds = (p * dp).to(k.dtype)"),
    (
        "keys begin at the diagonal, mask or not",
        "    first, full = 0, 0\n    if CAUSAL:\n",
        "    first, full = 0, 0\n    if True:\n",
    ),
    (
        "full attention's queries end at the diagonal",
        PASS_FOR_QUERIES,
        PASS_FOR_QUERIES.replace("if CAUSAL:", "if True:"),
    ),
    ("keys see the query before", "offs_n <= offs_m[None, :], p", "offs_n <= offs_m[None, :] + 1, p"),
    (
        "keys skip the rest of the diagonal",
        "full = tl.cdiv(begin + BLOCK_N, BLOCK_M) * BLOCK_M",
        "full = tl.cdiv(begin, BLOCK_M) * BLOCK_M",
    ),
    (
        "padded keys add to queries",
        "            p = tl.where(seen, p, 0.0)\n",
        "            p = tl.where(seen | (offs_n[None, :] >= LK), p, 0.0)\n",
    ),
    ("a group is its first head", "for member in range(GROUP):", "for member in range(1):"),
    ("queries past the end are read", "mask = (row < LQ) & (offs_d < D)", "mask = (row < LQ + 99) & (offs_d < D)"),
    (
        "the gradient of keys has no scale",
        "tl.store(dk_ptr + offs, dk * SCALE, mask=mask)",
        "tl.store(dk_ptr + offs, dk, mask=mask)",
    ),
    (
        "the gradient of queries has no scale",
        "tl.store(dq_ptrs + row * stride_dql, dq * SCALE, mask=mask)",
        "tl.store(dq_ptrs + row * stride_dql, dq, mask=mask)",
    ),
    (
        "padding of a head is read",
        "mask = (row < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)",
        "mask = (row < LQ) & (offs_d < D + 8)",
    ),
    ("queries without keys get anything", "return dq.zero_(), dk.zero_()", "return dq, dk.zero_()"),
    ("a pass for keys has no last block", "blocks = triton.cdiv(LK,", "blocks = triton.cdiv(LK - 1,"),
    (
        "a row of nothing has a finite log-sum-exp",
        'tl.where(total == 0, float("inf"), m + tl.log2(divisor))',
        "m + tl.log2(divisor)",
    ),
]
