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
from compiled import Ask, graphs, ptx
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
SHAPES = r"tuned_matmul takes an \(M, K\) and a \(K, N\) matrix, not \("
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
        Refused(lambda draw: (draw(2, 3), draw(3, 2).to("meta")), ValueError, "tuned_matmul takes one device"),
        Refused(lambda draw: (far(), draw(2, 1)), ValueError, STRIDES),
        Refused(lambda draw: (draw(1, 2), far().T), ValueError, STRIDES),
    ],
)
CONTRACT = [
    PRODUCT,
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


@needs_a_gpu
def test_capture(load_op: Callable[[str], ModuleType]) -> None:
    """A graph that would capture the tuning says so; after a call outside, the same capture replays right."""
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
    ("padding that is not zero", "    buffer[:, width:] = 0\n", ""),
    (
        "rows taken for aligned",
        "aligned = x.stride(1 - dim) % vec == 0 and x.shape[dim] % vec == 0",
        "aligned = x.shape[dim] % vec == 0",
    ),
    (
        "sizes taken for multiples",
        "aligned = x.stride(1 - dim) % vec == 0 and x.shape[dim] % vec == 0",
        "aligned = x.stride(1 - dim) % vec == 0",
    ),
    (
        "a gradient of zero",
        "tuned_matmul(grad, b.T) if by_a else None",
        "tuned_matmul(grad, b.T) * 0 if by_a else None",
    ),
    ("no launcher for GPUs", 'TUNED_MATMUL_LIBRARY.impl("tuned_matmul", _tuned_matmul_launch, "CUDA")\n', ""),
]
