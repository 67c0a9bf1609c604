"""The op of the recipe A product for every shape and layout, and its gradient."""

# ruff: noqa: N806 - a product has M, N and K, as in the recipe

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close
from compiled import Ask, graphs, ptx, stack
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes

RECIPE = Path("matmul") / "tuned_matmul.py"
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def with_one_candidate(module: ModuleType) -> None:
    """Have an op not tune: for each size, that would take hours."""
    for tuner in module.TUNED_MATMUL_TUNED.values():
        tuner.configs = tuner.configs[:1]


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it, with one candidate."""
    module = load_op(str(RECIPE))
    with_one_candidate(module)
    return module


def exact(a: torch.Tensor, b: torch.Tensor) -> list[Exact]:
    """Return the product: those of half precision are exact, others round once; then come K sums, in any order."""
    return [Exact(a @ b, a.abs() @ b.abs(), roundings=a.shape[1] + 2)]


ACTIVATIONS = {
    None: lambda z: z,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "square": torch.square,
}
SMOOTH = [name for name in ACTIVATIONS if name != "relu"]  # a z of nearly 0 may have either sign


def jitted_square() -> Any:
    """Return an activation of one's own."""
    import triton  # where it is imported first, the choice of the interpreter is made

    @triton.jit
    def square(z):  # type: ignore[no-untyped-def] # a kernel has no annotations
        return z * z

    return square


def with_square(module: ModuleType) -> None:
    """Have an op not tune, and add an activation to it."""
    with_one_candidate(module)
    module.TUNED_MATMUL_ACTIVATIONS["square"] = jitted_square(), lambda grad, z: 2 * grad * z


Lead = tuple[int, ...]


def biased(
    draw: Draw, M: int, N: int, K: int, activation: str | None, lead: Lead = (), shared: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str | None]:
    """Make batches of matrices that fit each other, or one second matrix for all, a bias; pass on the activation."""
    return draw(*lead, M, K), draw(*(() if shared else lead), K, N), draw(N), activation


def sum_and_terms(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the activation gets, and the sum of the magnitudes of its terms."""
    return a @ b + bias, a.abs() @ b.abs() + bias.abs()


def exact_activation(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, activation: str | None) -> list[Exact]:
    """Return the activation of a product with a bias: it passes on errors by its slope, and has some of its own."""
    z, terms = sum_and_terms(a, b, bias)
    steepest = 2 * terms if activation == "square" else 1.2
    return [Exact(ACTIVATIONS[activation](z), steepest * terms, roundings=a.shape[1] + 16)]


def exact_gradients(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, activation: str | None
) -> list[Exact]:
    """Return the gradients of the matrices and of the bias; their z is rounded, and its slope may change by 2 for 1."""
    z, terms = sum_and_terms(a, b, bias)
    with torch.enable_grad():
        leaf = z.clone().requires_grad_()
        (by_z,) = torch.autograd.grad(ACTIVATIONS[activation](leaf).sum(), leaf)
    by_z, size = grad * by_z, grad.abs() * (by_z.abs() + 2 * terms)
    left, right, right_size = (x.flatten(0, -2) if b.ndim == 2 else x for x in (a, by_z, size))
    return [
        Exact(by_z @ b.mT, size @ b.abs().mT),
        Exact(left.mT @ right, left.abs().mT @ right_size),
        Exact(by_z.flatten(0, -2).sum(0), size.flatten(0, -2).sum(0)),
    ]


def special_sums(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, str | None]]:
    """Make a bias with NaN, infinities and numbers whose squares and exponentials are none, for each activation."""
    a, b = draw(3, 4, of=torch.zeros_like), draw(4, 9)
    highest = torch.finfo(draw.dtype).max
    bias = torch.tensor([torch.nan, torch.inf, -torch.inf, highest, -highest, 60000, -60000, 0, -3], device=DEVICE)
    return [(a, b, bias.to(draw.dtype), name) for name in ACTIVATIONS]


def matrices(draw: Draw, M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make two matrices that fit each other."""
    return draw(M, K), draw(K, N)


def amid_nan(draw: Draw, rows: int, columns: int, transposed: bool, gap: int) -> torch.Tensor:
    """Make a matrix of small integers, with NaN between its rows, before and behind it."""
    if transposed:
        return amid_nan(draw, columns, rows, False, gap).T
    around = torch.full((rows + 320, columns + gap), torch.nan, dtype=draw.dtype, device=DEVICE)
    matrix = around[160:-160, :columns]
    return matrix.copy_(draw(rows, columns, of=lambda x: x.clamp(-4, 4).round()))


def special(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make matrices in all four layouts amid NaN: neither that nor padding may enter a result."""
    made = []
    for M, N, K in ((130, 136, 24), (131, 144, 45), (144, 131, 45), (133, 131, 40), (7, 131, 45), (133, 9, 45)):
        for first, second, aligned in product((False, True), repeat=3):
            gaps = [16 - width % 16 if aligned else 5 for width in (M if first else K, K if second else N)]
            made.append((amid_nan(draw, M, K, first, gaps[0]), amid_nan(draw, K, N, second, gaps[1])))
    return made


# M, N, K: rows at multiples of 16 bytes or not, and more than 128 rows and columns or fewer, where nothing is copied
SIZES = [(133, 131, 40), (7, 131, 150), (131, 144, 45), (144, 131, 45), (530, 9, 4), (3, 5, 0), (0, 7, 5), (5, 0, 7)]
SIZES += [(1, 1, 1), (130, 136, 24), (32, 65, 129), (33, 64, 128), (64, 128, 64), (133, 131, 45), (70, 270, 300)]
SMALL = [(33, 31, 40), (7, 31, 150), (31, 44, 45), (44, 31, 45), (1, 1, 1), (3, 5, 0), (0, 7, 5), (5, 0, 7)]
# In turns with each activation
WITH_BIAS = [
    (33, 31, 40, "gelu"),
    (7, 65, 15, "silu"),
    (44, 131, 5, None),
    (31, 64, 45, "gelu_tanh"),
    (1, 1, 1, "relu"),
]
WITH_BIAS += [(3, 5, 0, "silu"), (70, 9, 17, "square"), (0, 7, 5, "gelu"), (5, 0, 7, None), (133, 131, 40, "relu")]
# One row of each matrix is a matrix; one stride reaches all rows, or none; more matrices than tiles, and none
BATCHES = [(33, 9, 40, "gelu", (3,), False), (1, 31, 5, None, (6,), True), (20, 31, 16, "silu", (2, 3), False)]
BATCHES += [(5, 7, 9, None, (2, 1, 3), True), (70, 9, 8, None, (2, 2), True), (3, 5, 0, "silu", (2,), False)]
BATCHES += [(3, 5, 4, None, (0,), False), (2, 3, 4, "relu", (2, 1, 2, 2), False), (1, 1, 1, None, (1, 1), False)]
SHAPES = r"tuned_matmul takes \(..., M, K\) and \(K, N\) or \(..., K, N\), not \("
STRIDES = "tuned_matmul takes strides along K below 16777216"


def far() -> torch.Tensor:
    """Make a row with a stride that is too large."""
    return torch.empty(2**24 + 1, dtype=torch.float32, device=DEVICE).as_strided((1, 2), (1, 2**24))


PRODUCT = Case(
    "tuned_matmul",
    matrices,
    exact,
    autocast="asked",
    sizes=SIZES,
    small=(3, 2, 4),
    many=(4099, 4099, 65),
    shapes=st.tuples(sizes(64, 140), sizes(128, 140), sizes(64, 150)),
    reference=lambda a, b: (a.double() @ b.double()).to(a.dtype),
    special=special,
    gradients=lambda grad, a, b: exact(grad, b.T) + exact(a.T, grad),
    with_gradients=2,
    second_gradients=True,
    prepare=with_one_candidate,
    refused=[
        Refused(lambda draw: (draw(2, 3).int(), draw(3, 2).int()), TypeError, "tuned_matmul takes float .*int32"),
        Refused(lambda draw: (draw(2, 3), draw(3, 2).double()), TypeError, "tuned_matmul takes one dtype.*float64"),
        Refused(lambda draw: (draw(2, 3), draw(2, 3)), ValueError, SHAPES),
        Refused(lambda draw: (draw(3), draw(3, 2)), ValueError, SHAPES),
        Refused(lambda draw: (draw(2, 3), draw(1, 3, 2)), ValueError, SHAPES),
        Refused(lambda draw: (draw(4, 2, 3), draw(1, 3, 2)), ValueError, SHAPES),
        Refused(lambda draw: (draw(2, 3), draw(3)), ValueError, SHAPES),
        Refused(lambda draw: (draw(2, 3), draw(3, 2).to("meta")), ValueError, "tuned_matmul takes one device"),
        Refused(lambda draw: (far(), draw(2, 1)), ValueError, STRIDES),
        Refused(lambda draw: (draw(1, 2), far().T), ValueError, STRIDES),
    ],
)
WITH_EPILOGUE = replace(
    PRODUCT,
    name="tuned_matmul with bias",
    arguments=biased,
    exact=exact_activation,
    sizes=WITH_BIAS,
    small=(3, 2, 4, "gelu"),
    many=(4099, 4099, 65, "silu"),
    shapes=st.tuples(sizes(16, 40), sizes(16, 70), sizes(16, 40), st.sampled_from(SMOOTH)),
    reference=lambda a, b, bias, name: ACTIVATIONS[name](a.double() @ b.double() + bias.double()).to(a.dtype),
    special=special_sums,
    gradients=exact_gradients,
    with_gradients=3,
    prepare=with_square,
    refused=[
        Refused(
            lambda draw: (draw(2, 3), draw(3, 4), draw(3)),
            ValueError,
            r"tuned_matmul takes a bias of shape \(4,\), not \(3,\)",
        ),
        Refused(lambda draw: (draw(2, 3), draw(3, 2), draw(2, 2)), ValueError, "tuned_matmul takes a bias"),
        Refused(lambda draw: (draw(2, 3), draw(3, 2), draw(2).double()), TypeError, "tuned_matmul takes one dtype"),
        Refused(lambda draw: (draw(2, 3), draw(3, 2), draw(2).to("meta")), ValueError, "tuned_matmul takes one device"),
        Refused(
            lambda draw: (draw(2, 3), draw(3, 2), draw(2), "tanh"),
            ValueError,
            r"tuned_matmul takes as activation None or one of \['relu', .*\], not 'tanh'",
        ),
    ],
)


def special_batches(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, str | None]]:
    """Make matrices whose rows begin 16 bytes apart, but whose first rows do not, amid NaN."""

    def odd(count: int, rows: int, columns: int) -> torch.Tensor:
        around = draw(count, rows * columns + 1, of=torch.round)
        around[:, -1] = torch.nan
        return around[:, :-1].unflatten(1, (rows, columns))

    made = [
        (odd(3, 20, 16), odd(3, 16, 32)),
        (odd(3, 16, 16).mT, odd(3, 16, 16).mT),
        (odd(2, 9, 16), odd(1, 16, 16)[0]),
    ]
    return [(a, b, torch.zeros_like(b[..., 0, :].reshape(-1, b.shape[-1])[0]), None) for a, b in made]


LEADS = st.lists(st.integers(1, 3), max_size=4).map(tuple)
OF_BATCHES = replace(
    WITH_EPILOGUE,
    name="tuned_matmul of batches",
    sizes=BATCHES,
    small=(3, 2, 4, "gelu", (2,), False),
    in_layouts=(20, 31, 16, "silu", (2, 3), False),
    many=(130, 131, 65, "silu", (7, 41), False),
    shapes=st.tuples(*(sizes(16, 20) for _ in range(3)), st.sampled_from(SMOOTH), LEADS, st.booleans()),
    special=special_batches,
    refused=(),
)
CONTRACT = [
    PRODUCT,
    WITH_EPILOGUE,
    OF_BATCHES,
    replace(OF_BATCHES, name="tuned_matmul of copied batches", settings={"TUNED_MATMUL_COPY": 0}),
    replace(
        PRODUCT,
        name="tuned_matmul with small copies",
        sizes=SMALL,
        many=(1031, 1033, 5),
        shapes=st.tuples(*(sizes(16, 40) for _ in range(3))),
        settings={"TUNED_MATMUL_COPY": 0},
        special=None,
        refused=(),
    ),
]


def assert_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert_close(PRODUCT, a.dtype, out, *exact(a.double(), b.double()))


def test_gradient_of_one_operand(taken: ModuleType) -> None:
    """Where one gradient is wanted, it is the same."""
    op = taken.tuned_matmul
    a, b = (x.requires_grad_() for x in matrices(Draw(torch.float32), 3, 5, 4))
    both = torch.autograd.grad(op(a, b).square().sum(), (a, b))
    assert torch.equal(*torch.autograd.grad(op(a, b.detach()).square().sum(), a), both[0])
    assert torch.equal(*torch.autograd.grad(op(a.detach(), b).square().sum(), b), both[1])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_activations_float32(taken: ModuleType, activation: str | None) -> None:
    """They are PyTorch's, with a bias and without one, in the order of the function's arguments."""
    with_square(taken)
    a, b, bias = (x.requires_grad_() for x in biased(Draw(torch.float32), 5, 7, 9, None)[:3])
    grad = torch.randn(5, 7, device=DEVICE)
    for given in ((a, b, bias), (a, b), (a.detach(), b, bias), (a, b.detach(), bias.detach())):
        leaves = [x for x in given if x.requires_grad]
        right = ACTIVATIONS[activation](given[0] @ given[1] + (given[2] if len(given) > 2 else 0))
        actual = torch.autograd.grad(taken.tuned_matmul(*given, activation=activation), leaves, grad)
        torch.testing.assert_close(actual, torch.autograd.grad(right, leaves, grad), rtol=1e-4, atol=1e-4)


def test_activation_without_gradient(taken: ModuleType) -> None:
    """One's own may have none: a backward says so."""
    with_square(taken)
    taken.TUNED_MATMUL_ACTIVATIONS["squared"] = taken.TUNED_MATMUL_ACTIVATIONS["square"][0], None
    a, b = (x.requires_grad_() for x in matrices(Draw(torch.float32), 3, 5, 4))
    out = taken.tuned_matmul(a, b, activation="squared")
    torch.testing.assert_close(out, (a @ b).square())
    with pytest.raises(RuntimeError, match=r"^tuned_matmul has no gradient of 'squared'"):
        out.sum().backward()


def test_batches_are_not_copied_float32(taken: ModuleType) -> None:
    """One launch reads the operands where they are: as a matrix if one stride reaches all rows, else in two steps."""
    x = torch.randn(2, 5, 3, 8, device=DEVICE)  # (batch, token, head, of a head)
    weight = torch.randn(8, 7, device=DEVICE)
    launched = []

    class Launch:
        def __getitem__(self, grid: Callable[[dict[str, int]], tuple[int]]) -> Callable[..., None]:
            tiles = grid({"BLOCK_M": 64, "BLOCK_N": 64})
            return lambda a, b, *_, **__: launched.append((a.data_ptr(), b.data_ptr(), *tiles))

    for a, b, count in (
        (x, weight, 1),
        (x[..., -1:, :], weight, 1),
        (x.transpose(1, 2), weight, 6),
        (x[..., :1, :].expand(2, 5, 6, 8), weight, 10),
        (x.transpose(1, 2), x.permute(0, 2, 3, 1), 6),
    ):
        taken._tuned_matmul_launch(a, b, wrap=lambda tuner: Launch())
        assert launched.pop() == (a.data_ptr(), b.data_ptr(), count)


def test_operands(taken: ModuleType) -> None:
    """What lies side by side is what it says, and a copy has rows of 16 bytes and zeros behind them."""
    x = Layout("contiguous", 0).make((40, 48), torch.float16, DEVICE)
    operand = taken._tuned_matmul_operand
    for view, vecs in ((x, (1, 8)), (x.T, (8, 1)), (x[:, :40], (1, 8)), (x[:3].expand(3, 48), (1, 8))):
        result, *along = operand(view, copy=True)
        assert result is view
        assert tuple(along) == vecs
    for view in (
        x[:, 1:41],
        x[:, :41],
        x[:, ::2],
        x[:41, 5:].T,
        x[:1, :1].expand(30, 30),
        x.flatten()[:1517].view(41, 37),
    ):
        result, *along = operand(view, copy=False)
        assert result is view
        assert along == [1, 1]
        result, *along = operand(view, copy=True)
        rows, columns = view.shape
        assert torch.equal(result[:rows, :columns], view)
        assert not result[rows:].any()
        assert not result[:, columns:].any()
        (dim,) = [d for d in (0, 1) if along[d] == 8]
        assert along[1 - dim] == 1
        assert result.stride(dim) == 1
        assert result.stride(1 - dim) % 8 == 0
        assert result.storage_offset() == 0


def test_key(taken: ModuleType) -> None:
    """Sizes of models have a key of their own; there are few keys, and a size is at most a quarter below its own."""
    like = taken._tuned_matmul_like
    for n in (1, 2, 3, 8, 16, 2048, 4096, 5120, 7168, 8192, 14336):
        assert like(n) == n
    assert like(5000) == 5120
    assert all(n <= like(n) < 1.25 * n for n in range(8, 5000))
    assert len({like(n) for n in range(1, 16385)}) < 64


def test_kinds(taken: ModuleType) -> None:
    """Few rows of half precision have tiles of their own; the first of each list fits a GPU with 64 KiB."""
    kind = taken._tuned_matmul_kind
    assert kind(32, torch.bfloat16) == "few rows"
    assert [kind(33, dtype) for dtype in FLOATS] == ["2 bytes", "2 bytes", "4 bytes", "8 bytes"]
    assert kind(1, torch.float32) == "4 bytes"
    for name, tiles in taken.TUNED_MATMUL_TILES.items():
        assert len(tiles) >= 4
        assert len(set(tiles)) == len(tiles)
        BLOCK_M, BLOCK_N, BLOCK_K, _, stages = tiles[0]
        size = 2 if name == "few rows" else int(name[0])
        assert (stages - 1) * (BLOCK_M + BLOCK_N) * BLOCK_K * size <= 64 * 1024


def test_wide_accumulator(taken: ModuleType) -> None:
    """A sum of many ones is not the 2048 or 256 at which half precision stands still."""
    for dtype in FLOATS:
        a = torch.ones(2, 4096, dtype=dtype, device=DEVICE)
        assert (taken.tuned_matmul(a, a.T) == 4096).all()
    a = torch.tensor([[1.0, 2.0**-40]], dtype=torch.float64, device=DEVICE)
    assert taken.tuned_matmul(a, torch.ones_like(a).T).item() == 1 + 2.0**-40


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_first_kernel(recipe: ModuleType, dtype: torch.dtype) -> None:
    """The first kernel takes all layouts, and the ladder's kernel agrees; dtype is that of the reference."""
    a, b = recipe.random(170, 37, 150)
    right = (a.to(dtype) @ b.to(dtype)).half()
    for layout in recipe.LAYOUTS:
        a_view, b_view = (x.T.contiguous().T if f"{n}.T" in layout else x for n, x in (("A", a), ("B", b)))
        assert recipe.random(5, 6, 7, layout=layout)[0].is_contiguous() == ("A.T" not in layout)
        for LEAST in (0, 1):
            c = recipe.first_matmul(a_view, b_view, tile=(16, 32, 16), warps=4, LEAST=LEAST)
            torch.testing.assert_close(c, right, rtol=2**-9, atol=2e-3)
    for copy in (False, True):
        torch.testing.assert_close(recipe.fixed(a, b, copy=copy), right, rtol=2**-9, atol=2e-3)


def in_python(function: Any) -> Callable[..., tuple[int, int]]:
    """Return a jitted function of integers as one of Python's."""
    language = SimpleNamespace(cdiv=lambda n, d: -(-n // d), minimum=min)
    return FunctionType(function.fn.__code__, {"tl": language})


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 5), (8, 3), (3, 20), (64, 32)])
def test_order(taken: ModuleType, rows: int, columns: int) -> None:
    """Every tile is taken once, in groups of rows."""
    tile = in_python(taken._tuned_matmul_tile)
    for GROUP_M in (1, 2, 3, 8, 32):
        sizes_ = 16 * rows - 3, 32 * columns - 5, 16, 32, GROUP_M
        order = [tile(pid, *sizes_) for pid in range(rows * columns)]
        assert sorted(order) == [(m, n) for m in range(rows) for n in range(columns)]
        assert order == sorted(order, key=lambda at: (at[0] // GROUP_M, at[1], at[0]))


class Alone:
    """A kernel with one config, chosen here and not by the tuner."""

    def __init__(self, tuner: Any, tile: tuple[int, ...]) -> None:
        """Take the tuner of the kernel and a tile of the recipe's lists."""
        names = "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"
        self.kernel, self.config = tuner.fn, dict(zip(names, tile, strict=True))

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Return what launches it."""
        return partial(self.kernel[grid], **self.config)


CANDIDATES = {"few rows": 7, "2 bytes": 9, "4 bytes": 6, "8 bytes": 5}
DTYPES = {"few rows": torch.bfloat16, "2 bytes": torch.float16, "4 bytes": torch.float32, "8 bytes": torch.float64}


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "index"), [(kind, i) for kind, count in CANDIDATES.items() for i in range(count)])
def test_every_config(taken: ModuleType, kind: str, index: int, record_property: Callable[[str, object], None]) -> None:
    """Each candidate of each list is right, for several tiles and a rest, where BLOCK_K divides K and where not."""
    record_property("config", f"_tuned_matmul_kernel {kind} {index}")
    tile = taken.TUNED_MATMUL_TILES[kind][index]
    BLOCK_M, BLOCK_N, BLOCK_K, *_ = tile
    M = 29 if kind == "few rows" else 2 * BLOCK_M + 5
    for K in (BLOCK_K + 9, 2 * BLOCK_K, 128):
        a = Layout("contiguous", 0).make((M, K), DTYPES[kind], DEVICE)
        b = Layout("transposed", 1).make((K, 2 * BLOCK_N + 3), DTYPES[kind], DEVICE)
        assert taken._tuned_matmul_kind(M, a.dtype) == kind
        assert_product(taken._tuned_matmul_launch(a, b, lambda tuner: Alone(tuner, tile)), a, b)


def test_all_configs_are_tested(recipe: ModuleType) -> None:
    """The numbers above are those of the recipe, whose tuners have all of them on a GPU."""
    assert {kind: len(tiles) for kind, tiles in recipe.TUNED_MATMUL_TILES.items()} == CANDIDATES
    if not recipe.triton.knobs.runtime.interpret:
        assert {kind: len(tuner.configs) for kind, tuner in recipe.TUNED_MATMUL_TUNED.items()} == CANDIDATES


@pytest.mark.needs_gpu_memory(15)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements in an operand and in the result: the last row is right."""
    rows, K = 2**17 + 1, 2**14
    a = torch.zeros(rows, K, dtype=torch.float16, device=DEVICE)
    a[-1, -1] = 1
    b = torch.ones(K, 16, dtype=torch.float16, device=DEVICE)
    c = taken.tuned_matmul(a, b)
    assert (c[-1] == 1).all()
    assert not c[:-1].any()
    c = taken.tuned_matmul(b.T, a.T)
    assert (c[:, -1] == 1).all()
    assert not c[:, :-1].any()
    del a, b, c
    a = torch.zeros(rows, 16, dtype=torch.float16, device=DEVICE)
    a[-1, -1] = 1
    c = taken.tuned_matmul(a, torch.ones(16, K, dtype=torch.float16, device=DEVICE))
    assert (c[-1] == 1).all()
    assert not c[:-1].any()


def test_tuning_in_a_capture(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """No candidate is timed while a CUDA graph is captured."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="one call before the capture"):
        taken._tuned_matmul_clock(pytest.fail, None)


LAYOUTS = [(along_a, along_b) for along_a in (False, True) for along_b in (False, True)]  # whether along K


def known(taken: ModuleType, kind: str, tile: tuple[int, ...], along: tuple[bool, bool], **more: Any) -> dict[str, Any]:
    """Return what a launch knows, of operands whose rows begin at multiples of 16 bytes."""
    import triton.language as tl

    size = 2 if kind == "few rows" else int(kind[0])
    vec, (along_a, along_b) = 16 // size, along
    constants = {"dtype": {2: "fp16", 4: "fp32", 8: "fp64"}[size], "num_warps": tile[3]}
    constants |= {"ACC": tl.float64 if size == 8 else tl.float32, "GROUP_M": 8}
    constants |= dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=False))
    constants |= {"VEC_AM": 1 if along_a else vec, "VEC_AK": vec if along_a else 1}
    constants |= {"VEC_BK": vec if along_b else 1, "VEC_BN": 1 if along_b else vec}
    none = "bias_ptr", "inner", "stride_az", "stride_ay", "stride_bz", "stride_by", "like_batch", "ACTIVATION"
    constants |= dict.fromkeys(none)
    constants |= {"stride_ak" if along_a else "stride_am": 1, "stride_bk" if along_b else "stride_bn": 1}
    return constants | more


def notes(taken: ModuleType) -> list[str]:
    """Return what the assembler says of products that wait for each other, for tiles with tensor cores."""
    from triton.backends.nvidia.compiler import get_ptxas

    lines = []
    for kind, along in product(("few rows", "2 bytes"), LAYOUTS):
        for tile in taken.TUNED_MATMUL_TILES[kind]:
            code = ptx(taken._tuned_matmul_kernel, **known(taken, kind, tile, along, N=4096))
            with NamedTemporaryFile(suffix=".ptx", mode="w") as file:
                file.write(code)
                file.flush()
                command = [get_ptxas(90).path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
                log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            assert "Used" in log
            lines += [f"{tile} {along} {line}" for line in log.splitlines() if "Potential Performance" in line]
    return lines


def codes(taken: ModuleType) -> list[tuple[set[str], int]]:
    """Return, for all layouts, the bytes of copies, and the loads that are none."""
    results = []
    for along in LAYOUTS:
        text = ptx(taken._tuned_matmul_kernel, **known(taken, "2 bytes", (128, 256, 64, 8), along))
        widths = set(re.findall(r"cp\.async\S* \[.*?\], \[.*?\], (\w+)", text))
        results.append((widths, text.count("ld.global")))
    return results


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Where rows begin at multiples of 16 bytes, all loads are copies of 16, whatever divides the sizes."""
    (results,) = on_h100(gallery / RECIPE, codes)
    for widths, loads in results:
        assert {int(width, base=0) for width in widths} == {16}
        assert loads == 0


def codes_with_options(taken: ModuleType) -> list[tuple[set[str], int]]:
    """Return the bytes of copies, and those of spilled registers, with a bias, each activation and a batch."""
    results = []
    given = {"bias_ptr", "inner", "stride_az", "stride_ay", "stride_bz", "stride_by", "like_batch"}
    for activation in (None, "relu", "silu", "gelu", "gelu_tanh", jitted_square()):
        for kind, tile in (("2 bytes", (128, 256, 64, 8)), ("8 bytes", (64, 64, 16, 4))):
            constants = known(taken, kind, tile, (True, True), ACTIVATION=activation, N=4096)
            launch = {name: value for name, value in constants.items() if name not in given}
            text = ptx(taken._tuned_matmul_kernel, **launch)
            widths = set(re.findall(r"cp\.async\S* \[.*?\], \[.*?\], (\w+)", text))
            spills = activation == "gelu" and kind == "2 bytes"  # tl.erf takes many registers
            results.append((widths, 0 if spills else stack(taken._tuned_matmul_kernel, **launch)))
    return results


@pytest.mark.thorough
def test_compiled_options(gallery: Path, on_h100: Ask) -> None:
    """With all of them, loads are as wide as without; where 16 divides N, no register is spilled, but for erf."""
    (results,) = on_h100(gallery / RECIPE, codes_with_options)
    for widths, spilled in results:
        assert {int(width, base=0) for width in widths} == {16}
        assert spilled == 0


@pytest.mark.thorough
def test_products_do_not_wait_for_each_other(gallery: Path, on_h100: Ask) -> None:
    """With no tile and in no layout has the assembler to put products one after the other."""
    (lines,) = on_h100(gallery / RECIPE, notes)
    assert lines == []


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward."""
    return graphs(recipe.tuned_matmul, *(torch.randn(64, 64, requires_grad=True) for _ in range(2)))


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written, either way."""
    ((forward, backward),) = on_h100(gallery / RECIPE, traced)
    for graph, products in ((forward, 1), (backward, 2)):
        kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
        assert kernels == products * ["triton_kernel_wrapper_functional"]
        assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("matmul/tuned_matmul")
    lines = [line.split() for line in out.splitlines()]
    counts = [line for line in lines if line[:1] in (["A,"], ["A.T,"]) and "error" not in line]
    by_layout = {" ".join(line[:-7]): tuple(map(int, line[-7:])) for line in counts}
    for name in (f"{a}, {b}" for a in ("A", "A.T") for b in ("B", "B.T")):
        for more in ("", ", LEAST = 1", ", the op"):
            assert by_layout[name + more][:3] == (12, 0, 4)
        for more in (", LEAST = 1", ", the op"):
            assert by_layout[name + more][3] == 1
        assert by_layout[name][6] == by_layout[f"{name}, the op"][6] == 0
    copies, loads, *_, spilled = by_layout["A, B, not by 16"]
    assert (copies, loads) == (0, 96)
    assert spilled > 0
    errors = [line for line in out.splitlines() if "Error: tuned_matmul takes" in line]
    assert len(errors) == 3


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "stored without a mask",
        "tl.store(c_ptrs, c, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])",
        "tl.store(c_ptrs, c)",
    ),
    (
        "stored with a mask of rows alone",
        "tl.store(c_ptrs, c, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])",
        "tl.store(c_ptrs, c, mask=(offs_m < M)[:, None])",
    ),
    ("loads of A past K", "a_mask = a_rows & (offs_k < a_end - k)[None, :]", "a_mask = a_rows"),
    ("loads of B past K", "b_mask = (offs_k < b_end - k)[:, None] & b_columns", "b_mask = b_columns"),
    ("the last rows of A left out", "offs_m < tl.cdiv(M, VEC_AM) * VEC_AM", "offs_m < M // VEC_AM * VEC_AM"),
    ("the last columns of B left out", "offs_n < tl.cdiv(N, VEC_BN) * VEC_BN", "offs_n < N // VEC_BN * VEC_BN"),
    (
        "a sum of the last step alone",
        'tl.dot(a, b, acc, input_precision="ieee", out_dtype=ACC)',
        'tl.dot(a, b, input_precision="ieee", out_dtype=ACC)',
    ),
    ("an accumulator of float32", "torch.float64: tl.float64", "torch.float64: tl.float32"),
    (
        "the first step of A again and again",
        "out_dtype=ACC)\n        a_ptrs += BLOCK_K * stride_ak\n",
        "out_dtype=ACC)\n",
    ),
    (
        "columns of B taken for neighbours",
        "offs_n[None, :] * stride_bn\n    # A wide load",
        "offs_n[None, :]\n    # A wide load",
    ),
    ("padding that is not zero", "    buffer[..., width:] = 0\n", ""),
    (
        "rows taken for aligned",
        "aligned = x.stride(other) % vec == 0 and x.shape[side] % vec == 0",
        "aligned = x.shape[side] % vec == 0",
    ),
    (
        "sizes taken for multiples",
        "aligned = x.stride(other) % vec == 0 and x.shape[side] % vec == 0",
        "aligned = x.stride(other) % vec == 0",
    ),
    (
        "a gradient of zero",
        "tuned_matmul(grad, b.mT) if by_a else None",
        "tuned_matmul(grad, b.mT) * 0 if by_a else None",
    ),
    (
        "the last bias left out",
        "tl.load(bias_ptr + offs_n, mask=offs_n < N,",
        "tl.load(bias_ptr + offs_n, mask=offs_n < N - 1,",
    ),
    ("a slope without the bias", "grad = backward(grad, tuned_matmul(a, b, bias))", "grad = backward(grad, a @ b)"),
    (
        "matrices of a batch taken for aligned",
        "for n in (x.storage_offset(), *apart)",
        "for n in (x.storage_offset(),)",
    ),
    ("one matrix of each batch", "z // inner * stride_z + z % inner * stride_y", "z // inner * stride_z"),
    ("results of a batch in one place", "        c_ptr += z * M * N\n", ""),
    (
        "any batch taken for a matrix",
        "all(a.stride(i) == a.stride(j) * a.shape[j] for i, j in pairs)",
        "True",
    ),
    ("a slope of another GELU", "* tl.sigmoid(z * slope)", "* tl.sigmoid(z * 1.702)"),
    ("a NaN that becomes zero", "y = tl.where(z < 0, 0.0, z)", "y = tl.where(z > 0, z, 0.0)"),
    ("no launcher for GPUs", 'TUNED_MATMUL_LIBRARY.impl("tuned_matmul", _tuned_matmul_launch, "CUDA")\n', ""),
]


@needs_a_gpu
def test_capture(load_op: Callable[[str], ModuleType]) -> None:
    """A graph that would capture the tuning says so; after a call outside, the same capture replays right.

    The last test of this file: to load the op again ends the one that the others have.
    """
    op = load_op(str(RECIPE))
    op.TUNED_MATMUL_TUNED["2 bytes"].configs = op.TUNED_MATMUL_TUNED["2 bytes"].configs[:2]
    a, b = (torch.randn(shape, device="cuda", dtype=torch.float16) for shape in ((264, 520), (520, 392)))
    with pytest.raises(RuntimeError, match="one call before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        op.tuned_matmul(a, b)
    op.tuned_matmul(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = op.tuned_matmul(a, b)
    a.normal_()
    graph.replay()
    assert_product(c, a, b)
