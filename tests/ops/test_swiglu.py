"""The ops of the recipe SwiGLU, their gradients, and what the page says of traffic."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import Ask, graphs, ptx, stack
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, shapes
from tolerance import assert_within

TILE = 1024  # of the recipe
MOST = 2 * TILE + 1  # elements: the interpreter takes milliseconds for a tile
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/swiglu.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("fusion/swiglu.py")


def reference(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return value, gradients and magnitudes of these in float64, for a gradient, gate and up."""
    grad, gate, up = (t.detach().double() for t in tensors)
    s = torch.sigmoid(gate)
    dgate, dup = grad * up * s * (1 + gate * (1 - s)), grad * gate * s
    # What is added up in dgate may cancel; the error is that of the terms.
    terms = (grad * up * s).abs() * (1 + gate.abs() * (1 - s))
    return [gate * s * up, dgate, dup, (gate * s * up).abs(), terms, dup.abs()]


def assert_right(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, *got: torch.Tensor) -> None:
    """Assert that value and gradients are as good as their accumulator and their dtype."""
    expected = reference(grad, gate, up)
    for out, exact, magnitude in zip(got, expected[:3], expected[3:], strict=True):
        assert (out.dtype, out.shape, out.device) == (gate.dtype, exact.shape, gate.device)
        # The exponent is rounded, a relative error of 2 |x| < 16 roundings, and there are eight more operations.
        assert_within(out, exact, magnitude, roundings=32)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random numbers that want a gradient."""
    return torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return gate and up of a projection, where they lie."""
    return x.tensor_split(2, -1)


def projection(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with twice the elements in each row."""
    return layout.make((*shape[:-1], 2 * shape[-1]), dtype, DEVICE)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(shape=shapes(TILE, MOST), of=st.tuples(layouts(), layouts(), layouts()))
def test_value_and_gradients(
    taken: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], of: tuple[Layout, Layout, Layout]
) -> None:
    """Value and gradients are right in any layout, that of the incoming gradient too."""
    grad, gate, up = (layout.make(shape, dtype, DEVICE) for layout in of)
    out = guarded(taken.swiglu, gate, up)
    assert out.is_contiguous()
    assert_right(grad, gate, up, out, *guarded(taken.swiglu_backward, grad, gate, up))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(shape=shapes(TILE, MOST).filter(len), of_grad=layouts(), of_x=layouts())
def test_packed(taken: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], of_grad: Layout, of_x: Layout) -> None:
    """The op on a whole projection writes the whole of its gradient."""
    grad, x = of_grad.make(shape, dtype, DEVICE), projection(of_x, shape, dtype)
    out = guarded(taken.swiglu_packed, x)
    dx = guarded(taken.swiglu_packed_backward, grad, x)
    assert dx.is_contiguous()
    assert_right(grad, *halves(x), out, *halves(dx))


# Rows of a tile's length and those beside it, and units of 1, 2, 4, 8 and 16 elements.
COLUMNS = [1, 2, 3, 4, 8, 24, 31, 40, 64, 129, 257, 1000, 1023, 1024, 1025, 2056]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_halves(taken: ModuleType, columns: int, dtype: torch.dtype) -> None:
    """Halves of a projection give what contiguous tensors give, to the last bit, and so do rows of any distance."""
    rows = 2 * TILE // columns + 3 if columns < TILE else 3
    rows = min(rows, 70)
    x = projection(Layout("contiguous", columns), (rows, columns), dtype)
    grad = Layout("contiguous", columns + 1).make((rows, columns), dtype, DEVICE)
    apart, whole = halves(x), [half.contiguous() for half in halves(x)]
    for op, arguments in ((taken.swiglu, ()), (taken.swiglu_backward, (grad,))):
        outs = [guarded(op, *arguments, *pair) for pair in (apart, whole, (apart[0], whole[1]))]
        for other in outs[1:]:
            torch.testing.assert_close(outs[0], other, rtol=0, atol=0)
    out, dx = guarded(taken.swiglu_packed, x), guarded(taken.swiglu_packed_backward, grad, x)
    assert_right(grad, *apart, out, *halves(dx))
    one_row = x[:1, :columns].expand(rows, -1), whole[1]
    assert torch.equal(taken.swiglu(*one_row), taken.swiglu(one_row[0].contiguous(), whole[1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("distance", [41, 42, 44, 56])
def test_rows_of_any_distance(taken: ModuleType, distance: int, dtype: torch.dtype) -> None:
    """A distance between rows need not be a multiple of what their length is one of, in any of the tensors."""
    whole = [Layout("contiguous", k).make((9, 40), dtype, DEVICE) for k in range(3)]
    for i in range(3):
        apart = torch.zeros(9, distance, dtype=dtype, device=DEVICE)
        apart[:, :40] = whole[i]
        grad, gate, up = (apart[:, :40] if k == i else x for k, x in enumerate(whole))
        assert_right(*whole, taken.swiglu(gate, up), *taken.swiglu_backward(grad, gate, up))


def test_rows_are_read_where_they_are(taken: ModuleType) -> None:
    """The kernel gets the halves of a projection, and no copies of them."""
    seen = []

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: seen.append((grid, args, options))

    for columns in (8, 1000):
        x = torch.ones(5, 2 * columns, device=DEVICE)
        pair = halves(x)
        taken._swiglu_launch(*pair, Spy())
        taken._swiglu_packed_launch(x, Spy())
        taken._swiglu_backward_launch(pair[0], *pair, Spy())
        for _, args, _ in seen[-3:-1]:
            assert [t.data_ptr() for t in args[:2]] == [half.data_ptr() for half in pair]
            assert args[6:9] == (2 * columns, 2 * columns, columns)
        grid, args, options = seen[-1]
        assert [t.data_ptr() for t in args[:3]] == [half.data_ptr() for half in (pair[0], *pair)]
        assert (options["VEC"], options["BLOCK_M"] * options["BLOCK_N"]) == (4, TILE // 2)
        assert grid == (-(-5 // options["BLOCK_M"]) * -(-columns // options["BLOCK_N"]),)
    whole = torch.ones(7, 3 * TILE, device=DEVICE)
    taken._swiglu_launch(whole, whole, Spy())
    grid, args, _ = seen[-1]
    assert (grid, args[3:9]) == ((42,), (1, 21 * TILE, 42, 0, 0, 0)), "contiguous tensors are one long row"


@pytest.mark.parametrize("tile", [256, 512, 1024, 2048])
def test_every_tile(taken: ModuleType, tile: int) -> None:
    """The result is the same whatever the tile, of rows that lie apart and of one long row."""
    for columns in (24, 1000):
        block = min(tile, 32 if columns == 24 else 1024)
        x = projection(Layout("contiguous", 1), (33, columns), torch.float32)
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


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_through_autograd(taken: ModuleType, dtype: torch.dtype) -> None:
    """What autograd returns are the gradients of the ops that are tested above, for expanded gradients too."""
    x = projection(Layout("contiguous", 0), (3, 20), dtype).requires_grad_()
    gate, up = (half.detach().clone().requires_grad_() for half in halves(x))
    ones = torch.ones_like(gate)
    dgate, dup = torch.autograd.grad(taken.swiglu(gate, up).sum(), (gate, up))
    assert_right(ones, gate, up, taken.swiglu(gate, up), dgate, dup)
    for op in (taken.swiglu_packed, lambda x: taken.swiglu(*halves(x))):
        (dx,) = torch.autograd.grad(op(x).sum(), x)
        assert torch.equal(dx, torch.cat([dgate, dup], -1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_special_values(taken: ModuleType) -> None:
    """Large numbers don't overflow on the way, and NaN and infinities come out as from PyTorch."""

    def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    special = torch.tensor([0.0, -0.0, 1e4, -1e4, 88.0, -89.0, -104.0, torch.inf, -torch.inf, torch.nan])
    gate, up = (t.flatten().to(DEVICE) for t in torch.meshgrid(special, special, indexing="ij"))
    torch.testing.assert_close(taken.swiglu(gate, up), plain(gate, up), equal_nan=True)
    finite = gate.isfinite() & up.isfinite()
    pair = [t[finite].requires_grad_() for t in (gate, up)]
    got = torch.autograd.grad(taken.swiglu(*pair).sum(), pair)
    torch.testing.assert_close(got, torch.autograd.grad(plain(*pair).sum(), pair))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(taken: ModuleType, dtype: torch.dtype) -> None:
    """The sigmoid of -12 and the product of two large numbers are not lost on the way in half precision."""
    gate, up = (torch.full((1, 40), value, dtype=dtype, device=DEVICE) for value in (-12.0, 60_000.0))
    assert_right(
        torch.ones_like(gate), gate, up, taken.swiglu(gate, up), *taken.swiglu_backward(gate * 0 + 1, gate, up)
    )


def test_gradcheck(taken: ModuleType) -> None:
    """Both ops pass gradcheck; a second derivative is refused, not wrong."""
    gate, up, x = (Layout("contiguous", n).make((2, n), torch.float64, DEVICE).requires_grad_() for n in (3, 3, 6))
    assert torch.autograd.gradcheck(taken.swiglu, (gate, up))
    assert torch.autograd.gradcheck(lambda x: taken.swiglu(*halves(x)), x)
    assert torch.autograd.gradcheck(taken.swiglu_packed, x)
    for op, inputs in ((taken.swiglu, (gate, up)), (taken.swiglu_packed, (x,))):
        gradients = torch.autograd.grad(op(*inputs).sum(), inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            gradients[0].sum().backward()


def test_guards_reach_into_the_ops(taken: ModuleType) -> None:
    """What the ops allocate lies between guards in the tests above."""
    x, grad = torch.ones(3, 10, device=DEVICE), torch.ones(3, 5, device=DEVICE)
    for op, inputs in (
        (taken.swiglu, halves(x)),
        (taken.swiglu_backward, (grad, *halves(x))),
        (taken.swiglu_packed, (x,)),
        (taken.swiglu_packed_backward, (grad, x)),
    ):
        with Guard() as guard:
            out = op(*inputs)
        guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
        assert out.untyped_storage().data_ptr() in guards


def test_refuses(taken: ModuleType) -> None:
    """What the ops do not take, they name."""
    x = torch.ones(2, 4, device=DEVICE)
    for name, op in {
        "swiglu": taken.swiglu,
        "swiglu_backward": lambda x, y: taken.swiglu_backward(x, x, y),
        "swiglu_backward ": lambda x, y: taken.swiglu_backward(y, x, x),
        "swiglu_packed_backward": lambda x, y: taken.swiglu_packed_backward(y, torch.cat([x, x], -1)),
    }.items():
        begin = f"^{name.strip()} takes"
        with pytest.raises(TypeError, match=rf"{begin} one float dtype, not .*torch\.int32"):
            op(x.int(), x.int())
        with pytest.raises(ValueError, match=rf"{begin} tensors of one shape, not .*\((2, 4|4,)\)"):
            op(x, x[0])
        with pytest.raises(
            TypeError, match=rf"{begin} one float dtype, not .*torch\.float(32|64).*torch\.float(64|32)"
        ):
            op(x, x.double())
        with pytest.raises(TypeError, match=f"{begin} tensors on one device, not .*meta"):
            op(x, x.to("meta"))
    with pytest.raises(TypeError, match=r"^swiglu_packed takes .*torch\.complex64"):
        taken.swiglu_packed(x.to(torch.complex64))
    for odd in (x[:, :3], x[0, 0]):
        with pytest.raises(ValueError, match=r"^swiglu_packed takes an even last dimension, not "):
            taken.swiglu_packed(odd)
        with pytest.raises(ValueError, match=r"^swiglu_packed_backward takes an even last dimension, not "):
            taken.swiglu_packed_backward(x, odd)


def test_launchers_are_what_a_call_reaches(taken: ModuleType) -> None:
    """On a GPU, without the triton_op in between."""
    x, grad = (Layout("contiguous", k).make((3, n), torch.float32, DEVICE) for k, n in ((0, 48), (1, 24)))
    for op, inputs in (
        (taken.swiglu, halves(x)),
        (taken.swiglu_backward, (grad, *halves(x))),
        (taken.swiglu_packed, (x,)),
        (taken.swiglu_packed_backward, (grad, x)),
    ):
        assert torch.equal(at_cuda(op, *inputs), op(*inputs))


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
    found = {}
    for name, kernel in KERNELS.items():
        for dtype, unit in (("bf16", 8), ("bf16", 1), ("fp32", 4)):
            known = {"ACC": taken.tl.float32, "VEC": unit, "FLAT": False, "BLOCK_M": 2, "BLOCK_N": 512}
            text = ptx(getattr(taken, kernel), dtype, **known)
            wanted = re.findall(r"(@%p\d+ )?((?:ld|st)\.global\S*)", text)
            # Those with a mask stand in the other branch.
            found[name, dtype, unit, False] = Counter(access for masked, access in wanted if not masked)
            found[name, dtype, unit, True] = Counter(access for masked, access in wanted if masked)
    for name in ("M", "N", "tiles_n"):
        one = {name: 1, "VEC": 1, "FLAT": name == "M", "BLOCK_M": 32, "BLOCK_N": 32}
        ptx(taken._swiglu_backward_kernel, "fp64", ACC=taken.tl.float64, **one)
    return found


def launches(taken: ModuleType) -> list[int]:
    """Return how many launches the graphs of the ops have, for sizes that units divide and that they do not."""
    made = []
    for op, inputs, columns in ((taken.swiglu, 2, 48), (taken.swiglu, 2, 47), (taken.swiglu_packed, 1, 96)):
        made += graphs(op, *(torch.randn(33, columns, requires_grad=True) for _ in range(inputs)))
    return [sum("triton_kernel" in name for name in graph) for graph in made]


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill."""
    found = {}
    for dtype in ("bf16", "fp32", "fp64"):
        acc = taken.tl.float64 if dtype == "fp64" else taken.tl.float32
        for name, kernel in KERNELS.items():
            for rows in (1, 16, 2 * TILE):
                known = {"ACC": acc, "VEC": 2, "FLAT": False, "BLOCK_M": rows, "BLOCK_N": 2 * TILE // rows}
                found[f"{dtype} {rows} {name}"] = stack(getattr(taken, kernel), dtype, **known)
    return found


def test_compiled(gallery: Path, on_h100: Ask) -> None:
    """Accesses have 16 bytes where VEC allows; sizes of 1 compile; the ops can be traced with symbolic sizes."""
    found, seen = on_h100(gallery / "fusion" / "swiglu.py", accesses, launches)
    for (name, dtype, unit, _), accesses_ in found.items():
        loads, stores = {"forward": (2, 1), "backward": (3, 2)}[name]
        if unit == 1:
            assert accesses_ == {"ld.global.b16": 8 * loads, "st.global.b16": 8 * stores}
        else:  # a thread has eight elements, of 16 or 32 bytes
            each = 1 if dtype == "bf16" else 2
            assert accesses_ == {"ld.global.v4.b32": each * loads, "st.global.v4.b32": each * stores}
    assert seen == [1] * 6  # forward and backward


@pytest.mark.thorough
def test_register_spills(gallery: Path, on_h100: Ask) -> None:
    """Two registers, where no two elements of a row can be loaded at once; else none, for rows of any length."""
    (found,) = on_h100(gallery / "fusion" / "swiglu.py", spills)
    assert len(found) == 3 * 2 * 3
    assert {name: size for name, size in found.items() if size} == {"bf16 1 backward": 8}


def test_page(printed: Callable[[str], str]) -> None:
    """What the page prints without a GPU is what its text says."""
    out = printed("fusion/swiglu")
    counted, floor, error, _, *ways, dtypes, shapes_, odd, right, wrong, told = out.splitlines()
    assert counted.endswith("kept: 5.0 9.0 3.0")
    assert floor == "floor: 3 forward, 5 backward"
    assert re.fullmatch(r"largest relative error \d\.\de-07, allowed 1\.0e-06", error)
    assert [way.split()[-3:-1] for way in ways][-1] == ["3.0", "5.0"]
    assert dtypes.startswith("TypeError: swiglu takes one float dtype")
    assert shapes_.startswith("ValueError: swiglu takes tensors of one shape")
    assert odd.startswith("ValueError: swiglu_packed takes an even last dimension")
    assert right.split()[1:] != wrong.split()[1:]
    assert told.startswith("told: one of the variables needed for gradient computation")


@pytest.mark.needs_gpu_memory(34)
@pytest.mark.parametrize("columns", [2**14, 2999])
def test_beyond_int32(taken: ModuleType, columns: int) -> None:
    """The last elements of more than 2**31 are right, in one long row and in rows that lie apart."""
    rows = 2**31 // columns + 3
    x = torch.zeros(rows, 2 * columns, dtype=torch.bfloat16, device=DEVICE)
    grad = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    corner = torch.tensor([2.0, 3.0, 5.0], dtype=torch.bfloat16, device=DEVICE)
    grad[-1, -1], x[-1, columns - 1], x[-1, -1] = corner
    expected = [value.bfloat16() for value in reference(*corner)[:3]]
    out, dx = taken.swiglu_packed(x), taken.swiglu_packed_backward(grad, x)
    got = torch.stack([out[-1, -1], dx[-1, columns - 1], dx[-1, -1]])
    assert torch.equal(got, torch.stack(expected))
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


@gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [5, 48])
def test_opcheck(taken: ModuleType, dtype: torch.dtype, columns: int) -> None:
    """All four ops pass the whole of opcheck."""
    gate, up, x = (normal(7, n * columns, dtype=dtype) for n in (1, 1, 2))
    half = [half.detach().requires_grad_() for half in halves(x.detach())]
    grad = torch.randn_like(gate)
    for op, inputs in (
        (taken.swiglu, (gate, up)),
        (taken.swiglu, half),
        (taken.swiglu_packed, (x,)),
        (taken.swiglu_backward, (grad, gate.detach(), up.detach())),
        (taken.swiglu_packed_backward, (grad, x.detach())),
    ):
        assert set(torch.library.opcheck(op, tuple(inputs)).values()) == {"SUCCESS"}


@gpu
def test_nothing_is_copied_under_torch_compile(taken: ModuleType) -> None:
    """Compiled, the ops are their launches: Inductor has no kernels of its own to copy what a launch writes to."""
    gate, up, x = (normal(64, n * 1024) for n in (1, 1, 2))
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


@gpu
@pytest.mark.parametrize("shape", [(31, 48), (31, 47)])
def test_under_torch_compile(taken: ModuleType, shape: tuple[int, int]) -> None:
    """The ops give the same bits compiled, alone and between other operators."""
    gate, up, grad = (normal(*shape) for _ in range(3))
    x = torch.cat([gate, up], -1).detach().requires_grad_()
    for op, inputs in ((taken.swiglu, (gate, up)), (taken.swiglu_packed, (x,))):
        compiled = torch.compile(lambda *inputs, op=op: op(*[2 * t for t in inputs]) * 2, fullgraph=True)
        out, expected = compiled(*inputs), op(*[2 * t for t in inputs]) * 2
        assert torch.equal(out, expected)
        for a, b in zip(*(torch.autograd.grad(y, inputs, grad.detach()) for y in (out, expected)), strict=True):
            assert torch.equal(a, b)


def _plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up


def _packed(x: torch.Tensor) -> torch.Tensor:
    return _plain(*halves(x))


def _gradients(op: Callable[..., torch.Tensor], grad: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    leaves = [t.clone().requires_grad_() for t in inputs]
    found = torch.autograd.grad(op(*leaves), leaves, grad)
    return torch.stack(found) if len(found) > 1 else found[0]


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    ("swiglu", lambda normal, M, N: (normal(M, N), normal(M, N)), _plain),
    (
        "swiglu_backward",
        lambda normal, M, N: (normal(M, N), normal(M, N), normal(M, N)),
        partial(_gradients, _plain),
    ),
    ("swiglu_packed", lambda normal, M, N: (normal(M, 2 * N),), _packed),
    (
        "swiglu_packed_backward",
        lambda normal, M, N: (normal(M, N), normal(M, 2 * N)),
        partial(_gradients, _packed),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "swiglu stored without a mask",
        "tl.store(out_ptrs, gate * tl.sigmoid(gate) * up, mask=mask)",
        "tl.store(out_ptrs, gate * tl.sigmoid(gate) * up)",
    ),
    (
        "a gradient stored without a mask",
        "tl.store(dup_ptrs, grad * gate * s, mask=mask)",
        "tl.store(dup_ptrs, grad * gate * s)",
    ),
    ("a tile that is nearly full", "full_m = (pid_m + 1) * BLOCK_M <= M", "full_m = pid_m * BLOCK_M < M"),
    ("a row that is nearly full", "full_n = (pid_n + 1) * BLOCK_N <= N", "full_n = pid_n * BLOCK_N < N"),
    ("a wrong derivative", "s * (1 + gate * (1 - s))\n    tl", "s * (1 - gate * (1 - s))\n    tl"),
    (
        "up with the stride of gate",
        "up_ptrs = up_ptr + offs_m * stride_um + offs_n  # (BLOCK_M, BLOCK_N)\n    out_ptrs",
        "up_ptrs = up_ptr + offs_m * stride_gm + offs_n  # (BLOCK_M, BLOCK_N)\n    out_ptrs",
    ),
    ("vectors across rows", "VEC = math.gcd(N, *strides,", "VEC = math.gcd(N,"),
    ("vectors beyond a row", "VEC = math.gcd(N, *strides,", "VEC = math.gcd(*strides,"),
    ("a copy left out", "x if x.stride(1) == 1 else x.contiguous()", "x"),
    ("rows apart taken for one", "flat = stride_om == N and all(", "flat = all("),
]
