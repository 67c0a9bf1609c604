"""The op of the recipe Flash attention, forward."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attentions import SPECIAL, arguments, exact, refused, shapes
from case import Case, assert_close, check, in_float64
from compiled import Ask, compiled, graphs, ptx
from inputs import DEVICE, Layout

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
RECIPE = "attention/flash_attention_forward.py"


# Around the edges of tiles, full or causal; heads alone and in groups; no keys, no queries; scales; blocks after blocks
SIZES = [(2, 2, 1, 70, 90, 40, True), (1, 4, 2, 129, 65, 16), (1, 3, 3, 127, 129, 64, True), (1, 1, 1, 1, 200, 100)]
SIZES += [(1, 2, 1, 33, 0, 16, True), (1, 2, 1, 70, 70, 32, False, -0.3)]
SIZES += SPECIAL
SIZES += [(1, 2, 1, 70, 70, 32, True, scale) for scale in (0.0, 1.0, 2.5)]
SIZES += [(2, 0, 2, 9, 9, 16), (0, 2, 1, 9, 9, 16), (1, 2, 1, 0, 33, 16)]
SIZES += [(1, 1, 1, 1, 1, 1, True), (1, 2, 2, 64, 64, 8)]
SIZES += [(1, 2, 1, LQ, LK, 256, causal) for LQ, LK in ((129, 127), (200, 64)) for causal in (False, True)]
SIZES += [(1, 2, 1, 300, 400, D, True) for D in (16, 32, 64, 80, 96, 128, 256)]
CONTRACT = [
    Case(
        "flash_attention_forward",
        arguments,
        exact,
        autocast="asked",
        sizes=SIZES,
        small=(2, 4, 2, 40, 50, 16, True),
        in_layouts=(2, 2, 1, 37, 20, 20, True),
        many=(16, 24, 8, 263, 131, 24, True),
        shapes=shapes([16, 32, 40, 64, 80, 96, 128]),
        refused=refused("flash_attention_forward", 0, 257),
    ),
]


def assert_right(out: torch.Tensor, *inputs: Any) -> None:
    """Assert that a result of such arguments is right."""
    (right,) = exact(*in_float64(inputs))
    assert out.shape == right.value.shape
    assert_close(CONTRACT[0], out.dtype, out, right)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 3.3e38), (torch.float64, 1.7e308)], ids=str)
def test_equal_scores(taken: ModuleType, dtype: torch.dtype, most: float) -> None:
    """The mean of v, whatever the score: also where it is rounded by more than exp2 can take."""
    for score in (-most, -1e10, 1e10, most):
        q, k, v = (Layout("contiguous", seed).make((1, 1, 70, 32), dtype, DEVICE) for seed in range(3))
        q[:], k[:] = 0, 0
        q[..., 0], k[..., 0] = 1, score
        out = taken.flash_attention_forward(q, k, v, scale=1.0)
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(v), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around the keys stays there."""
    around = torch.full((2, 100, 3, 96), torch.nan, dtype=dtype, device=DEVICE)
    around[:, 5:75, 1:, 8:88] = Layout("contiguous", 0).make((2, 70, 2, 80), dtype, DEVICE)
    x = around[:, 5:75, 1:, 8:88].transpose(1, 2)
    for causal in (False, True):
        check(CONTRACT[0], taken, dtype, (x, x, x, causal, None))


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The page's kernel is right, with and without a mask, and refuses what it does not take."""
    q, k, v = (Layout("contiguous", seed).make((1, 2, 200, 64), torch.float16, DEVICE) for seed in range(3))
    for causal in (False, True):
        assert_right(recipe.attention(q, k, v, causal), q, k, v, causal)
    for wrong in (q.float(), q[..., ::2], q.mT):
        with pytest.raises(AssertionError):
            recipe.attention(wrong, wrong, wrong)


def test_one_query_as_the_page_says(recipe: ModuleType) -> None:
    """Its output is right, unless all of the first block is hidden."""
    assert recipe.one_query(1.0, 2.0, 1.0, 3.0) == 5
    assert recipe.one_query(1.0, 2.0, -math.inf, -math.inf) == pytest.approx(16 / 3)
    assert math.isnan(recipe.one_query(-math.inf, -math.inf, 1.0, 3.0))


def test_exercises_of_the_page(recipe: ModuleType) -> None:
    """Their checks tell right from wrong."""
    for check_answer, answer in (
        (recipe.check_start, recipe.start_answer),
        (recipe.check_merge, recipe.merge_answer),
    ):
        assert check_answer(answer) == "right"
        assert check_answer(lambda *given: given[0]) == "wrong"
        assert check_answer(lambda *given: None) == "not solved yet"


def at_launch(taken: ModuleType, dtype: str, D: int, causal: bool) -> dict[str, object]:
    """Return what the launcher passes on for lengths and strides that 16 divides."""
    import triton.language as tl

    BLOCK_D = max(16, 1 << (D - 1).bit_length())
    BLOCK_M, BLOCK_N, num_warps, _ = taken.FLASH_ATTENTION_FORWARD_TILES[BLOCK_D]
    strides = [f"stride_{tensor}{along}" for tensor in "qkvo" for along in "bhl"]
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
    results = {}
    for D in (64, 128, 256):
        kernel = taken._flash_attention_forward_kernel
        text = compiled(kernel, **at_launch(taken, "fp16", D, True)).asm["ptx"]
        widths = set(re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", text))
        results[D] = widths, set(re.findall(r"(wgmma|mma)\.\S*?m\d+", text)), "ex2.approx" in text
    return results


def exponentials(recipe: ModuleType) -> set[str]:
    """Return which instructions the exponentials of the page's kernel become."""
    known = {"D": 64, "CAUSAL": True, "BLOCK_M": 128, "BLOCK_N": 64, "scale": 0.125}
    return set(re.findall(r"ex2\.[\w.]+", ptx(recipe.attention_kernel, "fp16", num_warps=8, **known)))


def test_exponentials(gallery: Path, on_h100: Ask) -> None:
    """Each is one instruction, as the page says."""
    (results,) = on_h100(gallery / RECIPE, exponentials)
    assert results == {"ex2.approx.ftz.f32"}


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Copies of 16 bytes, Hopper's instruction in both products, and one instruction for an exponential."""
    (results,) = on_h100(gallery / RECIPE, codes)
    assert results == dict.fromkeys((64, 128, 256), ({"0x10"}, {"wgmma"}, True))


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
    assert_right(out[:, -1:], q[:, -1:], k, k)
    torch.testing.assert_close(out[0, 0, 0], k[0, 0].float().mean(0).half(), rtol=0, atol=1e-3)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
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
    ("padding of a head is read", "inside = offs_d < D  # (1, BLOCK_D)\n", "inside = offs_d < D + 8\n"),
]
