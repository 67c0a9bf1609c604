"""The op of the recipe Flash attention: values and gradients."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gluon_model
import pytest
import torch
from attentions import (
    arguments,
    exact,
    exact_backward,
    exact_gradients,
    exact_with_lse,
    falling,
    filled,
    near,
    of_backward,
    of_weights,
    positive,
    refused,
    rising,
    scores,
    shapes,
    weights,
)
from case import Case, Draw, assert_close, check, in_float64
from compiled import Ask, compiled, graphs
from device_key import at_cuda
from inputs import DEVICE, Layout, first_quickly
from op_fixtures import end_ops

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
RECIPE = "attention/flash_attention.py"


# Around the edges of tiles, full or causal; heads alone and in groups; no keys, no queries; a scale of one's own
SIZES = [(2, 2, 1, 70, 90, 40, True), (1, 4, 2, 90, 37, 16), (1, 3, 3, 65, 67, 64, True), (1, 1, 1, 1, 100, 100)]
SIZES += [(1, 2, 1, 33, 0, 16, True), (1, 2, 1, 0, 33, 16), (1, 6, 2, 40, 40, 16, True, -0.3), (1, 2, 1, 33, 17, 256)]
SIZES += [(1, 2, 1, 70, 70, 32, True, scale) for scale in (0.0, 1.0)]
SIZES += [(2, 0, 2, 9, 9, 16), (0, 2, 1, 9, 9, 16), (1, 1, 1, 1, 1, 1, True), (1, 2, 2, 64, 64, 8)]
# Scores in the thousands that rise or fall along the keys
SIZES += [(1, 1, 1, 3, 100, 64, False, None, positive, along) for along in (rising, falling)]
SIZES += [(1, 2, 1, *lengths, 100, causal) for lengths in ((127, 129), (129, 65)) for causal in (False, True)]
SIZES += [(1, 2, 1, 300, 400, D, True) for D in (16, 32, 64, 80, 128, 256)]
# What pads the last block has a score of 0, far from all others: its weight would be infinite.
FAR = [(1, 1, 1, 37, 45, 16, causal, 1.0, near(1), near(far / 16)) for far in (-1e3, 1e3) for causal in (False, True)]
# Keys without a weight, and queries that see none but such keys
HIDDEN = [(1, 1, 1, 70, 60, 16, causal, None, positive, filled(0, 35, -torch.inf)) for causal in (True, False)]
HIDDEN += [(1, 1, 1, 70, 60, 16, False, None, positive, filled(0, 60, -torch.inf))]
OF_ALL = {
    "small": (1, 2, 1, 3, 3, 2, True),
    "in_layouts": (2, 2, 1, 37, 20, 20, True),
    "many": (16, 24, 8, 263, 131, 24, True),
    "shapes": shapes([16, 32, 40, 64, 80, 128], most=70),
}
OF_FORWARD = {"gradients": exact_gradients, "with_gradients": 3, "refused": refused("flash_attention", 0, 257)}
CONTRACT = [
    Case("flash_attention", arguments, exact, sizes=SIZES[:3], plain=True, autocast="asked", **OF_FORWARD, **OF_ALL),
    Case(
        "flash_attention_with_lse",
        arguments,
        exact_with_lse,
        sizes=SIZES[:5] + HIDDEN + SIZES[5:] + FAR,
        autocast="asked",
        **OF_FORWARD,
        **OF_ALL,
    ),
    Case(
        "flash_attention_backward",
        of_backward,
        exact_backward,
        sizes=SIZES[:7] + FAR + SIZES[7:],
        contiguous=False,  # a gradient lies as what it is of
        **OF_ALL,
    ),
]


def assert_gradients(grads: Sequence[torch.Tensor], *given: Any) -> None:
    """Assert that gradients are right, given the tensors that they are of, and that of the result."""
    q, k, v, grad, *options = in_float64(given)
    for actual, right in zip(grads, exact_gradients(grad, q, k, v, *options), strict=True):
        assert actual.shape == right.value.shape
        assert_close(CONTRACT[2], given[0].dtype, actual, right)


@pytest.mark.parametrize("causal", first_quickly(True, False))
@pytest.mark.parametrize("tiles", ["FLASH_ATTENTION_TILES", "FLASH_ATTENTION_HOPPER", "FLASH_ATTENTION_SMALL"])
def test_tiles_of_gpus(taken: ModuleType, tiles: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Hopper, and of a GPU with little shared memory, at lengths around their edges."""
    taken._flash_attention_tiles.cache_clear()
    monkeypatch.setattr(taken, "FLASH_ATTENTION_TILES", taken.FLASH_ATTENTION_TILES | getattr(taken, tiles))
    for D, lengths in itertools.product((16, 64, 128, 200), [(70, 90), (129, 193), (256, 128)]):
        for case in CONTRACT[1:]:
            check(case, taken, torch.float16, case.arguments(Draw(torch.float16), 1, 2, 1, *lengths, D, causal))
    taken._flash_attention_tiles.cache_clear()


# Shared memory of a program, in bytes, and the compute capability's first number
GPUS = {"A100": (166_912, 8), "H200": (232_448, 9), "B200": (232_448, 10), "RTX 4090": (101_376, 8), "MI300": (None, 9)}


@pytest.mark.parametrize("gpu", GPUS)
def test_which_tiles(taken: ModuleType, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's are for Hopper alone, and GPUs with little shared memory have small ones."""
    room, major = GPUS[gpu]
    properties = {"major": major} | ({"shared_memory_per_block_optin": room} if room else {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
    which = {"H200": taken.FLASH_ATTENTION_HOPPER, "RTX 4090": taken.FLASH_ATTENTION_SMALL}
    which["MI300"] = which["RTX 4090"]
    for BLOCK_D, tiles in (taken.FLASH_ATTENTION_TILES | which.get(gpu, {})).items():
        actual = taken._flash_attention_tiles.__wrapped__(torch.device("cuda"), BLOCK_D, 2)
        assert [tuple(tile.values()) for tile in actual] == tiles


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_reads_nothing_beside_its_inputs(taken: ModuleType, dtype: torch.dtype) -> None:
    """NaN in what lies around the inputs stays there."""
    around = torch.full((1, 60, 4, 96), torch.nan, dtype=dtype, device=DEVICE)
    around[:, 5:45, 1:3, 8:88] = Layout("contiguous", 0).make((1, 40, 2, 80), dtype, DEVICE)
    x = around[:, 5:45, 1:3, 8:88].transpose(1, 2)
    for causal in (False, True):
        check(CONTRACT[1], taken, dtype, (x, x, x, causal, None))
        out, lse = taken.flash_attention_with_lse(x, x, x, causal)
        check(CONTRACT[2], taken, dtype, (x, x, x, x, out, lse, causal, None))


def test_layouts_of_gradients(taken: ModuleType) -> None:
    """Gradients lie in memory as their tensors do, where those are dense."""
    x = torch.randn(2, 9, 3, 16, dtype=torch.float16, device=DEVICE).transpose(1, 2)
    leaves = [t.detach().requires_grad_() for t in (x, x, x.contiguous())]
    dq, dk, _ = torch.autograd.grad(taken.flash_attention(*leaves).sum(), leaves)
    assert dq.stride() == dk.stride() == x.stride()


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """Every step of the ladder is right."""
    draw = Draw(torch.float16)
    grad, q, k, v = (draw(1, 2, 200, 64) for _ in range(4))
    doubles = in_float64((q, k, v, grad))
    for make, causal, *_ in recipe.STEPS.values():
        assert_gradients(make(q, k, v, grad)(), q, k, v, grad, causal)
    expected = [result.value for result in exact_gradients(doubles[3], *doubles[:3], True)]
    torch.testing.assert_close(list(recipe.expected_of(*doubles, is_causal=True)), expected)
    p, out = weights(*scores(*doubles[:2], True, None)[:2]).p, exact(*doubles[:3], True)[0].value
    terms = [result.terms for result in of_weights(doubles[3], *doubles[:3], out, p, p, 64**-0.5)]
    torch.testing.assert_close(recipe.terms_of(*doubles, True), terms)


KERNELS = ["_flash_attention_kernel", "_flash_attention_dkv_kernel", "_flash_attention_dq_kernel"]


def at_launch(taken: ModuleType, which: int, dtype: str, D: int, causal: bool, tiles: str) -> dict[str, object]:
    """Return what the launchers pass on, to the kernel of a number, for lengths and strides that 16 divides."""
    import triton.language as tl

    BLOCK_D = max(16, 1 << (D - 1).bit_length())
    if dtype in ("fp16", "bf16"):
        table = taken.FLASH_ATTENTION_TILES | getattr(taken, tiles)
        BLOCK_M, BLOCK_N, num_warps, num_stages, *maxnreg = table[BLOCK_D][which]
    else:
        tile = taken._flash_attention_tiles(torch.device("cpu"), BLOCK_D, 8)[which]
        BLOCK_M, BLOCK_N, num_warps, num_stages, *maxnreg = tile.values()
    names = getattr(taken, KERNELS[which]).arg_names
    acc_type, scale = "fp64" if dtype == "fp64" else "fp32", D**-0.5
    known = {
        "lse_ptr": acc_type,
        "delta_ptr": acc_type,
        "GROUP": 1,
        "D": D,
        "SCALE": scale,
        "SCALE_2": scale * math.log2(math.e),
        "CAUSAL": causal,
        "ACC": {"fp32": tl.float32, "fp64": tl.float64}[acc_type],
        "LOWEST": torch.finfo(torch.float32).min,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
    }
    strides = [name for name in names if name.startswith("stride_")]
    options = {
        "dtype": dtype,
        "num_warps": num_warps,
        "num_stages": num_stages,
        "maxnreg": maxnreg[0] if maxnreg else None,
        "multiples": ["LQ", "LK", *strides],
    }
    return options | {name: value for name, value in known.items() if name in names}


def codes(taken: ModuleType) -> dict[tuple[int, int], tuple[set[str], bool, bool]]:
    """Return, for heads and kernels, the matrix instructions, whether exp2 is one, and whether anything is atomic."""
    results = {}
    for D, which in itertools.product((64, 128), range(3)):
        known = at_launch(taken, which, "fp16", D, True, "FLASH_ATTENTION_HOPPER")
        text = compiled(getattr(taken, KERNELS[which]), **known).asm["ptx"]
        matrix = set(re.findall(r"(wgmma|mma)\.\S*?m\d+n\d+", text))
        results[D, which] = matrix, "ex2.approx" in text, bool(re.search(r"\b(atom|red)\.global", text))
    return results


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Hopper's instruction in all products, one instruction for an exponential, and no additions to memory."""
    (results,) = on_h100(gallery / RECIPE, codes)
    assert set(results) == set(itertools.product((64, 128), range(3)))
    assert set(map(repr, results.values())) == {repr(({"wgmma"}, True, False))}


def rooms(taken: ModuleType) -> list[int]:
    """Return the bytes of shared memory that float64 takes for the largest heads."""
    return [
        compiled(getattr(taken, KERNELS[which]), **at_launch(taken, which, "fp64", 256, causal, "")).metadata.shared
        for which in range(3)
        for causal in (False, True)
    ]


@pytest.mark.thorough
def test_float64_fits(gallery: Path, on_h100: Ask) -> None:
    """An A100's shared memory has room for the largest heads."""
    (byte_counts,) = on_h100(gallery / RECIPE, rooms)
    assert len(byte_counts) == 6
    assert max(byte_counts) <= 163 * 1024


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs of a causal call, forward and backward."""
    x = torch.randn(2, 4, 40, 64, dtype=torch.float16, requires_grad=True)
    k = torch.randn(2, 2, 40, 64, dtype=torch.float16, requires_grad=True)
    return graphs(lambda q, k: recipe.flash_attention(q, k, k, True), x, k)


def traced_open(recipe: ModuleType) -> list[list[str]]:
    """Return those graphs where the choice is open, as on a Hopper."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "_flash_attention_hopper", lambda _: True)
        return traced(recipe)


def test_torch_compile_looks_into_it(gallery: Path, on_h100: Ask) -> None:
    """It sees one kernel forward and three backward; where the choice is open, one call in each direction."""
    (forward, backward), in_gluon = on_h100(gallery / RECIPE, traced, traced_open)
    for graph, name in zip(in_gluon, ("flash_attention_run", "flash_attention_backward_run"), strict=True):
        assert [call for call in graph if "triton" in call] == [f"triton_gallery.{name}.default"]
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]
    for graph, number in ((forward, 1), (backward, 3)):
        assert sum(call.startswith("triton_kernel_wrapper") for call in graph) == number
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]


HALVES = [torch.float16, torch.bfloat16]
# Batch, heads, heads of keys, queries, keys, D; the dtype, the scale; whether Gluon has the forward, and the backward
CHOICES: list[tuple[tuple[int, ...], torch.dtype, float | None, bool, bool]] = [
    ((4, 16, 16, 4096, 4096, 128), torch.float16, None, True, True),
    ((4, 32, 32, 4096, 4096, 64), torch.bfloat16, 0.5, True, True),
    ((16, 32, 32, 1024, 1024, 64), torch.float16, None, False, True),
    ((16, 16, 16, 1024, 1024, 128), torch.float16, None, True, True),
    ((32, 16, 16, 512, 512, 128), torch.float16, None, False, True),
    ((64, 16, 16, 511, 4096, 128), torch.float16, None, False, False),
    ((64, 16, 16, 4096, 511, 128), torch.float16, None, False, False),
    ((1, 16, 16, 1024, 1024, 128), torch.float16, None, True, True),
    ((1, 15, 15, 1024, 1024, 128), torch.float16, None, False, False),  # too few programs
    ((1, 32, 8, 1024, 1024, 128), torch.float16, None, True, False),  # of the keys' pass
    ((1, 32, 8, 2048, 2048, 128), torch.float16, None, True, True),
    ((4, 16, 16, 4096, 4096, 96), torch.float16, None, False, False),
    ((4, 16, 16, 4096, 4096, 128), torch.float32, None, False, False),
    *(((4, 16, 16, 4096, 4096, 128), torch.float16, scale, False, False) for scale in (0.0, -0.5, math.inf, math.nan)),
    ((0, 16, 16, 4096, 4096, 128), torch.float16, None, False, False),
    ((4, 16, 16, 4096, 0, 128), torch.float16, None, False, False),
]


@pytest.mark.parametrize(("size", "dtype", "scale", "forward", "backward"), CHOICES)
def test_accumulator_which_kernels(
    taken: ModuleType, size: tuple[int, ...], dtype: torch.dtype, scale: float | None, forward: bool, backward: bool
) -> None:
    """Gluon's where they were measured to lead: by lengths, heads, the dtype and how many programs there are."""
    batch, heads, shared, LQ, LK, D = size
    q = torch.empty(batch, heads, LQ, D, dtype=dtype, device="meta")
    k = torch.empty(batch, shared, LK, D, dtype=dtype, device="meta")
    assert taken._flash_attention_in_gluon(q, k, scale, backward=False) == forward
    assert taken._flash_attention_in_gluon(q, k, scale, backward=True) == backward


def test_accumulator_which_gpus(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gluon's kernels are for NVIDIA's GPUs of compute capability 9.0 alone."""
    look = taken._flash_attention_hopper.__wrapped__
    assert not look(torch.device("cpu"))
    for capability, hip in (((8, 0), None), ((9, 0), None), ((9, 1), None), ((10, 0), None), ((9, 0), "7.0")):
        known = SimpleNamespace(major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, known=known: known)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert look(torch.device("cuda", 0)) == (capability == (9, 0) and hip is None)


@pytest.fixture
def on_hopper(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the op take this device for a Hopper, and short sequences for long; return what calls go to, in order.

    Triton's kernels compute in place of Gluon's.
    """
    asked: list[str] = []

    def forward(q: Any, k: Any, v: Any, causal: bool, scale: float | None, lse: torch.Tensor) -> torch.Tensor:
        asked.append("forward")
        out, right = taken._flash_attention_launch(q, k, v, causal, scale)
        lse.copy_(right)
        return out

    def backward(*given: Any) -> tuple[torch.Tensor, ...]:
        asked.append("backward")
        *given, like = given
        grads = taken._flash_attention_backward_launch(*given)
        return tuple(like(grad).copy_(grad) for grad in grads)

    monkeypatch.setattr(taken, "_flash_attention_hopper", lambda _: True)
    monkeypatch.setattr(taken, "FLASH_ATTENTION_GLUON", {64: (70, 40), 128: (70, 40)})
    monkeypatch.setattr(taken, "_gluon_attention_launch", forward)
    monkeypatch.setattr(taken, "_gluon_attention_backward_launch", backward)
    return asked


BOTH = ["forward", "backward"]
TURNED = [lambda t: t, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)]
# Beside what the copy engine takes: odd strides, odd addresses, elements that are not adjacent
ODD = [
    lambda t: torch.nn.functional.pad(t, (0, 1))[..., :-1],
    lambda t: torch.nn.functional.pad(t.flatten(), (1, 0))[1:].view(t.shape),
    lambda t: t.mT.contiguous().mT,
]


@pytest.mark.parametrize(
    ("length", "D", "kinds", "expected"),
    [
        (80, 64, TURNED, BOTH),
        (80, 128, TURNED, BOTH),
        (80, 32, TURNED, []),
        (60, 64, TURNED, ["backward"]),
        (30, 64, TURNED, []),
        (80, 64, ODD, []),
    ],
)
def test_accumulator_goes_to(
    taken: ModuleType,
    on_hopper: list[str],
    length: int,
    D: int,
    kinds: list[Callable[[torch.Tensor], torch.Tensor]],
    expected: list[str],
) -> None:
    """Each direction goes where it leads, by the op's function for GPUs as well, and what needs a copy to Triton's."""
    draw = Draw(torch.float16)
    for kind in kinds:
        q, k, v, grad = (kind(draw(1, 2, length, D)) for _ in range(4))
        for call in (
            lambda *x: taken.flash_attention_with_lse(*x, True),
            lambda *x: at_cuda(taken.flash_attention_with_lse, *x, True, None),
        ):
            on_hopper.clear()
            out, lse = call(q, k, v)
            check_results(CONTRACT[1], (out, lse), q, k, v, True, None)
            given = grad, q, k, v, out, lse, True, None
            grads = taken.flash_attention_backward(*given)
            assert on_hopper == expected
            assert_gradients(grads, q, k, v, grad, True)
            assert [t.stride() for t in grads] == [taken._flash_attention_like(t).stride() for t in (q, k, k)]
            on_hopper.clear()
            assert_gradients(at_cuda(taken.flash_attention_backward, *given), q, k, v, grad, True)
            assert on_hopper == expected[-1:]


def check_results(case: Case, results: Sequence[torch.Tensor], *given: Any) -> None:
    """Assert that results are right."""
    for out, right in zip(results, case.exact(*in_float64(given)), strict=True):
        assert_close(case, given[0].dtype, out, right)


def test_accumulator_of_a_repeated_gradient(taken: ModuleType, on_hopper: list[str]) -> None:
    """The gradient of a sum is one number in memory: Triton's kernels read it."""
    q, k, v = (Draw(torch.float16)(1, 2, 80, 64).requires_grad_() for _ in range(3))
    out = taken.flash_attention(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert on_hopper == ["forward"]
    assert_gradients(grads, q.detach(), k.detach(), v.detach(), torch.ones_like(out))


def test_errors_of_gluon(taken: ModuleType, on_hopper: list[str]) -> None:
    """What Gluon's kernels refuse is refused in the words of this op."""
    q = torch.ones(1, 4, 80, 64, dtype=torch.float16, device=DEVICE)
    for k, error in ((q[:, :3], ValueError), (q[0], ValueError), (q.bfloat16(), TypeError)):
        with pytest.raises(error, match=r"^flash_attention takes"):
            at_cuda(taken.flash_attention_with_lse, q, k, k, False, None)
    assert on_hopper == []


def test_accumulator_of_open_graphs(taken: ModuleType, on_hopper: list[str]) -> None:
    """One graph serves all lengths, and each goes where it leads; a package of AOTInductor has Triton's kernels."""
    from torch._dynamo.testing import CompileCounterWithBackend  # loads Triton: not before the interpreter is chosen
    from torch._inductor.virtualized import V

    q = SimpleNamespace(dtype=torch.float16, shape=(1, 2, object(), 64))  # its length can be compared with nothing
    assert taken._flash_attention_in_gluon(q, q, None, backward=False)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(taken.flash_attention, backend=counter, dynamic=True, fullgraph=True)
    draw = Draw(torch.float16)
    for length, expected in ((80, BOTH), (30, []), (60, ["backward"]), (100, BOTH)):
        on_hopper.clear()
        q, k, v, grad = (draw(1, 2, length, 64) for _ in range(4))
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        grads = torch.autograd.grad(call(*leaves, True), leaves, grad)
        assert on_hopper == expected
        assert_gradients(grads, q, k, v, grad, True)
    assert counter.frame_count == 1
    with V.set_aot_compilation(True):
        assert not taken._flash_attention_is_open(q, k, None, backward=False)
    assert taken._flash_attention_is_open(q, k, None, backward=False)


def test_opcheck_where_the_choice_is_open(taken: ModuleType, on_hopper: list[str]) -> None:
    """What torch.compile calls knows the shapes and strides of its results."""
    x = Draw(torch.float16)(1, 2, 80, 64).transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = taken.flash_attention_with_lse(x, x, x)
    torch.library.opcheck(taken._flash_attention_open, (x, x, x, True, None))
    torch.library.opcheck(taken._flash_attention_backward_open, (x, x, x, x, out, lse, True, None))
    leaf = x.detach().requires_grad_()
    torch.library.opcheck(taken.flash_attention_with_lse, (leaf, x, x, True, None))


@pytest.fixture(scope="module")
def modelled(gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Return the recipe with a model in place of Gluon, which has all that it takes."""
    if DEVICE.type == "cuda":
        pytest.skip("the kernel of delta is compiled where there is a GPU, and takes no tensors of the CPU")
    source = (gallery / RECIPE).read_text().replace('= "triton_gallery"', '= "modelled"')
    recipe = gluon_model.load(source, tmp_path_factory.mktemp("modelled") / "modelled_flash_attention.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        for name in ("_gluon_attention_gpu", "_gluon_attention_backward_gpu", "_flash_attention_hopper"):
            patch.setattr(recipe, name, lambda _: True)
        patch.setattr(recipe, "FLASH_ATTENTION_GLUON", {64: (1, 1), 128: (1, 1)})
        yield recipe
    end_ops(recipe)  # PyTorch 2.11 refuses a second one


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "size",
    [(2, 2, 1, 70, 150, 64), (1, 4, 2, 129, 65, 128), (1, 1, 1, 1, 300, 64), (1, 2, 2, 300, 260, 64)],
    ids=str,
)
def test_accumulator_both_ways(
    modelled: ModuleType, taken: ModuleType, size: tuple[int, ...], dtype: torch.dtype, causal: bool
) -> None:
    """By a model of Gluon's kernels: results, log-sum-exp and gradients are right, and either way takes the other's."""
    batch, heads, shared, LQ, LK, D = size
    draw = Draw(dtype)
    given = draw(batch, heads, LQ, D), draw(batch, shared, LK, D), draw(batch, shared, LK, D), causal, None
    grad = draw(batch, heads, LQ, D)
    check(CONTRACT[1], modelled, dtype, given)
    in_gluon = modelled.flash_attention_with_lse(*given)
    in_triton = taken.flash_attention_with_lse(*given)
    for forward, module in ((in_gluon, taken), (in_triton, modelled), (in_gluon, modelled)):
        check(CONTRACT[2], module, dtype, (grad, *given[:3], *forward, causal, None))


def test_accumulator_hidden_rows_in_gluon(modelled: ModuleType) -> None:
    """A query that sees nothing but keys of -inf has a log-sum-exp of inf, and a gradient of 0."""
    q, grad = (Draw(torch.float16)(1, 1, 70, 64).abs() for _ in range(2))
    k = torch.full_like(q, -torch.inf)
    check(CONTRACT[1], modelled, torch.float16, (q, k, q, False, None))
    k[:, :, 35:] = 1
    check(CONTRACT[1], modelled, torch.float16, (q, k, q, True, None))
    out, lse = modelled.flash_attention_with_lse(q, k, q, True, None)
    assert lse[0, 0, :35].isinf().all()
    dq, *_ = modelled.flash_attention_backward(grad, q, k.clamp(min=-9), q, out, lse, True, None)
    assert not dq[:, :, :35].any()


HOPPER = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "size", [(1, 16, 8, 1024, 2048, 128), (2, 8, 8, 1500, 1499, 128), (1, 8, 4, 4100, 4096, 64)], ids=str
)
def test_long_sequences_on_hopper(
    taken: ModuleType, size: tuple[int, ...], causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes to Gluon's kernels is right, and so is what torch.compile makes of it."""
    asked = []
    for name in ("_gluon_attention_launch", "_gluon_attention_backward_launch"):
        launch = getattr(taken, name)
        monkeypatch.setattr(taken, name, lambda *given, name=name, launch=launch: asked.append(name) or launch(*given))
    batch, heads, shared, LQ, LK, D = size
    draw = Draw(dtype)
    q, grad = (draw(batch, heads, LQ, D) for _ in range(2))
    k, v = (draw(batch, shared, LK, D) for _ in range(2))
    check(CONTRACT[1], taken, dtype, (q, k, v, causal, None))
    out, lse = taken.flash_attention_with_lse(q, k, v, causal)
    check(CONTRACT[2], taken, dtype, (grad, q, k, v, out, lse, causal, None))
    assert {*asked} == {"_gluon_attention_launch", "_gluon_attention_backward_launch"}
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    found = torch.compile(taken.flash_attention, fullgraph=True)(*leaves, causal)
    assert torch.equal(found, out)
    assert_gradients(torch.autograd.grad(found, leaves, grad), q, k, v, grad, causal)


@pytest.mark.needs_gpu_memory(40)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements: the last head is right."""
    q = torch.zeros(1, 2**13 + 1, 2048, 128, dtype=torch.float16, device=DEVICE)
    q[0, -1] = torch.randn(2048, 128, device=DEVICE)
    k = torch.randn(1, 1, 100, 128, device=DEVICE).half()
    out, lse = taken.flash_attention_with_lse(q, k, k)
    grad = torch.zeros_like(q)
    grad[0, -1] = torch.randn(2048, 128, device=DEVICE)
    dq, dk, dv = taken.flash_attention_backward(grad, q, k, k, out, lse, False, None)
    assert_gradients((dq[:, -1:], dk, dv), q[:, -1:], k, k, grad[:, -1:])
    for actual, right in zip((out, lse), exact_with_lse(*in_float64((q[:, -1:], k, k))), strict=True):
        assert_close(CONTRACT[1], q.dtype, actual[:, -1:], right)


PASS_FOR_QUERIES = """
    if CAUSAL:
        full = tl.minimum(full, pid_m * BLOCK_M // BLOCK_N * BLOCK_N)
        end = tl.minimum(LK, (pid_m + 1) * BLOCK_M)
    for MASKED in tl.static_range(2):
        for start in range(
            full if MASKED else 0, end if MASKED else full, BLOCK_N
        ):
            offs_n = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
            # Past D lies another head, or memory of another tensor.
            inside = offs_d < D  # (1, BLOCK_D)
            if MASKED:
                # Only the last block of keys can be ragged. This loop has it.
                inside = inside & (offs_n[:, None] < LK)  # (BLOCK_N, BLOCK_D)
            # In int32, a key's offset would overflow past element 2**31.
            row_n = offs_n[:, None].to(tl.int64)
            k = tl.load(k_ptrs + row_n * stride_kl, mask=inside, other=0.0)
            s = tl.dot(q, k.T, input_precision="ieee", out_dtype=ACC)
            p ="""

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("no delta in the pass for keys", "p * (dp - delta[None, :])", "p * dp"),
    ("no delta in the pass for queries", "ds = (p * (dp - delta)).to(k.dtype)", "ds = (p * dp).to(k.dtype)"),
    (
        "keys begin at the diagonal, mask or not",
        "    first, full = 0, 0\n    if CAUSAL:\n",
        "    first, full = 0, 0\n    if True:\n",
    ),
    (
        "full attention's queries end at the diagonal",
        PASS_FOR_QUERIES,
        PASS_FOR_QUERIES.replace("if CAUSAL:", "if True:"),
    ),
    ("keys see the query before", "offs_n <= offs_m[None, :], p", "offs_n <= offs_m[None, :] + 1, p"),
    (
        "keys skip the rest of the diagonal",
        "full = tl.cdiv(begin + BLOCK_N, BLOCK_M) * BLOCK_M",
        "full = tl.cdiv(begin, BLOCK_M) * BLOCK_M",
    ),
    (
        "padded keys add to queries",
        "                p = tl.where(seen, p, 0.0)\n",
        "                p = tl.where(seen | (offs_n[None, :] >= LK), p, 0.0)\n",
    ),
    ("a group is its first head", "for member in range(GROUP):", "for member in range(1):"),
    ("queries past the end are read", "inside = (row_m < LQ) & (", "inside = (row_m < LQ + 99) & ("),
    (
        "the gradient of keys has no scale",
        "tl.store(dk_ptr + offs, dk * SCALE, mask=mask)",
        "tl.store(dk_ptr + offs, dk, mask=mask)",
    ),
    (
        "the gradient of queries has no scale",
        "tl.store(dq_ptrs + row * stride_dql, dq * SCALE, mask=mask)",
        "tl.store(dq_ptrs + row * stride_dql, dq, mask=mask)",
    ),
    (
        "padding of a head is read",
        "inside = (row_m < LQ) & (offs_d < D)  # (BLOCK_M, BLOCK_D)",
        "inside = (row_m < LQ) & (offs_d < D + 8)",
    ),
    (
        "queries without keys get anything",
        "if q.numel() == 0 or k.numel() == 0:\n        return dq.zero_()",
        "if q.numel() == 0 or k.numel() == 0:\n        return dq",
    ),
    ("a pass for keys has no last block", "blocks = triton.cdiv(LK,", "blocks = triton.cdiv(LK - 1,"),
    (
        "a row of nothing has a finite log-sum-exp",
        'tl.where(total == 0, float("inf"), m + tl.log2(divisor))',
        "m + tl.log2(divisor)",
    ),
    # Where calls go
    ("any GPU", "return (gpu.major, gpu.minor) == (9, 0)", "return gpu.major >= 9"),
    ("any scale", "(scale is None or 0 < scale < math.inf)", "(scale is None or scale < math.inf)"),
    ("one length alone", "return min(LQ, LK) >= least[backward]", "return LQ >= least[backward]"),
    (
        "odd strides forward",
        "if in_gluon and all(map(_gluon_attention_fits, (q, k, v))):",
        "if in_gluon:",
    ),
    (
        "odd strides backward",
        "if in_gluon and all(map(_gluon_attention_fits, (grad, q, k, v))):",
        "if in_gluon:",
    ),
    (
        "gradients in another order",
        "            like = _flash_attention_like\n",
        "            like = _gluon_attention_backward_like\n",
    ),
    ("a graph chooses", "return True  # a comparison", "return False  # a comparison"),
    ("a package needs Python", "    if V.aot_compilation:\n        return False\n", ""),
    # What Gluon's forward keeps
    ("no maximum in what Gluon keeps", "m + gl.log2(total)", "gl.log2(total)"),
    ("a row of nothing in Gluon", 'gl.where(total == 0, float("inf"), m + ', "(m + "),
    ("another head in Gluon", "lse_ptr + (batch * heads + head).to", "lse_ptr + head.to"),
]
