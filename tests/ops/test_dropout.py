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
from case import Case, Draw, Exact, Refused
from compiled import Ask, ptx
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, shapes

BLOCK = 2048  # of the recipe
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter


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


def expected(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    """Return what is kept, scaled, and zeros."""
    kept = 1 - round(p * 2**16) / 2**16
    keep = mask(seed.item(), p, x.numel()).view(x.shape).to(x.device)
    return torch.where(keep, x / (kept or 1), 0)


def exact(x: torch.Tensor, p: float, seed: torch.Tensor) -> list[Exact]:
    """Return the result."""
    return [Exact(expected(x, p, seed))]


def a_seed(draw: Draw, seed: int | None = 1) -> torch.Tensor:
    """Make a seed, or without a number any."""
    return draw(1, dtype=torch.int64, of=None if seed is None else lambda _: torch.tensor([seed]))


def arguments(
    draw: Draw, shape: tuple[int, ...], p: float, seed: int | None
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Make a tensor, the chance and a seed."""
    return draw(*shape), p, a_seed(draw, seed)


def special(draw: Draw) -> list[tuple[torch.Tensor, float, torch.Tensor]]:
    """Make NaN, infinities, a zero of the other sign and a high number, dropped and kept."""
    high = torch.finfo(draw.dtype).max / 4
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, high], dtype=draw.dtype, device=DEVICE).repeat(40)
    return [(x, p, seeded(6)) for p in (0.0, 0.5, 1.0)]


# A block and several, whole or not, tensors of all ranks, and the ends of the chances and the seeds
SIZES = [((2053,), 0.5, None), ((4096,), 0.25, -7), ((5, 700), 0.3, 2**40 + 3), ((35,), 1.0, 0), ((), 0.9, 1)]
SIZES += [((0,), 0.5, 1), ((2, 1024), 0.0, 2**63 - 1), ((3, 1, 2049), 2**-17, -(2**63)), ((2047,), 0.1, 2**32)]
SIZES += [((4099,), 1 - 2**-16, -1), ((2, 0, 3), 0.5, 1), ((3, 5, 7, 11), 0.5, 3), ((3 * BLOCK + 8,), 0.4, 3)]
SEEDS = st.sampled_from([0, 1, -1, 2**32, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
CHANCES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 2**-17]) | st.floats(0, 0.999)
TYPES = "dropout takes a tensor with one int64 as its seed, not"
CONTRACT = [
    Case(
        "dropout",
        arguments,
        exact,
        sizes=SIZES,
        small=((3, 5), 0.3, 4),
        many=((1031, 2053), 0.3, 5),
        # By the largest scale, float16 overflows.
        fits=lambda size, dtype: dtype != torch.float16 or size[1] in (0, 1) or size[1] < 0.999,
        shapes=st.tuples(shapes(BLOCK, 2 * BLOCK + 1), CHANCES, SEEDS),
        roundings=2,  # of the scale, and of the product
        reference=expected,
        special=special,
        gradients=lambda grad, x, p, seed: exact(grad, p, seed),
        second_gradients=True,
        refused=[
            Refused(
                lambda draw: (draw(4).int(), 0.5, a_seed(draw)),
                TypeError,
                r"dropout takes a float tensor, not torch\.int32",
            ),
            *(
                Refused(lambda draw, p=p: (draw(4), p, a_seed(draw)), ValueError, r"dropout takes a p from 0 to 1, not")
                for p in (-0.1, 1.1, math.nan)
            ),
            Refused(lambda draw: (draw(4), 0.5, a_seed(draw).int()), TypeError, TYPES),
            Refused(lambda draw: (draw(4), 0.5, a_seed(draw).expand(2)), TypeError, TYPES),
            Refused(lambda draw: (draw(4), 0.5, a_seed(draw)[:0]), TypeError, TYPES),
            Refused(lambda draw: (draw(4), 0.5, a_seed(draw).double()), TypeError, TYPES),
            Refused(
                lambda draw: (draw(4), 0.5, a_seed(draw).to("meta")),
                TypeError,
                "dropout takes a seed on the device of x, .* not on meta",
            ),
        ],
    ),
]


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


@pytest.mark.parametrize("block", [128, 512, 4096])
def test_mask_is_of_the_index_alone(taken: ModuleType, block: int) -> None:
    """The number of elements to a program does not change it."""
    x = torch.ones(3 * BLOCK + 8, device=DEVICE)
    assert torch.equal(taken._dropout_launch(x, 0.4, seeded(3), block=block) != 0, mask(3, 0.4, len(x)).to(DEVICE))


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


def test_autograd_keeps_the_seed_alone(taken: ModuleType) -> None:
    """Neither the mask nor x is kept for the backward."""
    x, seed, kept = torch.ones(700, device=DEVICE, requires_grad=True), seeded(21), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        taken.dropout(x, 0.3, seed)
    assert [t.data_ptr() for t in kept] == [seed.data_ptr()]


def test_seed_may_not_change_before_the_backward(taken: ModuleType) -> None:
    """A seed that is counted up in place is found out, and no gradient has another mask."""
    x = torch.ones(100, device=DEVICE, requires_grad=True)
    seed = seeded(4)
    y = taken.dropout(x, 0.5, seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@quiet
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_dropped_is_positive_zero(taken: ModuleType, dtype: torch.dtype) -> None:
    """Whatever it was; PyTorch's own keeps a NaN where it drops."""
    x, p, seed = special(Draw(dtype))[1]
    dropped = taken.dropout(x, p, seed)[~mask(6, p, len(x)).to(DEVICE)]
    assert not dropped.view(torch.uint8).any()
    assert torch.nn.functional.dropout(torch.full((64,), torch.nan), 0.5).isnan().all()


def test_ends_of_p(taken: ModuleType) -> None:
    """With p = 0 nothing changes, not a bit, and with a p that rounds to 0 neither."""
    x = Layout("contiguous", 2).make((3000,), torch.float32, DEVICE)
    for p in (0.0, 1e-9, 2**-18):
        assert torch.equal(taken.dropout(x, p, seeded(1)), x)
    few = taken.dropout(torch.ones(2**16, device=DEVICE), 2**-12, seeded(1))
    assert 1 <= (few == 0).sum() <= 50
    assert taken.dropout(x[:4], 0.0, seeded(1)[0]).tolist() == x[:4].tolist()  # a seed without a dimension is fine


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


def counts(taken: ModuleType) -> dict[str, Counter[str]]:
    """Return how often what is looked for stands in the PTX, for some dtypes; thresholds of 1 and 0 compile too."""
    wanted = r"(?:ld|st)\.(?:global|shared)[.\w]*|mul\.hi"
    options = {"seed_ptr": "i64", "ACC": taken.tl.float32, "BLOCK": 1024}
    ptx(taken._dropout_kernel, "bf16", threshold=1, **options)
    return {
        dtype: Counter(re.findall(wanted, ptx(taken._dropout_kernel, dtype, **options))) for dtype in ("bf16", "fp32")
    }


def test_compiled(gallery: Path, on_h100: Ask) -> None:
    """Full programs move 16 bytes at a time at any size. A call serves eight elements, in bfloat16 of one thread."""
    (results,) = on_h100(gallery / "fusion" / "dropout.py", counts)
    for dtype, accesses in (("bf16", 1), ("fp32", 2)):
        counted = results[dtype]
        assert counted["ld.global.v4.b32"] == counted["st.global.v4.b32"] == accesses
        # With eight elements for each load; float32 has four.
        assert any("shared" in name for name in counted) == (dtype == "fp32")
        # One call for the eight elements of a thread, in both branches; some of its twenty products have factors of 0.
        assert 10 <= counted["mul.hi"] / 2 <= 20


def test_seeds(taken: ModuleType) -> None:
    """A seed comes from the generator that is given, or from PyTorch's own, and no two are the same."""
    pair = [taken.dropout_seed(DEVICE, torch.Generator(DEVICE).manual_seed(5)) for _ in range(2)]
    assert torch.equal(*pair)
    before = torch.random.get_rng_state()
    seeds = {taken.dropout_seed(DEVICE).item() for _ in range(50)}
    torch.random.set_rng_state(before)
    assert len(seeds) == 50
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert pair[0].shape == (1,)
    assert pair[0].dtype == torch.int64


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(taken: ModuleType) -> None:
    """The last of more than 2**31 elements have their own numbers."""
    size, tail = 2**31 + 2**12 + 3, 2**12 + 3
    x = torch.ones(size, dtype=torch.bfloat16, device=DEVICE)
    out = taken.dropout(x, 0.5, seeded(5))
    assert torch.equal(out[:tail].cpu() != 0, mask(5, 0.5, tail))
    assert torch.equal(out[-tail:].cpu() != 0, mask(5, 0.5, tail, first=2**31))
    assert out.mean(dtype=torch.float32).sub(1).abs() < 1e-3


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
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
