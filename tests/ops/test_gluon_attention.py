"""The op of the recipe Attention in Gluon: as a model of the GPU runs it, as a compiler takes it, and on a GPU."""

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
from case import Case, Draw, Exact, assert_close, in_float64
from compiled import Ask, graphs
from device_key import at_cuda
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, layouts

HOPPER = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

CPU = torch.device("cpu")
RECIPE = Path("attention") / "gluon_attention.py"
HALVES = [torch.float16, torch.bfloat16]
ROOM = 227 * 1024  # bytes of shared memory
# What is read of the order of things in PTX
ORDER = (
    r"wgmma\.(wait_group|commit_group)|(bar\.sync)|mbarrier\.(arrive)\.shared|(fence)\.proxy\.async"
    r"|bulk\.tensor\.4d\.global\.shared::(cta)"
)


@pytest.fixture(scope="module")
def modelled(gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Return the recipe with a model in place of Gluon."""
    source = (gallery / RECIPE).read_text().replace('= "triton_gallery"', '= "modelled"')
    recipe = gluon_model.load(source, tmp_path_factory.mktemp("modelled") / "modelled_attention.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        patch.setattr(recipe, "_gluon_attention_gpu", lambda _: None)
        yield recipe
    recipe.GLUON_ATTENTION_LIBRARY._destroy()  # PyTorch 2.11 refuses a second one


def arguments(
    draw: Draw,
    batch: int,
    groups: tuple[int, int],
    LQ: int,
    LK: int,
    D: int,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Make queries, keys and values of so many heads, and options."""
    heads, shared = groups
    return draw(batch, heads, LQ, D), draw(batch, shared, LK, D), draw(batch, shared, LK, D), causal, scale


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> list[Exact]:
    """Return attention by its formula, whose weights are rounded; a query that sees nothing gives 0."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    p = (s - s.amax(-1, keepdim=True).clamp(min=-1e300)).exp() if s.shape[-1] else s
    total = p.sum(-1, keepdim=True)
    p = p / total.masked_fill(total == 0, 1)
    terms = p @ v.abs()
    return [Exact(p @ v, terms, narrow=terms)]


def assert_attention(out: torch.Tensor, *inputs: Any, **options: Any) -> None:
    """Assert that a result is right."""
    (right,) = exact(*in_float64(inputs), **options)
    assert (out.dtype, out.shape) == (inputs[0].dtype, inputs[0].shape)
    assert out.is_contiguous()
    assert_close(CONTRACT[0], out.dtype, out, right)


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float16, seed: int = 0, device: Any = "cpu") -> Any:
    """Return random values."""
    return Layout("contiguous", seed).make(shape, dtype, device)


LENGTH = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 256, 257, 300, 400]) | st.integers(1, 400)
GROUPS = st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)])
SHAPES = st.tuples(st.integers(1, 2), GROUPS, LENGTH, LENGTH, st.sampled_from([64, 128]), st.booleans())
# Around the edges of tiles, full or causal; heads alone and in groups; no keys, no queries; a scale of one's own
SIZES = [
    (2, (2, 1), 70, 150, 64, True),
    (1, (4, 2), 129, 65, 128),
    (1, (1, 1), 1, 300, 64),
    (1, (3, 3), 1, 1, 128, True),
]
SIZES += [(1, (2, 1), 5, 0, 64), (1, (2, 1), 0, 5, 64), (0, (2, 1), 5, 5, 64), (1, (2, 1), 70, 150, 64, False, 2.5)]
SIZES += [
    (1, (8, 4), *lengths, D, causal)
    for lengths in ((4096, 4096), (1000, 9000), (5000, 700), (1500, 1499))
    for D in (64, 128)
    for causal in (False, True)
]
CONTRACT = [
    Case(
        "gluon_attention",
        arguments,
        exact,
        autocast="asked",
        sizes=SIZES,
        small=(2, (4, 2), 70, 70, 64, True),
        many=(8, (24, 8), 1031, 131, 64, True),
        shapes=SHAPES,
        dtypes=HALVES,
        floor=lambda dtype: torch.finfo(dtype).eps * torch.finfo(dtype).smallest_normal,
    ),
]


@settings(max_examples=25)
@given(
    size=SHAPES,
    dtype=st.sampled_from(HALVES),
    drawn=st.tuples(layouts(), layouts(), layouts()),
    seed=st.integers(0, 2**31),
)
def test_accumulator_by_a_model(
    modelled: ModuleType, size: tuple[Any, ...], dtype: torch.dtype, drawn: tuple[Layout, Layout, Layout], seed: int
) -> None:
    """Whatever happens first, the op is right: no wait is for ever, and nothing is written while it is read."""
    gluon_model.SEEDS[0] = seed
    q, k, v, causal, _ = arguments(Draw(dtype, drawn, CPU), *size)
    out = guarded(partial(modelled._gluon_attention_launch, causal=causal), q, k, v)
    assert_attention(out, q, k, v, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(200, 1200), (700, 700), (129, 513), (600, 300)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_accumulator_of_many_steps_by_a_model(
    modelled: ModuleType, lengths: tuple[int, int], causal: bool, seed: int
) -> None:
    """More steps than buffers; with larger maxima in later tiles, and in earlier ones."""
    LQ, LK = lengths
    gluon_model.SEEDS[0] = seed
    q, k, v = make((2, 2, LQ, 64), seed=seed), make((2, 1, LK, 64), seed=seed + 1), make((2, 1, LK, 64), seed=seed + 2)
    k *= torch.linspace(0.1, 3, LK)[:, None] if seed % 2 else torch.linspace(3, 0.1, LK)[:, None]
    out = guarded(partial(modelled._gluon_attention_launch, causal=causal), q, k, v)
    assert_attention(out, q, k, v, causal)


@pytest.mark.parametrize("seed", range(4))
def test_accumulator_of_the_steps_by_a_model(modelled: ModuleType, seed: int) -> None:
    """Every step of the ladder is right."""
    gluon_model.SEEDS[0] = seed
    steps = ["one group", "roles for warps", "roles and turns"]
    for D in (64, 128):
        q, k, v = (make((1, 2, 384, D), seed=seed + i) for i in range(3))
        for step in itertools.chain(*[modelled.STEPS[name] for name in steps]):
            assert_attention(step(q, k, v), q, k, v)


def products(recipe: ModuleType, turns: bool, seed: int) -> list[int]:
    """Return which consumer issued each product of a program, in order, but for the first and the last of each."""
    gluon_model.SEEDS[0] = seed
    x = make((1, 1, 512, 64))
    recipe.with_roles(x, x, x, BLOCK_N=64, turns=turns)
    asked = [thread for kind, thread in gluon_model.MACHINE.asked if kind == "product"]
    first, *_ = asked
    # Scores and values in eight steps
    counts = {thread: asked.count(thread) for thread in asked}
    assert [*counts.values()] == [16, 16]
    seen = dict.fromkeys(asked, 0)
    kept = []
    for thread in asked:
        seen[thread] += 1
        if 1 < seen[thread] < 16:
            kept.append(int(thread is not first))
    return kept


@pytest.mark.parametrize("seed", range(4))
def test_accumulator_turns_by_a_model(modelled: ModuleType, seed: int) -> None:
    """Values and the next scores of one consumer, then of the other one, to the end; without turns it is otherwise."""
    order = products(modelled, True, seed)
    pairs = [order[i : i + 2] for i in range(0, len(order), 2)]
    assert len(pairs) == 14
    assert all(pair[0] == pair[1] for pair in pairs)
    assert all(previous[0] != current[0] for previous, current in itertools.pairwise(pairs))
    assert products(modelled, False, seed) not in (order, [1 - consumer for consumer in order])


def test_accumulator_of_large_scores(modelled: ModuleType) -> None:
    """Scores in the thousands that rise or fall along the keys: the maximum changes in every tile, or never."""
    steps = torch.arange(300)
    q, v = torch.ones(1, 1, 3, 64).half(), make((1, 1, 300, 64))
    for order in (steps, steps.flip(0)):
        k = (order * 2).half()[None, None, :, None].repeat(1, 1, 1, 64)
        assert_attention(modelled._gluon_attention_launch(q, k, v), q, k, v)
        assert_attention(modelled._gluon_attention_launch(q, k, v, scale=3.0), q, k, v, scale=3.0)


@pytest.mark.parametrize("causal", [False, True])
def test_accumulator_of_infinities(modelled: ModuleType, causal: bool) -> None:
    """A key of -inf has no weight; a query that sees none but such keys gives 0, and no other is touched."""
    q, k, v = make((1, 1, 250, 64)).abs(), make((1, 1, 270, 64), seed=1), make((1, 1, 270, 64), seed=2)
    for hidden in (slice(0, 90), slice(60, 140), slice(0, 200), slice(100, 270), slice(0, 270)):
        some = k.clone()
        some[:, :, hidden] = -torch.inf
        assert_attention(modelled._gluon_attention_launch(q, some, v, causal), q, some, v, causal)


def test_accumulator_reads_nothing_beside_its_inputs(modelled: ModuleType) -> None:
    """NaN in what lies around the keys stays there, and rows that the engine takes are not copied."""
    around = torch.full((2, 400, 3, 80), torch.nan).half()
    around[:, 5:285, 1:, 8:72] = make((2, 280, 2, 64))
    x = around[:, 5:285, 1:, 8:72].transpose(1, 2)
    assert modelled._gluon_attention_aligned(x) is x
    for causal in (False, True):
        assert_attention(modelled._gluon_attention_launch(x, x, x, causal), x, x, x, causal)


def test_accumulator_copies_what_the_engine_refuses(modelled: ModuleType) -> None:
    """Rows at odd addresses, with gaps, with steps, that overlap or repeat are copied, dimensions of one are not."""
    padded = make((2, 3, 40, 80))
    odd = torch.zeros(2 * 3 * 40 * 64 + 1).half()[1:].view(2, 3, 40, 64)
    gaps = torch.zeros(2, 3, 40, 65).half()[..., :64]
    overlapping = torch.zeros(2, 3, 4000).half().as_strided((2, 3, 40, 64), (12000, 4000, 32, 1))
    repeated = torch.zeros(2, 1, 40, 64).half().expand(2, 3, 40, 64)
    for x in (padded[..., 4:68], padded[..., :64].mT.contiguous().mT, odd, gaps, overlapping, repeated):
        copy = modelled._gluon_attention_aligned(x)
        assert copy.is_contiguous()
        assert copy.data_ptr() not in (0, x.data_ptr())
        assert torch.equal(copy, x)
    single = torch.zeros(1, 1, 1, 64).half().as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    assert modelled._gluon_attention_aligned(single) is single
    out = guarded(modelled._gluon_attention_launch, single, single, single)
    assert not out.any()


def test_accumulator_of_nothing(modelled: ModuleType) -> None:
    """Nothing is launched for it; a query without keys gives 0."""
    for LQ, LK, batch in ((5, 0, 1), (0, 5, 1), (5, 5, 0)):
        q, k = make((batch, 2, LQ, 64)), make((batch, 1, LK, 64))
        out = guarded(modelled._gluon_attention_launch, q, k, k)
        assert out.shape == q.shape
        assert not out.any()


def compiled(recipe: ModuleType, kernel: Any, call: Callable[[], object]) -> dict[str, Any]:
    """Return what the compiler makes of a launch; a GPU is not asked."""
    import triton  # where it is imported first, the choice of the interpreter is made

    made = []

    def run(*arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made.append(type(kernel).run(kernel, *arguments, grid=grid, warmup=True, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        patch.setattr(recipe, "_gluon_attention_gpu", lambda _: None)
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
        "wgmma": re.findall(r"HGMMA\.(\S+) (R\d+), (R|gdesc)", code),
        "groups": len(re.findall(r"HGMMA.*gsb0", code)),
        # From the wait for the scores to that for the values
        "under way": re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, (\w+)", code, re.DOTALL),
        "moved": {int(number) for number in re.findall(r"setmaxnreg\.\S+\s+(\d+)", text)},
        "loads": len(re.findall(r"cp\.async\.bulk\.tensor\S*global\S*mbarrier", text)),
        "stores": len(re.findall(r"cp\.async\.bulk\.tensor\.4d\.global\.shared", text)),
        "pointers": len(re.findall(r"ld\.global|st\.global|cp\.async\.c[ag]", text)),
        "moves": len(re.findall(r"\b(?:ldmatrix|ld\.shared\.v4)", text)),
        "order": [next(filter(None, groups)) for groups in re.findall(ORDER, text)],
    }


def codes(recipe: ModuleType, kinds: Any = ((torch.float16, 128, True),)) -> dict[tuple[Any, ...], Any]:
    """Return that of the op."""
    results = {}
    for dtype, D, causal in kinds:
        x = torch.zeros(1, 2, 320, D, dtype=dtype)
        launch = partial(recipe._gluon_attention_launch, x, x, x, causal=causal)
        results[dtype, D, causal] = compiled(recipe, recipe._gluon_attention_kernel, launch)
    return results


def all_codes(recipe: ModuleType) -> dict[tuple[Any, ...], Any]:
    """Return that in both dtypes, of both heads, with a mask and without."""
    return codes(recipe, itertools.product(HALVES, (64, 128), (False, True)))


@pytest.mark.parametrize("look", [codes, pytest.param(all_codes, marks=pytest.mark.thorough)])
def test_compiled_code(gallery: Path, on_h100: Ask, look: Any) -> None:
    """Maxima are found while the values' product runs, nothing spills, all fits, and warps meet where they must."""
    (results,) = on_h100(gallery / RECIPE, look)
    assert len(results) == (1 if look is codes else 8)
    for (dtype, D, _), known in results.items():
        # Of each consumer: two products for scores, of 16 of D each, and two for values, of 16 keys each.
        kind = ".F32" + (".BF16" if dtype == torch.bfloat16 else "")
        scores, values = ("64x128x16" + kind, "gdesc"), (f"64x{D}x16" + kind, "R")
        instructions = [(kind, first) for kind, _, first in known["wgmma"]]
        assert instructions.count(scores) == 2 * 2 * D // 16
        assert instructions.count(values) == 2 * 2 * 128 // 16
        assert len(instructions) == 4 * (D + 128) // 16
        # They are groups: no wait follows all but the last.
        assert known["groups"] == 8
        assert [wait for _, wait in known["under way"]] == ["0x0"] * 2
        assert all("FMNMX" in code for code, _ in known["under way"])
        assert [code.count("MUFU.EX2") for code, _ in known["under way"]] == [0, 0]
        assert known["warps"] == 12
        assert known["registers"] == 168
        assert known["moved"] >= {240, 24}
        assert known["spilled"] == known["pointers"] == known["moves"] == 0
        assert known["shared"] <= ROOM
        # A copy takes 64 columns: of both halves of the queries, of keys and of values.
        assert known["loads"] == 4 * D // 64
        assert known["stores"] == 2
        # A consumer's warps meet between the end of a product and the arrival that gives its buffer back,
        order = " ".join(known["order"])
        assert len(re.findall(r"wait_group( bar\.sync)+ arrive", order)) == 6
        assert "wait_group arrive" not in order
        # and between what they write of a result, with the fence, and the copy of it.
        assert len(re.findall(r"fence( bar\.sync)+ cta", order)) == 2


def test_compiled_wait(gallery: Path, on_h100: Ask, tmp_path: Path) -> None:
    """As the first exercise has it: a wait for the next values keeps exponentials before the wait for the product."""
    source = (gallery / RECIPE).read_text()
    line = "        mbarrier.wait(v_full.index(before), (n - 1) // STAGES & 1)\n"
    last = "    mbarrier.wait(v_full.index((steps - 1) % STAGES), (steps - 1) // STAGES & 1)\n"
    loop, product = "    for n in range(1, steps):\n", "        acc = warpgroup_mma_wait(0, deps=(acc,))\n"
    for text in (line, last, loop, product):
        assert source.count(text) == 1
    moved = line.replace("before", "stage").replace("(n - 1)", "n")
    source = source.replace(line, "").replace(last, "").replace(product, moved + product)
    variant = tmp_path / "moved_wait.py"
    source = source.replace(loop, "    mbarrier.wait(v_full.index(0), 0)\n" + loop)
    # PyTorch 2.11 refuses a second op of one name in that process.
    variant.write_text(source.replace('NAMESPACE = "triton_gallery"', 'NAMESPACE = "moved_wait"'))
    (results,) = on_h100(variant, codes)
    for known in results.values():
        # A thread has 64 scores, and a factor for each of its two rows.
        assert [code.count("MUFU.EX2") for code, _ in known["under way"]] == [66, 66]


def codes_of_steps(recipe: ModuleType) -> list[tuple[str, dict[str, Any]]]:
    """Return that of each variant of the ladder, and the name of its step."""
    kernels = {"one group": "tile_kernel", "roles for warps": "roles_kernel", "roles and turns": "roles_kernel"}
    results = []
    for D in (64, 128):
        x = torch.zeros(1, 2, 384, D).half()
        for step, kernel in kernels.items():
            for variant in recipe.STEPS[step]:
                results.append((step, compiled(recipe, getattr(recipe, kernel), partial(variant, x, x, x))))
    return results


def test_compiled_steps(gallery: Path, on_h100: Ask) -> None:
    """Each variant of the ladder fits, spills nothing, waits for groups, and has probabilities in registers."""
    (results,) = on_h100(gallery / RECIPE, codes_of_steps)
    assert len(results) == 12
    for step, known in results:
        assert known["spilled"] == known["moves"] == 0
        assert known["shared"] <= ROOM
        assert 0 < known["groups"] < len(known["wgmma"])
        assert "R" in {first for *_, first in known["wgmma"]}
        order = " ".join(known["order"])
        assert "wait_group arrive" not in order
        # All of a consumer's warps have issued their product before the turn is passed on.
        passed = re.findall(r"commit_group( bar\.sync)+ arrive wait_group", order)
        assert len(passed) == (2 if step == "roles and turns" else 0)


def refusal(call: Callable[..., object], *arguments: object) -> str:
    """Return what a call raises, in words."""
    try:
        call(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it is taken"


def test_accumulator_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names, wherever it is asked."""
    q = torch.ones(2, 4, 3, 64, dtype=torch.float16, device=DEVICE)
    begin = "Error: gluon_attention takes"
    for call in (taken.gluon_attention, partial(at_cuda, taken.gluon_attention), taken._gluon_attention_fake):
        message = refusal(call, *[q.float()] * 3)
        assert re.match(rf"Type{begin} .*, not torch\.float32: flash_attention_forward takes others", message)
        message = refusal(call, q, q.bfloat16(), q)
        assert re.match(rf"Type{begin} one dtype .*float16.*, torch\.bfloat16", message)
        message = refusal(call, q, q.to("meta"), q)
        assert re.match(rf"Type{begin} one dtype .* on meta", message)
        pairs = [(x, x) for x in (q[:, :3], q[:, :0], q[..., :32], q[:1], q[0])]
        for k, v in (*pairs, (q, q[:, :2]), (q, q[:, :, :2])):
            shapes = re.escape(", ".join(str(tuple(t.shape)) for t in (q, k, v)))
            assert re.match(rf"Value{begin} q of .*, not {shapes}: flash_attention_forward", refusal(call, q, k, v))
        for D in (32, 96, 256):
            assert re.match(rf"Value{begin} .* D of 64 or 128", refusal(call, *[q.new_ones(1, 1, 3, D)] * 3))
        for scale in (0.0, -1.0, float("inf"), float("nan")):
            message = refusal(call, q, q, q, False, scale)
            assert re.match(rf"Value{begin} a positive scale, not {scale}: flash_attention_forward takes any", message)


def test_accumulator_scale(modelled: ModuleType) -> None:
    """A scale of one's own."""
    q, k, v = (make((1, 2, 150, 64), seed=seed) for seed in range(3))
    for scale in (1, 0.01, 2.5):
        assert_attention(modelled._gluon_attention_launch(q, k, v, scale=scale), q, k, v, scale=scale)


def test_accumulator_refuses_gpus(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no GPU, an older, a newer and AMD's are refused."""
    look = taken._gluon_attention_gpu.__wrapped__
    text = r"RuntimeError: gluon_attention takes tensors on .* compute capability 9\.0 alone.*: flash_attention_forward"
    assert re.match(text, refusal(look, torch.device("cpu")))
    gpu = torch.device("cuda", 0)
    for capability, hip in (((8, 0), None), ((9, 1), None), ((10, 0), None), ((12, 0), None), ((9, 0), "7.0")):
        known = SimpleNamespace(major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, known=known: known)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert re.match(text, refusal(look, gpu))
    monkeypatch.setattr(torch.version, "hip", None)
    assert look(gpu) is None


def test_has_no_gradient(modelled: ModuleType) -> None:
    """A gradient is refused, not zero."""
    q = torch.ones(1, 1, 3, 64, dtype=torch.float16, requires_grad=True)
    with pytest.raises(RuntimeError, match="autograd"):
        modelled.gluon_attention(q, q, q).sum().backward()


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graph of the op."""
    x = torch.randn(2, 4, 40, 64).half()
    return graphs(lambda q, k, v: recipe.gluon_attention(q, k, v, True), x, x[:, :2], x[:, :2])


def test_graph(gallery: Path, on_h100: Ask) -> None:
    """torch.compile has one call of the op, and knows its shape."""
    ((forward,),) = on_h100(gallery / RECIPE, traced)
    assert [call for call in forward if "gluon_attention" in call] == ["triton_gallery.gluon_attention.default"]


@on_hopper
def test_nan_goes_to_its_queries(taken: ModuleType) -> None:
    """A query with NaN gives NaN alone; a key with NaN goes to no query of earlier blocks."""
    q, k, v = (make((1, 1, 300, 64), seed=seed, device=DEVICE) for seed in range(3))
    q[0, 0, 7, 3] = torch.nan
    out = taken.gluon_attention(q, k, v, causal=True)
    assert out[0, 0].isnan().any(1).nonzero().flatten().tolist() == [7]
    q[0, 0, 7, 3], k[0, 0, 290, 5] = 0, torch.nan
    out = taken.gluon_attention(q, k, v, causal=True)
    assert out[0, 0, 290:].isnan().all()
    assert not out[0, 0, :256].isnan().any()


@on_hopper
def test_steps_of_the_ladder(load_recipe: Callable[[str], ModuleType]) -> None:
    """Every variant is right on a GPU."""
    recipe = load_recipe(str(RECIPE))
    for D in (64, 128):
        q, k, v = (make((2, 3, 640, D), seed=seed, device=DEVICE) for seed in range(3))
        for variant in itertools.chain(*recipe.STEPS.values()):
            assert_attention(variant(q, k, v), q, k, v)


@on_hopper
@pytest.mark.needs_gpu_memory(18)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last head is right."""
    q = torch.zeros(1, 2**13 + 1, 2048, 128, dtype=torch.float16, device=DEVICE)
    q[0, -1] = torch.randn(2048, 128, device=DEVICE)
    k = torch.randn(1, 1, 100, 128, device=DEVICE).half()
    out = taken.gluon_attention(q, k, k)
    assert_attention(out[:, -1:], q[:, -1:], k, k)
    torch.testing.assert_close(out[0, 0, 0], k[0, 0].float().mean(0).half(), rtol=0, atol=1e-3)


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "keys have one phase",
        "mbarrier.wait(k_full.index(stage), n // STAGES & 1)",
        "mbarrier.wait(k_full.index(stage), 0)",
    ),
    (
        "values have one phase",
        "mbarrier.wait(v_full.index(before), (n - 1) // STAGES & 1)",
        "mbarrier.wait(v_full.index(before), 0)",
    ),
    (
        "the last values have one phase",
        "mbarrier.wait(v_full.index((steps - 1) % STAGES), (steps - 1) // STAGES & 1)",
        "mbarrier.wait(v_full.index((steps - 1) % STAGES), 0)",
    ),
    ("values are not awaited", "        mbarrier.wait(v_full.index(before), (n - 1) // STAGES & 1)\n", ""),
    (
        "the last values are not awaited",
        "    mbarrier.wait(v_full.index((steps - 1) % STAGES), (steps - 1) // STAGES & 1)\n",
        "",
    ),
    ("the first keys are not awaited", "    mbarrier.wait(k_full.index(0), 0)\n", ""),
    ("queries are not awaited", "    mbarrier.wait(q_full, 0)\n    mbarrier.wait(k_full", "    mbarrier.wait(k_full"),
    (
        "empty buffers of keys begin full",
        "mbarrier.wait(k_empty.index(stage), phase ^ 1)",
        "mbarrier.wait(k_empty.index(stage), phase)",
    ),
    ("empty buffers of values are not awaited", "        mbarrier.wait(v_empty.index(stage), phase ^ 1)\n", ""),
    (
        "one consumer gives keys back",
        "mbarrier.init(k_empty.index(stage), count=2)",
        "mbarrier.init(k_empty.index(stage), count=1)",
    ),
    (
        "one consumer gives values back",
        "mbarrier.init(v_empty.index(stage), count=2)",
        "mbarrier.init(v_empty.index(stage), count=1)",
    ),
    ("scores are not awaited", "s = warpgroup_mma_wait(1, deps=(s,))", "s = warpgroup_mma_wait(2, deps=(s,))"),
    (
        "values' product is not awaited",
        "acc = warpgroup_mma_wait(0, deps=(acc,))\n        mb",
        "acc = warpgroup_mma_wait(1, deps=(acc,))\n        mb",
    ),
    (
        "values are given back at once",
        "        acc = warpgroup_mma_wait(0, deps=(acc,))\n        mbarrier.arrive(v_empty.index(before))\n",
        "        mbarrier.arrive(v_empty.index(before))\n        acc = warpgroup_mma_wait(0, deps=(acc,))\n",
    ),
    (
        "the wrong values are given back",
        "mbarrier.arrive(v_empty.index(before))",
        "mbarrier.arrive(v_empty.index(stage))",
    ),
    ("the first keys are kept", "    mbarrier.arrive(k_empty.index(0))\n", ""),
    ("values of the wrong step", "values = v.index(before)", "values = v.index(stage)"),
    (
        "nobody begins",
        "mbarrier.wait(turn.index(HALF), (n + HALF) & 1)",
        "mbarrier.wait(turn.index(HALF), (n + 1) & 1)",
    ),
    ("both begin", "mbarrier.wait(turn.index(HALF), HALF ^ 1)", "mbarrier.wait(turn.index(HALF), 1)"),
    (
        "a turn is kept",
        "mbarrier.arrive(turn.index(1 - HALF))\n        s",
        "mbarrier.arrive(turn.index(HALF))\n        s",
    ),
    ("the last turn is kept", "        mbarrier.arrive(turn.index(1 - HALF))  # the", "        pass  # the"),
    ("no turns", "            mbarrier.wait(turn.index(HALF), (n + HALF) & 1)\n", "            pass\n"),
    (
        "fewer bytes are expected",
        "mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)\n    for",
        "mbarrier.expect(q_full, q_desc.block_type.nbytes)\n    for",
    ),
    ("no fence", "    fence_async_shared()  # what threads wrote", "    # what threads wrote"),
    ("the end does not wait", "    tma.store_wait(0)  # the shared", "    # the shared"),
    ("both halves have the same rows", "    row += HALF * ROWS\n", ""),
    ("queries see the next key", "gl.minimum(offs_m, LK - 1)", "gl.minimum(offs_m + 1, LK - 1)"),
    ("causal queries see keys past the end", "gl.minimum(offs_m, LK - 1)[:, None]", "offs_m[:, None]"),
    ("keys past the end are seen", "if CAUSAL else LK - 1\n", "if CAUSAL else LK\n"),
    (
        "the diagonal is left out",
        "gl.minimum(LK, row + 2 * ROWS) if CAUSAL else LK",
        "gl.minimum(LK, row) if CAUSAL else LK",
    ),
    ("the first tile comes first", "key = (steps - 1 - n) * BLOCK_N", "key = n * BLOCK_N"),
    ("heads do not share keys", "shared = head // group", "shared = head % group"),
    ("sums of before not rescaled", "acc = acc * factor[:, None]", "acc = acc * 1.0"),
    (
        "weights of before not rescaled",
        "return p, m_new, total * factor + gl.sum(p, axis=1), factor",
        "return p, m_new, total + gl.sum(p, axis=1), factor",
    ),
    ("-inf minus -inf", 'origin = gl.where(m_new == -float("inf"), 0.0, m_new)', "origin = m_new"),
    ("a row of nothing is divided by 0", "total = gl.where(total == 0, 1.0, total)", "total = total * 1.0"),
    ("sums in half the registers", "maxnreg=168,  # of", "maxnreg=80,  # of"),
    ("too many stages", "GLUON_ATTENTION_STAGES = 2", "GLUON_ATTENTION_STAGES = 3"),
    ("rows of any length", "step >= D and step % 8 == 0 for", "step >= D for"),
    ("rows that overlap", "step >= D and step % 8 == 0 for", "step % 8 == 0 for"),
    ("any address", " and x.data_ptr() % 16 == 0", ""),
    ("strides of one", "step if n > 1 else x.shape[3] for", "step for"),
    ("queries without keys", "if out.numel() * k.numel() == 0:", "if out.numel() == 0:"),
    ("any scale", "if not 0 < scale < math.inf:", "if not scale < math.inf:"),
    ("any GPU", "(gpu.major, gpu.minor) == (9, 0)", "gpu.major >= 9"),
    (
        "no launcher for GPUs",
        '"gluon_attention", _gluon_attention_launch, "CUDA"',
        '"gluon_attention", _gluon_attention_launch, "XPU"',
    ),
]
