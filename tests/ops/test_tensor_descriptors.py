"""The recipe Tensor descriptors: its three kernels, and what it reads in compiled code."""

import re
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pandas as pd
import pytest
import torch
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, values
from tolerance import assert_within

SMALL = (64, 64, 32)  # a tile
SIZE = st.sampled_from([1, 8, 64, 65, 128, 129]) | st.integers(1, 200)


@pytest.fixture(scope="module")
def made(recipe: ModuleType) -> pd.DataFrame:
    """Return what becomes of each kernel for tiles and GPUs; all are compiled in one process."""
    names = [kernel.fn.__name__ for kernel in recipe.KERNELS]
    jobs = {
        (name, gpu, tile): recipe.job(name, tile, gpu)
        for name in names
        for gpu in (80, 90, 100)
        for tile in ((64, 128, 64), recipe.TILE)
        if (gpu, name) != (80, "device_kernel")
    }
    table = recipe.compile_all(jobs, *recipe.KERNELS)
    table.index = pd.MultiIndex.from_tuples(jobs)
    return table


def matrices(M: int, N: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two float16 matrices."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (values(shape, torch.float16, generator).to(DEVICE) for shape in ((M, K), (K, N)))
    return a, b


def assert_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that a product was added up in float32."""
    a, b = a.double(), b.double()
    assert_within(out, a @ b, a.abs() @ b.abs(), roundings=a.shape[1])


@settings(max_examples=12)
@given(M=SIZE, N=SIZE, K=SIZE, seed=st.integers(0, 2**31))
def test_accumulator_with_pointers(recipe: ModuleType, M: int, N: int, K: int, seed: int) -> None:
    """Matrices of any size are multiplied, and nothing else is read or stored."""
    a, b = matrices(M, N, K, seed)
    for tile in (SMALL, recipe.TILE):
        assert_product(guarded(partial(recipe.by_pointers, tile=tile), a, b), a, b)


@settings(max_examples=12)
@given(M=SIZE, N=st.integers(1, 25), K=st.integers(1, 25), seed=st.integers(0, 2**31))
def test_accumulator_with_descriptors(recipe: ModuleType, M: int, N: int, K: int, seed: int) -> None:
    """Whoever makes the descriptors, the product is right, and its bits are the same."""
    a, b = matrices(M, 8 * N, 8 * K, seed)
    for tile in (SMALL, recipe.TILE):
        out = guarded(partial(recipe.by_host, tile=tile), a, b)
        assert_product(out, a, b)
        assert torch.equal(guarded(partial(recipe.by_kernel, tile=tile), a, b), out)


def test_refusal(recipe: ModuleType) -> None:
    """It is the address, the step between rows, or the step between elements."""
    x = torch.ones(24, 24, device=DEVICE).half()
    assert recipe.refusal(x) == recipe.refusal(x[:, 8:23]) == recipe.refusal(x[::2]) == "taken"
    assert "base" in recipe.refusal(x[:, 4:])
    assert "strides" in recipe.refusal(x[:, :20].contiguous())
    assert "contiguous" in recipe.refusal(x[:, ::2])
    assert recipe.refusal(x.float()[:, :20].contiguous()) == "taken"  # 80 bytes


def test_answer(recipe: ModuleType) -> None:
    """A head of one batch is a matrix that the engine takes."""
    x = torch.ones(2, 5, 3, 128, device=DEVICE).half()
    head = x[1, :, 2]
    assert (head.shape, head.stride()) == ((5, 128), (3 * 128, 1))
    assert recipe.refusal(head) == "taken"


def test_what_is_gone(recipe: ModuleType, made: pd.DataFrame) -> None:
    """What the page reads in one tile holds in another, and on a B200 as well."""
    for gpu in (90, 100):
        for tile in ((64, 128, 64), recipe.TILE):
            pointers, host, kernel = (made.loc[k.fn.__name__, gpu, tile] for k in recipe.KERNELS)
            for row in ("registers", "instructions", "integer"):
                assert host[row] < pointers[row]
            assert (pointers["UTMALDG"], host["LDGSTS"], kernel["LDGSTS"]) == (0, 0, 0)
            assert min(pointers["LDGSTS"], host["UTMALDG"], kernel["UTMALDG"]) > 0
            assert pointers["HGMMA"] == host["HGMMA"] == kernel["HGMMA"]
            assert (host["HGMMA"] > 0) == (gpu == 90)
            assert host["scratch"] == 0 < kernel["scratch"] == 3 * 128
            assert (pointers["spilled"], host["spilled"], kernel["spilled"]) == (0, 0, 0)


def test_without_the_engine(recipe: ModuleType, made: pd.DataFrame) -> None:
    """On an A100 descriptors become pointers without asynchronous copies."""
    for tile in ((64, 128, 64), recipe.TILE):
        pointers, host = (made.loc[name, 80, tile] for name in ("pointer_kernel", "host_kernel"))
        assert pointers["UTMALDG"] == host["UTMALDG"] == 0
        assert pointers["LDGSTS"] > 0 == host["LDGSTS"]


def test_what_fails_is_said(recipe: ModuleType) -> None:
    """An error of the compiler is in the table, and one of the child is not lost."""
    jobs = {"fails": recipe.job("host_kernel", num_warps=4, specialize=True)}
    table = recipe.compile_all(jobs, recipe.host_kernel)
    if "failed" in table:  # as in Triton 3.6 and 3.7
        assert recipe.outcome({"specialised": float("nan"), "registers": float("nan")}) == "the compiler fails"
    with pytest.raises(AssertionError, match="KeyError: 'host_kernel'"):
        recipe.compile_all(jobs, recipe.pointer_kernel)


def test_outcome(recipe: ModuleType) -> None:
    """A word for each thing that may come of asking."""
    assert recipe.outcome({"specialised": 1, "registers": 168, "warps": 12}) == "done: 12 warps"
    assert recipe.outcome({"specialised": 0, "registers": 90, "warps": 8}) == "ignored"


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("matmul/tensor_descriptors")
    assert re.search(r"HGMMA +4 +4 +4\n", out)
    assert re.search(r"sm_90 +128x128 +the compiler fails +ignored\n", out)
    assert re.search(r" 64x128 +done: 12 warps +ignored\n", out)
    assert len(re.findall(r"done: 8 warps +done: 12 warps\n", out)) == 3


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("columns of the sum without a mask", "mask_k = offs_k < K - k", "mask_k = offs_k < K"),
    ("stored without a mask", "tl.store(c_ptrs, c, mask=(offs_m < M) & (offs_n < N))", "tl.store(c_ptrs, c)"),
    (
        "a step of the wrong matrix",
        "b_ptrs += BLOCK_K * tl.cast(N, tl.int64)",
        "b_ptrs += BLOCK_K * tl.cast(K, tl.int64)",
    ),
    ("no accumulator with pointers", "acc = tl.dot(a, b, acc)\n        a_ptrs", "acc = tl.dot(a, b)\n        a_ptrs"),
    ("no accumulator", "acc = tl.dot(a, b, acc)\n    c_desc", "acc = tl.dot(a, b)\n    c_desc"),
    ("a stride of the wrong matrix", "b_ptr, shape=[K, N], strides=[N, 1]", "b_ptr, shape=[K, N], strides=[K, 1]"),
    ("tiles of other columns", "b = b_desc.load([k, off_n])", "b = b_desc.load([k, off_m])"),
]
