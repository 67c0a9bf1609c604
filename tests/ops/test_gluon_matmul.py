"""The op of the recipe A product in Gluon: as a model of the GPU runs it, as a compiler takes it, and on a GPU."""

# ruff: noqa: N806 - a product has M, N and K, as in the recipe

import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import gluon_model
import pytest
import torch
from case import Case, Draw, Exact, assert_close
from compiled import Ask, graphs
from device_key import at_cuda
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE

HOPPER = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

CPU = torch.device("cpu")
RECIPE = Path("matmul") / "gluon_matmul.py"
HALVES = [torch.float16, torch.bfloat16]
ROOM = 227 * 1024  # bytes of shared memory
# What is read of the order of things in PTX
ORDER = (
    r"wgmma\.(wait_group)|(bar\.sync)|mbarrier\.(arrive)\.shared|(fence)\.proxy\.async|(stmatrix)"
    r"|bulk\.tensor\.2d\.global\.shared::(cta)"
)
ORDERS = [*itertools.product((False, True), repeat=2)]


@pytest.fixture(scope="module")
def modelled(gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Return the recipe with a model in place of Gluon, on a GPU of two multiprocessors."""
    source = (gallery / RECIPE).read_text().replace('= "triton_gallery"', '= "modelled"')
    recipe = gluon_model.load(source, tmp_path_factory.mktemp("modelled") / "modelled.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        patch.setattr(recipe, "_gluon_matmul_gpu", lambda _: 2)
        yield recipe
    recipe.GLUON_MATMUL_LIBRARY._destroy()  # PyTorch 2.11 refuses a second one


def matrix(draw: Draw, rows: int, columns: int, transposed: bool, gap: int) -> torch.Tensor:
    """Make a matrix with a gap between its rows or columns and one before."""
    if transposed:
        return matrix(draw, columns, rows, False, gap).T
    return draw(rows, -(-columns // 8) * 8 + gap)[:, gap : gap + columns]


def operands(
    draw: Draw, M: int, N: int, K: int, order: tuple[bool, bool] = (False, False), gaps: tuple[int, int] = (0, 0)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make two matrices, of which each may be another's transpose."""
    return matrix(draw, M, K, order[0], gaps[0]), matrix(draw, K, N, order[1], gaps[1])


def exact(a: torch.Tensor, b: torch.Tensor) -> list[Exact]:
    """Return the product, whose terms go through as many additions."""
    return [Exact(a @ b, a.abs() @ b.abs(), roundings=a.shape[1])]


def assert_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that a matrix is the product of two."""
    (right,) = exact(a.double(), b.double())
    assert (out.shape, out.dtype) == (right.value.shape, a.dtype)
    assert_close(CONTRACT[0], out.dtype, out, right)


SIZE = st.sampled_from([1, 2, 63, 64, 65, 128, 129, 256, 257, 300]) | st.integers(1, 300)
WIDE = st.sampled_from([1, 64, 65, 255, 256, 257, 520, 700]) | st.integers(1, 700)
GAP = st.sampled_from([0, 8, 16, 3])  # with 3, the matrix is copied
SHAPES = st.tuples(SIZE, WIDE, SIZE | st.sampled_from([512, 520, 1000]), st.sampled_from(ORDERS), st.tuples(GAP, GAP))
TURNED = (False, True)  # b alone
# Tiles at their edges, more of them than programs, and none; rows of any length, which have gaps; all orders. The first
# and the small one have none: copies of them, which opcheck makes too, are as they are.
SIZES = [(129, 257, 520, TURNED), (264, 72, 136), (1, 1, 1), (65, 700, 63, (True, True), (8, 16)), (300, 256, 1000)]
SIZES += [(0, 8, 8), (8, 0, 8), (8, 8, 0)]
SIZES += [
    (*size, order)
    for size in ((4096, 4096, 512), (1000, 3000, 520), (129, 8200, 4096), (8192, 64, 264))
    for order in ORDERS
]
CONTRACT = [
    Case(
        "gluon_matmul",
        operands,
        exact,
        autocast="asked",
        sizes=SIZES,
        small=(40, 21, 24, TURNED),
        in_layouts=(129, 257, 70, (True, False), (8, 0)),
        many=(4099, 4101, 520, TURNED),
        shapes=SHAPES,
        dtypes=HALVES,
        contiguous=False,
    ),
]


@settings(max_examples=20)
@given(size=SHAPES, dtype=st.sampled_from(HALVES), seed=st.integers(0, 2**31))
def test_accumulator_by_a_model(modelled: ModuleType, size: tuple[Any, ...], dtype: torch.dtype, seed: int) -> None:
    """Whatever happens first, the op is right: no wait is for ever, and nothing is written while it is read."""
    gluon_model.SEEDS[0] = seed
    a, b = operands(Draw(dtype, device=CPU, seed=seed), *size)
    assert_product(modelled._gluon_matmul_launch(a, b), a, b)


@pytest.mark.parametrize("shape", [(300, 1000, 700), (257, 200, 1300), (1400, 72, 300)])
@pytest.mark.parametrize("seed", range(6))
def test_accumulator_of_many_tiles_by_a_model(modelled: ModuleType, shape: tuple[int, int, int], seed: int) -> None:
    """Two programs have several tiles each, of more and of fewer steps than buffers, and tiles in two groups."""
    M, K, N = shape
    gluon_model.SEEDS[0] = seed
    order, gaps = (seed % 2 == 1, seed % 4 > 1), (8 * (seed % 3), 8 * ((seed + 1) % 3))
    a, b = operands(Draw(torch.float16, device=CPU, seed=seed), M, N, K, order, gaps)
    assert_product(guarded(modelled._gluon_matmul_launch, a, b), a, b)


@pytest.mark.parametrize("seed", range(4))
def test_accumulator_of_the_steps_by_a_model(modelled: ModuleType, seed: int) -> None:
    """Every step of the ladder is right, with fewer steps than buffers as well."""
    gluon_model.SEEDS[0] = seed
    steps = [modelled.by_tiles, modelled.ringed, modelled.with_roles]
    for M, K, N in ((200, 72, 136), (130, 520, 264)):
        a, b = operands(Draw(torch.float16, device=CPU), M, N, K)
        for step in steps:
            assert_product(step(a, b), a, b)


def compiled(recipe: ModuleType, kernel: Any, call: Callable[[], object]) -> dict[str, Any]:
    """Return what the compiler makes of a launch; a GPU is not asked."""
    import triton  # where it is imported first, the choice of the interpreter is made

    made = []

    def run(*arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made.append(type(kernel).run(kernel, *arguments, grid=grid, warmup=True, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        patch.setattr(recipe, "_gluon_matmul_gpu", lambda _: 132)
        patch.setattr(kernel, "run", run)
        call()
    (built,) = made
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        tools = triton.knobs.nvidia
        command = [tools.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [tools.nvdisasm.path, "--print-code", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = built.asm["ptx"]
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "spilled": int(re.findall(r"STACK:(\d+)", usage)[0]) + len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "shared": built.metadata.shared,
        "warps": built.metadata.num_warps,
        "wgmma": re.findall(r"HGMMA\.(\S+)", code),
        "groups": len(re.findall(r"HGMMA.*gsb0", code)),
        "moved": {int(number) for number in re.findall(r"setmaxnreg\.\S+\s+(\d+)", text)},
        "loads": len(re.findall(r"cp\.async\.bulk\.tensor\S*global\S*mbarrier", text)),
        "stores": len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", text)),
        "pointers": len(re.findall(r"ld\.global|st\.global|cp\.async\.c[ag]", text)),
        "order": [next(filter(None, groups)) for groups in re.findall(ORDER, text)],
    }


def codes(recipe: ModuleType, kinds: Any = None) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return that of the op, in two dtypes and orders or in so many."""
    results = {}
    for dtype, a_t, b_t in kinds or [(torch.float16, False, False), (torch.bfloat16, True, True)]:
        a, b = operands(Draw(dtype, device=CPU), 320, 320, 320, (a_t, b_t))
        launch = lambda a=a, b=b: recipe._gluon_matmul_launch(a, b)  # noqa: E731
        results[dtype, a_t, b_t] = compiled(recipe, recipe._gluon_matmul_kernel, launch)
    return results


def all_codes(recipe: ModuleType) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return that in both dtypes and all orders."""
    return codes(recipe, [(dtype, *order) for dtype in HALVES for order in ORDERS])


@pytest.mark.parametrize("look", [codes, pytest.param(all_codes, marks=pytest.mark.thorough)])
def test_compiled_code(gallery: Path, on_h100: Ask, look: Any) -> None:
    """A consumer's products follow each other, sums stay in registers, all fits, and warps meet where they must."""
    (results,) = on_h100(gallery / RECIPE, look)
    assert len(results) == (2 if look is codes else 8)
    for known in results.values():
        # Four products for each consumer, of 16 of K each. They are one group: no wait follows the first three.
        kind = known["wgmma"][0]
        assert kind.startswith("64x256x16.F32")
        assert known["wgmma"] == [kind] * 8
        assert known["groups"] == 2
        assert known["warps"] == 12
        assert known["registers"] == 168
        assert known["moved"] >= {240, 24}
        assert known["spilled"] == known["pointers"] == 0
        assert known["shared"] <= ROOM
        assert known["loads"] >= 3
        assert known["stores"] == 8
        # A consumer's warps meet between the end of a product and the arrival that gives its buffers back.
        order = " ".join(known["order"])
        assert len(re.findall(r"wait_group( bar\.sync)+ arrive", order)) == 4
        assert "wait_group arrive" not in order
        # And between what they write of a piece, with the fence, and the copy of it.
        assert len(re.findall(r"(stmatrix )+fence bar\.sync( bar\.sync)* cta", order)) == 8


def codes_of_steps(recipe: ModuleType) -> list[dict[str, Any]]:
    """Return that of each variant of the ladder."""
    a, b = (torch.randn(512, 512).half() for _ in range(2))
    kernels = {"wait at once": "tile_kernel", "a ring of buffers": "ring_kernel", "roles for warps": "roles_kernel"}
    return [
        compiled(recipe, getattr(recipe, kernel), lambda variant=variant: variant(a, b))
        for step, kernel in kernels.items()
        for variant in recipe.STEPS[step]
    ]


def test_compiled_steps(gallery: Path, on_h100: Ask) -> None:
    """Each variant of the ladder fits, spills nothing, and waits for groups of products."""
    (results,) = on_h100(gallery / RECIPE, codes_of_steps)
    assert len(results) == 6
    for known in results:
        assert known["spilled"] == known["pointers"] == 0
        assert known["shared"] <= ROOM
        assert 0 < known["groups"] < len(known["wgmma"])


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """Return what a call raises, in words."""
    try:
        call(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it is taken"


def test_accumulator_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names, wherever it is asked."""
    a = torch.ones(16, 16, dtype=torch.float16, device=DEVICE)
    begin = "Error: gluon_matmul takes"
    for call in (taken.gluon_matmul, lambda *pair: at_cuda(taken.gluon_matmul, *pair), taken._gluon_matmul_fake):
        message = refusal(call, a.float(), a.float())
        assert re.match(rf"Type{begin} .* not torch\.float32 and .*: matmul takes others", message)
        assert re.match(rf"Type{begin} .* not torch\.float16 and torch\.bfloat16", refusal(call, a, a.bfloat16()))
        for b in (a[:8], a[0]):
            message = refusal(call, a, b)
            assert re.match(rf"Value{begin} matrices of shapes \(M, K\) and \(K, N\), not", message)
        assert re.match(rf"Value{begin} two matrices on one device, not on", refusal(call, a, a.to("meta")))


@pytest.mark.parametrize("place", [0, 1])
def test_accumulator_of_copies(modelled: ModuleType, place: int) -> None:
    """Rows of other lengths, with steps, at odd addresses or that overlap are copied, in either operand."""
    x, good = torch.randn(40, 40).half(), torch.randn(16, 16).half()
    lengths = torch.randn(16, 20).half()[:, :16]
    for odd in (lengths, lengths.T, x[:32:2, :32:2], x[:16, 1:17], x[:1, :16].expand(16, 16)):
        pair = [good, good]
        pair[place] = odd
        assert_product(guarded(modelled._gluon_matmul_launch, *pair), *pair)
        side, turned = modelled._gluon_matmul_side(odd)
        assert torch.equal(side.T if turned else side, odd)
        assert side.untyped_storage().data_ptr() != odd.untyped_storage().data_ptr()
        assert turned == (odd.stride(0) == 1)


def test_accumulator_of_nothing(modelled: ModuleType) -> None:
    """Nothing is launched for it, and a sum of nothing is zero."""
    for M, K, N in ((0, 8, 8), (8, 8, 0), (8, 0, 8)):
        out = guarded(modelled._gluon_matmul_launch, torch.zeros(M, K).half(), torch.zeros(K, N).half())
        assert out.shape == (M, N)
        assert not out.any()


def test_accumulator_refuses_gpus(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no GPU, an older, a newer and AMD's are refused."""
    look = taken._gluon_matmul_gpu.__wrapped__
    text = r"RuntimeError: gluon_matmul takes tensors on .* compute capability 9\.0 alone.*: matmul takes any"
    assert re.match(text, refusal(look, torch.device("cpu")))
    gpu = torch.device("cuda", 0)
    for capability, hip in (((8, 0), None), ((9, 1), None), ((10, 0), None), ((12, 0), None), ((9, 0), "7.0")):
        known = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, known=known: known)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert re.match(text, refusal(look, gpu))
    monkeypatch.setattr(torch.version, "hip", None)
    assert look(gpu) == 132


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of the op."""
    return graphs(recipe.gluon_matmul, *(torch.randn(16, 16).half() for _ in range(2)))


def test_graph(gallery: Path, on_h100: Ask) -> None:
    """torch.compile has one call of the op, and knows its shape."""
    ((forward,),) = on_h100(gallery / RECIPE, traced)
    assert [call for call in forward if "gluon_matmul" in call] == ["triton_gallery.gluon_matmul.default"]


@on_hopper
def test_compiled_between_others(taken: ModuleType) -> None:
    """What torch.compile makes of the operands has rows that the engine takes; rows of the result may have a gap."""
    a, b = operands(Draw(torch.float16), 40, 21, 24, TURNED)
    op = torch.compile(lambda a, b: taken.gluon_matmul(a * 2, b) + 1, fullgraph=True)
    torch.testing.assert_close(op(a, b), (a * 2) @ b + 1, rtol=1e-2, atol=1e-2)


@on_hopper
def test_steps_of_the_ladder(load_recipe: Callable[[str], ModuleType]) -> None:
    """Every variant is right on a GPU."""
    recipe = load_recipe(str(RECIPE))
    for M, K, N in ((40, 64, 72), (300, 1000, 264)):
        a, b = (torch.randn(*shape, device=DEVICE).half() for shape in ((M, K), (K, N)))
        for variant in itertools.chain(*recipe.STEPS.values()):
            assert_product(variant(a, b), a, b)


@on_hopper
@pytest.mark.needs_gpu_memory(12)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements, of the result and of an operand: the last corner is right."""
    M, N = 2**16 + 8, 2**15 + 8
    a, b = (torch.randn(s, device=DEVICE).bfloat16() for s in ((M, 64), (64, N)))
    out = taken.gluon_matmul(a, b)
    assert out.numel() > 2**31
    assert_product(out[-300:, -300:], a[-300:], b[:, -300:])
    assert_product(taken.gluon_matmul(out, b.T)[-9:], out[-9:], b.T)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("full buffers have one phase", "n // STAGES & 1)\n            left", "0)\n            left"),
    ("empty buffers begin full", "(n // STAGES & 1) ^ 1)\n            # The", "n // STAGES & 1)\n            # The"),
    ("one consumer gives a buffer back", "count=2)  # one of each", "count=1)  # one of each"),
    (
        "a buffer is given back at once",
        "warpgroup_mma_wait(1, deps=(acc,))\n            before",
        "warpgroup_mma_wait(2, deps=(acc,))\n            before",
    ),
    (
        "the last product is not awaited",
        "warpgroup_mma_wait(0, deps=(acc,))\n        # The",
        "warpgroup_mma_wait(1, deps=(acc,))\n        # The",
    ),
    (
        "a tile's last buffer is kept",
        "        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES))\n",
        "",
    ),
    ("the first step gives one back", "mbarrier.arrive(before, pred=k > 0)", "mbarrier.arrive(before)"),
    ("the wrong buffer is given back", "before = empty.index((n + STAGES - 1)", "before = empty.index((n)"),
    (
        "fewer bytes are expected",
        "(bar, 2 * nbytes + b_desc.block_type.nbytes)\n            for",
        "(bar, nbytes + b_desc.block_type.nbytes)\n            for",
    ),
    ("no fence", "            fence_async_shared()  # what threads wrote", "            # what threads wrote"),
    ("pieces do not wait", "            tma.store_wait(1)\n", "            tma.store_wait(2)\n"),
    ("the end does not wait", "    tma.store_wait(0)  # the shared", "    tma.store_wait(1)  # the shared"),
    ("both halves of the rows are one", "[off_m + HALF * ROWS, off_n + i * PIECE]", "[off_m, off_n + i * PIECE]"),
    ("all pieces are stored in one place", "off_n + i * PIECE], piece", "off_n], piece"),
    ("columns take turns", "parts.permute(0, 2, 1).split()", "parts.reshape([x.shape[0], x.shape[1] // 2, 2]).split()"),
    ("groups that overlap", "first = tile // (8 * tiles_n) * 8", "first = tile // (8 * tiles_n) * 7"),
    ("a is loaded by rows alone", "[k, row] if A_T else [row, k]", "[row, k]"),
    ("b is multiplied by rows alone", "right.permute([1, 0]) if B_T else right", "right"),
    ("sums in half the registers", "maxnreg=168,  # of", "maxnreg=80,  # of"),
    ("one stage too many", "GLUON_MATMUL_STAGES = 4", "GLUON_MATMUL_STAGES = 5"),
    ("rows of any length", "apart = stride >= length and stride % 8 == 0", "apart = stride >= length"),
    ("rows that overlap", "apart = stride >= length and stride % 8 == 0", "apart = stride % 8 == 0"),
    ("any address", " and x.data_ptr() % 16 == 0", ""),
    ("a copy of the other side", "copy_(side), turned", "copy_(side), not turned"),
    ("no padding", "new_empty(M, triton.cdiv(N, 8) * 8)[:, :N]", "new_empty(M, N)"),
    ("any GPU", "(gpu.major, gpu.minor) == (9, 0)", "gpu.major >= 9"),
    ("no launcher for GPUs", '_gluon_matmul_launch, "CUDA"', '_gluon_matmul_launch, "XPU"'),
]
