"""The recipe CUDA graphs: its op, and what it says about captures; most of that needs a GPU."""

import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import Layout, layouts, shapes

BLOCK = 1024  # of the recipe
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
WEIGHTS = st.sampled_from([0.0, 0.1, 0.4999, 0.5, 0.75, 1.0, -0.5, 1.5])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")


def assert_lerp(recipe: ModuleType, x: torch.Tensor, end: torch.Tensor, weight: float, out: torch.Tensor) -> None:
    """Assert that a result is as good as float32 and its dtype."""
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    assert out.device.type == recipe.DEVICE.type
    magnitude = (x.double().abs() + end.double().abs()) * max(1, abs(weight), abs(1 - weight))
    expected = torch.lerp(x.double(), end.double(), weight)
    # Five roundings at most, of numbers no larger than the magnitude. Then the one to the dtype, where the interpreter
    # cuts and a GPU rounds, so a whole unit; a result that is subnormal in the dtype is off by a unit of those.
    last = torch.finfo(x.dtype).eps
    allowed = 5 * 2**-24 * magnitude + last * expected.abs() + torch.finfo(x.dtype).tiny * last
    assert ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    shape=shapes(BLOCK, 5 * BLOCK), of_x=layouts(), of_end=layouts(), weight=WEIGHTS, dtype_w=st.sampled_from(DTYPES)
)
def test_floats(
    recipe: ModuleType,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    of_x: Layout,
    of_end: Layout,
    weight: float,
    dtype_w: torch.dtype,
) -> None:
    """A weight comes as a number or in a tensor of any float dtype, and gives the same bits."""
    x, end = of_x.make(shape, dtype, recipe.DEVICE), of_end.make(shape, dtype, recipe.DEVICE)
    tensor = torch.tensor([weight], dtype=dtype_w, device=recipe.DEVICE)
    weight = tensor.item()
    out = guarded(recipe.lerp, x, end, tensor)
    assert_lerp(recipe, x, end, weight, out)
    assert torch.equal(guarded(lambda x, end: recipe.lerp(x, end, weight), x, end), out)
    assert torch.equal(recipe.lerp(x, end, tensor), out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_ends_are_met(recipe: ModuleType, dtype: torch.dtype) -> None:
    """A weight of 0 gives the one and a weight of 1 the other, to the last bit, however far apart they are."""
    x, end = torch.tensor([[1e4, 1.0, -3.0, 1e-4], [1e-4, -1.0, 1e4, 0.0]], dtype=dtype, device=recipe.DEVICE)
    assert torch.equal(recipe.lerp(x, end, 0.0), x)
    assert torch.equal(recipe.lerp(x, end, 1), end)
    assert torch.equal(recipe.lerp(x, end, torch.ones((), device=recipe.DEVICE)), end)


@pytest.mark.needs_gpu_memory(16)
def test_beyond_int32(recipe: ModuleType) -> None:
    """The last elements of a tensor of more than 2**31 elements are right."""
    x = torch.zeros(2**31 + 5, dtype=torch.float16, device=recipe.DEVICE)
    out = recipe.lerp(x, x + 1, 0.5)
    assert out.eq(0.5).all()


def test_refuses(recipe: ModuleType) -> None:
    """What the op does not take, it names."""
    x = torch.ones(2, 3, device=recipe.DEVICE)
    with pytest.raises(ValueError, match=r"shapes differ: \(2, 3\), \(3,\)"):
        recipe.lerp(x, x[0], 0.5)
    with pytest.raises(TypeError, match=r"not torch\.float64 and torch\.float64"):
        recipe.lerp(x.double(), x.double(), 0.5)
    with pytest.raises(TypeError, match=r"not torch\.float32 and torch\.float16"):
        recipe.lerp(x, x.half(), 0.5)
    for weight in (x, x[0, :0], torch.ones(1, dtype=torch.int64, device=recipe.DEVICE)):
        with pytest.raises(ValueError, match="one float"):
            recipe.lerp(x, x, weight)
    for tensors in ((x.to("meta"), x.to("meta"), 0.5), (x, x.to("meta"), 0.5), (x, x, torch.ones(1, device="meta"))):
        with pytest.raises(ValueError, match=r"device, not .*meta"):
            recipe.lerp(*tensors)
    with pytest.raises(ValueError, match="no backward"):
        recipe.lerp(x, x.clone().requires_grad_(), 0.5)
    with pytest.raises(ValueError, match="no backward"):
        recipe.lerp(x, x, torch.ones(1, device=recipe.DEVICE, requires_grad=True))
    with torch.no_grad():
        recipe.lerp(x, x.clone().requires_grad_(), 0.5)


@needs_gpu
def test_waits_are_found(recipe: ModuleType) -> None:
    """The debug mode raises where the page says that it does, and not in the op."""
    x, weight = torch.rand(8, device="cuda"), torch.rand(1, device="cuda")
    mask = x > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        recipe.lerp(x, x, weight)
        for function in (weight.item, lambda: float(weight), lambda: bool(weight > 0), lambda: x[mask]):
            with pytest.raises(RuntimeError, match="synchronizing"):
                function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_graph(recipe: ModuleType, dtype: torch.dtype) -> None:
    """A replay reads what is in the captured inputs now, the weight's tensor too, and writes to the same output."""
    x, end, weight = (Layout("contiguous", seed).make((1031,), dtype, recipe.DEVICE) for seed in range(3))
    weight = weight[:1].sigmoid()
    graph, out = recipe.capture(lambda: recipe.lerp(x, end, weight))
    for seed in range(3, 6):
        x.copy_(Layout("contiguous", seed).make((1031,), dtype, recipe.DEVICE))
        weight.mul_(0.5)
        graph.replay()
        assert_lerp(recipe, x, end, weight.item(), out)


@needs_gpu
def test_reduce_overhead_looks_after_itself(recipe: ModuleType) -> None:
    """It sees other numbers, shapes and tensors."""
    torch.compiler.reset()
    step = recipe.compiled(recipe.lerp, mode="reduce-overhead")
    for size, weight in ((100, 0.25), (100, 0.75), (50, 0.75), (100, 0.25)):
        for _ in range(4):  # it captures at the second call
            x, end = torch.rand(2, size, device="cuda")
            assert_lerp(recipe, x, end, weight, step(x, end, weight))


@needs_gpu
def test_kernels_are_counted(recipe: ModuleType) -> None:
    """A chain is one kernel per step, of the name and with the grid that the launcher gave it."""
    x, samples, weight = recipe.inputs
    kernels = recipe.kernels(lambda: recipe.average(recipe.lerp, x, samples[:5], weight))
    assert kernels == [("lerp_kernel", "4")] * 5


def keys(recipe: ModuleType) -> list[list[str]]:
    """Return the keys of launches that share a compiled kernel, and of launches that do not."""

    def key(N: int = 4096, weight_ptr: torch.dtype | None = None, weight: float = 0.25) -> str:
        x = torch.float32
        return recipe.lerp_kernel.warmup(x, x, x, weight_ptr, weight, N, BLOCK=1024, grid=(1,)).hash

    return [[key(), key(N=8192), key(weight=0.75)], [key(N=4095), key(weight_ptr=torch.float32)]]


def test_keys(gallery: Path, on_h100: Ask) -> None:
    """A size that 16 does not divide, or a weight in a tensor, is another compiled kernel; another number is not."""
    ((shared, others),) = on_h100(gallery / "pytorch" / "cuda_graphs.py", keys)
    assert len(set(shared)) == 1
    assert len({*shared, *others}) == 3


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("lerp", lambda normal, M, N: (normal(M, N), normal(M, N), torch.full((1,), 0.3, device="cuda"))),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "lerp stored without a mask",
        "tl.where(w < 0.5, near_x, near_end), mask=mask)",
        "tl.where(w < 0.5, near_x, near_end))",
    ),
    ("lerp by one formula", "tl.where(w < 0.5, near_x, near_end)", "near_x"),
]
