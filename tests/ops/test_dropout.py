"""The op of the recipe dropout: the mask it promises, what it does with it, and whether that is random."""

import hashlib
import importlib.util
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from compiled import Ask, ptx
from guard import Guard, guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, shapes

BLOCK = 2048  # of the recipe
SEEDS = st.sampled_from([0, 1, -1, 2**32, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
CHANCES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 2**-17, 1 - 2**-16]) | st.floats(0, 1)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/dropout.py")


def philox(seed: int, n: np.ndarray) -> np.ndarray:
    """Return four words for each counter, as (counters, 4) of uint32."""
    low, half = np.uint64(2**32 - 1), np.uint64(32)
    a, b, c, d = n & low, n >> half, n * np.uint64(0), n * np.uint64(0)
    for i in range(10):
        first, second = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        key = [np.uint64((part + i * step) % 2**32) for part, step in ((seed, 0x9E3779B9), (seed >> 32, 0xBB67AE85))]
        a, c = (second >> half) ^ b ^ key[0], (first >> half) ^ d ^ key[1]
        b, d = second & low, first & low
    return np.stack([a, b, c, d], axis=-1).astype(np.uint32)


def mask(seed: int, p: float, size: int, first: int = 0) -> torch.Tensor:
    """Return which of the elements from `first` on, a multiple of eight, are kept."""
    counters = np.arange(first // 8, (first + size + 7) // 8, dtype=np.uint64)
    halves = philox(seed, counters).view(np.int16).reshape(-1)[:size]  # little endian: the lower half first
    return torch.from_numpy(halves >= round(p * 2**16) - 2**15)


def expected(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Return the result in float64."""
    kept = 1 - round(p * 2**16) / 2**16
    keep = mask(seed, p, x.numel()).view(x.shape).to(x.device)
    return torch.where(keep, x.detach().double() / (kept or 1), 0)


def assert_right(out: torch.Tensor, x: torch.Tensor, p: float, seed: int) -> None:
    """Assert that the right elements were dropped, and the others scaled and rounded."""
    assert (out.dtype, out.shape, out.device) == (x.dtype, x.shape, x.device)
    # Scale, product and result are rounded; a unit for the result, since the interpreter cuts bfloat16.
    last = torch.finfo(x.dtype)
    accumulator = 2 * (2**-53 if x.dtype == torch.float64 else 2**-24)
    exact = expected(x, p, seed)
    allowed = (accumulator + last.eps) * exact.abs() + last.tiny * last.eps
    overflow = exact.abs() > last.max  # of float16, by a large scale
    wrong = ((out.detach().double() - exact).abs() > allowed) & ~overflow
    assert not wrong.any(), f"{wrong.sum()} wrong elements, the first at {wrong.flatten().nonzero()[0].item()}"


@quiet
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=15)
@given(shape=shapes(BLOCK, 2 * BLOCK + 1), layout=layouts(), p=CHANCES, seed=SEEDS)
@example((BLOCK + 5,), Layout("contiguous", 0), 0.5, 2**40 + 3)
@example((2 * BLOCK,), Layout("contiguous", 1), 0.25, -7)
def test_value(
    recipe: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], layout: Layout, p: float, seed: int
) -> None:
    """The mask is that of Philox for the index of each element, whatever the shape, the layout and the seed."""
    x = layout.make(shape, dtype, recipe.DEVICE)
    out = guarded(lambda x, seed: recipe.dropout(x, p, seed), x, recipe.new_seed(seed))
    assert_right(out, x, p, seed)


def test_philox_of_the_page(recipe: ModuleType) -> None:
    """The function in Python gives what the authors of Philox publish, and what the tests' own gives."""
    assert philox(0, np.zeros(1, np.uint64)).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    for seed in (0, 1, -1, 0x299F31D0A4093822, 2**63 - 1, -(2**63)):
        for n in (0, 1, 2**32 - 1, 2**32, 2**63 - 1):
            assert recipe.philox(seed, n) == philox(seed, np.array([n], np.uint64))[0].tolist()
    for p in (0.0, 0.3, 1.0):
        assert torch.equal(recipe.mask_python(99, p, 5), mask(5, p, 99))


def test_checksum(recipe: ModuleType) -> None:
    """A mask that was computed elsewhere comes out bit for bit."""
    x = torch.ones(4099, device=recipe.DEVICE)
    keep = recipe.dropout(x, 0.3, recipe.new_seed(0x0123456789ABCDEF)) != 0
    assert hashlib.sha256(bytes(keep.tolist())).hexdigest().startswith("9a09311ba44e26f5")


BITS = """
import triton
import triton.language as tl
from dropout import random_bits

@triton.jit
def bits_kernel(out_ptr, seed_ptr, first, PER: tl.constexpr):
    bits = random_bits(tl.load(seed_ptr), first, PER, 64)
    tl.store(out_ptr + tl.arange(0, 64), bits)
"""


@pytest.fixture(scope="module")
def bits_kernel(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return a kernel that stores the numbers of the elements from `first` on."""
    file = tmp_path_factory.mktemp("bits") / "bits.py"
    file.write_text(BITS)
    sys.modules["dropout"] = recipe
    spec = importlib.util.spec_from_file_location("bits", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bits_kernel


@pytest.mark.parametrize("per", [8, 4, 1])
@pytest.mark.parametrize("first", [0, 64, 2**31 - 64, 2**32, 2**34, 2**35, 2**38 + 64, 2**61])
def test_no_mask_begins_again(recipe: ModuleType, bits_kernel: Callable[..., None], first: int, per: int) -> None:
    """Behind any number of elements the counter goes on counting, with 64 bits."""
    out, seed = torch.empty(64, dtype=torch.int32, device=recipe.DEVICE), 2**40 + 9
    bits_kernel[(1,)](out, recipe.new_seed(seed), first, per)
    words = philox(seed, np.arange(first // per, (first + 64) // per, dtype=np.uint64))
    if per == 8:  # half a word each, in the upper half
        words = np.stack([words << np.uint32(16), words & np.uint32(0xFFFF0000)], axis=-1)
        out &= -(2**16)
    words = words[:, 0] if per == 1 else words.reshape(-1)
    assert out.tolist() == words.view(np.int32).tolist()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mask_is_of_the_index_only(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Neither dtype nor layout nor block change the mask, and more elements leave it as it was."""
    seed, size = recipe.new_seed(3), 3 * BLOCK + 8
    keep = mask(3, 0.4, size).to(recipe.DEVICE)
    x = torch.ones(size, dtype=dtype, device=recipe.DEVICE)
    assert torch.equal(recipe.dropout(x, 0.4, seed) != 0, keep)
    assert torch.equal(recipe.dropout(x[: BLOCK + 3], 0.4, seed) != 0, keep[: BLOCK + 3])
    turned = x.view(8, -1).T.contiguous().T
    assert torch.equal(recipe.dropout(turned, 0.4, seed).flatten() != 0, keep)
    for block in (128, 512, 4096):
        out = torch.empty_like(x)
        recipe.launch(recipe.dropout_kernel, x, 0.4, seed, out, block=block)
        assert torch.equal(out != 0, keep)


@pytest.mark.parametrize("per", [4, 1])
def test_fewer_elements_per_call(recipe: ModuleType, per: int) -> None:
    """The variants that are timed use whole words, of which the upper half decides as well."""
    x, out, seed = *torch.ones(2, 1000, device=recipe.DEVICE), 11
    recipe.launch(recipe.dropout_kernel, x, 0.3, recipe.new_seed(seed), out, per)
    words = philox(seed, np.arange(1000 // per, dtype=np.uint64))[:, : min(per, 4)].reshape(-1)
    keep = torch.from_numpy(words.view(np.int32) >= round(0.3 * 2**16) * 2**16 - 2**31)
    assert torch.equal(out.cpu() != 0, keep)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_through_autograd(recipe: ModuleType, dtype: torch.dtype) -> None:
    """The gradient is dropped by the same mask, an expanded one too, and autograd keeps the seed only."""
    x = Layout("contiguous", 0).make((5, 700), dtype, recipe.DEVICE).requires_grad_()
    seed, kept = recipe.new_seed(21), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = recipe.dropout(x, 0.3, seed)
    assert [t.data_ptr() for t in kept] == [seed.data_ptr()]
    grad = Layout("transposed", 1).make((5, 700), dtype, recipe.DEVICE)
    (dx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    assert_right(dx, grad, 0.3, 21)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert_right(dx, torch.ones_like(x), 0.3, 21)


@quiet
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_gradcheck(recipe: ModuleType, p: float) -> None:
    """First and second derivatives are right."""
    x = torch.randn(3, 5, dtype=torch.float64, device=recipe.DEVICE, requires_grad=True)
    op = partial(recipe.dropout, p=p, seed=recipe.new_seed(4))
    assert torch.autograd.gradcheck(op, x)
    assert torch.autograd.gradgradcheck(op, x)


def test_seed_may_not_change_before_the_backward(recipe: ModuleType) -> None:
    """A seed that is counted up in place is found out, and no gradient has another mask."""
    x = torch.ones(100, device=recipe.DEVICE, requires_grad=True)
    seed = recipe.new_seed(4)
    y = recipe.dropout(x, 0.5, seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@quiet
def test_special_values(recipe: ModuleType) -> None:
    """What is dropped is 0, whatever it was; what is kept stays NaN or infinite."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3e38], device=recipe.DEVICE)
    x = special.repeat(40)
    for p in (0.0, 0.5, 1.0):
        keep = mask(6, p, 200).to(recipe.DEVICE)
        out = recipe.dropout(x, p, recipe.new_seed(6))
        assert torch.equal(out[~keep].view(torch.int32), torch.zeros_like(out[~keep]).view(torch.int32))
        kept = x[keep] / (1 - p or 1)
        torch.testing.assert_close(out[keep], kept, rtol=0, atol=0, equal_nan=True)
    # PyTorch's own keeps NaN where it drops.
    assert torch.nn.functional.dropout(torch.full((64,), torch.nan), 0.5).isnan().all()


def test_ends_of_p(recipe: ModuleType) -> None:
    """With p = 0 nothing changes, not a bit, and with a p that rounds to 0 neither."""
    x = Layout("contiguous", 2).make((3000,), torch.float32, recipe.DEVICE)
    for p in (0.0, 1e-9, 2**-18):
        assert torch.equal(recipe.dropout(x, p, recipe.new_seed(1)), x)
    few = recipe.dropout(torch.ones(2**16, device=recipe.DEVICE), 2**-12, recipe.new_seed(1))
    assert 1 <= (few == 0).sum() <= 50


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_share_of_dropped_elements(recipe: ModuleType, p: float) -> None:
    """As many elements are dropped as a binomial distribution allows, and the mean stays that of x."""
    size = 2**17  # so many that a few numbers are equal to the limit, and kept
    out = recipe.dropout(torch.ones(size, device=recipe.DEVICE), p, recipe.new_seed(2024))
    assert torch.equal(out.cpu() != 0, mask(2024, p, size))
    exact = round(p * 2**16) / 2**16
    spread = math.sqrt(size * exact * (1 - exact))
    assert abs((out == 0).sum().item() - size * exact) < 4 * spread
    assert abs(out.double().sum().item() - size) < 4 * spread / (1 - exact)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_independence(recipe: ModuleType, p: float) -> None:
    """Neighbours, rows and seeds know nothing of each other, for the mask that the op has in all tests above."""
    masks = torch.stack([mask(seed, p, 16 * 2048).view(16, 2048) for seed in range(200)])
    for name, z in recipe.deviations(masks, p).items():
        assert z.abs().max() < 5, name
        assert 0.8 < z.std() < 1.2, name
        assert z.mean().abs() < 5 / math.sqrt(200), name


def test_deviations_find_dependence(recipe: ModuleType) -> None:
    """The statistics of the page notice masks that repeat: from element to element, row to row, seed to seed."""
    p, shape = 0.5, (40, 16, 512)
    generator = torch.Generator().manual_seed(0)
    new = partial(torch.rand, generator=generator)
    fine = new(shape) >= p
    masks = {
        "mean": new(shape) >= 0.45,
        "next seed": fine[:1].expand(shape),
        "next row": fine[:, :1].expand(shape),
        "8 further": fine[..., :8].repeat(1, 1, 64),
        "1 further": fine[..., ::2].repeat_interleave(2, -1),
    }
    assert max(z.abs().max() for z in recipe.deviations(fine, p).values()) < 5
    for name, mask in masks.items():
        assert recipe.deviations(mask, p)[name].abs().max() > 5, name


def test_a_seed_for_each_program(recipe: ModuleType) -> None:
    """The mistake that the page shows: the masks of two neighbouring seeds are one, shifted."""
    first, second = torch.empty(2, 3, 256, dtype=torch.int8, device=recipe.DEVICE)
    for seed, out in ((7, first), (8, second)):
        recipe.seeded_kernel[(3,)](out, seed, 0.5, BLOCK=256)
    assert torch.equal(first[1:], second[:-1])
    assert not torch.equal(first, second)


def test_guards_reach_into_the_op(recipe: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    with Guard() as guard:
        out = recipe.dropout(torch.ones(30, device=recipe.DEVICE), 0.5, recipe.new_seed(1))
    assert out.untyped_storage().data_ptr() in {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    x, seed = torch.ones(4, device=recipe.DEVICE), recipe.new_seed(1)
    with pytest.raises(TypeError, match=r"floating dtypes, not torch\.int32"):
        recipe.dropout(x.int(), 0.5, seed)
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="a p from 0 to 1, not"):
            recipe.dropout(x, p, seed)
    for wrong in (seed.int(), seed.expand(2), seed[:0], seed.double()):
        with pytest.raises(TypeError, match="one int64"):
            recipe.dropout(x, 0.5, wrong)
    with pytest.raises(ValueError, match="the seed on meta"):
        recipe.dropout(x, 0.5, seed.to("meta"))
    assert recipe.dropout(x, 0.0, seed[0]).tolist() == [1] * 4  # no dimension is fine
    assert recipe.dropout(x[:0], 0.5, seed).shape == (0,)


def counts(recipe: ModuleType) -> dict[int, Counter[str]]:
    """Return how often what is looked for stands in the PTX, with so many elements for each call."""
    wanted = r"(?:ld|st)\.(?:global|shared)[.\w]*|mul\.hi"
    options = {"seed_ptr": "i64", "ACC": recipe.tl.float32, "BLOCK": 1024}
    return {per: Counter(re.findall(wanted, ptx(recipe.dropout_kernel, "bf16", PER=per, **options))) for per in (8, 4)}


def test_compiled(gallery: Path, on_h100: Ask) -> None:
    """Full programs move 16 bytes at a time at any size, no thread waits for another's numbers, calls are shared."""
    (found,) = on_h100(gallery / "fusion" / "dropout.py", counts)
    for per, counted in found.items():
        assert counted["ld.global.v4.b32"] == counted["st.global.v4.b32"] == 1
        assert not any("shared" in name for name in counted)
        # Eight elements for each thread, in both branches; some of twenty products have factors of 0.
        assert 10 * 8 / per <= counted["mul.hi"] / 2 <= 20 * 8 / per


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(recipe: ModuleType) -> None:
    """The last of more than 2**31 elements have their own numbers."""
    size, tail = 2**31 + 2**12 + 3, 2**12 + 3
    x = torch.ones(size, dtype=torch.bfloat16, device=recipe.DEVICE)
    out = recipe.dropout(x, 0.5, recipe.new_seed(5))
    assert torch.equal(out[:tail].cpu() != 0, mask(5, 0.5, tail))
    assert torch.equal(out[-tail:].cpu() != 0, mask(5, 0.5, tail, first=2**31))
    assert out.mean(dtype=torch.float32).sub(1).abs() < 1e-3


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [35, 4096])
def test_opcheck(recipe: ModuleType, dtype: torch.dtype, size: int) -> None:
    """The op passes the whole of opcheck."""
    x = torch.randn(size, dtype=dtype, device=recipe.DEVICE, requires_grad=True)
    assert set(torch.library.opcheck(recipe.dropout, (x, 0.3, recipe.new_seed(1))).values()) == {"SUCCESS"}


@gpu
def test_compile_and_graph(recipe: ModuleType) -> None:
    """Compiled, the mask is the same; a captured graph reads the seed at each replay."""
    x, seed = torch.randn(1000, 33, device=recipe.DEVICE), recipe.new_seed(1)
    op = partial(recipe.dropout, p=0.5)
    compiled = torch.compile(lambda x, seed: op(x * 2, seed=seed) + 1, fullgraph=True)
    assert torch.equal(compiled(x, seed), op(x * 2, seed=seed) + 1)
    leaf = x.clone().requires_grad_()
    d, exact = (torch.autograd.grad(y.sum(), leaf)[0] for y in (compiled(leaf, seed), op(leaf * 2, seed=seed)))
    assert torch.equal(d, exact)
    op(x, seed=seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x, seed=seed)
    for value in (1, 2):
        seed.fill_(value)
        graph.replay()
        assert torch.equal(out, op(x, seed=seed))


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("dropout", lambda normal, M, N: (normal(M, N), 0.3, torch.tensor([5], device="cuda"))),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "dropout stored without a mask",
        "tl.where(bits >= limit, x * scale, 0), mask)",
        "tl.where(bits >= limit, x * scale, 0))",
    ),
    (
        "the words of a call in another order",
        "tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "tl.join(tl.join(w0, w1), tl.join(w2, w3))",
    ),
    ("one half of each word twice", "tl.join(bits << 16, bits)", "tl.join(bits << 16, bits << 16)"),
    (
        "every program counts from 0",
        "n = tl.cast(first, tl.int64) // PER + tl.arange",
        "n = tl.cast(first, tl.int64) * 0 + tl.arange",
    ),
    (
        "a seed of 32 bits",
        "w0, w1, w2, w3 = tl.randint4x(seed, n)",
        "w0, w1, w2, w3 = tl.randint4x(seed.to(tl.int32), n)",
    ),
    (
        "another mask for the gradient",
        "dropout(grad, ctx.p, *ctx.saved_tensors)",
        "dropout(grad, ctx.p, ctx.saved_tensors[0] + 1)",
    ),
    (
        "the scale of another p",
        "kept = 2147483648 - tl.cast(limit, tl.int64)",
        "kept = 2147483648 - tl.cast(limit, tl.int64) // 2",
    ),
]
