"""The recipe The stages of the compiler: its kernels, what it reads in their texts, and its answers."""

import math
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import TRITON
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import Layout
from tolerance import assert_within

# Tiles of the sum, and warps: a row in one warp, in a part of one, several rows in a thread.
TILES = [(8, 64, 4), (8, 32, 4), (4, 128, 4), (16, 64, 4), (8, 64, 8), (8, 64, 1), (32, 16, 4), (8, 64, 2), (8, 32, 2)]
# Multiply-adds of one instruction, by its name, and how many warps do it.
MATRIX = {
    "A100": ("HMMA.16816.F32", 16 * 8 * 16, 1),
    "H100": ("HGMMA.64x64x16.F32", 64 * 64 * 16, 4),
    "B200": ("UTCHMMA", 64 * 64 * 16, 4),
    "MI300": ("v_mfma_f32_32x32x8_f16", 32 * 32 * 8, 1),
}

Texts = dict[Any, dict[str, Any]]


# The third exercise: the product without descriptors.
POINTERS = """
import triton
import triton.language as tl

@triton.jit
def pointer_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    offs_m = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    offs_n = tl.program_id(axis=1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    offs_k = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        mask = offs_k < K - k
        a = tl.load(a_ptr + offs_m * K + k + offs_k[None, :], mask=(offs_m < M) & mask[None, :], other=0.0)
        b = tl.load(b_ptr + (k + offs_k[:, None]) * N + offs_n, mask=mask[:, None] & (offs_n < N), other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + offs_m * N + offs_n, acc.to(tl.float16), mask=(offs_m < M) & (offs_n < N))
"""


@pytest.fixture(scope="module")
def made(
    recipe: ModuleType, load_recipe: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> Texts:
    """Return the texts of all that these tests look at; they are compiled in one process."""
    h100 = {"target": recipe.GPUS["H100"]}
    jobs: dict[Any, dict[str, Any]] = {}
    for rows, columns, warps in TILES:
        tile = {"constants": {"BLOCK_M": rows, "BLOCK_N": columns}, "num_warps": warps, "sass": False}
        jobs[rows, columns, warps] = recipe.SUM | h100 | tile
    for gpu, target in recipe.GPUS.items():
        jobs["sum", gpu] = recipe.SUM | {"target": target}
        jobs["dot", gpu] = recipe.DOT | {"target": target, "num_stages": 3}
    jobs["float32"] = recipe.DOT | h100 | {"dtype": "*fp32"}
    jobs["pointers"] = recipe.DOT | h100 | {"kernel": "pointer_kernel"}
    answer = tmp_path_factory.mktemp("answer") / "pointers.py"
    answer.write_text(POINTERS)
    kernels = recipe.row_sum_kernel, recipe.matmul_kernel, load_recipe(str(answer)).pointer_kernel
    return recipe.compile_all(jobs, *kernels)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@given(M=st.integers(1, 40), N=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_row_sum(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, seed: int) -> None:
    """Rows of any number and length are added up, and nothing else is read or stored."""
    x = Layout("contiguous", seed).make((M, N), dtype, recipe.DEVICE)
    out = guarded(recipe.row_sum, x)
    assert_within(out, x.double().sum(1), x.double().abs().sum(1), roundings=N)


@given(M=st.integers(1, 100), N=st.integers(1, 12), K=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_product_of_accumulator(recipe: ModuleType, M: int, N: int, K: int, seed: int) -> None:
    """Matrices of any size that descriptors take are multiplied, with one rounding to float16."""
    shapes = (M, 8 * K), (8 * K, 8 * N)
    a, b = (Layout("contiguous", seed + k).make(shape, torch.float16, recipe.DEVICE) for k, shape in enumerate(shapes))
    out = guarded(recipe.matmul, a, b)
    a, b = a.double(), b.double()
    assert_within(out, a @ b, a.abs() @ b.abs(), roundings=8 * K)


def test_find(recipe: ModuleType) -> None:
    """Lines are found by a pattern, and have one blank where they had more."""
    assert recipe.find("  a   b\nc\n\ta\td", "a") == ["a b", "a d"]
    assert recipe.find("a", "b") == []


def test_texts(recipe: ModuleType, made: Texts) -> None:
    """Each compilation has the texts of its GPU's stages, without places in a source, and its figures."""
    for gpu in recipe.GPUS:
        texts = made["sum", gpu]
        last = {"amdgcn"} if gpu == "MI300" else {"ptx", "sass"}
        assert texts.keys() >= {"ttir", "ttgir", "llir", "shared", "registers", *last}
        assert not re.search(r"\bloc\(|#loc", texts["ttir"] + texts["ttgir"])
        assert 4 <= texts["registers"] <= 255
    assert "sass" not in made[8, 64, 4]


def test_verdict(recipe: ModuleType, made: Texts) -> None:
    """Each stage has one line that says what it decides."""
    for _, name, _, pattern in recipe.VERDICT:
        texts = made["sum", "MI300" if name == "amdgcn" else "H100"]
        assert len(recipe.find(texts[name], pattern)) == 1, name


def test_what_is_refused_is_said(recipe: ModuleType) -> None:
    """An error of the compiler is not lost in the child process."""
    job = recipe.SUM | {"target": recipe.GPUS["H100"], "constants": {"BLOCK_M": 8, "BLOCK_N": 60}}
    with pytest.raises(AssertionError, match="must be a power of 2"):
        recipe.compile_all({"sum": job}, recipe.row_sum_kernel)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_layout_decides_shuffles_and_width(recipe: ModuleType, made: Texts, tile: tuple[int, int, int]) -> None:
    """What the page reads in one layout holds in others, whose rows lie in one warp."""
    rows, columns, warps = tile
    (_, held), (_, lanes), (warps_down, across) = recipe.blocked(made[tile])
    assert (across, warps_down) == (1, warps)
    a_thread = rows * columns // (32 * warps)
    rows_of_thread = a_thread * lanes // columns
    shuffles = len(recipe.find(made[tile]["llir"], "= .*shfl"))
    assert shuffles == rows_of_thread * math.log2(lanes)
    loads = re.findall(r"ld\.global(?:\.v(\d))?\.b32", made[tile]["ptx"])
    assert {int(width or 1) for width in loads} == {held}
    assert len(loads) * held == a_thread


def test_threads_of_a_load(recipe: ModuleType, made: Texts) -> None:
    """They are those that the numbers of `#blocked` mean."""
    threads, steps = recipe.threads_of(made["sum", "H100"]["ttgir"], "H100", "tt.load", [8, 64])
    row, column = torch.meshgrid(torch.arange(8), torch.arange(64), indexing="ij")
    assert 2 ** len(steps) == 32
    assert torch.equal(threads, 16 * row + column // 4)
    threads, steps = recipe.threads_of(made["sum", "MI300"]["ttgir"], "MI300", "tt.load", [8, 64])
    assert 2 ** len(steps) == 64
    assert torch.equal(threads, 32 * row + column // 2)


def test_threads_of_a_dot(recipe: ModuleType, made: Texts) -> None:
    """They are those that NVIDIA's documentation of the matrix instructions draws."""
    row, column = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    lane = row % 8 * 4 + column % 8 // 2
    expected = {
        "A100": lane + 32 * (column // 8 % 2 + 2 * (row // 16 % 2)),  # mma.m16n8k16, warps 2 by 2
        "H100": lane + 32 * (row // 16),  # wgmma.m64nNk16
    }
    for gpu, threads in expected.items():
        actual, steps = recipe.threads_of(made["dot", gpu]["ttgir"], gpu, "arith.truncf", [64, 64])
        assert 2 ** len(steps) == 32
        assert torch.equal(actual, threads), gpu


def test_matrix_instructions(recipe: ModuleType, made: Texts) -> None:
    """An instruction does what its name says, so that the dots of a text are done by those in the code.

    From Triton 3.8 on there are four dots for an A100, each of 16 columns of `a`, to load those of the next meanwhile.
    """
    for gpu, (name, work, warps) in MATRIX.items():
        facts = recipe.anatomy(made["dot", gpu])
        times, instruction = facts["matrix instructions"].split()
        assert instruction == name
        columns = 16 if gpu == "A100" and TRITON >= (3, 8) else 64
        assert int(times) * work * (4 // warps) == facts["times"] * 64 * 64 * columns
        assert facts["times"] == {"A100": 64 // columns, "H100": 1, "B200": 2, "MI300": 3}[gpu]


def test_what_stands_behind_a_loop(made: Texts) -> None:
    """The sum of a B200 is fetched there; an MI300 has two more dots there, and stores into shared memory before."""
    loop, _, behind = made["dot", "B200"]["ttgir"].partition("scf.yield")
    assert ("tmem_load %" in loop, behind.count("tmem_load %")) == (False, 1)
    loop, _, behind = made["dot", "MI300"]["ttgir"].partition("scf.yield")
    assert ("ttg.local_store %" in loop, behind.count("tt.dot %")) == (True, 2)


def test_one_pipeline(recipe: ModuleType) -> None:
    """Buffers and copies are counted in a text; a tile that is not of a buffer has no count."""
    copy = "ttg.async_copy_global_to_local %1\n"
    text = f"!ttg.memdesc<5x64x64xf16, #shared>\n{copy * 3}scf.for\nttng.async_tma_copy_global_to_local\n{copy}"
    assert list(recipe.pipeline({"ttgir": text, "shared": 7}).values()) == [5, 7, 3, 2]
    assert recipe.pipeline({"ttgir": text.replace("5x", ""), "shared": 7})["buffers"] == 1


def test_answers(recipe: ModuleType, made: Texts) -> None:
    """The exercises come out as the page says."""
    half, two_warps = made[8, 32, 4], made[8, 32, 2]
    assert "ld.global.v2.b32" in half["ptx"]
    assert len(recipe.find(half["llir"], "= .*shfl")) == 4
    assert "ld.global.v4.b32" in two_warps["ptx"]
    assert recipe.anatomy(made["float32"])["matrix instructions"].endswith(" HGMMA.64x64x8.F32.TF32")
    assert recipe.anatomy(made["pointers"])["loads"].endswith(" LDGSTS.E.BYPASS.128")


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("columns without a mask", "mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]", "mask = (offs_m < M)[:, None]"),
    ("padded with ones", "tl.load(x_ptrs, mask=mask, other=0.0)", "tl.load(x_ptrs, mask=mask, other=1.0)"),
    ("stored without a mask", "tl.sum(x, axis=1), mask=offs_m < M)", "tl.sum(x, axis=1))"),
    ("no accumulator", "acc = tl.dot(a, b, acc)", "acc = tl.dot(a, b)"),
    ("a stride of the wrong matrix", "a_ptr, [M, K], [K, 1]", "a_ptr, [M, K], [N, 1]"),
]
