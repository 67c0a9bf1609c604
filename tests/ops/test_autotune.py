"""The op of the recipe Autotuning, with every config of its kernel."""

# ruff: noqa: N806 - a matrix is called A, and its extents M and N, as in the recipe

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, sizes

CONFIGS = 14  # of the recipe
ROWS = st.sampled_from([0, 1, 2, 3, 9, 33])


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module, with one config for its op: on a GPU it would tune for minutes otherwise."""
    module = load_recipe("first_steps/autotune.py")
    module.mv_kernel.configs = module.CONFIGS[:1]
    return module


def with_config(recipe: ModuleType, index: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the op as it is with one config, chosen here and not by the tuner."""
    config = recipe.CONFIGS[index]

    def op(A: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(A.shape[0], dtype=A.dtype, device=A.device)
        if out.numel() > 0:
            recipe.launch(recipe.mv_kernel.fn, A, x, out, **config.all_kwargs())
        return out

    return op


def assert_product(recipe: ModuleType, A: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """Assert that a product is as good as its accumulator and its dtype."""
    assert out.dtype == A.dtype
    assert out.shape == A.shape[:1]
    assert out.device.type == recipe.DEVICE.type
    A, x = A.double(), x.double()
    expected, magnitudes = A @ x, A.abs() @ x.abs()
    # A product, and an addition for each step of the loop and of the tree, each off by half a unit of the sum of
    # magnitudes at most, with the smallest block of any config. (Twice that many: the reference has errors of its own.)
    roundings = 2 * (math.ceil(A.shape[1] / 16) + 12 + 2)
    accumulator = 2**-53 if out.dtype == torch.float64 else 2**-24
    # The last rounding, to the dtype; the interpreter cuts where a GPU rounds, so a whole unit. A result that is
    # subnormal in the dtype is off by a unit of those.
    last = torch.finfo(out.dtype).eps
    allowed = roundings * accumulator * magnitudes + last * expected.abs() + torch.finfo(out.dtype).tiny * last
    error = (out.double() - expected).abs()
    assert (error <= allowed).all(), f"off by {(error / allowed).max().item():.1f} times the tolerance"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(M=ROWS, N=sizes(512, 1100), of_A=layouts(), of_x=layouts())
def test_floats(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, of_A: Layout, of_x: Layout) -> None:
    """Floats come back in their own dtype, accumulated in float32 or better."""
    A, x = of_A.make((M, N), dtype, recipe.DEVICE), of_x.make((N,), dtype, recipe.DEVICE)
    assert_product(recipe, A, x, guarded(recipe.mv, A, x))


@pytest.mark.thorough
@pytest.mark.parametrize("index", range(CONFIGS))
def test_every_config_float32(recipe: ModuleType, index: int, record_property: Callable[[str, object], None]) -> None:
    """Each config is right, whichever of them wins: rows and columns that fill its tile, and that don't."""
    record_property("config", f"mv_kernel {index}")
    tile = recipe.CONFIGS[index].kwargs
    rows = st.sampled_from([1, 2, tile["BLOCK_M"], tile["BLOCK_M"] + 1, 2 * tile["BLOCK_M"] + 1])

    @settings(max_examples=10)
    @given(M=rows, N=sizes(tile["BLOCK_N"], 2 * tile["BLOCK_N"] + 1), of_A=layouts(), of_x=layouts())
    def check(M: int, N: int, of_A: Layout, of_x: Layout) -> None:
        A = of_A.make((M, N), torch.float32, recipe.DEVICE)
        x = of_x.make((N,), torch.float32, recipe.DEVICE)
        assert_product(recipe, A, x, guarded(with_config(recipe, index), A, x))

    check()


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_tuned(recipe: ModuleType, layout: str) -> None:
    """A tuner that chooses among all configs leaves the right result, when it tunes and when it has tuned."""
    tuned = recipe.triton.autotune(
        configs=recipe.CONFIGS, key=recipe.KEY, prune_configs_by=recipe.DROP, do_bench=recipe.bench
    )(recipe.mv_kernel.fn)
    A = Layout(layout, 0).make((70, 520), torch.float32, recipe.DEVICE)
    x = Layout("strided", 1).make((520,), torch.float32, recipe.DEVICE)
    for _ in range(2):
        out = torch.full((70,), torch.nan, device=recipe.DEVICE)
        recipe.launch(tuned, A, x, out)
        assert_product(recipe, A, x, out)
    assert len(tuned.cache) == 1
    assert 1 < len(tuned.configs_timings) < CONFIGS
    assert tuned.best_config in tuned.configs_timings


def test_all_configs_are_tested(recipe: ModuleType) -> None:
    """The number above is that of the recipe; no config stands there twice."""
    assert len(set(recipe.CONFIGS)) == len(recipe.CONFIGS) == CONFIGS


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_accumulator(recipe: ModuleType, dtype: torch.dtype) -> None:
    """In half precision 2048 + 1 is 2048; with an accumulator like that, the ones in the middle would be lost."""
    for index, config in enumerate(recipe.CONFIGS):
        block = config.kwargs["BLOCK_N"]
        A = torch.tensor([2048, 1, -2048], dtype=dtype, device=recipe.DEVICE).repeat_interleave(block).expand(2, -1)
        ones = torch.ones(3 * block, dtype=dtype, device=recipe.DEVICE)
        assert with_config(recipe, index)(A, ones).tolist() == [block] * 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_special_values_stay_in_their_row(recipe: ModuleType, dtype: torch.dtype) -> None:
    """NaN and infinities of the matrix reach their own row's product and no other."""
    A = torch.ones(5, 37, dtype=dtype, device=recipe.DEVICE)
    A[1, 36], A[2, 0], A[3, 5], A[3, 6] = torch.nan, torch.inf, torch.inf, -torch.inf
    x = torch.ones(37, dtype=dtype, device=recipe.DEVICE)
    for index in range(CONFIGS):
        torch.testing.assert_close(with_config(recipe, index)(A, x), A.sum(1), rtol=0, atol=0, equal_nan=True)


@given(M=st.integers(0, 70), N=st.integers(0, 5000), transposed=st.booleans())
def test_prune_keeps_what_fits(recipe: ModuleType, M: int, N: int, transposed: bool) -> None:
    """Tiles that are too large or lie across are dropped, but never all configs."""
    kept = recipe.prune(recipe.CONFIGS, {"like_m": M, "like_n": N, "row_major": int(not transposed)}, grid=None)
    assert kept
    if kept != recipe.CONFIGS[:1]:
        for config in kept:
            tile = config.kwargs
            assert tile["BLOCK_M"] <= M
            assert tile["BLOCK_N"] <= N
            assert (tile["BLOCK_M"] > tile["BLOCK_N"]) == transposed


@pytest.mark.needs_gpu_memory(12)
def test_beyond_int32(recipe: ModuleType) -> None:
    """A matrix may have more than 2**31 elements: in many rows, which each config finds, or in long ones."""
    for shape, indices in (((2**17 + 1, 2**14), range(CONFIGS)), ((3, 2**30), (0, 8))):
        A = torch.ones(shape, dtype=torch.float16, device=recipe.DEVICE)
        x = torch.zeros(shape[1], dtype=torch.float16, device=recipe.DEVICE)
        A[-1, -1], x[-1] = 7, 1
        for index in indices:
            assert torch.equal(with_config(recipe, index)(A, x), A[:, -1])


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    A, x = torch.ones(2, 3, device=recipe.DEVICE), torch.ones(3, device=recipe.DEVICE)
    for bad_A, bad_x in ((A[0], x), (A[None], x), (A, x[:2]), (A, A), (A.T, x)):
        with pytest.raises(ValueError, match="shapes"):
            recipe.mv(bad_A, bad_x)
    with pytest.raises(TypeError, match=r"not torch\.float32, torch\.float64"):
        recipe.mv(A, x.double())
    with pytest.raises(TypeError, match=r"not torch\.int32"):
        recipe.mv(A.int(), x.int())
    with pytest.raises(ValueError, match="no backward"):
        recipe.mv(A, x.clone().requires_grad_())
    with torch.no_grad():
        recipe.mv(A.clone().requires_grad_(), x)


def test_stages(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage of a loop with a product has buffers of its own; a loop without one ignores the launch option."""
    recipe.stages()
    _, *lines = capsys.readouterr().out.splitlines()
    rows = {line[:32].strip(): [int(number.replace(",", "")) for number in line[32:].split()] for line in lines}
    products = [rows[f"tl.dot, num_stages={n}"] for n in (1, 2, 3, 4)]
    tiles = 2 * 128 * 128 * 2  # bytes
    assert [shared // tiles for shared, _ in products] == [1, 2, 3, 4]
    copies = [row[1] for row in products]
    assert copies[0] == 0
    assert copies == sorted(set(copies))
    assert rows["sum, num_stages=4, STAGES=1"] == rows["sum, num_stages=1, STAGES=1"]
    assert rows["sum, num_stages=1, STAGES=1"][1] == 0 < rows["sum, num_stages=1, STAGES=4"][1]
    assert rows["sum, num_stages=1, STAGES=4"][0] >= 3 * 1024 * 4


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("mv", lambda normal, M, N: (normal(M, N), normal(N))),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("rows stored without a mask", "tl.sum(acc, axis=1), mask=mask_m)", "tl.sum(acc, axis=1))"),
    ("a ragged tail called even", 'args["N"] % args["BLOCK_N"] == 0', 'args["N"] % 2 == 0'),
    ("a vector's stride left out", "x_ptr + offs_n * stride_xn", "x_ptr + offs_n"),
    ("half an accumulator, tuned", "torch.float16: tl.float32,", "torch.float16: tl.float16,"),
    ("a grid from a constant", 'args["BLOCK_M"]),)](', "4),)]("),
]
