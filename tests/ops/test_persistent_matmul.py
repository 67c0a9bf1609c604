"""The op of the recipe Persistent matmul and its gradient."""

# ruff: noqa: N806 - a product has M, N and K, as in the recipe

import itertools
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close
from compiled import Ask, graphs
from guard import Guard, guarded
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, NAMES, Layout, sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RECIPE = Path("matmul") / "persistent_matmul.py"
HALVES = FLOATS[:2]
ROOMS = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}  # bytes of shared memory


def matrix(draw: Draw, rows: int, columns: int, by: str, gap: int) -> torch.Tensor:
    """Make a matrix by rows or by columns, with a gap of some bytes between and before them; of 8, it is copied."""
    if by == "columns":
        return matrix(draw, columns, rows, "rows", gap).T
    unit = 16 // draw.dtype.itemsize
    gap //= draw.dtype.itemsize
    return draw(rows, gap - columns // -unit * unit)[:, gap : gap + columns]


def matrices(draw: Draw, M: int, N: int, K: int, by_a: str, by_b: str, gap: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make two matrices that fit each other."""
    return matrix(draw, M, K, by_a, gap), matrix(draw, K, N, by_b, 16)


def exact(a: torch.Tensor, b: torch.Tensor) -> list[Exact]:
    """Return the product, in K sums one after another."""
    return [Exact(a @ b, a.abs() @ b.abs(), roundings=a.shape[1])]


def special(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make matrices in all orders with NaN and infinities, at the edges too: those spoil their rows and columns."""
    made = []
    for by_a, by_b in itertools.product(("rows", "columns"), repeat=2):
        a, b = (x.fill_(1) for x in matrices(draw, 150, 136, 72, by_a, by_b, 32))
        a[3, 71], a[149, 0], a[64, 20] = torch.nan, torch.inf, -torch.inf
        b[71, 135], b[20, 5] = torch.inf, torch.nan
        made.append((a, b))
    return made


# M, N, K, how they lie, and the bytes between rows; more tiles than programs, and more rows of tiles than a group
SIZES = [(130, 152, 40, "rows", "rows", 16), (129, 65, 72, "columns", "rows", 32), (65, 200, 17, "rows", "columns", 0)]
SIZES += [(257, 128, 130, "columns", "columns", 16), (573, 150, 8, "rows", "rows", 0), (3, 5, 0, "rows", "rows", 16)]
SIZES += [(0, 8, 8, "rows", "rows", 16), (8, 0, 8, "rows", "columns", 0), (1, 1, 1, "columns", "rows", 16)]
SIZES += [(130, 152, 40, "rows", "rows", 8), (33, 65, 17, "columns", "columns", 8)]
SIZES += [(M, 150, 8, "rows", "rows", 16) for M in (64, 300, 512, 1085)]
SIZE = sizes(128, 300)
BY = st.sampled_from(["rows", "columns"])
KINDS = "persistent_matmul takes two float matrices of one dtype, not .* and torch."
SHAPES = r"persistent_matmul takes matrices of shapes .*, not \(.*\) and \(.*\)$"
PRODUCT = Case(
    "persistent_matmul",
    matrices,
    exact,
    autocast="asked",
    sizes=SIZES,
    small=(4, 5, 8, "rows", "columns", 16),
    many=(4099, 4097, 65, "rows", "columns", 16),
    shapes=st.tuples(SIZE, SIZE, SIZE, BY, BY, st.sampled_from([0, 8, 16, 32])),
    contiguous=False,
    reference=lambda a, b: (a.double() @ b.double()).to(a.dtype),
    special=special,
    gradients=lambda grad, a, b: exact(grad, b.T) + exact(a.T, grad),
    with_gradients=2,
    second_gradients=True,
    refused=[
        Refused(lambda draw: (draw(8, 8).int(), draw(8, 8).int()), TypeError, f"{KINDS}int32"),
        Refused(lambda draw: (draw(8, 8), draw(8, 8).half()), TypeError, f"{KINDS}float16"),
        Refused(lambda draw: (draw(8), draw(8, 8)), ValueError, SHAPES),
        Refused(lambda draw: (draw(8, 8), draw(8)), ValueError, SHAPES),
        Refused(lambda draw: (draw(8, 8), draw(4, 8)), ValueError, SHAPES),
        Refused(lambda draw: (draw(1, 8, 8), draw(1, 8, 8)), ValueError, SHAPES),
        Refused(
            lambda draw: (draw(8, 8), draw(8, 8), "bf16x3"),
            ValueError,
            "persistent_matmul takes ieee, tf32 or tf32x3 as input_precision, not bf16x3",
        ),
        Refused(
            lambda draw: (draw(8, 8), draw(8, 8).to("meta")),
            ValueError,
            "persistent_matmul takes two matrices on one device, not on .* and meta",
        ),
    ],
)
CONTRACT = [
    PRODUCT,
    replace(
        PRODUCT,
        name="persistent_matmul of one program",
        many=(1031, 1033, 65, "columns", "rows", 16),
        settings={"_persistent_matmul_gpu": lambda device: (1, min(ROOMS.values()))},
        special=None,
        refused=(),
    ),
]


def assert_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert_close(PRODUCT, out.dtype, out, *exact(a.double(), b.double()))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_of_the_result(taken: ModuleType, dtype: torch.dtype) -> None:
    """They begin at multiples of 16 bytes."""
    unit = 16 // dtype.itemsize
    for N in (1, 15, 16, 17):
        a, b = matrices(Draw(dtype), 3, N, 5, "rows", "rows", 0)
        assert taken.persistent_matmul(a, b).stride() == (-(N // -unit) * unit, 1)


@pytest.mark.parametrize("layout", NAMES, ids="float32-{}".format)
@pytest.mark.parametrize("shape", [(37, 50, 21), (3, 5, 0), (0, 8, 8), (8, 0, 8)], ids=str)
def test_gradients(taken: ModuleType, shape: tuple[int, int, int], layout: str) -> None:
    """They are right for an incoming one of any layout, and lie by rows or columns as their matrices."""
    grad = Layout(layout, 0).make(shape[:2], torch.float32, DEVICE)
    for ways in itertools.product(("rows", "columns"), repeat=2):
        pair = matrices(Draw(torch.float32), *shape, *ways, 16)
        saved = SimpleNamespace(saved_tensors=pair, needs_input_grad=(True, True), input_precision="ieee")
        with Guard():  # inside of autograd no allocation is seen
            grads = taken._persistent_matmul_gradient(saved, grad)
        assert_product(grads[0], grad, pair[1].T)
        assert_product(grads[1], pair[0].T, grad)
        assert [d.stride(1 if by == "rows" else 0) for d, by in zip(grads[:2], ways, strict=True)] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("needed", [0, 1])
def test_gradient_of_one(taken: ModuleType, dtype: torch.dtype, needed: int) -> None:
    """Only one gradient is wanted."""
    pair = [torch.ones(8, 8, dtype=dtype, device=DEVICE) for _ in range(2)]
    pair[needed].requires_grad_()
    taken.persistent_matmul(*pair).sum().backward()
    assert pair[needed].grad is not None
    assert pair[1 - needed].grad is None
    assert (pair[needed].grad == 8).all()


def every_tile(taken: ModuleType) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Return all tiles, with a precision and a dtype that have them."""
    half, wide_tiles = taken.PERSISTENT_MATMUL_TILES, taken.PERSISTENT_MATMUL_WIDE
    kinds = [(dtype, tile) for dtype in HALVES for tile in half]
    kinds += [(dtype, tile) for dtype in FLOATS[2:] for tile in wide_tiles]
    return [("ieee", *kind) for kind in kinds] + [("tf32", FLOATS[2], tile) for tile in taken.PERSISTENT_MATMUL_TF32]


@pytest.mark.thorough
@pytest.mark.parametrize("by_a", ["rows", "columns"])
@pytest.mark.parametrize("by_b", ["rows", "columns"])
def test_every_tile(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, by_a: str, by_b: str) -> None:
    """Each tile is right, with one program for all of them, with some for each, and with one for each."""
    _, shared = taken._persistent_matmul_gpu(DEVICE if DEVICE.type == "cpu" else torch.device("cuda", 0))
    for (precision, dtype, tile), multiprocessors in itertools.product(every_tile(taken), (1, 3, 1000)):
        for kind in ("TILES", "WIDE", "TF32"):
            monkeypatch.setattr(taken, f"PERSISTENT_MATMUL_{kind}", [tile])
        monkeypatch.setattr(taken, "_persistent_matmul_gpu", lambda _, known=(multiprocessors, shared): known)
        M, N, K = 2 * tile[0] + 40, tile[1] + 72, 2 * tile[2] + 24
        a, b = matrices(Draw(dtype), M, N, K, by_a, by_b, 32)
        out = guarded(partial(taken.persistent_matmul, input_precision=precision), a, b)
        if precision == "tf32" and DEVICE.type == "cuda":
            assert (out - a @ b).abs().max() <= 2**-8 * (a.abs() @ b.abs()).max()
        else:
            assert_product(out, a, b)


@pytest.mark.parametrize("precision", ["tf32", "tf32x3"])
def test_precisions_float32(taken: ModuleType, precision: str) -> None:
    """They are for float32 alone, for its gradients too; the interpreter multiplies all bits with any."""
    a, b = (x.requires_grad_() for x in matrices(Draw(torch.float32), 40, 72, 56, "rows", "columns", 16))
    out = taken.persistent_matmul(a, b, input_precision=precision)
    lost = 2**-8 if precision == "tf32" else 2**-18
    grad = torch.randn(40, 72, device=DEVICE)
    d_a, d_b = torch.autograd.grad(out, (a, b), grad)
    for actual, left, right in ((out, a, b), (d_a, grad, b.T), (d_b, a.T, grad)):
        left, right = left.detach().double(), right.detach().double()
        assert ((actual.double() - left @ right).abs() <= lost * (left.abs() @ right.abs())).all()
    for dtype in (torch.float16, torch.float64):
        a, b = matrices(Draw(dtype), 40, 72, 56, "rows", "columns", 16)
        assert torch.equal(taken.persistent_matmul(a, b, precision), taken.persistent_matmul(a, b))


def planned(
    taken: ModuleType, M: int, N: int, K: int, room: int = ROOMS[90], kind: str = "TILES", programs: int = 132
) -> tuple[tuple[int, ...], int, int, int, int, int]:
    """Return the tile, its stages, the whole tiles, those after them, their parts, and a part's steps."""
    size = 2 if kind == "TILES" else 4
    tiles = tuple(getattr(taken, f"PERSISTENT_MATMUL_{kind}"))
    return taken._persistent_matmul_plan(M, N, K, tiles, size, programs, room)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_plan(taken: ModuleType, dtype: torch.dtype) -> None:
    """The tile fits a GPU with three stages, and each tile and each step of a split sum has its program."""
    assert len(taken.PERSISTENT_MATMUL_TILES) >= 4
    for shared, kind in itertools.product(ROOMS.values(), ("TILES", "WIDE", "TF32")):
        for M, N, K in itertools.product((1, 64, 128, 1024, 5000, 50000), (1, 200, 5000, 50000), (1, 72, 9000)):
            tile, stages, whole, tail, parts, steps = planned(taken, M, N, K, shared, kind)
            assert whole + tail == -(-M // tile[0]) * -(-N // tile[1])
            assert 3 <= stages <= 8
            held = stages * (tile[0] + tile[1]) * tile[2] + tile[0] * tile[1] // 2
            assert held * (2 if kind == "TILES" else 4) + 1024 <= shared
            assert (tail > 0) == (parts > 1) == (steps > 0)
            if tail:
                assert whole % 132 == 0
                assert tail * parts <= 132
                assert (parts - 1) * steps * tile[2] < K <= parts * steps * tile[2]


# M, N, K: the tile, and into how many parts its last tiles are divided. Of an H200; what each row is for:
CHOICES = {
    (8192, 8192, 8192): ((128, 256), 1),  # many rounds
    (5000, 5000, 5000): ((128, 256), 12),  # 792 tiles of 132 programs, and 8
    (500, 9216, 3072): ((128, 256), 8),  # 132 tiles and 12
    (500, 5376, 1792): ((128, 256), 1),  # 84 tiles: one round
    (3000, 9000, 7000): ((256, 128), 2),  # 12 rows of tiles, and 24 would leave less
    (1024, 1024, 1024): ((64, 128), 1),  # 128 small tiles, 32 large ones
    (40, 9216, 3072): ((64, 128), 1),  # it waits for memory, so nothing is gained by parts
    (64, 64, 16384): ((64, 64), 16),  # one tile
    (64, 64, 64): ((64, 128), 1),  # one step, which is shorter with this tile
}


@pytest.mark.parametrize("shape", CHOICES, ids=str)
def test_choices(taken: ModuleType, shape: tuple[int, int, int]) -> None:
    """The least of what rounds, bytes and parts cost."""
    tile, _, _, _, parts, _ = planned(taken, *shape)
    assert (tile[:2], parts) == CHOICES[shape]


def test_copies_float32(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows at odd multiples of 32 bytes are copied for many others; any copy is whole, and the product is right."""
    wide = torch.zeros(72, 96, dtype=torch.float16, device=DEVICE)
    for length, is_slow in ((40, True), (48, False), (56, True)):
        for x in (wide[:, :length].contiguous(), wide[:, :length].contiguous().T):
            for others in (4095, 4096):
                side, turned = taken._persistent_matmul_side(x, 0, others)
                copied = side.data_ptr() != x.data_ptr()
                assert (copied, turned) == (is_slow and others == 4096, x.stride(0) == 1)
                assert side.shape == (72, length)
    assert taken._persistent_matmul_side(wide[:1, :40], 0, 4096)[0].data_ptr() == wide.data_ptr()
    monkeypatch.setattr(taken, "PERSISTENT_MATMUL_MANY", 0)
    for k, (M, N, begin) in enumerate(((5, 40, 0), (40, 520, 8), (17, 513, 0), (3, 24, 1), (33, 1030, 2))):
        x = Layout("contiguous", k).make((M, N + begin), torch.bfloat16, DEVICE)[:, begin:]
        out = taken._persistent_matmul_copy(taken._persistent_matmul_rows(M, N, x, 128), x)
        assert out.stride(0) * out.element_size() % 128 == 0
        assert torch.equal(out, x)
    a, b = (Layout("contiguous", k).make(shape, torch.float16, DEVICE) for k, shape in enumerate(((72, 40), (56, 40))))
    assert_product(taken.persistent_matmul(a, b.T), a, b.T)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_width_of_copies(taken: ModuleType, dtype: torch.dtype) -> None:
    """A load of 16 bytes begins at a multiple of them; half precision at another address is copied in pairs."""
    known: list[dict[str, int]] = []
    kernel = defaultdict(lambda: lambda *_, **constants: known.append(constants))
    for kind, begin, expected in (
        (torch.float16, 0, (False, 8)),
        (torch.float16, 2, (True, 1)),
        (dtype, 2, (False, 1)),
    ):
        x = torch.zeros(3, 48, dtype=kind, device=DEVICE)[:, begin : begin + 32]
        taken._persistent_matmul_copy(taken._persistent_matmul_rows(3, 32, x, 128), x, kernel)
        assert (known[-1]["PAIRS"], known[-1]["VEC"]) == expected


def test_small_shared_memory(taken: ModuleType) -> None:
    """A tile that does not fit with three stages is not chosen."""
    assert planned(taken, 8192, 8192, 8192, ROOMS[120], programs=170)[0][:3] == (64, 128, 64)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_cost(taken: ModuleType, dtype: torch.dtype) -> None:
    """Rounds are counted: one tile more than multiprocessors takes twice as long, or its parts are added."""
    tile, many = (128, 128, 64, 4, 6), 10**6
    step = 64 * (128 * 128 + 80 * 256)
    known = partial(taken._persistent_matmul_work, tile=tile, itemsize=dtype.itemsize, multiprocessors=4)
    assert known(256, 256, many) == ((15625 * step, 15625 * step), (4, 0, 1, 0))
    (cost, time), divided = known(256, 257, many)
    assert divided == (4, 2, 2, 7813)
    assert time == (15625 + 7813) * step
    assert cost == time + 10**7 + 10 * 2 * 2 * 128 * 128
    (cost, time), divided = known(256, 257, 512)
    assert divided == (6, 0, 1, 0)
    assert cost == time == 2 * 8 * step
    assert known(1, 1, 64)[0][0] == step
    # 128 x 8 products of 128 x 128 take less time than to read b
    (cost, time), divided = taken._persistent_matmul_work(1, 10**6, 10**4, tile, dtype.itemsize, 10**4)
    assert (cost, divided) == (2 * 4 * (10**4 + 10**10 + 10**6), (7813, 0, 1, 0))
    assert time < cost


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """A sum of many ones is not the 2048 or 256 at which half precision stands still."""
    a, b = (torch.ones(s, dtype=dtype, device=DEVICE) for s in ((3, 4608), (4608, 8)))
    assert (taken.persistent_matmul(a, b) == 4608).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_copies(taken: ModuleType, dtype: torch.dtype) -> None:
    """What the engine cannot address is copied, to rows or columns as it has them; nothing else is."""
    x, odd = (torch.randn(n, n, device=DEVICE).to(dtype) for n in (32, 21))
    shifted = torch.randn(24 * 24 + 1, device=DEVICE).to(dtype)[1:].view(24, 24)
    expanded = x[:1].expand(8, 32), x[:, :1].expand(32, 8)
    unit = 16 // dtype.itemsize
    for a in (odd, odd.T, shifted, shifted.T, x[:, 1:], x[1:, 1:], x[:, ::2], x[::2, ::2], *expanded):
        side, turned = taken._persistent_matmul_side(a, a.data_ptr())
        assert torch.equal(side.T if turned else side, a)
        assert side.stride(1) == 1
        assert side.data_ptr() % 16 == side.stride(0) % unit == 0
        assert side.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()
        if a.is_contiguous() or a.T.is_contiguous():
            assert turned != a.is_contiguous()
        assert_product(taken.persistent_matmul(a, x[: a.shape[1]]), a, x[: a.shape[1]])
        assert_product(taken.persistent_matmul(x[:, : a.shape[0]], a), x[:, : a.shape[0]], a)
    for a in (x, x.T, x[:, unit : unit + 3], x[3:, :5].T, x[:1]):
        side, turned = taken._persistent_matmul_side(a, a.data_ptr())
        assert side.data_ptr() == a.data_ptr()
        assert torch.equal(side.T if turned else side, a)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_odd_sizes_of_models(taken: ModuleType, dtype: torch.dtype) -> None:
    """An N of 5000, a K of 1791, and a slice that begins at an odd element."""
    a, b = Draw(dtype)(70, 1791), Draw(dtype)(1791, 200 if DEVICE.type == "cpu" else 5000)
    assert_product(taken.persistent_matmul(a, b), a, b)
    a, b = Draw(dtype)(70, 1800)[:, 3:1794], Draw(dtype)(203, 1791).T[:, 3:]
    assert_product(taken.persistent_matmul(a, b), a, b)


@pytest.mark.parametrize(("backend", "arch"), [("cuda", 80), ("cuda", 89), ("hip", "gfx942")])
def test_refuses_gpus_without_the_engine(
    taken: ModuleType, monkeypatch: pytest.MonkeyPatch, backend: str, arch: int | str
) -> None:
    """An older GPU and AMD's are refused, and remembered only if they are not."""
    known = {"multiprocessor_count": 132, "max_shared_mem": 227 * 1024}
    target = SimpleNamespace(backend=backend, arch=arch)
    utils = SimpleNamespace(get_device_properties=lambda _: known)
    active = SimpleNamespace(get_current_target=lambda: target, utils=utils)
    monkeypatch.setattr(taken.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    look = taken._persistent_matmul_gpu.__wrapped__
    with pytest.raises(RuntimeError, match=rf"^persistent_matmul takes .* 9\.0 .* {backend} {arch}: tuned_matmul"):
        look(torch.device("cuda", 0))
    target.backend, target.arch = "cuda", 90
    assert look(torch.device("cuda", 0)) == (132, 227 * 1024)


@needs_a_gpu
def test_first_work_of_a_thread(taken: ModuleType) -> None:
    """A thread that has not used the GPU yet, as autograd's may be, can make descriptors."""
    a, b = (torch.randn(256, 256, device=DEVICE).half() for _ in range(2))
    with ThreadPoolExecutor(1) as pool:
        assert_product(pool.submit(taken.persistent_matmul, a, b).result(), a, b)


@needs_a_gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(4096, 4096, 512), (1000, 3000, 520), (129, 8200, 4096), (8192, 64, 264)])
def test_large(taken: ModuleType, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """In half precision too, programs of many large tiles each give the same again and again."""
    for by_a, by_b in itertools.product(["rows", "columns"], repeat=2):
        a, b = matrices(Draw(dtype), *shape, by_a, by_b, 32)
        out = taken.persistent_matmul(a, b)
        assert_product(out, a, b)
        for _ in range(5):
            assert torch.equal(taken.persistent_matmul(a, b), out)


@pytest.mark.needs_gpu_memory(12)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements, of the result and of an operand: the last corner is right."""
    M, N = 2**16 + 8, 2**15 + 8
    a, b = (torch.randn(s, device=DEVICE).bfloat16() for s in ((M, 64), (64, N)))
    out = taken.persistent_matmul(a, b)
    assert out.numel() > 2**31
    assert_product(out[-300:, -300:], a[-300:], b[:, -300:])
    assert_product(out[-300:, :300], a[-300:], b[:, :300])
    d = taken.persistent_matmul(out, b.T)
    assert_product(d[-9:], out[-9:], b.T)
    d = taken.persistent_matmul(out.T, a)
    assert_product(d[-9:], out[:, -9:].T, a)


def test_steps_of_the_ladder(recipe: ModuleType) -> None:
    """Every step is right, where it is not slow or fast."""
    for M, N, K in ((40, 72, 64), (300, 264, 136)):
        a, b = recipe.random(M, K), recipe.random(K, N)
        for call in recipe.STEPS.values():
            for how in (((64, 64, 64), 4, 3), (recipe.BIG, 8, 3)):
                assert recipe.error_of(call(a, b, *how), a, b).abs().max() <= 1
        for tile in recipe.PERSISTENT_MATMUL_TILES:
            assert recipe.error_of(recipe.with_tile(tile, a, b), a, b).abs().max() <= 1
    assert len(recipe.PERSISTENT_MATMUL_TILES) == 7
    assert recipe.chosen(4096, 8192, 4096) == ((128, 256, 64), 4, 1024, 8)


def code(kernel: Any, dtype: str, tile: tuple[int, ...], stages: int, gpu: int, **constants: object) -> dict[str, Any]:
    """Return what the compiler says of the op's kernel."""
    import triton  # where it is imported first, the choice of the interpreter is made

    m, n, k, num_warps, _ = tile
    a = (k, m) if constants["A_T"] else (m, k)
    b = (n, k) if constants["B_T"] else (k, n)
    blocks = {"a_desc": a, "b_desc": b, "c": (m, n // 2)}
    types = {name: f"tensordesc<{dtype}{[*block]}>" for name, block in blocks.items()}
    types["part_ptr"] = "*fp64" if dtype == "fp64" else "*fp32"
    if not constants.pop("split"):
        constants["part_ptr"] = None
    if constants["VEC"]:
        types["c"] = f"*{dtype}"
    constants["ACC"] = triton.language.float64 if dtype == "fp64" else triton.language.float32
    types |= dict.fromkeys(("stride_cm", "whole", "tail", "items", "steps"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    ordered = {name: types[name] for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("c", "part_ptr")}
    pointers = {place: hint for place, hint in aligned.items() if [*ordered.values()][place[0]].startswith("*")}
    source = triton.compiler.ASTSource(kernel, ordered, constants, pointers)
    target = triton.backends.compiler.GPUTarget("cuda", gpu, 32)
    made = triton.compile(source, target=target, options={"num_warps": num_warps, "num_stages": stages})
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = made.asm["ptx"]
    return {
        "spilled": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared": made.metadata.shared,
        "wgmma": re.findall(r"wgmma\.mma_async\S*?(m64n\d+k\d+)", text),
        "from shared": len(re.findall(r"ld\.shared|ldmatrix", text)),
        "copies": len(re.findall(r"cp\.async\.bulk\.tensor\S*global\.mbarrier", text)),
        "pointers": len(re.findall(r"ld\.global|st\.global|cp\.async\.c[ag]", text)),
        "tf32": text.count("tf32"),
        "double": len(re.findall(r"mma\S*f64\.f64", text)),
    }


def codes(taken: ModuleType, gpu: int) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return that for all tiles that fit a GPU, in all orders."""
    results = {}
    kinds = [("ieee", "fp16", 2, tile) for tile in taken.PERSISTENT_MATMUL_TILES]
    wide = ("fp32", 4), ("fp64", 8)
    kinds += [("ieee", name, size, tile) for tile in taken.PERSISTENT_MATMUL_WIDE for name, size in wide]
    for precision in ("tf32", "tf32x3"):
        kinds += [(precision, "fp32", 4, tile) for tile in taken.PERSISTENT_MATMUL_TF32]
    for precision, dtype, size, tile in kinds:
        stages = taken._persistent_matmul_stages(tile, size, ROOMS[gpu])
        if stages < 3:
            continue
        hows = [(a_t, b_t, False, 0) for a_t, b_t in itertools.product((False, True), repeat=2)]
        # Sums that are split, and rows of a result of any length
        for a_t, b_t, split, vec in (*hows, (False, True, True, 0), (True, False, True, 1)):
            constants = {"A_T": a_t, "B_T": b_t, "PRECISION": precision, "split": split, "VEC": vec}
            known = code(taken._persistent_matmul_kernel, dtype, tile, stages, gpu, **constants)
            results[precision, dtype, tile, a_t, b_t, split] = known
    return results


@pytest.mark.thorough
@pytest.mark.parametrize(("gpu", "kinds"), [(90, 15), (100, 15), (120, 7)])
def test_compiled_code(gallery: Path, on_h100: Ask, gpu: int, kinds: int) -> None:
    """Nothing spills on large GPUs, all fits, the engine copies, and in half precision each order reads alike."""
    (results,) = on_h100(gallery / RECIPE, partial(codes, gpu=gpu))
    assert len(results) == 6 * kinds
    for (precision, dtype, tile, *_, split), known in results.items():
        # Triton 3.6 spills a few registers of some tiles on the smallest of the three GPUs, and 3.7 none.
        most = 24 if gpu == 120 and version("triton").startswith("3.6.") else 0
        if precision != "ieee" and gpu != 90:  # a few of those as well
            most = 128
        if split and gpu != 90:  # at the end of a program, where it stores a part
            most = max(most, 64)
        assert known["spilled"] <= most, (precision, dtype, tile)
        assert known["shared"] <= ROOMS[gpu]
        assert known["copies"] > 0
        assert (known["pointers"] > 0) == split
        assert (known["tf32"] > 0) == (precision != "ieee")
        assert (known["double"] > 0) == (dtype == "fp64" and gpu == 90)
        if gpu == 90 and dtype == "fp16":
            count = tile[0] // 64 * tile[2] // 16 // (tile[3] // 4)
            assert known["wgmma"] == [f"m64n{tile[1]}k16"] * (count * (2 if split else 1))
            assert split or known["from shared"] == results["ieee", dtype, tile, False, False, False]["from shared"]


def shared(recipe: ModuleType) -> dict[tuple[int, int], tuple[int, int]]:
    """Return what the page counts of shared memory and what the compiler does, for stages and parts of a large tile."""
    import triton

    target, results = triton.backends.compiler.GPUTarget("cuda", 90, 32), {}
    m, n, k = recipe.BIG
    for stages, parts in itertools.product((3, 4), (1, 2)):
        blocks = {"a_desc": [m, k], "b_desc": [k, n], "c_desc": [m, n // parts]}
        types = {name: f"tensordesc<fp16{block}>" for name, block in blocks.items()}
        constants = {"FLATTEN": True, "PARTS": parts}
        types |= dict.fromkeys(constants, "constexpr")
        source = triton.compiler.ASTSource(recipe.walk_kernel, types, constants)
        made = triton.compile(source, target=target, options={"num_warps": 8, "num_stages": stages})
        results[stages, parts] = recipe.held(recipe.BIG, stages, parts), made.metadata.shared
    return results


def test_shared_memory(gallery: Path, on_h100: Ask) -> None:
    """The page counts what the compiler does, but for barriers: four stages fit in halves alone."""
    (results,) = on_h100(gallery / RECIPE, shared)
    for how, (counted, by_the_compiler) in results.items():
        assert counted <= by_the_compiler < counted + 1024
        assert (by_the_compiler <= ROOMS[90]) == (how != (4, 1))


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward."""
    a, b = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    return graphs(recipe.persistent_matmul, a, b)


def lost(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of a triton_op whose kernel takes host descriptors."""

    def product(a: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(a)
        arguments = recipe.descriptors(a, a, out, (16, 16, 16))
        torch.library.wrap_triton(recipe.tile_kernel)[(1,)](*arguments)
        return out

    op = torch.library.triton_op("triton_gallery_tests::lost", product, mutates_args={})
    return graphs(op, torch.randn(16, 16))


def test_graphs(gallery: Path, on_h100: Ask) -> None:
    """The op is one call each way it is needed; a triton_op with host descriptors would lose its kernel."""
    (forward, backward), (without,) = on_h100(gallery / RECIPE, traced, lost)
    name = "triton_gallery.persistent_matmul.default"
    assert forward == [name]
    assert backward.count(name) == 2
    assert not [call for call in without if "triton" in call]


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("matmul/persistent_matmul")
    assert re.findall(r"(\d) stages, (\d) part\(s\): \d+ bytes, does not fit\n", out) == [("4", "1")]
    assert re.search(r"1792 tiles of \(128, 256, 64\) with 4 stages,\n +14 round\(s\), filled to 97%\n", out)
    assert out.endswith(
        "TypeError: persistent_matmul takes two float matrices of one dtype, not torch.float16 and torch.int32\n"
    )


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "both halves are the left one",
        "c, right, off_m, off_n + HALF, M, stride_cm, VEC",
        "c, left, off_m, off_n + HALF, M, stride_cm, VEC",
    ),
    (
        "halves that take turns",
        "tl.reshape(tile, (rows, 2, half)).permute(0, 2, 1)",
        "tl.reshape(tile, (rows, half, 2))",
    ),
    (
        "every second tile",
        "programs = tl.program_id(axis=0), tl.num_programs(axis=0)\n    # Flattened, the loads of the next tile begin "
        "before this one is stored.\n    for tile in tl.range(first, whole,",
        "programs = tl.program_id(axis=0), 2 * tl.num_programs(axis=0)\n    # Flattened, the loads of the next tile "
        "begin before this one is stored.\n    for tile in tl.range(first, whole,",
    ),
    ("no sum over K", "acc = tl.dot(a, b, acc, input_precision", "acc = tl.dot(a, b, input_precision"),
    (
        "groups that overlap",
        "is still in L2.\n    first = tile // (8 * tiles_n) * 8\n",
        "is still in L2.\n    first = tile // (8 * tiles_n) * 7\n",
    ),
    ("rows of any length", "    return (length + unit - 1) // unit * unit\n", "    return length\n"),
    ("rows without gaps", "strides = [side.stride(0) if rows > 1 else only, 1]", "strides = [only, 1]"),
    ("any address", " and begin % 16 == 0:", ":"),
    ("a copy of the other side", "side, 128), side), turned", "side, 128), side), not turned"),
    ("a gradient of zero", "grad = side.T if turned else side", "grad = side.T if turned else side * 0"),
    ("rows that overlap", "apart = stride >= length and ", "apart = "),
    ("gradients by rows", "    if x.stride(1) == 1:\n", "    if True:\n"),
    ("a gradient as well", "    if ctx.needs_input_grad[1]:\n", "    if ctx.needs_input_grad[0]:\n"),
    ("one stage too many", "free = shared - half - 1024", "free = shared - 1024"),
    ("rounds that cost nothing", "time = (rounds * steps + of_part) * step", "time = of_part * step"),
    ("a last round for nothing", "if tail > 0 else 0\n        time", "if tail > 0 else steps\n        time"),
    ("parts for nothing", "            add += PERSISTENT_MATMUL_ADD\n", ""),
    ("memory that costs nothing", "return max(time, memory) + add, time", "return time + add, time"),
    ("parts without programs", "if some and 0 < tail * parts <= multiprocessors:", "if some and tail > 0:"),
    ("parts of no steps", "if some and 0 < tail", "if 0 < tail"),
    ("the interpreter's bfloat16", "return x.to(ACC) if PERSISTENT_MATMUL_INTERPRETED else x", "return x"),
    ("no launcher for GPUs", '_persistent_matmul_launch, "CUDA"\n', '_persistent_matmul_launch, "XPU"\n'),
    ("the tail is the first tiles", "tile = whole + item % tail", "tile = item % tail"),
    ("parts of one beginning", "item // tail * length, length", "item // tail * 0, length"),
    ("one part less", "tl.static_range(1, PARTS)", "tl.static_range(2, PARTS)"),
    ("a part twice", "total = tl.load(part_ptrs)", "total = 2 * tl.load(part_ptrs)"),
    (
        "a copy without its last column",
        "mask = (offs_m < M) & (offs_n < N)\n        x = tl.load(",
        "mask = (offs_m < M) & (offs_n < N - 1)\n        x = tl.load(",
    ),
    (
        "a copy without its last pair",
        "mask = (offs_m < M) & (2 * pairs < N)",
        "mask = (offs_m < M) & (2 * pairs < N - 1)",
    ),
    ("rows that begin with a pair", "is_odd = begin % 2 == 1", "is_odd = begin % 2 == 2"),
    ("the left halves of two pairs", "(x >> 16) | (right << 16)", "x & 65535 | (right << 16)"),
    ("pairs from where x begins", "(x_ptr - first).to(", "x_ptr.to("),
    ("wide loads at any address", "is_aligned = x.data_ptr() % 16 == 0", "is_aligned = True"),
    ("no copy of slow rows", "side.element_size() % 32)", "side.element_size() % 16)"),
    ("a copy for few rows", "others >= PERSISTENT_MATMUL_MANY and", "others >= 0 and"),
]
