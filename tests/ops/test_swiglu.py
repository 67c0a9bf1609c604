"""The ops of the recipe SwiGLU, their gradients, and what the page says of traffic."""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, Exact, Refused, check
from compiled import Ask, graphs, ptx
from inputs import DEVICE, Layout, shapes

TILE = 1024  # of the recipe


def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return gate and up of a projection, where they lie."""
    return x.tensor_split(2, -1)


def reference(
    gate: torch.Tensor,
    up: torch.Tensor,
    activation: str = "silu",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """Return what PyTorch makes of a gate and up, rounded once."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(dtype), up.to(dtype)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if activation == "silu":
        passed = g * torch.sigmoid(alpha * g)
    elif activation == "gelu_tanh":
        passed = torch.nn.functional.gelu(g, approximate="tanh")
    else:  # that of torch.nn.functional is NaN for an infinity on some CPUs
        passed = g * (0.5 + 0.5 * torch.erf(g * 0.5**0.5))
    return (passed * (u + beta)).to(gate.dtype)


def reference_gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *options: Any) -> torch.Tensor:
    """Return the gradients of that."""
    leaves = [half.clone().requires_grad_() for half in (gate, up)]
    return torch.stack(torch.autograd.grad(reference(*leaves, *options), leaves, grad))


def sizes_of(gate: torch.Tensor, up: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
    """Return magnitudes: of what is multiplied with up, of up + beta, and of what the derivative adds up.

    A GELU's share and its slope are differences of numbers near 1.
    """
    activation, alpha, beta, limit = (*options, *("silu", 1.0, 0.0, None)[len(options) :])
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation != "silu":
        return gate.abs(), up.abs() + abs(beta), torch.full_like(gate, 2)
    s = torch.sigmoid(alpha * gate)
    return (gate * s).abs(), up.abs() + abs(beta), s * (1 + (alpha * gate).abs() * (1 - s))


def exact(gate: torch.Tensor, up: torch.Tensor, *options: Any) -> list[Exact]:
    """Return the activation."""
    passed, size, _ = sizes_of(gate, up, *options)
    return [Exact(reference(gate, up, *options), passed * size)]


def exact_gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *options: Any) -> list[Exact]:
    """Return both gradients; what is added up in that of the gate may cancel."""
    passed, size, slope = sizes_of(gate, up, *options)
    values = reference_gradients(grad, gate, up, *options)
    return [Exact(values[0], grad.abs() * size * slope), Exact(values[1], grad.abs() * passed)]


def joined(
    join: Callable[[list[torch.Tensor]], torch.Tensor],
    grad: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    *options: Any,
) -> list[Exact]:
    """Return both gradients in one tensor."""
    values, terms, *_ = zip(*exact_gradients(grad, gate, up, *options), strict=True)
    return [Exact(join([*values]), join([*terms]))]


def ordered(pair: Sequence[torch.Tensor], options: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return gate and up of a projection, or the reverse, given its options."""
    up_first = len(options) > 4 and options[4]
    return tuple(pair)[:: -1 if up_first else 1]


def exact_packed(x: torch.Tensor, *options: Any) -> list[Exact]:
    """Return the activation of a projection."""
    return exact(*ordered(halves(x), options), *options[:4])


def exact_packed_gradient(grad: torch.Tensor, x: torch.Tensor, *options: Any) -> list[Exact]:
    """Return the gradient of a projection."""

    def join(pair: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(ordered(pair, options), -1)

    return joined(join, grad, *ordered(halves(x), options), *options[:4])


def special(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make all pairs of numbers of which something overflows on the way, of infinities and of NaN."""
    numbers = [0.0, -0.0, 1e4, -1e4, 88.0, -89.0, -104.0, torch.inf, -torch.inf, torch.nan]
    gate, up = torch.cartesian_prod(*[torch.tensor(numbers, dtype=draw.dtype, device=DEVICE)] * 2).T
    return [(gate, up)]


def special_gradients(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Make the finite ones, and a gradient of ones."""
    ((gate, up),) = special(draw)
    finite = gate.isfinite() & up.isfinite()
    return [(torch.ones_like(gate[finite]), gate[finite], up[finite])]


def packed(draw: Draw, *shape: int) -> tuple[torch.Tensor]:
    """Make a projection: twice the elements in each row."""
    return (draw(*shape[:-1], 2 * shape[-1]),)


Kinds = Callable[[Draw], tuple[torch.Tensor, torch.Tensor]]
# What the ops do not take: two tensors that do not fit each other, and what is said of them.
PAIRS: list[tuple[Kinds, type[Exception], str]] = [
    (lambda draw: (draw(2, 4).int(), draw(2, 4).int()), TypeError, r"one float dtype, not .*torch\.int32"),
    (lambda draw: (draw(2, 4), draw(4)), ValueError, r"tensors of one shape, not .*\((2, 4|4,)\)"),
    (
        lambda draw: (draw(2, 4), draw(2, 4).double()),
        TypeError,
        r"one float dtype, not .*torch\.float(32|64).*torch\.float(64|32)",
    ),
    (lambda draw: (draw(2, 4), draw(2, 4).to("meta")), TypeError, "tensors on one device, not .*meta"),
]


def refused(name: str, *ways: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> list[Refused]:
    """Return the calls of an op that raise, given how arguments are made of two tensors that do not fit."""
    return [
        Refused(lambda draw, way=way, pair=pair: way(*pair(draw)), error, f"{name} takes {text}")
        for way in ways
        for pair, error, text in PAIRS
    ]


def odd(*before: int) -> list[Callable[[Draw], tuple[torch.Tensor, ...]]]:
    """Return what makes arguments without two halves, after a gradient of some shape."""
    return [lambda draw, shape=shape: (*(draw(*before) for _ in before[:1]), draw(*shape)) for shape in ((2, 3), ())]


# What is no option, and what is said of it.
NO_OPTIONS: list[tuple[tuple[Any, ...], str]] = [
    (("relu",), "takes activation='silu', 'gelu' or 'gelu_tanh', not 'relu'"),
    (("gelu", 1.702), r"takes alpha=1\.702 with activation='silu', not 'gelu'"),
    *((("silu", 1.0, 0.0, limit), f"takes a limit above 0, not {limit}") for limit in (0.0, -7.0, float("nan"))),
]


def no_options(name: str, tensors: int) -> list[Refused]:
    """Return the calls of an op that raise for their options."""
    return [
        Refused(lambda draw, options=options: (*(draw(2, 4) for _ in range(tensors)), *options), ValueError, match)
        for options, match in ((options, f"{name} {text}") for options, text in NO_OPTIONS)
    ]


# Units of 4, 1 and 2 elements; a row that fills tiles, is beside one or ends within one; tiles that rows do not fill.
SIZES = [(5, 40), (70, 8), (3, 1025), (1, 1), (0, 7), (513, 1), (33, 257), (5, 1000)]
SIZES += [(70, N) for N in (2, 3, 4, 24, 31, 64, 129)]
SIZES += [(3, N) for N in (511, 512, 1023, 1024, 2056)]
SHAPES = shapes(TILE, 2 * TILE + 1)  # the interpreter takes milliseconds for a tile
ROWS = SHAPES.filter(len)
# The exponent is rounded, a relative error of 2 |x| < 16 roundings, and there are eight more operations.
ROUNDINGS = 32
OPTIONS = {
    "of gpt-oss": ("silu", 1.702, 1.0, 7.0),
    "with a low limit": ("silu", 1.0, -0.5, 0.75),
    "with GELU": ("gelu",),
    "with the GELU of tanh": ("gelu_tanh", 1.0, 0.0, 1.5),
}
FEW = {"sizes": [(5, 40), (3, 1025), (33, 257), (0, 7), (513, 1)], "small": (2, 3), "roundings": ROUNDINGS}


def with_options(name: str, options: tuple[Any, ...]) -> Iterator[Case]:
    """Yield the cases of all functions with some options."""
    yield from packed_with_options(name, options)
    yield Case(
        "swiglu",
        lambda draw, *shape: (draw(*shape), draw(*shape), *options),
        exact,
        name=f"swiglu {name}",
        shapes=SHAPES,
        reference=reference,
        special=lambda draw: [(*pair, *options) for pair in special(draw)],
        gradients=exact_gradients,
        with_gradients=2,
        **FEW,
    )
    yield Case(
        "swiglu_backward",
        lambda draw, *shape: (draw(*shape), draw(*shape), draw(*shape), *options),
        partial(joined, torch.stack),
        name=f"swiglu_backward {name}",
        shapes=SHAPES,
        reference=reference_gradients,
        special=lambda draw: [(*given, *options) for given in special_gradients(draw)],
        **FEW,
    )


def packed_with_options(name: str, options: tuple[Any, ...]) -> Iterator[Case]:
    """Yield the cases of the functions of a projection."""
    yield Case(
        "swiglu_packed",
        lambda draw, *shape: (*packed(draw, *shape), *options),
        exact_packed,
        name=f"swiglu_packed {name}",
        shapes=ROWS,
        gradients=exact_packed_gradient,
        **FEW,
    )
    yield Case(
        "swiglu_packed_backward",
        lambda draw, *shape: (draw(*shape), *packed(draw, *shape), *options),
        exact_packed_gradient,
        name=f"swiglu_packed_backward {name}",
        shapes=ROWS,
        **FEW,
    )


CONTRACT = [
    Case(
        "swiglu",
        lambda draw, *shape: (draw(*shape), draw(*shape)),
        exact,
        sizes=[*SIZES, ()],
        small=(2, 3),
        shapes=SHAPES,
        roundings=ROUNDINGS,
        reference=reference,
        special=special,
        gradients=exact_gradients,
        with_gradients=2,
        refused=[*refused("swiglu", lambda x, y: (x, y)), *no_options("swiglu", 2)],
    ),
    Case(
        "swiglu_backward",
        lambda draw, *shape: (draw(*shape), draw(*shape), draw(*shape)),
        partial(joined, torch.stack),
        sizes=[*SIZES, ()],
        small=(2, 3),
        shapes=SHAPES,
        roundings=ROUNDINGS,
        reference=reference_gradients,
        special=special_gradients,
        refused=[
            *refused("swiglu_backward", lambda x, y: (x, x, y), lambda x, y: (y, x, x)),
            *no_options("swiglu_backward", 3),
        ],
    ),
    Case(
        "swiglu_packed",
        packed,
        exact_packed,
        sizes=SIZES,
        small=(2, 3),
        shapes=ROWS,
        roundings=ROUNDINGS,
        gradients=exact_packed_gradient,
        refused=[
            Refused(
                lambda draw: (draw(2, 4).to(torch.complex64),), TypeError, r"swiglu_packed takes .*torch\.complex64"
            ),
            *(Refused(make, ValueError, r"swiglu_packed takes an even last dimension, not ") for make in odd()),
            *no_options("swiglu_packed", 1),
        ],
    ),
    Case(
        "swiglu_packed_backward",
        lambda draw, *shape: (draw(*shape), *packed(draw, *shape)),
        exact_packed_gradient,
        sizes=SIZES,
        small=(2, 3),
        shapes=ROWS,
        roundings=ROUNDINGS,
        refused=[
            *refused("swiglu_packed_backward", lambda x, y: (y, torch.cat([x, x], -1))),
            *(
                Refused(make, ValueError, r"swiglu_packed_backward takes an even last dimension, not ")
                for make in odd(2, 4)
            ),
            *(
                Refused(
                    lambda draw, options=options: (draw(2, 2), draw(2, 4), *options),
                    ValueError,
                    f"swiglu_packed_backward {text}",
                )
                for options, text in NO_OPTIONS
            ),
        ],
    ),
    *itertools.chain(*(with_options(name, options) for name, options in OPTIONS.items())),
    *packed_with_options("with up first", ("silu", 1.702, 1.0, 7.0, True)),
]


def test_rows_are_read_where_they_are(taken: ModuleType) -> None:
    """The kernel gets the halves of a projection, and no copies of them."""
    seen = []

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: seen.append((grid, args, options))

    for columns in (8, 1000):
        x = torch.ones(5, 2 * columns, device=DEVICE)
        pair = halves(x)
        taken._swiglu_launch(*pair, kernel=Spy())
        taken._swiglu_packed_launch(x, kernel=Spy())
        taken._swiglu_backward_launch(pair[0], *pair, kernel=Spy())
        for _, args, _ in seen[-3:-1]:
            assert [t.data_ptr() for t in args[:2]] == [half.data_ptr() for half in pair]
            assert args[6:9] == (2 * columns, 2 * columns, columns)
        grid, args, options = seen[-1]
        assert [t.data_ptr() for t in args[:3]] == [half.data_ptr() for half in (pair[0], *pair)]
        assert (options["VEC"], options["BLOCK_M"] * options["BLOCK_N"]) == (4, TILE // 2)
        assert grid == (-(-5 // options["BLOCK_M"]) * -(-columns // options["BLOCK_N"]),)
    whole = torch.ones(7, 3 * TILE, device=DEVICE)
    taken._swiglu_launch(whole, whole, kernel=Spy())
    grid, args, _ = seen[-1]
    assert (grid, args[3:9]) == ((42,), (1, 21 * TILE, 42, 0, 0, 0)), "contiguous tensors are one long row"


@pytest.mark.parametrize("tile", [256, 512, 1024, 2048])
def test_every_tile(taken: ModuleType, tile: int) -> None:
    """The result is the same whatever the tile, of rows that lie apart and of one long row."""
    for columns in (24, 1000):
        block = min(tile, 32 if columns == 24 else 1024)
        (x,) = packed(Draw(torch.float32), 33, columns)
        expected, out = taken.swiglu_packed(x), torch.full((33, columns), torch.nan, device=DEVICE)
        for pair, shape in (
            (halves(x), {"BLOCK_M": tile // block, "BLOCK_N": block}),
            ([half.contiguous() for half in halves(x)], {"BLOCK_M": 1, "BLOCK_N": tile}),
        ):
            taken._swiglu_run(taken._swiglu_kernel, pair, out.fill_(torch.nan), columns, **shape)
            assert torch.equal(out, expected)


def test_plans(taken: ModuleType) -> None:
    """Tiles are what the page says: half for few elements, twice where much of them is masked."""
    few, many = taken.SWIGLU_FEW, taken.SWIGLU_FEW + 1
    for flat in (True, False):
        assert taken._swiglu_plan(few, 14336, flat) == {"BLOCK_M": 1, "BLOCK_N": 512}
        assert taken._swiglu_plan(many, 14336, flat) == {"BLOCK_M": 1, "BLOCK_N": 1024}
    for columns, shape in {
        1: (1024, 1),
        128: (8, 128),
        136: (8, 256),
        1000: (1, 1024),
        1100: (1, 2048),
        3000: (1, 1024),
    }.items():
        assert tuple(taken._swiglu_plan(many, columns, flat=False).values()) == shape
    assert taken._swiglu_plan(many, 1100, flat=True) == {"BLOCK_M": 1, "BLOCK_N": 1024}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """The sigmoid of -12 and the product of two large numbers are not lost on the way in half precision."""
    grad, gate, up = (torch.full((1, 40), value, dtype=dtype, device=DEVICE) for value in (1.0, -12.0, 60_000.0))
    check(CONTRACT[0], taken, dtype, (gate, up))
    check(CONTRACT[1], taken, dtype, (grad, gate, up))


def test_traffic(recipe: ModuleType) -> None:
    """What the page counts: PyTorch's own five and nine, and each way from a projection to the output."""
    counts = {name: recipe.count(way, recipe.random(4, 16)) for name, way in recipe.WAYS.items()}
    assert counts == {
        "PyTorch": [5, 13, 3],
        "the op on copies": [7, 9, 2],
        "the op on slices": [3, 17, 2],
        "the op on chunks": [3, 9, 2],
        "the packed op": [3, 5, 2],
    }
    assert recipe.count(recipe.swiglu_torch, recipe.random(6), recipe.random(6)) == [5, 9, 3]
    assert recipe.count(lambda x: x.exp().view(-1), recipe.random(2, 3)) == [2, 3, 1]


def test_steps_of_the_page(recipe: ModuleType) -> None:
    """The first kernel is right with every block; so are the op's launches that are timed."""
    for size in (1, 1000, 1024, 3001):
        gate, up = (Layout("contiguous", k).make((size,), torch.float32, DEVICE) for k in range(2))
        for block, _ in recipe.BLOCKS:
            torch.testing.assert_close(recipe.swiglu_flat(gate, up, block), recipe.swiglu_torch(gate, up))
    for layout in ((5, 40, False), (5, 41, False), (5, 40, True), (5, 41, True)):
        steps = recipe.steps(*layout)
        assert len(steps) == 5 + (not layout[2])
        for step, tensors in steps.values():
            *_, out = (step(), *getattr(step, "args", ())[2:3])
            assert tensors in (3, 5)
            assert out.isfinite().all()


def test_keeping_is_the_same_function(recipe: ModuleType) -> None:
    """The functions that are timed for keeping the sigmoid compute what the ops compute."""
    grad, gate, up = (recipe.random(3, 5, dtype=torch.float64).detach() for _ in range(3))
    out, s = recipe.keep(gate, up)
    torch.testing.assert_close(out, recipe.swiglu(gate, up))
    gradients = torch.stack(recipe.keep_backward(grad, gate, up, s))
    torch.testing.assert_close(gradients, recipe.swiglu_backward(grad, gate, up))


def test_gradients_over_the_inputs(recipe: ModuleType) -> None:
    """A launch that writes over its input corrupts what others kept, without an error, until PyTorch is told."""
    recipe.Overwriting.tell = False
    wrong, right = recipe.gradient(recipe.Overwriting.apply), recipe.gradient(recipe.swiglu_packed)
    assert not torch.allclose(wrong, right)
    recipe.Overwriting.tell = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recipe.gradient(recipe.Overwriting.apply)


KERNELS = {"forward": "_swiglu_kernel", "backward": "_swiglu_backward_kernel"}


def accesses(taken: ModuleType) -> dict[tuple[str, str, int], Counter[str]]:
    """Return how often kernels load and store in full tiles, by their name, the dtype and the unit."""
    results = {}
    for name, kernel in KERNELS.items():
        for dtype, unit in (("bf16", 8), ("bf16", 1), ("fp32", 4)):
            known = {"ACC": taken.tl.float32, "VEC": unit, "FLAT": False, "BLOCK_M": 2, "BLOCK_N": 512}
            known |= taken.SWIGLU_SILU
            text = ptx(getattr(taken, kernel), dtype, **known)
            wanted = re.findall(r"(@%p\d+ )?((?:ld|st)\.global\S*)", text)
            # Those with a mask stand in the other branch.
            results[name, dtype, unit, False] = Counter(access for masked, access in wanted if not masked)
            results[name, dtype, unit, True] = Counter(access for masked, access in wanted if masked)
    for name in ("M", "N", "tiles_n"):
        constants = {name: 1, "VEC": 1, "FLAT": name == "M", "BLOCK_M": 32, "BLOCK_N": 32}
        ptx(taken._swiglu_backward_kernel, "fp64", ACC=taken.tl.float64, **constants, **taken.SWIGLU_SILU)
    for dtype, acc in (("bf16", taken.tl.float32), ("fp64", taken.tl.float64)):
        for options in OPTIONS.values():
            known = taken.SWIGLU_SILU | dict(zip(taken.SWIGLU_SILU, options, strict=False))
            known |= {"ACC": acc, "VEC": 2, "FLAT": True, "BLOCK_M": 1, "BLOCK_N": 512}
            for kernel in KERNELS.values():
                ptx(getattr(taken, kernel), dtype, **known)
    return results


def launches(taken: ModuleType) -> list[int]:
    """Return how many launches the graphs of the ops have, for sizes that units divide and that they do not."""
    made = []
    for op, inputs, columns in ((taken.swiglu, 2, 48), (taken.swiglu, 2, 47), (taken.swiglu_packed, 1, 96)):
        tensors = [torch.randn(33, columns, requires_grad=True) for _ in range(inputs)]
        made += graphs(op, *tensors)
        for options in OPTIONS.values() if columns % 2 == 0 else ():
            made += graphs(lambda *given, op=op, options=options: op(*given, *options), *tensors)
    return [sum("triton_kernel" in name for name in graph) for graph in made]


def test_compiled(gallery: Path, on_h100: Ask) -> None:
    """Accesses have 16 bytes where VEC allows; sizes of 1 compile; the ops can be traced with symbolic sizes."""
    counts, seen = on_h100(gallery / "fusion" / "swiglu.py", accesses, launches)
    for (name, dtype, unit, _), accesses_ in counts.items():
        loads, stores = {"forward": (2, 1), "backward": (3, 2)}[name]
        if unit == 1:
            assert accesses_ == {"ld.global.b16": 8 * loads, "st.global.b16": 8 * stores}
        else:  # a thread has eight elements, of 16 or 32 bytes
            each = 1 if dtype == "bf16" else 2
            assert accesses_ == {"ld.global.v4.b32": each * loads, "st.global.v4.b32": each * stores}
    assert seen == [1] * (6 + 4 * len(OPTIONS))  # forward and backward


@pytest.mark.needs_gpu_memory(34)
@pytest.mark.parametrize("columns", [2**14, 2999])
def test_beyond_int32(taken: ModuleType, columns: int) -> None:
    """The last elements of more than 2**31 are right, in one long row and in rows that lie apart."""
    rows = 2**31 // columns + 3
    x = torch.zeros(rows, 2 * columns, dtype=torch.bfloat16, device=DEVICE)
    grad = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    corner = torch.tensor([2.0, 3.0, 5.0], dtype=torch.bfloat16, device=DEVICE)
    grad[-1, -1], x[-1, columns - 1], x[-1, -1] = corner
    doubles = corner.double()
    expected = [right.value.bfloat16() for right in (*exact(*doubles[1:]), *exact_gradients(*doubles))]
    out, dx = taken.swiglu_packed(x), taken.swiglu_packed_backward(grad, x)
    actual = torch.stack([out[-1, -1], dx[-1, columns - 1], dx[-1, -1]])
    assert torch.equal(actual, torch.stack(expected))
    dx[-1, columns - 1] = dx[-1, -1] = 0
    assert not dx.any()
    del dx
    gate, up = (half.contiguous() for half in halves(x))
    assert torch.equal(taken.swiglu(gate, up), out)
    out[-1, -1] = 0
    assert not out.any()
    del x, out
    both = taken.swiglu_backward(grad, gate, up)
    assert torch.equal(both[:, -1, -1], torch.stack(expected[1:]))
    both[:, -1, -1] = 0
    assert not both.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
def test_nothing_is_copied_under_torch_compile(taken: ModuleType) -> None:
    """Compiled, the ops are their launches: Inductor has no kernels of its own to copy what a launch writes to."""
    gate, up, x = (torch.randn(64, n * 1024, device=DEVICE).requires_grad_() for n in (1, 1, 2))
    for op, inputs in ((taken.swiglu, (gate, up)), (taken.swiglu_packed, (x,))):
        torch.compiler.reset()
        compiled = torch.compile(lambda *inputs, op=op: op(*inputs), fullgraph=True, dynamic=False)

        def run(compiled: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
            out = compiled(*inputs)
            torch.autograd.grad(out, inputs, torch.ones_like(out))

        _, codes = torch._inductor.utils.run_and_get_code(run, compiled, inputs)
        assert len(codes) == 2
        for code in codes:
            assert "swiglu" in code
            assert "triton_poi" not in code
            assert "copy_" not in code


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "swiglu stored without a mask",
        "tl.store(out_ptrs, gate * s * up, mask=mask)",
        "tl.store(out_ptrs, gate * s * up)",
    ),
    (
        "a gradient stored without a mask",
        "tl.store(dup_ptrs, dup, mask=mask)",
        "tl.store(dup_ptrs, dup)",
    ),
    ("a tile that is nearly full", "full_m = (pid_m + 1) * BLOCK_M <= M", "full_m = pid_m * BLOCK_M < M"),
    ("a row that is nearly full", "full_n = (pid_n + 1) * BLOCK_N <= N", "full_n = pid_n * BLOCK_N < N"),
    ("a wrong derivative", "up * s * (1 + z * (1 - s))", "up * s * (1 - z * (1 - s))"),
    ("a derivative without alpha", "            z *= ALPHA", "            z *= 1"),
    ("a wrong derivative of GELU", "(s + gate * density)", "(s - gate * density)"),
    ("a wrong derivative of the GELU of tanh", "0.21406444881780076", "0.07135481627260025"),
    ("no alpha", "tl.sigmoid(ALPHA * gate)", "tl.sigmoid(gate)"),
    ("no beta", "        up += BETA", "        up += 0"),
    ("a gate without a limit", "gate = tl.where(gate > LIMIT, LIMIT, gate)", "gate = gate"),
    ("a limit on one side", "up = tl.where(up < -LIMIT, -LIMIT, up)", "up = up"),
    ("a gradient of the gate beyond the limit", "tl.where(gate_in <= LIMIT, dgate, 0.0)", "dgate"),
    ("a gradient of up beyond the limit", "tl.where(tl.abs(up_in) <= LIMIT, dup, 0.0)", "dup"),
    ("NaN held to the limit", "tl.where(up > LIMIT, LIMIT, up)", "tl.where(up <= LIMIT, up, LIMIT)"),
    (
        "options lost by the backward",
        "*ctx.saved_tensors, *ctx.options)\n    return *d",
        "*ctx.saved_tensors)\n    return *d",
    ),
    (
        "up with the stride of gate",
        "up_ptrs = up_ptr + offs_m * stride_um + offs_n  # (BLOCK_M, BLOCK_N)\n    out_ptrs",
        "up_ptrs = up_ptr + offs_m * stride_gm + offs_n  # (BLOCK_M, BLOCK_N)\n    out_ptrs",
    ),
    ("up taken for the gate", "(second, first) if up_first else (first, second)", "(first, second)"),
    (
        "gradients in the other order",
        "        d_ptrs, dup_ptrs = dup_ptrs, d_ptrs\n",
        "        d_ptrs, dup_ptrs = d_ptrs, dup_ptrs\n",
    ),
    ("vectors across rows", "VEC = math.gcd(N, *strides,", "VEC = math.gcd(N,"),
    ("vectors beyond a row", "VEC = math.gcd(N, *strides,", "VEC = math.gcd(*strides,"),
    ("a copy left out", "x if x.stride(1) == 1 else x.contiguous()", "x"),
    ("rows apart taken for one", "flat = stride_om == N and all(", "flat = all("),
]
