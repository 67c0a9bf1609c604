"""The op of the recipe The backward of attention on Hopper: by a model of the GPU, as a compiler takes it, on a GPU."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import gluon_model
import pytest
import torch
from attentions import exact_backward, exact_with_lse, of_backward, shapes
from case import Case, Draw, assert_close, in_float64
from compiled import Ask, graphs
from device_key import at_cuda
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, layouts
from op_fixtures import end_ops

HOPPER = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

CPU = torch.device("cpu")
RECIPE = Path("attention") / "gluon_attention_backward.py"
HALVES = [torch.float16, torch.bfloat16]
ROOM = 227 * 1024  # bytes of shared memory
# What is read of the order of things in PTX
ORDER = (
    r"wgmma\.(wait_group|commit_group)|(bar\.sync)|mbarrier\.(arrive)\.shared|(fence)\.proxy\.async"
    r"|bulk\.tensor\.4d\.global\.shared::(cta)"
)


@pytest.fixture(scope="module")
def modelled(gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Return the recipe with a model in place of Gluon, where its plain kernel is interpreted."""
    if DEVICE.type == "cuda":
        pytest.skip("the kernel of delta is compiled where there is a GPU, and takes no tensors of the CPU")
    source = (gallery / RECIPE).read_text().replace('= "triton_gallery"', '= "modelled"')
    recipe = gluon_model.load(source, tmp_path_factory.mktemp("modelled") / "modelled_attention_backward.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        patch.setattr(recipe, "_gluon_attention_backward_gpu", lambda _: None)
        yield recipe
    end_ops(recipe)  # PyTorch 2.11 refuses a second one


SHAPES = shapes([64, 128], most=400)
# Around the edges of tiles, full or causal; heads alone and in groups; no keys, no queries; a scale of one's own
SIZES = [
    (2, 2, 1, 70, 150, 64, True),
    (1, 4, 2, 129, 65, 128),
    (1, 1, 1, 1, 300, 64),
    (1, 3, 3, 1, 1, 128, True),
]
SIZES += [(1, 2, 1, 5, 0, 64), (1, 2, 1, 0, 5, 64, True), (0, 2, 1, 5, 5, 64), (1, 2, 1, 70, 150, 64, False, 2.5)]
SIZES += [
    (1, 8, 4, *lengths, D, causal)
    for lengths in ((4096, 4096), (1000, 5000), (5000, 700), (1500, 1499))
    for D in (64, 128)
    for causal in (False, True)
]
CONTRACT = [
    Case(
        "gluon_attention_backward",
        of_backward,
        exact_backward,
        sizes=SIZES,
        small=(2, 4, 2, 70, 70, 64, True),
        many=(8, 24, 8, 1031, 131, 64, True),
        shapes=SHAPES,
        dtypes=HALVES,
        floor=lambda dtype: torch.finfo(dtype).eps * torch.finfo(dtype).smallest_normal,
    ),
]


def assert_gradients(module: ModuleType, *arguments: Any) -> None:
    """Assert that gradients are right, whole, and written nowhere else."""
    expected = exact_backward(*in_float64(arguments))
    tensors, (causal, scale) = arguments[:6], arguments[6:]
    results = guarded(partial(module._gluon_attention_backward_launch, causal=causal, scale=scale), *tensors)
    for out, right in zip(results, expected, strict=True):
        assert (out.dtype, out.shape) == (tensors[0].dtype, right.value.shape)
        assert out.is_contiguous()
        assert_close(CONTRACT[0], out.dtype, out, right)


@settings(max_examples=25)
@given(
    size=SHAPES,
    dtype=st.sampled_from(HALVES),
    drawn=st.lists(layouts(), min_size=5, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_accumulator_by_a_model(
    modelled: ModuleType, size: tuple[Any, ...], dtype: torch.dtype, drawn: list[Layout], seed: int
) -> None:
    """Whatever happens first, the op is right: no wait is for ever, and nothing is written while it is read."""
    gluon_model.SEEDS[0] = seed
    assert_gradients(modelled, *of_backward(Draw(dtype, drawn, CPU), *size))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("lengths", [(200, 1000), (1000, 200), (600, 600), (129, 513)], ids=str)
def test_accumulator_of_many_steps_by_a_model(
    modelled: ModuleType, lengths: tuple[int, int], D: int, causal: bool
) -> None:
    """More steps than buffers, of heads that share keys."""
    for seed in range(2):
        gluon_model.SEEDS[0] = seed
        arguments = of_backward(Draw(torch.float16, device=CPU, seed=seed), 1, 2, 1, *lengths, D, causal)
        assert_gradients(modelled, *arguments)


@pytest.mark.parametrize("causal", [False, True])
def test_accumulator_of_large_scores(modelled: ModuleType, causal: bool) -> None:
    """Past the end of the keys lies a score of 0, far from all others: its weight would be infinite."""
    for far in (-1e3, 1e3):
        x, y = torch.full((1, 1, 50, 64), 1.0).half(), torch.full((1, 1, 45, 64), far / 64).half()
        arguments = of_backward(Draw(torch.float16, device=CPU), 1, 1, 1, 50, 45, 64, causal, 1.0)
        grad, _, _, v, out, *_ = arguments
        lse = exact_with_lse(x.double(), y.double(), v.double(), causal, 1.0)[1].value.float()
        assert_gradients(modelled, grad, x, y, v, out, lse, causal, 1.0)


def test_accumulator_of_strides(modelled: ModuleType) -> None:
    """The log-sum-exp may lie in memory in any way, and so may a result."""
    grad, q, k, v, out, lse, *options = of_backward(Draw(torch.float16, device=CPU), 2, 2, 1, 70, 150, 64, True)
    turned = lse.mT.contiguous().mT
    assert_gradients(modelled, grad, q, k, v, out.mT.contiguous().mT, turned, *options)


def test_accumulator_scale(modelled: ModuleType) -> None:
    """A scale of one's own, an integer, negative, and 0."""
    for scale in (1, 0.01, -2.5, 0.0):
        arguments = of_backward(Draw(torch.float16, device=CPU), 1, 2, 1, 70, 150, 64, True, scale)
        assert_gradients(modelled, *arguments)


def test_accumulator_reads_nothing_beside_its_inputs(modelled: ModuleType) -> None:
    """NaN in what lies around the inputs stays there, and rows that the engine takes are not copied."""
    around = torch.full((2, 400, 3, 80), torch.nan).half()
    around[:, 5:285, 1:, 8:72] = Layout("contiguous", 0).make((2, 280, 2, 64), torch.float16, CPU)
    x = around[:, 5:285, 1:, 8:72].transpose(1, 2)
    assert modelled._gluon_attention_backward_aligned(x) is x
    for causal in (False, True):
        out, lse = (result.value for result in exact_with_lse(*[x.double()] * 3, causal))
        assert_gradients(modelled, x, x, x, x, out.half(), lse.float(), causal, None)


def test_accumulator_copies_what_the_engine_refuses(modelled: ModuleType) -> None:
    """Rows at odd addresses, with gaps, with steps, that overlap or repeat are copied, dimensions of one are not."""
    padded = Layout("contiguous", 0).make((2, 3, 40, 80), torch.float16, CPU)
    odd = torch.zeros(2 * 3 * 40 * 64 + 1).half()[1:].view(2, 3, 40, 64)
    gaps = torch.zeros(2, 3, 40, 65).half()[..., :64]
    overlapping = torch.zeros(2, 3, 4000).half().as_strided((2, 3, 40, 64), (12000, 4000, 32, 1))
    repeated = torch.zeros(2, 1, 40, 64).half().expand(2, 3, 40, 64)
    for x in (padded[..., 4:68], padded[..., :64].mT.contiguous().mT, odd, gaps, overlapping, repeated):
        copy = modelled._gluon_attention_backward_aligned(x)
        assert copy.is_contiguous()
        assert copy.data_ptr() not in (0, x.data_ptr())
        assert torch.equal(copy, x)
    single = torch.zeros(1, 1, 1, 64).half().as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    assert modelled._gluon_attention_backward_aligned(single) is single
    results = guarded(modelled._gluon_attention_backward_launch, *[single] * 5, torch.zeros(1, 1, 1))
    assert not any(grad.any() for grad in results)


def test_accumulator_of_nothing(modelled: ModuleType) -> None:
    """Nothing is launched for it; without keys, or without queries, gradients are 0."""
    for LQ, LK, batch in ((5, 0, 1), (0, 5, 1), (5, 5, 0)):
        q, k = torch.ones(batch, 2, LQ, 64).half(), torch.ones(batch, 1, LK, 64).half()
        results = guarded(modelled._gluon_attention_backward_launch, q, q, k, k, q, torch.ones(batch, 2, LQ))
        assert [grad.shape for grad in results] == [q.shape, k.shape, k.shape]
        assert not any(grad.any() for grad in results)


def compiled(recipe: ModuleType, *arguments: Any) -> list[dict[str, Any]]:
    """Return what the compiler makes of the passes; a GPU is not asked."""
    import triton  # where it is imported first, the choice of the interpreter is made

    kernel, made = recipe._gluon_attention_backward_kernel, []

    def run(*arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made.append((type(kernel).run(kernel, *arguments, grid=grid, warmup=True, **options), options["KEYS"]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        patch.setattr(recipe, "_gluon_attention_backward_gpu", lambda _: None)
        patch.setattr(recipe._gluon_attention_backward_delta_kernel, "run", lambda *_, **__: None)
        patch.setattr(kernel, "run", run)
        recipe._gluon_attention_backward_launch(*arguments)
    return [look(triton.knobs.nvidia, built) | {"KEYS": KEYS} for built, KEYS in made]


def look(tools: Any, built: Any) -> dict[str, Any]:
    """Return what is asked of a kernel."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = [tools.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [tools.nvdisasm.path, "--print-code", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = built.asm["ptx"]
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "spilled": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "shared": built.metadata.shared,
        "warps": built.metadata.num_warps,
        "wgmma": re.findall(r"HGMMA\.(\S+) R\d+, (R|gdesc)", code),
        "groups": len(re.findall(r"HGMMA.*gsb0", code)),
        "moved": {int(number) for number in re.findall(r"setmaxnreg\.\S+\s+(\d+)", text)},
        "loads": len(re.findall(r"cp\.async\.bulk\.tensor\S*global\S*mbarrier", text)),
        "stores": len(re.findall(r"cp\.async\.bulk\.tensor\.4d\.global\.shared", text)),
        "moves": len(re.findall(r"\b(?:ldmatrix|ld\.shared\.v4)", text)),
        "order": [next(filter(None, groups)) for groups in re.findall(ORDER, text)],
    }


def codes(recipe: ModuleType, kinds: Any = ((torch.float16, 128, True),)) -> dict[tuple[Any, ...], Any]:
    """Return that of the op."""
    results = {}
    for dtype, D, causal in kinds:
        x = torch.zeros(1, 2, 320, D, dtype=dtype)
        results[dtype, D, causal] = compiled(recipe, *[x] * 5, torch.zeros(1, 2, 320), causal)
    return results


def all_codes(recipe: ModuleType) -> dict[tuple[Any, ...], Any]:
    """Return that in both dtypes, of both heads, with a mask and without."""
    return codes(recipe, itertools.product(HALVES, (64, 128), (False, True)))


@pytest.mark.parametrize("look", [codes, pytest.param(all_codes, marks=pytest.mark.thorough)])
def test_compiled_code(gallery: Path, on_h100: Ask, look: Any) -> None:
    """Products are in flight together, operands stay in registers, all fits, and warps meet where they must."""
    (results,) = on_h100(gallery / RECIPE, look)
    assert len(results) == (1 if look is codes else 8)
    for (dtype, D, _), passes in results.items():
        assert [known["KEYS"] for known in passes] == [True, False]
        for known in passes:
            BLOCK = 64 if D == 128 and known["KEYS"] else 128
            sums = 2 if known["KEYS"] else 1
            kind = ".F32" + (".BF16" if dtype == torch.bfloat16 else "")
            scores, grads = (f"64x{BLOCK}x16" + kind, "gdesc"), (f"64x{D}x16" + kind, "R")
            # Of each consumer: two products over D, and the sums over the rows of a step
            assert known["wgmma"].count(scores) == 2 * 2 * D // 16
            assert known["wgmma"].count(grads) == 2 * sums * BLOCK // 16
            assert len(known["wgmma"]) == 2 * (2 * D + sums * BLOCK) // 16
            # They are groups: no wait follows all but the last.
            assert known["groups"] == 2 * (2 + sums)
            assert known["warps"] == 12
            assert known["registers"] == 168
            assert known["moved"] >= {240, 24}
            assert known["moves"] == 0
            # With heads of 64, sums and two tiles of scores leave few registers: some integers are spilled.
            assert known["stack"] <= (32 if D == 64 and known["KEYS"] else 0)
            assert known["spilled"] <= (13 if D == 64 and known["KEYS"] else 0)
            assert known["shared"] <= ROOM
            # A copy takes 64 columns: of two halves of two tiles, of two tiles of a step; and two rows of numbers.
            assert known["loads"] == 6 * D // 64 + (2 if known["KEYS"] else 0)
            assert known["stores"] == 2 * sums
            # A consumer's warps meet between the end of the products and the arrival that gives their buffers back,
            order = " ".join(known["order"])
            assert len(re.findall(r"wait_group( bar\.sync)+ arrive", order)) == 2
            assert "wait_group arrive" not in order
            # and between what they write of each result, with the fence, and the copy of it.
            assert len(re.findall(r"fence( bar\.sync)+ cta", order)) == 2 * sums


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """Return what a call raises, in words."""
    try:
        call(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it is taken"


def test_accumulator_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names, wherever it is asked."""
    q, lse = torch.ones(2, 4, 3, 64, dtype=torch.float16, device=DEVICE), torch.ones(2, 4, 3, device=DEVICE)
    begin = "Error: gluon_attention_backward takes"
    op = taken.gluon_attention_backward
    for call in (op, partial(at_cuda, op), taken._gluon_attention_backward_fake):
        message = refusal(call, *[q.float()] * 5, lse)
        assert re.match(rf"Type{begin} .*, not torch\.float32: flash_attention_backward takes others", message)
        for place in range(5):
            mixed, moved = [q] * 5, [q] * 5
            mixed[place], moved[place] = q.bfloat16(), q.to("meta")
            assert re.match(rf"Type{begin} one dtype .*torch\.bfloat16 on", refusal(call, *mixed, lse))
            assert re.match(rf"Type{begin} one dtype .* on meta", refusal(call, *moved, lse))
        for other in (lse.half(), lse.to("meta")):
            message = refusal(call, *[q] * 5, other)
            assert re.match(rf"Type{begin} lse of float32 on .*, not {other.dtype} on {other.device}", message)
        pairs = [(x, x) for x in (q[:, :3], q[:, :0], q[..., :32], q[:1], q[0])]
        wrong = [(q, q, k, v, q, lse) for k, v in (*pairs, (q, q[:, :2]), (q, q[:, :, :2]))]
        wrong += [(q[:, :, :2], q, q, q, q, lse), (q, q, q, q, q[:1], lse)]
        wrong += [(q, q, q, q, q, other) for other in (lse[..., :2], lse[..., None], lse[:1])]
        wrong += [(*[q.new_ones(2, 4, 3, D)] * 5, lse) for D in (32, 96, 256)]
        for arguments in wrong:
            shapes = re.escape(", ".join(str(tuple(t.shape)) for t in arguments))
            text = rf"Value{begin} do, q and out of .* D of 64 or 128.* of {shapes}$"
            assert re.match(text, refusal(call, *arguments))


def test_accumulator_refuses_gpus(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no GPU, an older, a newer and AMD's are refused."""
    find = taken._gluon_attention_backward_gpu.__wrapped__
    text = r"RuntimeError: gluon_attention_backward takes .* compute capability 9\.0 alone.*: flash_attention_backward"
    assert re.match(text, refusal(find, torch.device("cpu")))
    gpu = torch.device("cuda", 0)
    for capability, hip in (((8, 0), None), ((9, 1), None), ((10, 0), None), ((12, 0), None), ((9, 0), "7.0")):
        known = SimpleNamespace(major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, known=known: known)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert re.match(text, refusal(find, gpu))
    monkeypatch.setattr(torch.version, "hip", None)
    assert find(gpu) is None


def test_has_no_gradient(modelled: ModuleType) -> None:
    """A second derivative is refused, not zero."""
    q = torch.ones(1, 1, 3, 64, dtype=torch.float16, requires_grad=True)
    with pytest.raises(RuntimeError, match="autograd"):
        modelled.gluon_attention_backward(q, q, q, q, q, torch.ones(1, 1, 3))[0].sum().backward()


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of the op."""
    x, lse = torch.randn(2, 4, 40, 64).half(), torch.randn(2, 4, 40)
    call = recipe.gluon_attention_backward
    return graphs(lambda do, q, k, v, lse: call(do, q, k, v, q, lse, True), x, x, x[:, :2], x[:, :2], lse)


def test_graph(gallery: Path, on_h100: Ask) -> None:
    """torch.compile has one call of the op, and knows its shapes."""
    ((forward,),) = on_h100(gallery / RECIPE, traced)
    name = "triton_gallery.gluon_attention_backward.default"
    assert [call for call in forward if "gluon_attention_backward" in call] == [name]


@on_hopper
@pytest.mark.parametrize("D", [64, 128])
def test_of_a_forward(taken: ModuleType, D: int) -> None:
    """What flash_attention keeps is what this takes: gradients agree with those of its backward."""
    from triton_gallery_ops.flash_attention import flash_attention_backward, flash_attention_with_lse

    do, q = (Layout("contiguous", seed).make((2, 4, 1000, D), torch.bfloat16, DEVICE) for seed in range(2))
    k, v = (Layout("contiguous", seed).make((2, 2, 900, D), torch.bfloat16, DEVICE) for seed in range(2, 4))
    for causal in (False, True):
        kept = do, q, k, v, *flash_attention_with_lse(q, k, v, causal), causal, None
        pairs = zip(taken.gluon_attention_backward(*kept), flash_attention_backward(*kept), strict=True)
        for grad, expected in pairs:
            torch.testing.assert_close(grad.float(), expected.float(), rtol=2e-2, atol=2e-2)


@on_hopper
@pytest.mark.needs_gpu_memory(50)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last head is right."""
    q = torch.zeros(1, 2**13 + 1, 2048, 128, dtype=torch.float16, device=DEVICE)
    q[0, -1] = torch.randn(2048, 128, device=DEVICE)
    small = of_backward(Draw(torch.float16), 1, 1, 1, 2048, 100, 128)
    _, _, k, v, _, _, causal, scale = small
    out, lse = (result.value for result in exact_with_lse(q[:, -1:].double(), k.double(), v.double(), causal, scale))
    whole = torch.zeros_like(q)
    whole[:, -1:] = out
    lses = torch.zeros(q.shape[:3], device=DEVICE)
    lses[:, -1:] = lse
    grads = taken.gluon_attention_backward(q, q, k, v, whole, lses)
    last = exact_backward(*in_float64((q[:, -1:], q[:, -1:], k, v, whole[:, -1:], lses[:, -1:])), causal, scale)
    assert_close(CONTRACT[0], torch.float16, grads[0][:, -1:], last[0])


# What follows tells the op's text from that of the forward, which stands in the recipe as well.
OF_16_BYTES = "step % 8 == 0 for n, step in sides if n > 1)\n    if"
AND_ELSE = ':\n            return\n    raise RuntimeError(\n        "gluon_attention_backward takes'

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "tiles have one phase",
        "mbarrier.wait(full.index(stage), n // STAGES & 1)",
        "mbarrier.wait(full.index(stage), 0)",
    ),
    ("tiles are not awaited", "            mbarrier.wait(full.index(stage), n // STAGES & 1)\n", ""),
    ("kept tiles are not awaited", "    mbarrier.wait(kept, 0)\n", ""),
    (
        "empty buffers begin full",
        "mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)",
        "mbarrier.wait(empty.index(stage), n // STAGES & 1)",
    ),
    ("empty buffers are not awaited", "            mbarrier.wait(empty.index(stage), (n // STAGES & 1) ^ 1)\n", ""),
    (
        "one consumer gives buffers back",
        "mbarrier.init(empty.index(stage), count=2)",
        "mbarrier.init(empty.index(stage), count=1)",
    ),
    ("buffers are kept", "            mbarrier.arrive(empty.index(stage))\n", ""),
    (
        "buffers are given back too soon",
        "            da = warpgroup_mma(ds, x, da, is_async=True)\n",
        "            mbarrier.arrive(empty.index(stage))\n            da = warpgroup_mma(ds, x, da, is_async=True)\n"
        "            continue\n",
    ),
    (
        "scores are not awaited",
        "s = warpgroup_mma_wait(1, deps=(s,))\n    if KEYS",
        "s = warpgroup_mma_wait(2, deps=(s,))\n    if KEYS",
    ),
    (
        "the second product is not awaited beside keys",
        "                dp = warpgroup_mma_wait(1, deps=(dp,))",
        "                dp = warpgroup_mma_wait(2, deps=(dp,))",
    ),
    (
        "the second product is not awaited beside queries",
        "dp = warpgroup_mma_wait(0, deps=(dp,))",
        "dp = warpgroup_mma_wait(1, deps=(dp,))",
    ),
    (
        "sums of keys are not awaited",
        "                da, db = warpgroup_mma_wait(0, deps=(da, db))",
        "                da, db = warpgroup_mma_wait(1, deps=(da, db))",
    ),
    (
        "sums of queries are not awaited",
        "da = warpgroup_mma_wait(0, deps=(da,))",
        "da = warpgroup_mma_wait(1, deps=(da,))",
    ),
    (
        "sums of scores in half precision",
        "da = gl.zeros((ROWS, D), gl.float32, SUMS)",
        "da = gl.zeros((ROWS, D), dtype, SUMS)",
    ),
    (
        "sums of weights in half precision",
        "db = gl.zeros((ROWS, D), gl.float32, SUMS)",
        "db = gl.zeros((ROWS, D), dtype, SUMS)",
    ),
    ("fewer bytes of kept tiles", "4 * a_desc.block_type.nbytes", "3 * a_desc.block_type.nbytes"),
    ("no bytes of numbers", "2 * x_desc.block_type.nbytes + rest", "2 * x_desc.block_type.nbytes"),
    ("no fence before a store", "        fence_async_shared()  # what", "        pass  # what"),
    ("the end does not wait", "        )\n    tma.store_wait(0)  # the", "        )\n    # the"),
    ("both halves have the same rows", "    row += HALF * ROWS\n    a =", "    a ="),
    ("keys are seen by the query before", "gl.where(offs <= along, p, 0.0)", "gl.where(offs <= along + 1, p, 0.0)"),
    ("queries see the next key", "gl.where(along <= last, p, 0.0)", "gl.where(along <= last + 1, p, 0.0)"),
    ("causal queries see keys past the end", "last = gl.minimum(offs, LK - 1) if CAUSAL", "last = offs if CAUSAL"),
    (
        "keys past the end are seen",
        "gl.minimum(offs, LK - 1) if CAUSAL else LK - 1",
        "gl.minimum(offs, LK - 1) if CAUSAL else LK",
    ),
    ("one tile of queries less is masked", "start < row + ROWS - 1 if CAUSAL", "start < row - 1 if CAUSAL"),
    ("one tile of keys less is masked", "masked = start + BLOCK > (", "masked = start > ("),
    ("the diagonal is left out", "end = gl.minimum(LK, row + 2 * ROWS)\n", "end = gl.minimum(LK, row)\n"),
    ("queries at the diagonal are left out", "first = row // BLOCK * BLOCK", "first = row + BLOCK"),
    ("heads of queries do not share keys", "other, members = head // group, 1", "other, members = head % group, 1"),
    ("heads of keys have one of queries", "        members = group\n", "        members = 1\n"),
    ("another head of queries", "% blocks * 2 * ROWS, head * group, 0", "% blocks * 2 * ROWS, head, 0"),
    ("no delta", "(p * (dp - delta)).to(dtype)", "(p * dp).to(dtype)"),
    ("no lse of keys", "numbers(stats, number, TILE)", "numbers(stats, number, TILE) * 0"),
    ("no scale", "descs, (da * scale, db), tiles", "descs, (da, db), tiles"),
    ("numbers of another head", "stats_ptr + 2 * both * stride_s + offs_m", "stats_ptr + both * stride_s + offs_m"),
    ("rows of numbers at any address", "room = triton.cdiv(LQ, 4) * 4", "room = LQ"),
    ("numbers of strides of their own", "            lse.contiguous(),", "            lse,"),
    ("results of any stride", "out if out.stride(3) == 1 else out.contiguous()", "out"),
    ("sums in half the registers", " " * 16 + "maxnreg=168,", " " * 16 + "maxnreg=80,"),
    ("too many buffers", "128: [(64, 4), (128, 2)]", "128: [(64, 4), (128, 3)]"),
    ("rows of any length", f"step >= D and {OF_16_BYTES}", OF_16_BYTES.replace("step % 8 == 0", "step >= D")),
    ("rows that overlap", f"step >= D and {OF_16_BYTES}", OF_16_BYTES),
    ("any address", " and x.data_ptr() % 16 == 0:", ":"),
    (
        "strides of one",
        "step if n > 1 else x.shape[3] for n, step in sides]\n    layout = _gluon_attention_backward",
        "step for n, step in sides]\n    layout = _gluon_attention_backward",
    ),
    ("queries without keys", "if q.numel() * k.numel() == 0:", "if q.numel() == 0:"),
    ("lse of any dtype", "lse.dtype != torch.float32 or lse.device", "lse.device"),
    ("lse of any shape", "        and lse.shape == q.shape[:3]\n", ""),
    ("any gradient", "and q.shape == do.shape == out.shape", "and q.shape == out.shape"),
    ("any GPU", f"(gpu.major, gpu.minor) == (9, 0){AND_ELSE}", f"gpu.major >= 9{AND_ELSE}"),
    (
        "no launcher for GPUs",
        '"gluon_attention_backward", _gluon_attention_backward_launch, "CUDA"',
        '"gluon_attention_backward", _gluon_attention_backward_launch, "XPU"',
    ),
]
