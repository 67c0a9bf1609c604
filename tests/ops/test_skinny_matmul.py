"""The op of the recipe A product of few rows."""

# ruff: noqa: N806 - M, N and K are sizes, as in the recipe

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close
from compiled import TRITON, Ask, graphs
from guard import guarded
from hypothesis import strategies as st
from inputs import DEVICE, Layout, sizes
from tolerance import assert_within
from torch.nn.functional import linear

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEADS = st.sampled_from([(), (1,), (0,), (16,), (17,), (33,), (64,), (2, 3), (3, 1, 2), (5, 0)])


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random numbers of a shape, one after another in memory."""
    return Layout("contiguous", seed).make(shape, dtype, DEVICE)


def matrices(draw: Draw, lead: tuple[int, ...], N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make rows and a weight."""
    return draw(*lead, K), draw(N, K)


def exact(x: torch.Tensor, weight: torch.Tensor) -> list[Exact]:
    """Return the product: each term is added once to an accumulator, and each of up to 8 parts once to the others."""
    return [Exact(linear(x, weight), linear(x.abs(), weight.abs()), roundings=weight.shape[1] + 8)]


def special(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make ones with NaN behind each row, which no result has; then with a NaN and an infinity in one row each."""
    made = []
    for nan, infinity in ((1, 1), (torch.nan, torch.inf)):
        x, weight = (torch.ones(rows, 140, dtype=draw.dtype, device=DEVICE) for rows in (5, 70))
        x[:, 130:] = weight[:, 130:] = torch.nan
        x[1, 3], weight[7, 129] = nan, infinity
        made.append((x[:, :130], weight[:, :130]))
    return made


# Rows, N, K: sums in 8 parts, in parts that are not full, and in one; tiles that are not full; each number of rows
SIZES = [((5,), 65, 1000), ((64,), 64, 1024), ((17,), 40, 130), ((1,), 1030, 129), ((33,), 200, 64), ((2, 3), 9, 700)]
SIZES += [((), 1, 1), ((3, 0), 5, 7), ((3,), 4, 0), ((4,), 0, 6)]
SIZES += [((M,), N, K) for M in (1, 16, 32, 64) for N, K in ((64, 1024), (40, 130), (1030, 129), (200, 64), (3, 1))]
TYPES = "skinny_matmul takes two tensors of float16, bfloat16 or float32, not"
FORMS = r"skinny_matmul takes \(\.\.\., K\) and \(N, K\) on one device, not"
MANY_ROWS = "skinny_matmul takes up to 64 rows, not 65: linear of"
CONTRACT = [
    Case(
        "skinny_matmul",
        matrices,
        exact,
        autocast="asked",
        sizes=SIZES,
        small=((2,), 3, 130),
        in_layouts=((2, 3), 70, 300),
        many=((64,), 262_147, 40),
        shapes=st.tuples(LEADS, sizes(64, 150), sizes(128, 700)),
        dtypes=DTYPES,
        reference=lambda x, weight: linear(x.double(), weight.double()).to(x.dtype),
        special=special,
        refused=[
            Refused(lambda draw: (draw(2, 3).double(), draw(5, 3).double()), TypeError, f"{TYPES} torch.float64 and"),
            Refused(lambda draw: (draw(2, 3).half(), draw(5, 3)), TypeError, f"{TYPES} torch.float16 and"),
            Refused(lambda draw: (draw(2, 3).int(), draw(5, 3).int()), TypeError, f"{TYPES} torch.int32 and"),
            Refused(lambda draw: (draw(2, 4), draw(5, 3)), ValueError, FORMS),
            Refused(lambda draw: (draw(2, 3), draw(3)), ValueError, FORMS),
            Refused(lambda draw: (draw(), draw(5, 3)), ValueError, FORMS),
            Refused(lambda draw: (draw(2, 3), draw(1, 5, 3)), ValueError, FORMS),
            Refused(lambda draw: (draw(2, 3), draw(5, 3).to("meta")), ValueError, f"{FORMS} .* and meta"),
            Refused(lambda draw: (draw(65, 3), draw(5, 3)), ValueError, MANY_ROWS),
            Refused(lambda draw: (draw(5, 13, 3), draw(5, 3)), ValueError, MANY_ROWS),
        ],
    ),
]


def assert_product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert_close(CONTRACT[0], x.dtype, out, *exact(x.double(), weight.double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("M", [1, 64])
def test_integers_are_exact(taken: ModuleType, dtype: torch.dtype, M: int) -> None:
    """Sums of small integers that half precision would not hold, and every term counts once."""
    K = 2080
    x, weight = torch.ones(M, K, device=DEVICE), torch.ones(70, K, device=DEVICE)
    x[:, ::2] = -1
    x[:, 1] = 2
    for rows in (x, x.abs()):
        expected = linear(rows, weight).to(dtype)
        assert torch.equal(taken.skinny_matmul(rows.to(dtype), weight.to(dtype)), expected)


def run(taken: ModuleType, x: torch.Tensor, weight: torch.Tensor, splits: int, steps: int, **changes: Any) -> Any:
    """Return what the op's kernels make of another plan."""
    *_, tile = taken._skinny_matmul_plan(x.shape[0], weight)
    y = x.new_empty(x.shape[0], weight.shape[0])
    plan = splits, steps, tile | changes
    return taken._skinny_matmul_run(x, weight, y, plan, taken._skinny_matmul_kernel, taken._skinny_matmul_add_kernel)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_added_in_order(taken: ModuleType, dtype: torch.dtype) -> None:
    """Each part is a sum of its own, in float32; from the first to the last they make the result."""
    x, weight = make((5, 1024), dtype), make((200, 1024), dtype, 1)
    splits, steps, tile = taken._skinny_matmul_plan(5, weight)
    assert splits > 1
    part, y = x.new_full((splits, 5, 200), torch.nan, dtype=torch.float32), torch.empty_like(x[:, :200])
    sizes = (5, 200, 1024, steps, 1024, 1024, 1)
    taken._skinny_matmul_kernel[4, splits](x, weight, part, *sizes, **tile)
    width = steps * tile["BLOCK_K"]
    for k, partial_sum in enumerate(part):
        columns = slice(k * width, (k + 1) * width)
        assert_within(
            partial_sum,
            linear(x[:, columns].double(), weight[:, columns].double()),
            linear(x[:, columns].double().abs(), weight[:, columns].double().abs()),
            roundings=width,
        )
    taken._skinny_matmul_add_kernel[4,](part, y, 1000, splits, BLOCK=256)
    total = torch.zeros(5, 200, device=DEVICE)
    for partial_sum in part:
        total += partial_sum
    eps = torch.finfo(dtype).eps  # the interpreter cuts half precision
    assert ((y.float() - total).abs() <= eps * total.abs()).all()
    assert torch.equal(y, taken.skinny_matmul(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_parts_without_a_block(taken: ModuleType, dtype: torch.dtype) -> None:
    """A part that has nothing to add does not spoil the sum; the tuning on the page has such plans."""
    x, weight = make((5, 190), dtype)[:, :188], make((70, 188), dtype, 1)
    for splits, steps, changes in ((5, 1, {}), (1, 3, {}), (2, 2, {"BLOCK_N": 32}), (8, 1, {"BLOCK_N": 128})):
        assert_product(run(taken, x, weight, splits, steps, **changes), x, weight)


H200, A100, L4 = (132, 227 * 1024), (108, 163 * 1024), (58, 99 * 1024)  # multiprocessors, bytes of a program


def plan_on(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, gpu: tuple[int, int]) -> None:
    """Have plans made for a GPU."""
    monkeypatch.setattr(taken, "_skinny_matmul_gpu", lambda device: gpu)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gpu", [H200, A100, L4], ids=["H200", "A100", "L4"])
def test_plans(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, gpu: tuple[int, int], dtype: torch.dtype) -> None:
    """No more programs than multiprocessors where a sum is split; all of K, no part in vain; M decides no sum."""
    plan_on(taken, monkeypatch, gpu)
    processors, shared = gpu
    for N in (1, 64, 65, 2048, 5120, 8192, 8449, 14336, 151936):
        for K in (1, 100, 128, 129, 2880, 7168, 8192, 14336):
            weight = torch.empty(N, K, dtype=dtype, device="meta")
            plans = [taken._skinny_matmul_plan(M, weight) for M in range(1, 65)]
            assert len({(splits, steps, tile["BLOCK_K"]) for splits, steps, tile in plans}) == 1
            (splits, steps, tile), tiles = plans[0], -(-N // 64)
            block = tile["BLOCK_K"]
            assert 1 <= splits <= 8
            assert splits == 1 or splits * tiles <= processors
            # As many as may be, but for those that would have nothing to do
            blocks = -(-K // block)
            most = max(1, min(8, processors // tiles, blocks))
            assert steps == -(-blocks // most)
            assert (splits - 1) * steps * block < K <= splits * steps * block
            aligned = K * dtype.itemsize % 16 == 0 or K == 1
            assert block * dtype.itemsize == (256 if aligned else 128)
            tiles_of = [tile for *_, tile in plans]
            assert [tile["BLOCK_M"] for tile in tiles_of] == [16] * 16 + [32] * 16 + [64] * 32
            for tile in tiles_of:
                fit = shared // ((tile["BLOCK_M"] + 64) * 256)
                assert tile["num_stages"] == (min(5, fit) if aligned else 2)
                assert fit >= 2


def test_plans_of_the_page(taken: ModuleType, recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the text says of its shapes on an H200, and of an L4's stages."""
    weights = [torch.empty(N, K, dtype=torch.bfloat16, device="meta") for _, K, N in recipe.SHAPES]
    plan_on(taken, monkeypatch, H200)
    assert H200[0] == recipe.PROCESSORS
    plans = [taken._skinny_matmul_plan(M, weight) for weight in weights for M in (1, 64)]
    assert [splits for splits, *_ in plans] == [1, 1, 1, 1, 4, 4]
    assert {tile["num_stages"] for *_, tile in plans} == {5}
    plan_on(taken, monkeypatch, L4)
    assert [taken._skinny_matmul_plan(M, weights[0])[2]["num_stages"] for M in (1, 32, 64)] == [4, 4, 3]


def test_gpu_without_a_gpu(taken: ModuleType) -> None:
    """The interpreter splits small sums."""
    assert taken._skinny_matmul_gpu(torch.device("cpu")) == (8, 64 * 1024)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_steps_of_the_ladder(recipe: ModuleType, dtype: torch.dtype) -> None:
    """Every step is right, where it is not fast."""
    for M, K, N in ((1, 900, 100), (20, 300, 70), (33, 40, 9), (64, 129, 65)):
        x, weight = make((M, K), dtype), make((N, K), dtype, 1)
        for step, *_ in recipe.STEPS.values():
            assert_product(guarded(step, x, weight), x, weight)
        for splits in (1, 8):
            for atomic in (False, True):
                assert_product(recipe.one_launch(x, weight, atomic, splits), x, weight)
        for plan in recipe.PLANS:
            assert_product(recipe.replanned(x, weight, *plan), x, weight)
    assert [recipe.statements(*kernels) for _, *kernels in recipe.STEPS.values()] == [15, 30, 32, 32]
    assert recipe.results_of(linear, x, weight) == 1


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 weights: the last row and the last column count, in either layout."""
    N, K = 2**17 + 64, 2**14
    weight = torch.zeros(N, K, dtype=torch.bfloat16, device=DEVICE)
    weight[-1, ::2], weight[:, -1] = 1, 2
    x = torch.ones(2, K, dtype=torch.bfloat16, device=DEVICE)
    y = taken.skinny_matmul(x, weight)
    assert (y[:, :-1] == 2).all()
    assert (y[:, -1] == torch.tensor(K // 2 + 2.0).bfloat16()).all()
    y = taken.skinny_matmul(x[:, :1].expand(2, N), weight.T)
    assert y[0, 1::2][:-1].eq(0).all()
    assert y[0, ::2].eq(1).all()
    assert y[0, -1] == torch.tensor(2.0 * N).bfloat16()


@needs_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_others(taken: ModuleType, dtype: torch.dtype) -> None:
    """A row has the same bits, whatever rows come with it, in every layout of the weights."""
    for N, K in ((2048, 7168), (8192, 1024), (100, 1000)):
        x, weight = make((64, K), dtype), make((N, K), dtype, 1)
        for layout in (weight, weight.T.contiguous().T):
            y = taken.skinny_matmul(x, layout)
            for M in (1, 2, 15, 16, 17, 31, 32, 33, 63):
                assert torch.equal(taken.skinny_matmul(x[:M], layout), y[:M])
                assert torch.equal(taken.skinny_matmul(x[64 - M :], layout), y[64 - M :])


@needs_a_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stages_change_no_bit(taken: ModuleType, dtype: torch.dtype) -> None:
    """So a GPU with less shared memory has the same sums, part by part."""
    for M in (1, 64):
        x, weight = make((M, 7168), dtype), make((2048, 7168), dtype, 1)
        splits, steps, tile = taken._skinny_matmul_plan(M, weight)
        ys = [run(taken, x, weight, splits, steps, num_stages=s) for s in range(1, tile["num_stages"] + 1)]
        assert all(torch.equal(y, taken.skinny_matmul(x, weight)) for y in ys)


@needs_a_gpu
def test_streams(taken: ModuleType) -> None:
    """Launches that overlap are right: each has parts of its own."""
    x, weight = make((16, 8192), torch.bfloat16), make((512, 8192), torch.bfloat16, 1)
    expected = taken.skinny_matmul(x, weight)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(taken.skinny_matmul(x, weight))
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in results)


NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def compiled_for(target: Any, kernel: Any, types: Any, known: Any, by_16: Any, num_stages: int) -> Any:
    """Return what the compiler makes of a kernel for a GPU."""
    import triton

    places = [i for i, name in enumerate(kernel.arg_names) if name in by_16 - known.keys()]
    aligned = {(i,): [["tt.divisibility", 16]] for i in places}
    source = triton.compiler.ASTSource(kernel, types | dict.fromkeys(known, "constexpr"), known, aligned)
    return triton.compile(source, target=target, options={"num_stages": num_stages})


def made(
    recipe: ModuleType,
    M: int,
    dtype: torch.dtype,
    aligned: bool,
    transposed: bool,
    capability: int = 90,
    **changes: Any,
) -> Any:
    """Return what the compiler makes of the op's kernel for M rows, with parts."""
    import triton
    import triton.language as tl

    kernel = recipe._skinny_matmul_kernel
    recipe._skinny_matmul_gpu = lambda device: H200 if capability == 90 else L4
    weight = torch.empty(2048, 4096 if aligned else 4097, dtype=dtype, device="meta")
    *_, tile = recipe._skinny_matmul_plan(M, weight)
    assert tile["DOT"] == {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[NAMES[dtype]]
    tile |= changes
    stages = tile.pop("num_stages")
    known = tile | {"stride_wn" if transposed else "stride_wk": 1}
    pointers = {name for name in kernel.arg_names if name.endswith("_ptr")}
    types = {name: "*" + NAMES[dtype] if name in pointers else "i32" for name in kernel.arg_names}
    by_16 = pointers | ({"N", "K", "stride_xm", "stride_wn", "stride_wk"} if aligned else set())
    target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
    return compiled_for(target, kernel, types | {"y_ptr": "*fp32"}, known, by_16, stages)


def instructions(recipe: ModuleType) -> dict[str, tuple[set[str], set[str]]]:
    """Return, by rows, the sizes of matrix instructions and of copies ahead of the loop."""
    results = {}
    for M in (1, 16, 17, 32, 33, 64):
        ptx = made(recipe, M, torch.bfloat16, aligned=True, transposed=False).asm["ptx"]
        matrix = set(re.findall(r"\b(?:wgmma|mma)\S*\.(m\d+n\d+k\d+)", ptx))
        copies = set(re.findall(r"cp\.async\.c\w\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx))
        results[str(M)] = matrix, copies
    eight = made(recipe, 1, torch.bfloat16, aligned=True, transposed=False, BLOCK_M=8).asm["ptx"]
    results["8 columns"] = set(re.findall(r"\b(?:wgmma|mma)\S*\.(m\d+n\d+k\d+)", eight)), set()
    return results


def counted(recipe: ModuleType) -> bool:
    """Whether the page's counter is raised after all threads have stored, and parts are loaded after that."""
    import triton
    import triton.language as tl

    kernel = recipe.one_launch_kernel
    types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {"part_ptr": "*fp32", "count_ptr": "*i32"}
    known = {"ATOMIC": False, "SPLITS": 4, "DOT": tl.bfloat16, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128}
    by_16 = {name for name in types if name.endswith("_ptr")} | {"N", "K"}
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    ptx = compiled_for(target, kernel, types, known, by_16, 5).asm["ptx"]
    stored, rest = ptx[: ptx.index("atom.global")], ptx[ptx.index("atom.global") :]
    last = stored[stored.rindex("st.global") :]
    ordered = "bar.sync" in last and "atom.global.gpu.acq_rel" in rest
    return ordered and rest.index("bar.sync") < rest.index("ld.global.cg")


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """16 columns take Hopper's matrix instruction, 8 from Triton 3.8 on; weights are copied 16 bytes at a time."""
    results, ordered = on_h100(gallery / "matmul" / "skinny_matmul.py", instructions, counted)
    matrix, _ = results.pop("8 columns")
    assert matrix == {"m64n8k16" if TRITON >= (3, 8) else "m16n8k16"}
    for M, (matrix, copies) in results.items():
        columns = 16 if int(M) <= 16 else 32 if int(M) <= 32 else 64
        assert matrix == {f"m64n{columns}k16"}
        assert copies <= {"0x10", "16"}
        assert copies
    assert ordered, "all threads store before one counts, and nobody loads before that"


def exchanged(recipe: ModuleType) -> list[str]:
    """Return the size of the matrix instruction with the operands of `tl.dot` exchanged, by rows."""
    import triton
    import triton.language as tl
    from compiled import compiled

    source = Path(recipe.__file__).with_name("exchanged.py")
    code = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    code += "def kernel(x_ptr, w_ptr, y_ptr, BLOCK_M: tl.constexpr):\n"
    code += "    m, n, k = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, 64), tl.arange(0, 128)\n"
    code += "    x, w = tl.load(x_ptr + m * 128 + k[None, :]), tl.load(w_ptr + n[None, :] * 128 + k[:, None])\n"
    code += "    tl.store(y_ptr + m * 64 + n[None, :], tl.dot(x, w))\n"
    source.write_text(code)
    import importlib

    kernel = importlib.import_module("exchanged").kernel
    assert triton
    assert tl
    texts = [compiled(kernel, "bf16", BLOCK_M=block, y_ptr="fp32").asm["ptx"] for block in (16, 32, 64)]
    return [re.search(r"\b(?:wgmma|mma)\S*\.(m\d+n\d+k\d+)", text)[1] for text in texts]


def test_first_answer(gallery: Path, on_h100: Ask) -> None:
    """With the rows of x first, 64 of them take Hopper's instruction, and fewer the older one."""
    (results,) = on_h100(gallery / "matmul" / "skinny_matmul.py", exchanged)
    assert results == ["m16n8k16", "m16n8k16", "m64n64k16"]


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of a sum that is split, and of one that is not."""
    traced_graphs = []
    for K in (3000, 60):
        traced_graphs += graphs(recipe.skinny_matmul, torch.randn(4, K), torch.randn(100, K))
    return traced_graphs


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """Neither input counts as written."""
    (traced_graphs,) = on_h100(gallery / "matmul" / "skinny_matmul.py", traced)
    launches = [[call for call in graph if call.startswith("triton_kernel_wrapper")] for graph in traced_graphs]
    assert [len(calls) for calls in launches] == [2, 1]
    for graph in traced_graphs:
        assert not [call for call in graph if re.match(r"aten\.(clone|add|copy)", call)]


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("matmul/skinny_matmul")
    lines = out.splitlines()
    shares = [float(line.split("move, ")[1].split("%")[0]) for line in lines[:3]]
    work = [int(line.split()[-4]) for line in lines[:3]]
    assert min(shares) > 96
    assert max(work) < 206 / 3
    assert " 32 programs,  8 or  16 KiB in flight" in out
    assert [int(parts) for parts in re.findall(r"(\d+) parts of a sum", out)] == [1, 1, 4]
    *_, rows, shapes, dtypes, gradient = lines
    assert rows.startswith("ValueError: skinny_matmul takes up to 64 rows, not 65")
    assert shapes.startswith("ValueError: skinny_matmul takes (..., K) and (N, K)")
    assert dtypes.startswith("TypeError: skinny_matmul takes two tensors of float16")
    assert "no autograd formula" in gradient


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("weights past K", "mask=mask_n & mask_k[None, :], other", "mask=mask_n, other"),
    ("both tiles past K", "        mask_k = offs_k < K\n", "        mask_k = offs_k < K + BLOCK_K\n"),
    ("columns past N", "offs_n, mask_n & mask_m", "offs_n, mask_m & (offs_n >= 0)"),
    ("rows past M", "offs_n, mask_n & mask_m", "offs_n, mask_n & (offs_m >= 0)"),
    (
        "an accumulator in half precision",
        "acc = tl.dot(w.to(DOT), x.to(DOT), acc, input_precision",
        'acc += tl.dot(w.to(DOT), x.to(DOT), input_precision="ieee").to(tl.float16) #',
    ),
    ("weights taken for contiguous", "offs_n * stride_wn +", "offs_n * K +"),
    ("rows of x taken for adjacent", "offs_m * stride_xm +", "offs_m * K +"),
    ("a step that is too short", "w_ptrs += BLOCK_K * tl.cast(stride_wk, tl.int64)", "w_ptrs += BLOCK_K"),
    ("sums that overlap", "offs_k = pid_k * steps * BLOCK_K + tl", "offs_k = pid_k * BLOCK_K + tl"),
    ("parts stored over each other", "tl.program_id(axis=1).to(tl.int64) * M * N + offs", "offs"),
    ("parts in half precision", "(splits, M, N), dtype=torch.float32)", "(splits, M, N), dtype=torch.float16)"),
    (
        "the last part left out",
        "tl.static_range(SPLITS):\n        part_ptrs",
        "tl.static_range(SPLITS - 1):\n        part_ptrs",
    ),
    ("added past the end", "    mask = offs < size\n", "    mask = offs < size + BLOCK\n"),
    ("a second kernel that stops early", "(triton.cdiv(M * N, 256),)", "(max(1, M * N // 256),)"),
    ("splits that follow M", "min(SKINNY_MATMUL_SPLITS, blocks,", "min(M, SKINNY_MATMUL_SPLITS, blocks,"),
    ("more programs than multiprocessors", "blocks, processors // tiles)", "blocks, 2 * processors // tiles)"),
    ("stages that no shared memory holds", "min(SKINNY_MATMUL_STAGES, fit)", "SKINNY_MATMUL_STAGES"),
    (
        "no launcher for GPUs",
        'SKINNY_MATMUL_LIBRARY.impl("skinny_matmul", _skinny_matmul_launch, "CUDA")\n',
        "",
    ),
]
