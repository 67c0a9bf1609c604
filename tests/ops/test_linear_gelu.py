"""The op of the recipe A linear layer with GELU, and its gradients."""

# ruff: noqa: N806 - the sizes of a product are M, N and K, as in the recipe

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, assert_close, check
from compiled import TRITON, Ask, graphs
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, sizes
from torch.nn.functional import gelu, linear

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# Half precision, which the copy engine serves; test_mutants.py looks for these names.
halves = pytest.mark.parametrize("dtype", FLOATS[:2], ids=lambda dtype: f"{dtype}, its accumulator float32")
KINDS = ["none", "tanh"]
ERF = ["erf", *KINDS]
LEADS = st.sampled_from([(), (1,), (0,), (5,), (70,), (2, 3), (3, 1, 2)])


def slope(z: torch.Tensor, kind: str) -> torch.Tensor:
    """Return GELU's derivative in float64."""
    z = z.detach().double().requires_grad_()
    (gradient,) = torch.autograd.grad(gelu(z, approximate=kind).sum(), z)
    return gradient


def layer(
    draw: Draw, lead: tuple[int, ...], N: int, K: int, *options: str | bool, has_bias: bool = True
) -> tuple[Any, ...]:
    """Make x, a weight and a bias, or None, before other options."""
    return draw(*lead, K), draw(N, K), draw(N) if has_bias else None, *options


def gradient_and_product(draw: Draw, lead: tuple[int, ...], N: int, kind: str, scale: int) -> tuple[Any, ...]:
    """Make a gradient and a product of some size."""
    return draw(*lead, N), draw(*lead, N, of=lambda z: scale * z), kind


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str = "none",
    keep: bool = False,
    is_copy: bool = True,
) -> list[Exact]:
    """Return GELU of the product, and the product: copies by PyTorch, where rows are padded for the engine.

    Each product and the bias is added once; GELU itself rounds a few times, and passes errors on, by 1.13 at most.
    """
    z, K = linear(x, weight, bias), x.shape[-1]
    terms = linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    y = Exact(gelu(z, approximate=kind), terms, made_by_torch=is_copy, roundings=int(1.13 * K) + 16)
    return [y, Exact(z, terms, made_by_torch=is_copy, roundings=K + 2)] if keep else [y]


def exact_backward(grad: torch.Tensor, z: torch.Tensor, kind: str) -> list[Exact]:
    """Return the gradients of the product and of the bias, which PyTorch adds up of those of each tile."""
    rows = z.shape[:-1].numel()
    dz, terms = grad * slope(z, kind), grad.abs() * (1 + z.abs()) ** 3
    db, db_terms = (t.reshape(rows, z.shape[-1]).sum(0) for t in (dz, terms))
    return [Exact(dz, terms, roundings=16), Exact(db, db_terms, made_by_torch=True, roundings=16 + rows)]


def exact_autograd(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str = "none",
    keep: bool = True,
) -> list[Exact]:
    """Return the gradients of x, weight and bias.

    The product is off by its rounding, and in float32 by K roundings of its terms; the slope passes less than that on.
    Its gradient and each result is rounded again.
    """
    (N, K), M = weight.shape, x.shape[:-1].numel()
    z = linear(x, weight, bias)
    added = linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    dz = (grad * slope(z, kind)).reshape(M, N)
    size = (grad.abs() * (2 + z.abs() + K / 64 * added)).reshape(M, N)
    rows = x.reshape(M, K)
    results = [Exact((dz @ weight).view(x.shape), (size @ weight.abs()).view(x.shape))]
    results.append(Exact(dz.T @ rows, size.T @ rows.abs()))
    return results if bias is None else [*results, Exact(dz.sum(0), size.sum(0))]


def special(draw: Draw) -> list[tuple[Any, ...]]:
    """Make NaN, infinities, the largest numbers and others far out; and rows, of nothing too, that NaN follows."""
    large = torch.finfo(draw.dtype).max
    z = torch.tensor([[torch.nan, torch.inf, -torch.inf, large, -large, 0, 30, -30]], dtype=draw.dtype, device=DEVICE)
    made = [(z.T, torch.ones_like(z[:, :1]), None, kind) for kind in KINDS]
    for K in (40, 17, 1, 0):
        x, weight = (torch.ones(rows, 64, dtype=draw.dtype, device=DEVICE) for rows in (20, 30))
        weight[::2] = -1
        bias = weight[:, 0].clone()
        x[:, K:] = weight[:, K:] = torch.nan
        made.append((x[:, :K], weight[:, :K], bias, "none"))
    return made


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """Return GELU of the product, rounded once."""
    z = linear(x.double(), weight.double(), None if bias is None else bias.double())
    return gelu(z, approximate=kind).to(x.dtype)


# One tile and several, more rows of tiles than a group has, rows of any length, and none
SIZES = [((70,), 131, 20, "tanh"), ((5,), 65, 100, "none"), ((577,), 131, 7, "none"), ((2, 3), 64, 33, "tanh")]
SIZES += [((), 1, 1, "none"), ((0,), 7, 5, "none"), ((3, 1), 0, 5, "none")]
SIZES += [((1,), 130, 16, "none"), ((64,), 128, 15, "tanh"), ((129,), 64, 65, "none"), ((3, 1, 2), 150, 17, "tanh")]
# In half precision: more tiles than the interpreter has programs, and rows that begin at multiples of 16 bytes or not
HALF = [((20,), 48, 40, "none"), ((300,), 264, 136, "tanh"), ((70,), 43, 21, "none")]
HALF += [((2, 0), 8, 5, "none"), ((150,), 130, 300, "none")]
GROUPS = [((rows,), 136, 16, "none", True) for rows in (64 * 9 - 3, 64 * 8 - 3, 64 * 17 - 3)]
TINY = torch.finfo(torch.float32).tiny
TYPES = "linear_gelu takes float16, bfloat16, float32 or float64, one for all, on one device, not"
FORMS = r"linear_gelu takes shapes \(\.\.\., K\), \(N, K\) and \(N,\), not"
OF_BACKWARD = "linear_gelu_backward takes a gradient of .* for "
LAYER = Case(
    "linear_gelu",
    layer,
    exact,
    autocast="asked",
    sizes=SIZES,
    small=((2, 3), 4, 5, "none"),
    many=((4099,), 4099, 40, "none"),
    shapes=st.tuples(LEADS, sizes(64, 150), sizes(16, 100).filter(bool), st.sampled_from(KINDS)),
    floor=lambda _: TINY,
    gradients=exact_autograd,
    with_gradients=3,
    plain=True,
)
FORWARD = replace(
    LAYER,
    call="linear_gelu_forward",
    sizes=[(*size, True) for size in SIZES],
    small=((2, 3), 4, 5, "tanh", True),
    many=((4099,), 4099, 40, "none", True),
    shapes=None,
    plain=False,
)
ENGINE = replace(
    FORWARD,
    name="linear_gelu_forward by the engine, its accumulator float32",
    dtypes=FLOATS[:2],
    sizes=[(*size, True) for size in HALF],
    many=((1031,), 520, 256, "none", True),
)
CONTRACT = [
    replace(
        LAYER,
        reference=reference,
        special=special,
        refused=[
            Refused(lambda draw: (draw(6, 7).int(), draw(5, 7).int()), TypeError, TYPES),
            Refused(lambda draw: (draw(6, 7), draw(5, 7).double()), TypeError, TYPES),
            Refused(lambda draw: (draw(6, 7), draw(5, 7), draw(5).half()), TypeError, TYPES),
            Refused(lambda draw: (draw(6, 7), draw(5, 7).to("meta")), TypeError, TYPES),
            Refused(lambda draw: (draw(6, 7), draw(7, 5)), ValueError, FORMS),
            Refused(lambda draw: (draw(), draw(5, 7)), ValueError, FORMS),
            Refused(lambda draw: (draw(6, 7), draw(7)), ValueError, FORMS),
            Refused(lambda draw: (draw(6, 7), draw(5, 7), draw(4)), ValueError, FORMS),
            Refused(lambda draw: (draw(6, 7), draw(5, 7), draw(5, 1)), ValueError, FORMS),
            Refused(
                lambda draw: (draw(6, 7), draw(5, 7), None, "fast"),
                ValueError,
                "linear_gelu takes approximate='none' or 'tanh', not 'fast'",
            ),
        ],
    ),
    replace(LAYER, name="linear_gelu without a bias", arguments=partial(layer, has_bias=False), with_gradients=2),
    replace(FORWARD, exact=partial(exact, is_copy=False), dtypes=FLOATS[2:]),
    ENGINE,
    replace(
        ENGINE,
        name="linear_gelu_forward by one program, its accumulator float32",
        sizes=GROUPS,
        in_layouts=((70,), 72, 16, "none", True),
        settings={"LINEAR_GELU_TILES": [(64, 64, 128, 4, 6)], "_linear_gelu_programs": lambda device: 1},
    ),
    Case(
        "linear_gelu_backward",
        gradient_and_product,
        exact_backward,
        sizes=[
            ((70,), 131, "none", 1),
            ((2, 35), 257, "tanh", 5),
            ((5,), 128, "none", 5),
            ((), 1, "tanh", 1),
            ((0,), 9, "none", 1),
            ((3,), 0, "none", 1),
            ((129,), 7, "tanh", 1),
        ],
        small=((3,), 5, "none", 1),
        many=((4099,), 4099, "none", 1),
        shapes=st.tuples(LEADS, sizes(128, 300), st.sampled_from(KINDS), st.sampled_from([1, 5])),
        floor=lambda _: TINY,
        refused=[
            Refused(lambda draw: (draw(6, 7), draw(7), "none"), ValueError, OF_BACKWARD),
            Refused(lambda draw: (draw(6, 7), draw(6, 7).double(), "none"), ValueError, OF_BACKWARD),
            Refused(lambda draw: (draw(), draw(), "none"), ValueError, OF_BACKWARD),
        ],
    ),
]


def assert_value(y: torch.Tensor, inputs: Sequence[torch.Tensor], kind: str = "none") -> None:
    """Assert that a result is as good as its accumulator and its dtype."""
    assert_close(LAYER, y.dtype, y, *exact(*(t.double() for t in inputs), kind))


@halves
def test_which_kernel(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The engine gets rows that begin at multiples of 16 bytes, copied where they do not; without one, pointers do."""
    used = set()
    for name in ("_linear_gelu_by_engine", "_linear_gelu_by_pointers"):
        launch = getattr(taken, name)
        monkeypatch.setattr(taken, name, lambda *args, launch=launch, name=name: (used.add(name), launch(*args)))
    x, weight, bias = layer(Draw(dtype), (20,), 48, 64)
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(20, 64)
    expanded, odd = x[:1].expand(9, 64), x[:, 1:41]
    for rows in (x, x[:, 8:40], x[:, 8:43], x[::2]):
        assert taken._linear_gelu_rows(rows, 8) is rows
        assert taken._linear_gelu_rows(rows, 1) is rows
    for rows in (shifted, expanded, odd, x.flatten()[:105].view(5, 21), x.T, x[:, ::2]):
        copy = taken._linear_gelu_rows(rows, 8)
        assert copy is not rows
        assert torch.equal(copy, rows)
        assert copy.stride(1) == 1
        assert copy.stride(0) % 8 == copy.data_ptr() % 16 == 0
    for inputs, engine in (
        ((x, weight, bias), True),
        ((x[:, 8:43], weight[:, 8:43], bias), True),
        ((odd, weight[:, 8:48], bias), True),
        ((x[:, 8:48], weight[:, 1:41], bias), True),
        ((shifted, weight, bias), True),
        ((expanded, weight, bias), True),
        ((x, weight[:1].expand(48, 64), bias), True),
        ((x, weight[:43], bias[:43]), True),
        ((x[:, :0], weight[:, :0], bias), False),
        ((x.float(), weight.float(), bias.float()), False),
    ):
        used.clear()
        check(FORWARD, taken, inputs[0].dtype, (*inputs, "none", True))
        assert used == {"_linear_gelu_by_engine" if engine else "_linear_gelu_by_pointers"}
    monkeypatch.setattr(taken, "_linear_gelu_programs", lambda _: 0)
    for inputs in ((x, weight, bias), (odd, weight[:, 8:48], bias), (x.T[:, :20], weight[:, :20], bias)):
        used.clear()
        check(FORWARD, taken, dtype, (*inputs, "none", True))
        assert used == {"_linear_gelu_by_pointers"}


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_which_gpus(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """A GPU has an engine from Hopper on, and room for the tiles if its programs may have 227 KB."""
    assert dtype not in (torch.float16, torch.bfloat16)
    known = {"multi_processor_count": 132, "shared_memory_per_block_optin": 227 * 1024}
    programs = taken._linear_gelu_programs.__wrapped__
    for major, room, hip, expected in (
        (9, 227, None, 132),
        (10, 227, None, 132),
        (12, 99, None, 0),
        (8, 163, None, 0),
        (9, 227, "6.4", 0),
    ):
        gpu = SimpleNamespace(**known | {"major": major, "shared_memory_per_block_optin": room * 1024})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert programs(torch.device("cuda", 0)) == expected


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_plan(taken: ModuleType, dtype: torch.dtype) -> None:
    """Large products take large tiles; all fit a GPU's shared memory."""
    assert dtype.itemsize == 4
    for (M, N), tile in {
        (8192, 16384): (128, 256),
        (1024, 16384): (128, 256),
        (512, 4096): (128, 128),
        (1024, 1024): (64, 128),
        (64, 64): (64, 64),
    }.items():
        programs, (*block, _, _, _) = taken._linear_gelu_plan(M, N, 132)
        assert tuple(block) == tile
        assert programs == min(132, -(-M // tile[0]) * -(-N // tile[1]))
    for m, n, k, _, stages in taken.LINEAR_GELU_TILES:
        assert (stages * (m + n) * k + m * n // 2) * 2 + 1024 <= taken.LINEAR_GELU_ROOM


def test_wide_accumulator(taken: ModuleType) -> None:
    """Small products are not lost beside a large one."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((3, 1024), 2**-6, dtype=dtype, device=DEVICE)
        x[:, 0] = 4096
        weight = torch.ones(2, 1024, dtype=dtype, device=DEVICE)
        expected = torch.full((3, 2), 4096 + 1023 / 64).to(x)
        torch.testing.assert_close(taken.linear_gelu(x, weight), expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.thorough
@halves
@pytest.mark.parametrize("number", range(4))
def test_every_tile(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, number: int, dtype: torch.dtype) -> None:
    """Each tile is right by itself, with one program for all tiles, with some for each, and with one for each."""
    assert len(taken.LINEAR_GELU_TILES) == 4
    m, n, k, _, _ = tile = taken.LINEAR_GELU_TILES[number]
    monkeypatch.setattr(taken, "LINEAR_GELU_TILES", [tile])
    for programs, kind in ((1, "none"), (3, "tanh"), (1000, "none")):
        monkeypatch.setattr(taken, "_linear_gelu_programs", lambda _, programs=programs: programs)
        given = layer(Draw(dtype), (2 * m + 41,), n + 72, 2 * k + 24, kind)
        y, _ = check(FORWARD, taken, dtype, (*given, True))
        assert torch.equal(taken.linear_gelu(*given), y)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_only_wanted_gradients(taken: ModuleType, dtype: torch.dtype) -> None:
    """Frozen tensors get none, and the others the same."""
    inputs = layer(Draw(dtype), (6,), 5, 7)
    every = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(taken.linear_gelu(*every).sum(), every)
    for wanted in product((False, True), repeat=3):
        some = [t.clone().requires_grad_(w) for t, w in zip(inputs, wanted, strict=True)]
        y = taken.linear_gelu(*some)
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.sum().backward()
        for tensor, right, is_wanted in zip(some, expected, wanted, strict=True):
            assert torch.equal(tensor.grad, right) if is_wanted else tensor.grad is None


def test_keeps_only_for_a_gradient(taken: ModuleType) -> None:
    """Without one the product is not stored; a second derivative is refused, whatever the loss, and never wrong."""
    inputs = layer(Draw(torch.float64), (6,), 5, 7)
    y, z = taken.linear_gelu_forward(*inputs, "none", False)
    assert z.shape == (0,)
    inputs[1].requires_grad_()
    with torch.no_grad():
        assert torch.equal(taken.linear_gelu(*inputs), y)
    with pytest.raises(ValueError, match="keep=True"):
        taken.linear_gelu_forward(*inputs, "none", False)
    for loss in (torch.sum, lambda y: y.square().sum()):
        with pytest.raises(RuntimeError, match=r"^linear_gelu has no second derivatives"):
            torch.autograd.grad(loss(taken.linear_gelu(*inputs)), inputs[1], create_graph=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_slopes_far_out(taken: ModuleType, dtype: torch.dtype, kind: str) -> None:
    """They are 0 or 1 for the largest numbers, too, and NaN stays."""
    large = torch.finfo(dtype).max
    z = torch.tensor([torch.nan, large, -large, 0, 30, -30], dtype=dtype, device=DEVICE)
    dz, _ = taken.linear_gelu_backward(torch.ones_like(z), z, kind)
    torch.testing.assert_close(dz[1:], torch.tensor([1, 0, 0.5, 1, 0]).to(z), rtol=0, atol=1e-30)
    assert dz[0].isnan()


@pytest.mark.needs_gpu_memory(30)
def test_beyond_int32(taken: ModuleType) -> None:
    """More than 2**31 elements, of x, then of the result and its gradient: the last rows are right."""
    M, K = 2**17 + 3, 2**14
    x = torch.zeros(M, K, dtype=torch.bfloat16, device=DEVICE)
    x[-1, ::2] = 0.01
    weight = torch.ones(16, K, dtype=torch.bfloat16, device=DEVICE)
    y = taken.linear_gelu(x, weight)
    assert torch.equal(y[-1], taken.linear_gelu(x[-1:], weight)[0])
    assert not y[:-1].any()
    x = x[:, :16].contiguous()
    weight = torch.randn(K, 16, dtype=torch.bfloat16, device=DEVICE)
    y, z = taken.linear_gelu_forward(x, weight, None, "none", True)
    last = taken.linear_gelu_forward(x[-1:], weight, None, "none", True)
    assert torch.equal(y[-1], last[0][0])
    assert torch.equal(z[-1], last[1][0])
    assert not z[:-1].any()
    dz, _ = taken.linear_gelu_backward(y, z, "none")
    assert torch.equal(dz[-1], taken.linear_gelu_backward(*last, "none")[0][0])
    assert not dz[:-1].any()


@needs_a_gpu
def test_same_bits(taken: ModuleType) -> None:
    """Ten runs of the gradients have the same bits, in half precision as well."""
    inputs = [tensor.requires_grad_() for tensor in layer(Draw(torch.bfloat16), (1031,), 520, 256)]
    first = torch.autograd.grad(taken.linear_gelu(*inputs).sum(), inputs)
    for _ in range(9):
        again = torch.autograd.grad(taken.linear_gelu(*inputs).sum(), inputs)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_traffic(recipe: ModuleType) -> None:
    """PyTorch's two kernels read and write what the page says."""
    x, weight, bias = layer(Draw(torch.float32), (64,), 96, 32)
    with recipe.Traffic() as traffic:
        y = recipe.linear_gelu_torch(x, weight, bias)
    assert traffic.moved == 3 * y.nbytes + y.nbytes + sum(t.nbytes for t in (x, weight, bias)) - y.nbytes
    assert [name for name, *_ in traffic.operators] == ["aten.addmm.default", "aten.gelu.default"]


def test_first_kernel(recipe: ModuleType) -> None:
    """It is right for sizes that no block divides."""
    for dtype in (torch.float16, torch.float32):
        inputs = layer(Draw(dtype), (70,), 90, 50)
        assert_value(recipe.first_linear_gelu(*inputs, block=(32, 64, 16)), inputs)


def test_polynomial(recipe: ModuleType, gallery: Path) -> None:
    """The op has the coefficients that the page fits; in float32 they are as exact as erf, and more in the tail."""
    source = (gallery / "matmul" / "linear_gelu.py").read_text()
    first, others = re.search(r"p = (-\S+e-11) \* s \+ (\S+)\n((?: +p = p \* s .*\n){6})", source).group(1, 0)
    numbers = [float(n.replace(" ", "")) for n in re.findall(r"[+-] ?\d\S*", others)]
    numbers = [float(first), float(re.search(r"s \+ (\S+)", others)[1]), *numbers[2:]][::-1]
    assert len(numbers) == recipe.DEGREE + 1
    torch.testing.assert_close(torch.tensor(numbers).double(), recipe.fit(), rtol=1e-4, atol=0)
    z = torch.linspace(-12, 12, 1_000_001)
    right = torch.special.ndtr(z.double())
    off = (recipe.phi(z, numbers).double() - right).abs()
    erf = ((1 + torch.erf(z * 0.5**0.5)).double() / 2 - right).abs()
    near = z.abs() < 5
    assert off.max() < 3 * erf.max() < 2e-7
    assert 20 * (off / right)[near].max() < (erf / right)[near].max()


def test_shares(recipe: ModuleType) -> None:
    """26 instructions take about as long as fusion saves, for any K."""
    for K in (512, 4096):
        row = recipe.shares(K)
        assert abs(row["saved"] / row["10 instructions"] * 10 - 26) < 0.5


def test_ladder(recipe: ModuleType) -> None:
    """The rows of the ladder are launches of the op's kernels."""
    assert list(recipe.STEPS) == [f"{way}, {GELU}" for way in ("pointers", "descriptors") for GELU in ERF]
    inputs = layer(Draw(torch.float16), (130,), 144, 64)
    for name, step in recipe.STEPS.items():
        y = torch.full((130, 144), torch.nan, dtype=torch.float16, device=DEVICE)
        step(*inputs, y)
        assert_value(y, inputs, "tanh" if name.endswith("tanh") else "none")


def test_answers() -> None:
    """The derivative that the first answer keeps is the one of the page."""
    z = torch.linspace(-4, 4, 41, dtype=torch.float64)
    density = torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5
    torch.testing.assert_close(slope(z, "none"), torch.special.ndtr(z) + z * density)


def build(kernel: Any, types: dict[str, str], known: dict[str, object], plan: dict[str, int]) -> Any:
    """Return what the compiler makes of a kernel for an H100; sizes and strides may be known to be divided by 16."""
    import triton  # where it is imported first, the choice of the interpreter is made

    options = {name: plan[name] for name in ("num_warps", "num_stages") if name in plan}
    known |= {name: value for name, value in plan.items() if name not in options}
    types = {name: "constexpr" if name in known else types[name] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(types) if types[name].startswith(("*", "i32"))]
    source = triton.compiler.ASTSource(kernel, types, known, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32), options=options)


def usage(made: Any) -> tuple[int, int]:
    """Return the registers of a thread, and the bytes that it spills."""
    import tempfile

    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", text)[1]), int(re.search(r"STACK:(\d+)", text)[1])


def by_pointers(
    taken: ModuleType, GELU: str, keep: bool = False, dtype: str = "bf16", undivided: tuple[str, ...] = ()
) -> Any:
    """Return what the kernel with pointers becomes."""
    tl, kernel = taken.tl, taken._linear_gelu_kernel
    DOT = {"bf16": tl.bfloat16, "fp32": tl.float32, "fp64": tl.float64}[dtype]
    ACC = tl.float64 if dtype == "fp64" else tl.float32
    known = {"GELU": GELU, "BIAS": True, "KEEP": keep, "ACC": ACC, "DOT": DOT}
    types = {name: f"*{dtype}" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    # i64 stands for a number of which nothing is known.
    types |= dict.fromkeys(undivided, "i64")
    return build(kernel, types, known, taken.LINEAR_GELU_HALF if dtype == "bf16" else taken.LINEAR_GELU_WIDE)


def by_engine(taken: ModuleType, tile: tuple[int, ...], GELU: str, keep: bool) -> Any:
    """Return what the kernel with descriptors becomes."""
    m, n, k, num_warps, num_stages = tile
    blocks = {"x_desc": [m, k], "weight_desc": [n, k], "y_desc": [m, n // 2], "z_desc": [m, n // 2]}
    types = {name: f"tensordesc<bf16{block}>" for name, block in blocks.items()} | {"bias_ptr": "*bf16"}
    known = {"GELU": GELU, "BIAS": True, "KEEP": keep, "DOT": taken.tl.bfloat16}
    return build(taken._linear_gelu_engine_kernel, types, known, {"num_warps": num_warps, "num_stages": num_stages})


def loops(taken: ModuleType) -> list[tuple[int, int, int]]:
    """Return asynchronous copies, matrix instructions and bytes of a copy: sizes divisible by 16, then not."""
    results = []
    for undivided in ((), ("K", "stride_xm", "stride_wn")):
        made = by_pointers(taken, "none", undivided=undivided)
        copies = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)", made.asm["ptx"])
        ttgir = made.asm["ttgir"]
        results.append((ttgir.count("ttg.async_copy_global"), made.asm["ptx"].count("wgmma.mma_async"), len(copies)))
    return results


def epilogues(recipe: ModuleType) -> dict[str, float]:
    """Return the instructions of the epilogues for an element, as the page counts them."""
    return {GELU: recipe.epilogue(by_pointers(recipe, GELU)) for GELU in ERF}


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Tiles are copied 16 bytes at a time in the background, where 16 divides K; the polynomial is shorter than erf."""
    (even, odd), counts = on_h100(gallery / "matmul" / "linear_gelu.py", loops, epilogues)
    assert even[0] == 2 * 3
    assert even[1] >= 4
    assert even[2] >= 8
    assert odd[2] == 0
    assert counts["tanh"] < counts["none"] < 28 < 34 < counts["erf"]


def resources(taken: ModuleType) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int, int]]]:
    """Return registers of a program and spilled bytes by pointers, and spills, memory and matrix units by engine."""
    pointers, engine = {}, {}
    for GELU, keep in product(KINDS, (False, True)):
        made = by_pointers(taken, GELU, keep)
        registers, spilled = usage(made)
        pointers[f"{GELU} {keep}"] = registers * 32 * made.metadata.num_warps, made.metadata.shared, spilled
        for tile in taken.LINEAR_GELU_TILES:
            made = by_engine(taken, tile, GELU, keep)
            instructions = re.findall(r"wgmma\.mma_async\S*?(m64n\d+k\d+)", made.asm["ptx"])
            engine[f"{tile} {GELU} {keep}"] = usage(made)[1], made.metadata.shared, sorted(set(instructions))
    return pointers, engine


def test_resources(gallery: Path, on_h100: Ask) -> None:
    """By pointers two programs fit on a multiprocessor; by engine all fits, with the widest products, unspilled.

    From Triton 3.8 on, threads have two registers more by pointers, so that one fits, and spill two by engine.
    """
    ((pointers, engine),) = on_h100(gallery / "matmul" / "linear_gelu.py", resources)
    for registers, shared, spilled in pointers.values():
        assert registers <= 256 * (130 if TRITON >= (3, 8) else 128)
        assert 2 * (shared + 1024) <= 228 * 1024
        assert spilled == 0
    assert len(engine) == 4 * 4
    spills = {(3, 8): {"(128, 256, 64, 8, 4) none True": 8}, (3, 9): {"(128, 256, 64, 8, 4) tanh True": 8}}
    for name, (spilled, shared, products) in engine.items():
        assert (spilled, shared <= 227 * 1024) == (spills.get(TRITON, {}).get(name, 0), True), name
        assert products == [f"m64n{name.split(', ')[1]}k16"]


def wide(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill in wider dtypes, both ways."""
    tl, results = taken.tl, {}
    for dtype, ACC, GELU in (("fp32", tl.float32, "none"), ("fp64", tl.float64, "erf"), ("fp64", tl.float64, "tanh")):
        results[f"{dtype} {GELU}"] = usage(by_pointers(taken, GELU, True, dtype))[1]
        kernel = taken._linear_gelu_backward_kernel
        types = {name: f"*{dtype}" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
        types |= {"partial_ptr": "*fp64" if dtype == "fp64" else "*fp32"}
        plan = {"BLOCK_M": 64 if dtype == "fp32" else 16, "BLOCK_N": 128, "num_warps": 8}
        results[f"{dtype} {GELU} backward"] = usage(build(kernel, types, {"GELU": GELU, "ACC": ACC}, plan))[1]
    return results


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward, in float32 and bfloat16."""
    traced_graphs = []
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((40, 48), (64, 48), (64,))]
        traced_graphs += graphs(recipe.linear_gelu, *inputs)
    return traced_graphs


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """Forward there is the op alone; backward its kernel, and two products are left to PyTorch."""
    (traced_graphs,) = on_h100(gallery / "matmul" / "linear_gelu.py", traced)
    assert len(traced_graphs) == 4
    for graph in traced_graphs:
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]
    for forward, backward in zip(traced_graphs[::2], traced_graphs[1::2], strict=True):
        assert [call for call in forward if "." in call] == ["triton_gallery.linear_gelu_forward.default"]
        assert sum(call == "triton_kernel_wrapper_functional" for call in backward) == 1
        assert sum(call.startswith("aten.mm") for call in backward) == 2


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("matmul/linear_gelu")
    lines = out.splitlines()
    assert "the difference is 2.00 times y" in lines
    assert f"the product takes {2 * 256 * 512 * 2048:,} operations" in lines
    right = [line for line in lines if "largest error" in line]
    assert re.fullmatch(r"torch\.float32: largest error \d\.\de-07, allowed 8\.1e-06", right[0])
    assert re.fullmatch(r"torch\.float16: largest error \d\.\de-04, allowed 5\.0e-04", right[1])
    off = [line for line in lines if " is off by " in line]
    assert [line.split(" is off")[0].strip() for line in off] == ["erf", "the polynomial", "tanh"]
    assert lines[-2:] == ["on cpu, approximate='none': off by 0.0e+00", lines[-1]]


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a result stored without a mask", "z * _linear_gelu_phi(z, GELU), mask=mask)", "z * _linear_gelu_phi(z, GELU))"),
    ("z stored without a mask", "tl.store(z_ptr + offs, z, mask=mask)", "tl.store(z_ptr + offs, z)"),
    ("x loaded past a row's end", "tl.load(x_ptrs, mask=mask_k[None, :], other=0).to(DOT)", "tl.load(x_ptrs).to(DOT)"),
    (
        "half an accumulator",
        "LINEAR_GELU_ACC = {\n    torch.float16: tl.float32,\n",
        "LINEAR_GELU_ACC = {\n    torch.float16: tl.float16,\n",
    ),
    ("rows taken for adjacent", "tl.minimum(offs_m, M - 1).to(tl.int64) * stride_xm", "tl.minimum(offs_m, M - 1) * K"),
    (
        "rows of weights taken for adjacent",
        "tl.minimum(offs_n, N - 1).to(tl.int64) * stride_wn",
        "tl.minimum(offs_n, N - 1) * K",
    ),
    ("a last group as large as the others", "tl.minimum(tiles_m - first, 8)", "8"),
    ("a wrong order of tiles", "return first + within % rows, within // rows", "return within % rows, within // rows"),
    ("no bias", "    return acc + bias[None, :].to(acc.dtype)\n", "    return acc\n"),
    ("a coefficient too few", "            p = p * s + 0.104829921\n", ""),
    ("another GELU", "0.1029432395800235 * s", "0.1129432395800235 * s"),
    ("columns in any layout", "return x if step == 1 else x.contiguous()", "return x"),
    ("both halves are the left one", "        y = right * _linear_gelu_phi(right, GELU)\n", ""),
    ("halves that take turns", "(BLOCK_M, 2, HALF)).permute(0, 2, 1)", "(BLOCK_M, HALF, 2))"),
    ("the left half's bias", "bias_ptr, offs_n + HALF, N", "bias_ptr, offs_n, N"),
    ("y kept for z", "z_desc.store([off_m, off_n + HALF], right", "z_desc.store([off_m, off_n + HALF], y"),
    ("every second tile", "tiles_m * tiles_n, programs, flatten", "tiles_m * tiles_n, 2 * programs, flatten"),
    ("any address", "x.data_ptr() % 16 == 0 and ", ""),
    ("any distance of rows", " and stride % unit == 0", ""),
    ("columns in any layout for the engine", "begins and step == 1 and", "begins and"),
    ("rows that overlap", " and stride >= length", ""),
    ("rows of nothing for the engine", "x.element_size() == 2 and K > 0", "x.element_size() == 2"),
    ("rows of any length for the engine", "unit = 8 if engine else 1", "unit = 1"),
    ("a gradient stored without a mask", "tl.store(dz_ptr + offs, dz, mask=mask)", "tl.store(dz_ptr + offs, dz)"),
    ("sums stored without a mask", "tl.store(partial_ptrs, db, mask=offs_n < N)", "tl.store(partial_ptrs, db)"),
    ("sums of all tiles in one place", "partial_ptr + pid_m * N + offs_n", "partial_ptr + offs_n"),
    ("a gradient without the slope", "grad * (share + z * slope)", "grad * share"),
    ("a gradient taken for contiguous", "grad, z = grad.contiguous(), z.contiguous()", "z = z.contiguous()"),
    (
        "no launcher for GPUs",
        'LINEAR_GELU_LIBRARY.impl("linear_gelu_forward", _linear_gelu_launch, "CUDA")\n',
        "",
    ),
]
