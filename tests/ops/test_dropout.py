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
from compiled import Ask, ptx, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, shapes

BLOCK = 2048  # of the recipe
SEEDS = st.sampled_from([0, 1, -1, 2**32, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
CHANCES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 2**-17, 1 - 2**-16]) | st.floats(0, 1)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/dropout.py")


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


def seeded(number: int) -> torch.Tensor:
    """Return a seed."""
    return torch.tensor([number], device=DEVICE)


def mask(seed: int, p: float, size: int, first: int = 0) -> torch.Tensor:
    """Return which of the elements from `first` on, a multiple of eight, are kept."""
    counters = np.arange(first // 8, (first + size + 7) // 8, dtype=np.uint64)
    halves = philox(seed, counters).view(np.uint16).reshape(-1)[:size]  # little endian: the lower half first
    return torch.from_numpy(halves >= round(p * 2**16))


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
    taken: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], layout: Layout, p: float, seed: int
) -> None:
    """The mask is that of Philox for the index of each element, whatever the shape, the layout and the seed."""
    x = layout.make(shape, dtype, DEVICE)
    out = guarded(lambda x, seed: taken.dropout(x, p, seed), x, seeded(seed))
    assert_right(out, x, p, seed)


def test_philox_of_the_page(recipe: ModuleType) -> None:
    """The function in Python gives what the authors of Philox publish, and what the tests' own gives."""
    assert philox(0, np.zeros(1, np.uint64)).tolist() == [[0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]]
    for seed in (0, 1, -1, 0x299F31D0A4093822, 2**63 - 1, -(2**63)):
        for n in (0, 1, 2**32 - 1, 2**32, 2**63 - 1):
            assert recipe.philox(seed, n) == philox(seed, np.array([n], np.uint64))[0].tolist()
    for p in (0.0, 0.3, 1.0):
        assert torch.equal(recipe.mask_python(99, p, 5), mask(5, p, 99))


def test_checksum(taken: ModuleType) -> None:
    """A mask that was computed elsewhere comes out bit for bit."""
    x = torch.ones(4099, device=DEVICE)
    keep = taken.dropout(x, 0.3, seeded(0x0123456789ABCDEF)) != 0
    assert hashlib.sha256(bytes(keep.tolist())).hexdigest().startswith("9b273ffd06820cb8")


BITS = """
import triton
import triton.language as tl
from dropout_op import _dropout_bits

@triton.jit
def bits_kernel(out_ptr, seed_ptr, first_ptr):
    bits = _dropout_bits(tl.load(seed_ptr), tl.load(first_ptr), 64)
    tl.store(out_ptr + tl.arange(0, 64), bits)
"""


@pytest.fixture(scope="module")
def bits_kernel(taken: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return a kernel that stores the numbers of the elements from `first` on."""
    file = tmp_path_factory.mktemp("bits") / "bits.py"
    file.write_text(BITS)
    sys.modules["dropout_op"] = taken
    spec = importlib.util.spec_from_file_location("bits", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bits_kernel


@pytest.mark.parametrize("first", [0, 64, 2**31 - 64, 2**32, 2**34, 2**35, 2**38 + 64, 2**61])
def test_no_mask_begins_again(bits_kernel: Callable[..., None], first: int) -> None:
    """Past any number of elements the counter goes on counting, with 64 bits."""
    out, seed = torch.empty(64, dtype=torch.int32, device=DEVICE), 2**40 + 9
    bits_kernel[(1,)](out, seeded(seed), torch.tensor([first], device=DEVICE))
    words = philox(seed, np.arange(first // 8, (first + 64) // 8, dtype=np.uint64))
    assert out.tolist() == words.view(np.uint16).reshape(-1).tolist()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mask_is_of_the_index_only(taken: ModuleType, dtype: torch.dtype) -> None:
    """Neither dtype nor layout nor block change the mask, and more elements leave it as it was."""
    seed, size = seeded(3), 3 * BLOCK + 8
    keep = mask(3, 0.4, size).to(DEVICE)
    x = torch.ones(size, dtype=dtype, device=DEVICE)
    assert torch.equal(taken.dropout(x, 0.4, seed) != 0, keep)
    assert torch.equal(taken.dropout(x[: BLOCK + 3], 0.4, seed) != 0, keep[: BLOCK + 3])
    turned = x.view(8, -1).T.contiguous().T
    assert torch.equal(taken.dropout(turned, 0.4, seed).flatten() != 0, keep)
    for block in (128, 512, 4096):
        assert torch.equal(taken._dropout_launch(x, 0.4, seed, block=block) != 0, keep)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_number_at_the_threshold_is_kept(taken: ModuleType, dtype: torch.dtype) -> None:
    """Of 2**16 numbers, as many are dropped as p says: those below p * 2**16, and not that one."""
    halves = philox(3, np.arange(4, dtype=np.uint64)).view(np.uint16).reshape(-1)
    x = torch.ones(len(halves), dtype=dtype, device=DEVICE)
    for number, half in enumerate(halves):
        assert taken.dropout(x, half / 2**16, seeded(3))[number] != 0


def uniform(words: np.ndarray) -> np.ndarray:
    """Return what Triton makes of words of 32 bits: numbers from 0 to 1."""
    signed = words.view(np.int32)
    return np.where(signed < 0, -signed - 1, signed).astype(np.float32) * np.float32(4.6566127342e-10)


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The steps before the op use whole words, one or all four of a call; the op's are the same with any block."""
    x, y = torch.ones(1000, device=DEVICE), torch.empty(1000, device=DEVICE)
    for words_used, drop in ((1, recipe.drop_each), (4, recipe.drop_four)):
        words = philox(11, np.arange(1000 // words_used, dtype=np.uint64))[:, :words_used].reshape(-1)
        keep = torch.from_numpy(uniform(np.ascontiguousarray(words)) >= np.float32(0.3)).to(DEVICE)
        torch.testing.assert_close(drop(x, 0.3, 11), keep / 0.7)
    for name, (step, elements) in recipe.steps(seeded(7)).items():
        y.fill_(torch.nan)
        step(x, y)
        assert elements in (8, 16, 32)
        assert 0.8 < (y != 0).float().mean() < 0.99
        if "the op" in name:
            assert torch.equal(y, recipe.dropout(x, 0.1, seeded(7)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_through_autograd(taken: ModuleType, dtype: torch.dtype) -> None:
    """The gradient is dropped by the same mask, an expanded one too, and autograd keeps the seed only."""
    x = Layout("contiguous", 0).make((5, 700), dtype, DEVICE).requires_grad_()
    seed, kept = seeded(21), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = taken.dropout(x, 0.3, seed)
    assert [t.data_ptr() for t in kept] == [seed.data_ptr()]
    grad = Layout("transposed", 1).make((5, 700), dtype, DEVICE)
    (dx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
    assert_right(dx, grad, 0.3, 21)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert_right(dx, torch.ones_like(x), 0.3, 21)


@quiet
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_gradcheck(taken: ModuleType, p: float) -> None:
    """First and second derivatives are right."""
    x = torch.randn(3, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    op = partial(taken.dropout, p=p, seed=seeded(4))
    assert torch.autograd.gradcheck(op, x)
    assert torch.autograd.gradgradcheck(op, x)


def test_seed_may_not_change_before_the_backward(taken: ModuleType) -> None:
    """A seed that is counted up in place is found out, and no gradient has another mask."""
    x = torch.ones(100, device=DEVICE, requires_grad=True)
    seed = seeded(4)
    y = taken.dropout(x, 0.5, seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@quiet
def test_special_values(taken: ModuleType) -> None:
    """What is dropped is 0, whatever it was; what is kept stays NaN or infinite."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3e38], device=DEVICE)
    x = special.repeat(40)
    for p in (0.0, 0.5, 1.0):
        keep = mask(6, p, 200).to(DEVICE)
        out = taken.dropout(x, p, seeded(6))
        assert torch.equal(out[~keep].view(torch.int32), torch.zeros_like(out[~keep]).view(torch.int32))
        kept = x[keep] / (1 - p or 1)
        torch.testing.assert_close(out[keep], kept, rtol=0, atol=0, equal_nan=True)
    # PyTorch's own keeps NaN where it drops.
    assert torch.nn.functional.dropout(torch.full((64,), torch.nan), 0.5).isnan().all()


def test_ends_of_p(taken: ModuleType) -> None:
    """With p = 0 nothing changes, not a bit, and with a p that rounds to 0 neither."""
    x = Layout("contiguous", 2).make((3000,), torch.float32, DEVICE)
    for p in (0.0, 1e-9, 2**-18):
        assert torch.equal(taken.dropout(x, p, seeded(1)), x)
    few = taken.dropout(torch.ones(2**16, device=DEVICE), 2**-12, seeded(1))
    assert 1 <= (few == 0).sum() <= 50


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_share_of_dropped_elements(taken: ModuleType, p: float) -> None:
    """As many elements are dropped as a binomial distribution allows, and the mean stays that of x."""
    size = 2**17  # so many that a few numbers are equal to the limit, and kept
    out = taken.dropout(torch.ones(size, device=DEVICE), p, seeded(2024))
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
    first, second = torch.empty(2, 3, 256, dtype=torch.int8, device=DEVICE)
    for seed, out in ((7, first), (8, second)):
        recipe.seeded_kernel[(3,)](out, seed, 0.5, BLOCK=256)
    assert torch.equal(first[1:], second[:-1])
    assert not torch.equal(first, second)


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    with Guard() as guard:
        out = taken.dropout(torch.ones(30, device=DEVICE), 0.5, seeded(1))
    assert out.untyped_storage().data_ptr() in {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x, seed = torch.ones(4, device=DEVICE), seeded(1)
    with pytest.raises(TypeError, match=r"^dropout takes a float tensor, not torch\.int32"):
        taken.dropout(x.int(), 0.5, seed)
    for p in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"^dropout takes a p from 0 to 1, not"):
            taken.dropout(x, p, seed)
    for wrong in (seed.int(), seed.expand(2), seed[:0], seed.double()):
        with pytest.raises(TypeError, match=r"^dropout takes a tensor with one int64 as its seed, not"):
            taken.dropout(x, 0.5, wrong)
    with pytest.raises(TypeError, match=r"^dropout takes a seed on the device of x, .* not on meta"):
        taken.dropout(x, 0.5, seed.to("meta"))
    assert taken.dropout(x, 0.0, seed[0]).tolist() == [1] * 4  # no dimension is fine
    assert taken.dropout(x[:0], 0.5, seed).shape == (0,)


def counts(taken: ModuleType) -> dict[str, Counter[str]]:
    """Return how often what is looked for stands in the PTX, for some dtypes; thresholds of 1 and 0 compile too."""
    wanted = r"(?:ld|st)\.(?:global|shared)[.\w]*|mul\.hi"
    options = {"seed_ptr": "i64", "ACC": taken.tl.float32, "BLOCK": 1024}
    ptx(taken._dropout_kernel, "bf16", threshold=1, **options)
    return {
        dtype: Counter(re.findall(wanted, ptx(taken._dropout_kernel, dtype, **options))) for dtype in ("bf16", "fp32")
    }


def spills(taken: ModuleType) -> list[int]:
    """Return the bytes that threads spill, for all dtypes."""
    made = []
    for dtype, acc in (("fp16", "float32"), ("bf16", "float32"), ("fp32", "float32"), ("fp64", "float64")):
        options = {"seed_ptr": "i64", "ACC": getattr(taken.tl, acc), "BLOCK": taken.DROPOUT_BLOCK}
        made.append(stack(taken._dropout_kernel, dtype, **options))
    return made


def test_compiled(gallery: Path, on_h100: Ask) -> None:
    """Full programs move 16 bytes at a time at any size. A call serves eight elements, in bfloat16 of one thread."""
    (found,) = on_h100(gallery / "fusion" / "dropout.py", counts)
    for dtype, accesses in (("bf16", 1), ("fp32", 2)):
        counted = found[dtype]
        assert counted["ld.global.v4.b32"] == counted["st.global.v4.b32"] == accesses
        # With eight elements for each load; float32 has four.
        assert any("shared" in name for name in counted) == (dtype == "fp32")
        # One call for the eight elements of a thread, in both branches; some of its twenty products have factors of 0.
        assert 10 <= counted["mul.hi"] / 2 <= 20


@pytest.mark.thorough
def test_register_spills(gallery: Path, on_h100: Ask) -> None:
    """None, for any dtype."""
    (found,) = on_h100(gallery / "fusion" / "dropout.py", spills)
    assert found == [0] * 4


def test_launcher_is_what_a_call_reaches(taken: ModuleType) -> None:
    """On a GPU, without the triton_op in between."""
    x = Layout("contiguous", 0).make((3, 700), torch.float32, DEVICE)
    assert torch.equal(at_cuda(taken.dropout, x, 0.3, seeded(1)), taken.dropout(x, 0.3, seeded(1)))


def test_seeds(taken: ModuleType) -> None:
    """A seed comes from the generator that is given, or from PyTorch's own, and no two are the same."""
    pair = [taken.dropout_seed(DEVICE, torch.Generator(DEVICE).manual_seed(5)) for _ in range(2)]
    assert torch.equal(*pair)
    before = torch.random.get_rng_state()
    found = {taken.dropout_seed(DEVICE).item() for _ in range(50)}
    torch.random.set_rng_state(before)
    assert len(found) == 50
    assert all(0 <= seed < 2**63 for seed in found)
    assert pair[0].shape == (1,)
    assert pair[0].dtype == torch.int64


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/dropout")
    moved, floor, words, error, share, checksum, *errors = out.splitlines()[:9]
    assert moved.endswith("4.0 5.0 5.0 4.0 in all 18.0")
    assert floor.endswith(": 4.0")
    assert words.endswith("6627e8d5 e169c58d bc57ac4c 9b00dbd8")
    assert re.fullmatch(r"largest relative error \d\.\de-0[78], allowed 2\.5e-07", error)
    assert re.search(r"off by -?[0-4]\.\d standard deviations", share)
    assert checksum.endswith("9b273ffd06820cb8")
    assert [error.partition(":")[0] for error in errors] == ["TypeError", "ValueError", "TypeError"]
    assert out.count("1.0000") == 3


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(taken: ModuleType) -> None:
    """The last of more than 2**31 elements have their own numbers."""
    size, tail = 2**31 + 2**12 + 3, 2**12 + 3
    x = torch.ones(size, dtype=torch.bfloat16, device=DEVICE)
    out = taken.dropout(x, 0.5, seeded(5))
    assert torch.equal(out[:tail].cpu() != 0, mask(5, 0.5, tail))
    assert torch.equal(out[-tail:].cpu() != 0, mask(5, 0.5, tail, first=2**31))
    assert out.mean(dtype=torch.float32).sub(1).abs() < 1e-3


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [35, 4096])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, size: int) -> None:
    """The op passes the whole of opcheck."""
    x = torch.randn(size, dtype=dtype, device=DEVICE, requires_grad=True)
    assert set(torch.library.opcheck(taken.dropout, (x, 0.3, seeded(1))).values()) == {"SUCCESS"}


@gpu
def test_compile_and_graph(taken: ModuleType) -> None:
    """Compiled, the mask is the same; a captured graph reads the seed at each replay."""
    x, seed = torch.randn(1000, 33, device=DEVICE), seeded(1)
    op = partial(taken.dropout, p=0.5)
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


def _expected(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    return expected(x, p, seed.item()).to(x.dtype)


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    ("dropout", lambda normal, M, N: (normal(M, N), 0.3, torch.tensor([5], device=DEVICE)), _expected),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "dropout stored without a mask",
        "tl.where(bits >= threshold, x * scale, 0), mask=mask)",
        "tl.where(bits >= threshold, x * scale, 0))",
    ),
    ("no mask beyond the end", "        mask = offs < N\n        _drop", "        mask = None\n        _drop"),
    (
        "the words of a call in another order",
        "words = tl.join(tl.join(w0, w2), tl.join(w1, w3))",
        "words = tl.join(tl.join(w0, w1), tl.join(w2, w3))",
    ),
    ("one half of each word twice", "tl.join(words & 0xFFFF, words >> 16)", "tl.join(words >> 16, words >> 16)"),
    ("every program counts from 0", "n = first.to(tl.int64) // 8 + tl", "n = first.to(tl.int64) * 0 + tl"),
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
        "kept = tl.maximum(65536 - threshold, 1)",
        "kept = tl.maximum(65536 - threshold // 2, 1)",
    ),
    ("one value too many", "bits >= threshold, x", "bits > threshold, x"),
]
