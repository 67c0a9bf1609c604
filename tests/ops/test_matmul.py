"""The op of the recipe Matrix multiplication and its gradient."""

# ruff: noqa: N806 - a product has M, N and K, as in the recipe

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close
from compiled import Ask, compiled, graphs, ptx, stack
from guard import guarded
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, sizes

import benchmarks.matmul as fitting

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's NaN, in the interpreter

LAYOUTS = {"nn": (False, False), "nt": (False, True), "tn": (True, False), "tt": (True, True)}


def exact(a: torch.Tensor, b: torch.Tensor) -> list[Exact]:
    """Return the product of two matrices.

    A tensor core cuts off where a float32 addition rounds, so each of K products and sums counts twice; and in float64
    the reference is rounded as well.
    """
    return [Exact(a @ b, a.abs() @ b.abs(), roundings=4 * (a.shape[1] + 1))]


def matrices(draw: Draw, M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make two matrices that fit each other."""
    return draw(M, K), draw(K, N)


def special(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make matrices that lie amid NaN, and one with a NaN and an infinity, which go to their columns alone."""
    around = torch.full((80, 150), torch.nan, dtype=draw.dtype, device=DEVICE)
    around[10:40, 20:90] = 1
    amid = around[10:40, 20:90]
    b = torch.ones(70, 60, dtype=draw.dtype, device=DEVICE)
    b[3, 7], b[0, 9] = torch.nan, torch.inf
    return [(amid, amid.T), (amid.T, amid), (amid, b)]


# M, N, K: one tile and several along each, in every dtype, and none
SIZES = [(130, 70, 65), (257, 300, 129), (1, 130, 70), (129, 1, 65), (16, 17, 64), (3, 5, 0), (0, 7, 5), (5, 0, 7)]
SIZES += [(130, 200, 1), (1, 1, 1), (128, 256, 128), (127, 255, 63), (64, 64, 32), (65, 64, 33), (7, 3, 1000)]
KINDS = r"matmul takes matrices of one dtype on one device, not torch\.float32 on"
SHAPES = r"matmul takes matrices of \(M, K\) and \(K, N\), not "
# What a way costs, where the engine is to be the cheapest, and where pointers are
CHEAP, DEAR = ((begin, 0.0, 1.0, 0.0, 0.0, 0.0) for begin in (0.0, 1e9))
ENGINE, POINTERS = {"engine": CHEAP, "pointers": DEAR}, {"engine": DEAR, "pointers": CHEAP}
PRODUCT = Case(
    "matmul",
    matrices,
    exact,
    autocast="asked",
    settings={"MATMUL_COSTS": ENGINE, "MATMUL_TF32": 0},  # through the copy engine, where there is one
    sizes=SIZES,
    small=(3, 4, 5),
    many=(4099, 4099, 65),
    shapes=st.tuples(sizes(128, 140), sizes(256, 270), sizes(64, 140)),
    reference=lambda a, b: (a.double() @ b.double()).to(a.dtype),
    special=special,
    gradients=lambda grad, a, b: exact(grad, b.T) + exact(a.T, grad),
    with_gradients=2,
    second_gradients=True,
    refused=[
        Refused(lambda draw: (draw(2, 3).int(), draw(3, 2).int()), TypeError, "matmul takes float .*int32"),
        Refused(lambda draw: (draw(2, 3), draw(3, 2).double()), TypeError, f"{KINDS} .* and torch.float64 on"),
        Refused(lambda draw: (draw(2, 3), draw(3, 2).to("meta")), TypeError, f"{KINDS} .* and .* on meta"),
        Refused(lambda draw: (draw(2, 3), draw(2, 3)), ValueError, rf"{SHAPES}\(2, 3\) and \(2, 3\)"),
        Refused(lambda draw: (draw(2, 3), draw(1, 3, 2)), ValueError, rf"{SHAPES}\(2, 3\) and \(1, 3, 2\)"),
        Refused(lambda draw: (draw(2, 3), draw(3)), ValueError, rf"{SHAPES}\(2, 3\) and \(3,\)"),
        Refused(lambda draw: (draw(3), draw(3, 2)), ValueError, rf"{SHAPES}\(3,\) and \(3, 2\)"),
        Refused(
            lambda draw: (draw(2, 3), draw(3, 2), "bf16x3"),
            ValueError,
            "matmul takes ieee, tf32 or tf32x3 as input_precision, not bf16x3",
        ),
    ],
)
CONTRACT = [
    PRODUCT,
    replace(
        PRODUCT,
        name="matmul through pointers",
        settings={"_matmul_gpu": lambda device: (False, 4)},
        refused=(),
    ),
]


def assert_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that a product is as good as its accumulator and its dtype."""
    assert_close(CONTRACT[0], out.dtype, out, *exact(a.double(), b.double()))


def test_gradient_of_one_operand(taken: ModuleType) -> None:
    """Where one gradient is wanted, one is computed."""
    a, b = torch.ones(3, 4, device=DEVICE), torch.ones(4, 5, device=DEVICE)
    for operand, other in ((a, b), (b, a)):
        operand.requires_grad_()
        taken.matmul(a, b).sum().backward()
        assert operand.grad is not None
        assert other.grad is None
        operand.requires_grad_(False)
        operand.grad = None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """A long sum is rounded once, not at every step."""
    K = 4099
    a, b = torch.full((3, K), 0.1, device=DEVICE).to(dtype), torch.ones(K, 5, dtype=dtype, device=DEVICE)
    expected = (a.double() @ b.double()).to(dtype)
    eps = torch.finfo(dtype).eps if dtype.itemsize == 2 else K * 2.0**-24
    torch.testing.assert_close(taken.matmul(a, b), expected, rtol=eps, atol=0)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_precision(taken: ModuleType, precision: str) -> None:
    """Float32 is as good as it says: on a GPU, tf32 has 11 bits, and the others have 24."""
    K = 256
    a, b = (Layout("contiguous", k).make(shape, torch.float32, DEVICE) for k, shape in enumerate([(70, K), (K, 80)]))
    inputs = a.requires_grad_(), b.requires_grad_()
    out = taken.matmul(a, b, precision)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for actual, (x, y) in zip((out, *grads), ((a, b), (out * 0 + 1, b.T), (a.T, out * 0 + 1)), strict=True):
        x, y = x.detach().double(), y.detach().double()
        error, s = (actual.double() - x @ y).abs(), x.abs() @ y.abs()
        likely = x.shape[1] ** 0.5 * 2.0**-23 * s
        if precision == "tf32":
            assert (error <= 2.0**-9 * s + x.shape[1] * 2.0**-23 * s).all()
            assert DEVICE.type == "cpu" or (error > likely).any()
        else:
            assert (error <= likely).all()


class Launches:
    """Takes the place of a kernel, and keeps the constants of its launches."""

    def __init__(self) -> None:
        """Begin with no launch."""
        self.known: list[dict[str, Any]] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        """Return what is launched."""
        return lambda *_, **known: self.known.append(known)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize(("how", "least"), [("nn", 0), ("nt", 1), ("tn", 0), ("tt", 1)])
def test_least(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str, least: int, dtype: torch.dtype) -> None:
    """The kernel learns whether b is transposed: the loop runs at least once there."""
    kernel = Launches()
    monkeypatch.setattr(taken, "_matmul_kernel", kernel)
    lie = (torch.zeros(shape, dtype=dtype, device=DEVICE) for shape in ((20, 30), (30, 40)))
    a, b = (x.T.contiguous().T if t else x for x, t in zip(lie, LAYOUTS[how], strict=True))
    taken.matmul(a, b)
    assert [known["LEAST"] for known in kernel.known] == [least]


# A matrix's shape and strides, and how many elements one load takes, down and across: of half precision
LOADS = {
    ((5000, 5000), (5000, 1)): (1, 8),
    ((5000, 5000), (1, 5000)): (8, 1),
    ((5000, 4096), (5000, 1)): (1, 8),
    ((16, 5004), (5004, 1)): (1, 4),
    ((16, 5002), (5002, 1)): (1, 2),
    ((16, 5001), (5008, 1)): (1, 1),
    ((16, 5000), (5001, 1)): (1, 1),
    ((5000, 16), (10000, 2)): (1, 1),
    ((16, 64), (0, 1)): (1, 8),
    ((16, 64), (0, 0)): (1, 1),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_width_of_loads(taken: ModuleType, dtype: torch.dtype) -> None:
    """What divides a row's length and its stride: a load of more would pass a row's end, or begin between two."""
    for (shape, strides), vec in LOADS.items():
        x = torch.empty(1, dtype=dtype, device="meta").as_strided(shape, strides)
        assert taken._matmul_vec(x) == tuple(min(number, 16 // dtype.itemsize) for number in vec)


# M, N, K, how a and b lie, and whether the copy engine loads them on Hopper: not if that is little work, nor if it
# needs a copy that few rows of the other matrix are multiplied by.
WAYS = [
    (5000, 5000, 5000, "nn", True),
    (5000, 5000, 5000, "tt", True),
    (40, 9216, 3072, "nt", True),
    (1, 8, 8, "nn", False),
    (4096, 4095, 4096, "nn", True),  # b's rows are odd, a's are not, and M is large
    (16, 4095, 4096, "nn", False),
    (16, 4096, 4095, "nt", False),  # all rows are odd
    (8, 4095, 4096, "nn", False),
    (4095, 8, 4096, "tn", False),
]


def lying(how: str, M: int, N: int, K: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new matrices of a layout."""
    sizes_of_factors = zip(((M, K), (K, N)), LAYOUTS[how], strict=True)
    a, b = (torch.empty(shape[::-1] if t else shape, dtype=dtype, device=DEVICE) for shape, t in sizes_of_factors)
    return (a.T if how[0] == "t" else a), (b.T if how[1] == "t" else b)


@pytest.fixture
def hopper(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the op plan for an H200."""
    monkeypatch.setattr(taken, "_matmul_gpu", lambda _: (True, 132))
    monkeypatch.setattr(taken, "_persistent_matmul_gpu", lambda _: (132, 227 * 1024))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_way(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Half precision and TF32 go through the engine, if it is much work, and no copy is for few rows."""
    for M, N, K, how, by_engine in WAYS:
        found, plan = taken._matmul_choose(*lying(how, M, N, K, torch.bfloat16), "ieee")
        assert found == by_engine, (M, N, K, how, plan)
    x = torch.empty(520, 520, dtype=dtype, device=DEVICE)
    precisions = ("ieee", "tf32", "tf32x3")
    assert [taken._matmul_choose(x, x, precision)[0] for precision in precisions] == [False, True, True]
    assert not taken._matmul_choose(x.double(), x.double(), "tf32")[0]
    assert not taken._matmul_choose(x[:200], x, "tf32")[0]
    monkeypatch.setattr(taken, "_matmul_gpu", lambda _: (False, 132))
    assert not taken._matmul_choose(*lying("nn", 5000, 5000, 5000, torch.bfloat16), "tf32")[0]


@pytest.mark.usefixtures("hopper")
def test_plan_of_accumulators(taken: ModuleType) -> None:
    """A plan divides all of the work, and its least time is that of all tiles and parts."""
    for M, N, K, how in (
        (2, 4421, 7031, "nt"),
        (53, 88, 12268, "tn"),
        (500, 9216, 3072, "nt"),
        (3000, 9000, 7000, "tt"),
    ):
        a, b = lying(how, M, N, K, torch.bfloat16)
        by_engine, plan = taken._matmul_choose(a, b, "ieee")
        (m, n, k, *_), _, whole, tail, parts, steps = plan
        assert whole + tail == -(-M // m) * -(-N // n)
        if parts > 1:
            assert (parts - 1) * steps * k < K <= parts * steps * k  # each part has something to sum
        vecs = tuple(max(taken._matmul_vec(x)) for x in (a, b))
        tiles = taken.MATMUL_NARROW if min(vecs) == 1 else taken.MATMUL_TILES[2]
        copied = taken._matmul_copied(a) + taken._matmul_copied(b)
        edges = ((taken._matmul_block(M, m), taken._matmul_block(N, n), k) for m, n, k, *_ in tiles)
        ways = [("pointers", tile, 0) for tile in edges]
        ways += [("engine", tile[:3], copied) for tile in taken.PERSISTENT_MATMUL_TILES]
        times = {}
        for (kind, tile, more), some in product(ways, taken.MATMUL_PARTS):
            if found := taken._matmul_time(M, N, K, tile, some, kind, vecs, 132):
                times[kind, tile, some] = found[0] + more, found[1]
        chosen = times["engine" if by_engine else "pointers", plan[0][:3], parts]
        assert chosen[1] == (whole, tail, parts, steps)
        assert chosen[0] == min(time for time, _ in times.values())
    given = 64, 64, 5 * 64, (64, 64, 64)
    assert taken._matmul_time(*given, 3, "pointers", (8, 8), 132)
    assert taken._matmul_time(*given, 4, "pointers", (8, 8), 132) is None  # the last would sum nothing
    tile, rest = (64, 64, 64), (1, "pointers", (8, 8), 132)
    one, sixteen = (taken._matmul_time(tiles * 132 * 64, 64, 4096, tile, *rest)[0] for tiles in (1, 16))
    assert 8 * one < sixteen < 16 * one  # a multiprocessor has one tile, or sixteen
    # Two rows of many numbers leave most multiprocessors idle, unless their sums are split.
    assert taken._matmul_choose(*lying("nt", 2, 4421, 7031, torch.bfloat16), "ieee")[1][4] > 1


def test_costs_are_fitted(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the times of plans, the benchmark finds the numbers that they were made with, and the best plans again."""
    for name in ("MATMUL_COSTS", "MATMUL_COPY", *fitting.NAMES):
        monkeypatch.setattr(taken, name, getattr(taken, name))
    real, plans = fitting.numbers(taken), []
    shapes = [(8192, 8192, 1024), (100, 5000, 3000), (8, 4096, 4096), (600, 90, 7000)]
    ways = [("engine", taken.PERSISTENT_MATMUL_TILES, (1, 10**6)), ("pointers", taken.MATMUL_TILES[2], (0, 0))]
    for (number, (M, N, K)), (way, tiles, copies), vecs in product(enumerate(shapes), ways, [(1, 8), (8, 8)]):
        for tile, parts in product(tiles, (1, 2, 4, 8)):
            if found := taken._matmul_time(M, N, K, tile, parts, way, vecs, 132):
                told = M, N, K, tile, parts, way, vecs, 132
                plans.append(fitting.TimedPlan(number, told, copies, found[0]))
    plans = [replace(plan, us=fitting.counted(taken, plan)) for plan in plans]
    assert fitting.distance(taken, plans) == 0
    assert fitting.lost(taken, plans) == [1.0] * len(shapes)
    fitting.count_with(taken, [number * 1.5 ** (place % 3 - 1) for place, number in enumerate(real)])
    assert fitting.distance(taken, plans) > 0.1
    assert fitting.fit(taken, plans) < 0.03
    assert max(fitting.lost(taken, plans)) < 1.05


@pytest.mark.parametrize("how", LAYOUTS)
def test_plans_that_are_timed(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Each plan that the benchmark would time runs, by both ways, and the op counts a time for it."""

    def clock(calls: dict[Any, Callable[[], None]], *_: Any, **__: Any) -> dict[Any, list[tuple[float, ...]]]:
        for call in calls.values():
            call()
        return {plan: [(0.02,)] for plan in calls}

    monkeypatch.setattr("triton_gallery.bench.time_turns", clock)
    plans = fitting.timed(taken, 0, *lying(how, 40, 72, 33, torch.float16))
    assert {plan.told[5] for plan in plans} == {"engine", "pointers"}
    assert {plan.us for plan in plans} == {20.0}
    assert all(fitting.counted(taken, plan) > 0 for plan in plans)
    assert any(plan.copies[0] for plan in plans) == (how != "tn")  # else a or b has rows of 33 numbers


@pytest.mark.parametrize(
    ("major", "hip", "has_engine"), [(8, None, False), (9, None, True), (10, None, True), (9, "7", False)]
)
def test_gpu_for_float32(
    taken: ModuleType, monkeypatch: pytest.MonkeyPatch, major: int, hip: str | None, has_engine: bool
) -> None:
    """NVIDIA's GPUs have a copy engine from compute capability 9.0 on."""
    gpu = SimpleNamespace(major=major, multi_processor_count=144)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert taken._matmul_gpu.__wrapped__(torch.device("cuda", 0)) == (has_engine, 144)


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("by_engine", [False, True], ids=["pointers", "engine"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_parts(
    taken: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str, by_engine: bool, dtype: torch.dtype
) -> None:
    """Sums of the last tiles are split, in whole rounds before them and without, and rows of any length are right."""
    for name in ("PERSISTENT_MATMUL_ADD", "PERSISTENT_MATMUL_PART", "MATMUL_ADD", "MATMUL_PART", "MATMUL_TF32"):
        monkeypatch.setattr(taken, name, 0)
    monkeypatch.setattr(taken, "PERSISTENT_MATMUL_TILES", [(64, 64, 32, 4, 4), (64, 128, 32, 4, 4)])
    monkeypatch.setattr(taken, "MATMUL_TILES", {size: [(64, 64, 32, 4, 3)] for size in (2, 4, 8)})
    monkeypatch.setattr(taken, "MATMUL_NARROW", [(64, 64, 32, 4, 3)])
    monkeypatch.setattr(taken, "MATMUL_COSTS", ENGINE if by_engine else POINTERS)
    monkeypatch.setattr(taken, "MATMUL_RESIDENT", 1)
    plans = []
    for name in ("_persistent_matmul_plan", "_matmul_plan"):
        plan = getattr(taken, name)

        def kept(*given: Any, plan: Callable[..., Any] = plan) -> Any:
            found = plan(*given)
            plans.append(found[-1] if len(found) == 2 else found)
            return found

        monkeypatch.setattr(taken, name, kept)
    monkeypatch.setattr(taken, "_matmul_gpu", lambda _: (by_engine, 5))
    monkeypatch.setattr(taken, "_persistent_matmul_gpu", lambda _: (5, 227 * 1024))
    for M, N, K in ((130, 120, 200), (130, 121, 136), (40, 40, 400)):
        lie = (Layout("contiguous", k).make(shape, dtype, DEVICE) for k, shape in enumerate([(M, K), (K, N)]))
        a, b = (x.T.contiguous().T if t else x for x, t in zip(lie, LAYOUTS[how], strict=True))
        out = guarded(taken.matmul, a, b)
        assert out.is_contiguous()
        assert_product(out, a, b)
        assert torch.equal(taken.matmul(a, b), out)
    divided = {(whole > 0, tail > 0) for _, _, whole, tail, *_ in plans}
    assert {(True, True), (False, True)} <= divided


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The first kernel and its gradient are right with each tile of the page."""
    a, b = (Layout("contiguous", k).make((140, 140), torch.float16, DEVICE) for k in range(2))
    for tile in recipe.TILES:
        assert_product(recipe.tile_matmul(a, b, *tile), a, b)
    shapes = (70, 90), (90, 40), (1, 1)
    a, b, one = (Layout("contiguous", k).make(shape, torch.float16, DEVICE) for k, shape in enumerate(shapes))
    grad = one.expand(70, 40)  # the gradient of a sum is one number with strides of 0
    grad_a, grad_b = recipe.tile_matmul_backward(a, b, grad)
    for result, first, second in ((grad_a, grad, b.T), (grad_b, a.T, grad)):
        assert_product(result, first, second)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_precision_of_the_first_kernel(recipe: ModuleType, precision: str) -> None:
    """With ieee, float32 keeps the bound of the page; with tf32, on an NVIDIA GPU, it does not."""
    a, b = (Layout("contiguous", k).make(shape, torch.float32, DEVICE) for k, shape in enumerate([(64, 70), (70, 80)]))
    expected, bound = recipe.error_bound(a, b)
    is_within = ((recipe.tile_matmul(a, b, PRECISION=precision) - expected).abs() <= bound).all()
    assert is_within == (precision == "ieee" or DEVICE.type == "cpu" or torch.version.hip is not None)


def test_launcher_refuses(recipe: ModuleType) -> None:
    """What the first kernel cannot multiply is refused, not read past its end."""
    a = torch.ones(20, 30, dtype=torch.float16, device=DEVICE)
    for b in (a, a.T, a.T.contiguous().float()):
        with pytest.raises(AssertionError):
            recipe.tile_matmul(a, b)
    with pytest.raises(AssertionError):
        recipe.tile_matmul(a.double(), a.T.contiguous().double())


def test_exercises(recipe: ModuleType) -> None:
    """Their checks tell a hole, a mistake and the answer apart."""
    assert recipe.check_fused(recipe.fused_matmul) == "not solved yet"
    assert recipe.check_fused(recipe.fused_answer) == "right"
    assert recipe.check_fused(lambda a, b, bias, x: torch.relu(a @ b + bias + x)) == "wrong"
    assert recipe.check_registers(recipe.accumulator_registers) == "not solved yet"
    assert recipe.check_registers(lambda M, N, warps: M * N // (32 * warps)) == "right"
    assert recipe.check_registers(lambda M, N, warps: M * N // warps) == "wrong"


def at_launch(
    taken: ModuleType, dtype: str, how: str, tile: tuple[int, ...], vec: int, *, split: bool = False
) -> dict[str, object]:
    """Return what the launcher passes on for matrices of which `vec` divides all sizes, and 16 none."""
    import triton.language as tl

    m, n, k, num_warps, num_stages = tile
    by_rows, by_columns = (how[0] == "n", how[1] == "n")
    wide = "fp64" if dtype == "float64" else "fp32"
    return {
        "dtype": {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}[dtype],
        "num_warps": num_warps,
        "num_stages": num_stages,
        "stride_ak" if by_rows else "stride_am": 1,
        "stride_bn" if by_columns else "stride_bk": 1,
        "part_ptr": wide if split else None,
        "LEAST": int(not by_columns),
        "VEC_AM": 1 if by_rows else vec,
        "VEC_AK": vec if by_rows else 1,
        "VEC_BK": 1 if by_columns else vec,
        "VEC_BN": vec if by_columns else 1,
        "VEC_CN": vec,
        "ACC": tl.float64 if dtype == "float64" else tl.float32,
        "PRECISION": "ieee",
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
    }


def copies(taken: ModuleType) -> dict[str, tuple[set[str], set[str], bool]]:
    """Return, for each layout and tile, the bytes of a copy and of a store, and if tensor cores take copies."""
    results = {}
    for how in LAYOUTS:
        for tile in taken.MATMUL_TILES[2]:
            text = compiled(taken._matmul_kernel, **at_launch(taken, "float16", how, tile, 8, split=True)).asm["ptx"]
            copied = set(re.findall(r"cp\.async\.\S+ \[.*?\], \[.*?\], (\w+)", text))
            stored = set(re.findall(r"st\.global\.(v\d)\.b32", text))
            loads = len(re.findall(r"ld\.global", text))
            multiplied = "wgmma" if tile[0] >= 64 else "mma.sync"  # Hopper's instruction has 64 rows
            results[f"{how} {tile}"] = copied, stored, multiplied in text and loads == 0
    return results


def spills(taken: ModuleType) -> list[str]:
    """Return which kernels spill registers on an H100, of those for rows of any length as well."""
    spilled = []
    kinds = [("float16", tile, 8) for tile in taken.MATMUL_TILES[2]]
    kinds += [("float16", tile, 1) for tile in taken.MATMUL_NARROW]
    kinds += [("float32", tile, 4) for tile in taken.MATMUL_TILES[4]]
    kinds += [("float64", tile, 2) for tile in taken.MATMUL_TILES[8]]
    for (dtype, tile, vec), how in product(kinds, LAYOUTS):
        if stack(taken._matmul_kernel, **at_launch(taken, dtype, how, tile, vec, split=True)):
            spilled.append(f"{how} {dtype} {tile}")
    return spilled


def notes(taken: ModuleType) -> list[str]:
    """Return what the assembler says of products that wait for each other."""
    from triton.backends.nvidia.compiler import get_ptxas

    lines = []
    for how, dtype, tile in product(LAYOUTS, ("float16", "bfloat16"), taken.MATMUL_TILES[2]):
        code = ptx(taken._matmul_kernel, **at_launch(taken, dtype, how, tile, 8))
        with NamedTemporaryFile(suffix=".ptx", mode="w") as file:
            file.write(code)
            file.flush()
            command = [get_ptxas(90).path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
            log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "Used" in log
        lines += [f"{how} {dtype} {tile} {line}" for line in log.splitlines() if "Potential Performance" in line]
    return lines


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Of rows of 8 odd numbers, a thread copies and stores 16 bytes at once, and tensor cores multiply."""
    (results,) = on_h100(gallery / "matmul" / "matmul.py", copies)
    assert len(results) == 28
    assert all(result == ({"0x10"}, {"v4"}, True) for result in results.values()), results


@pytest.mark.thorough
def test_spills(gallery: Path, on_h100: Ask) -> None:
    """No tile needs more registers than there are."""
    (spilled,) = on_h100(gallery / "matmul" / "matmul.py", spills)
    assert spilled == []


@pytest.mark.thorough
def test_products_do_not_wait_for_each_other(gallery: Path, on_h100: Ask) -> None:
    """In no layout has the assembler to put products one after the other."""
    (lines,) = on_h100(gallery / "matmul" / "matmul.py", notes)
    assert lines == []


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward."""
    return graphs(recipe.matmul, *(torch.randn(40, 40, requires_grad=True) for _ in range(2)))


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """A product is one call forward and two backward, and no operand is copied."""
    (traced_graphs,) = on_h100(gallery / "matmul" / "matmul.py", traced)
    for graph, products in zip(traced_graphs, (1, 2), strict=True):
        assert graph.count("triton_gallery.matmul.default") == products
        assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]


@pytest.mark.needs_gpu_memory(7)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last row of an operand is right, and of its transpose."""
    M, K = 2**15 + 8, 2**16 + 8
    a = torch.zeros(M, K, dtype=torch.bfloat16, device=DEVICE)
    a[-1], a[:, -1] = 1, 1
    for first, expected in ((a, K), (a.T, M)):
        b = torch.ones(first.shape[1], 16, dtype=torch.bfloat16, device=DEVICE)
        out = taken.matmul(first, b)
        torch.testing.assert_close(out[-1], torch.full_like(out[-1], expected))
        assert (out[:-1] == 1).all()
        torch.testing.assert_close(taken.matmul(b.T, first.T)[:, -1], out[-1])


@pytest.mark.needs_gpu_memory(12)
def test_step_beyond_int32(taken: ModuleType) -> None:
    """A step along K is more than 2**31 elements."""
    a = torch.zeros(80, 2**26, dtype=torch.bfloat16, device=DEVICE)
    a[:, -1] = 1
    out = taken.matmul(a[:, -32:].T, torch.ones(80, 16, dtype=torch.bfloat16, device=DEVICE))
    assert (out[-1] == 80).all()
    assert not out[:-1].any()


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "rows without a mask",
        "a_mask = a_rows & (offs_k[None, :] < a_end - start)",
        "a_mask = a_rows | (offs_m < 0)",
    ),
    (
        "columns without a mask",
        "b_mask = (offs_k[:, None] < b_end - start) & b_columns",
        "b_mask = b_columns | (offs_n < 0)",
    ),
    ("stored past the end", "acc, mask=c_mask)\n\n\ndef _matmul_block", "acc, mask=offs_n < N)\n\n\ndef _matmul_block"),
    (
        "half an accumulator",
        "input_precision=PRECISION, out_dtype=ACC)\n        # Stepping",
        "input_precision=PRECISION, out_dtype=ACC).to(tl.float16).to(ACC)\n        # Stepping",
    ),
    ("rows taken for contiguous", "offs_m * stride_am + (off_k", "offs_m * K + (off_k"),
    ("a loop that always runs", "LEAST=int(b.stride(0) == 1)", "LEAST=1"),
    ("b's step along K is a's", "b_ptrs += step * stride_bk", "b_ptrs += step * stride_ak"),
    ("a load past a row's end", "math.gcd(columns, by_row, unit)", "math.gcd(by_row, unit)"),
    ("a load between two rows", "math.gcd(columns, by_row, unit)", "math.gcd(columns, unit)"),
    ("a copy that costs nothing", "return begin + 4 * x.numel() / rate", "return 0 * begin / rate"),
    ("an engine without copies", "copied = _matmul_copied(a) + _matmul_copied(b)", "copied = _matmul_copied(a)"),
    ("the most time", "_, way, tile, divided = min(choices)", "_, way, tile, divided = max(choices)"),
    ("parts of nothing", "or triton.cdiv(steps, of_part) != parts", "or of_part != of_part"),
    (
        "programs that do not share",
        "rounds, rest = divmod(own, together)",
        "rounds, rest = 0, 1",
    ),
    ("float32 in TF32", 'a.dtype == torch.float32 and input_precision != "ieee"', "a.dtype == torch.float32"),
    ("the engine for any TF32", "if has_engine and is_tf32 and M * N * K > MATMUL_TF32:", "if has_engine and is_tf32:"),
    ("AMD's copy engine", "gpu.major >= 9 and not torch.version.hip", "gpu.major >= 9"),
    (
        "parts from the beginning",
        "off_k = tl.where(is_part, item // tail",
        "off_k = tl.where(is_part, 0 * item // tail",
    ),
    ("parts to the end of K", "length = tl.where(is_part, left, K)", "length = tl.where(is_part, K - off_k, K)"),
    ("parts of a whole tile", "mask=is_part & (offs >= 0)", "mask=offs >= 0"),
    (
        "parts that no one adds",
        "        if tail > 0:\n            _persistent_matmul_add(part, c, plan)\n\n\ndef _matmul_launch",
        "\n\ndef _matmul_launch",
    ),
]
