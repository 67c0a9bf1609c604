"""The op of the recipe A linear layer with GELU, and its gradients."""

# ruff: noqa: N806 - the sizes of a product are M, N and K, as in the recipe

import math
import re
import subprocess
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import Ask, graphs
from device_key import at_cuda
from guard import Guard, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, sizes
from tolerance import assert_within
from torch.nn.functional import gelu, linear

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = ["none", "tanh"]
LEADS = st.sampled_from([(), (1,), (0,), (5,), (70,), (2, 3), (3, 1, 2)])


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("matmul/linear_gelu.py")


@pytest.fixture(scope="module")
def recipe(load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe as a module."""
    return load_recipe("matmul/linear_gelu.py")


def layer(
    lead: tuple[int, ...], N: int, K: int, dtype: torch.dtype, of: tuple[Layout, Layout, Layout] | None = None
) -> list[torch.Tensor]:
    """Return x, weight and bias in some layouts."""
    of = of or tuple(Layout("contiguous", seed) for seed in range(3))
    shapes = (*lead, K), (N, K), (N,)
    return [layout.make(shape, dtype, DEVICE) for layout, shape in zip(of, shapes, strict=True)]


def assert_value(y: torch.Tensor, z: torch.Tensor | None, inputs: list[torch.Tensor], kind: str) -> None:
    """Assert that results are as good as their accumulator and their dtype."""
    wide = [tensor.detach().double() for tensor in inputs]
    exact, K = linear(*wide), wide[0].shape[-1]
    unit = linear(*(tensor.abs() for tensor in wide))
    expected = gelu(exact, approximate=kind)
    assert (y.shape, y.dtype, y.device.type) == (expected.shape, inputs[0].dtype, DEVICE.type)
    assert y.is_contiguous()
    # Each product and the bias is added once; GELU itself rounds a few times, and passes errors on, by 1.13 at most.
    assert_within(y, expected, unit, roundings=int(1.13 * K) + 16, floor=torch.finfo(torch.float32).tiny)
    if z is not None:
        assert_within(z, exact, unit, roundings=K + 2, floor=torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(
    lead=LEADS, N=sizes(64, 150), K=sizes(16, 100), of=st.tuples(layouts(), layouts(), layouts()), bias=st.booleans()
)
def test_value(
    taken: ModuleType,
    dtype: torch.dtype,
    kind: str,
    lead: tuple[int, ...],
    N: int,
    K: int,
    of: tuple[Layout, Layout, Layout],
    bias: bool,
) -> None:
    """The value is right for any size and layout, with a bias and without, and is the same each time."""
    inputs = layer(lead, N, K, dtype, of)[: 3 if bias else 2]
    y = guarded(partial(taken.linear_gelu, approximate=kind), *inputs)
    assert torch.equal(taken.linear_gelu(*inputs, approximate=kind), y)
    assert_value(y, None, inputs, kind)
    kept = partial(taken.linear_gelu_forward, approximate=kind, keep=True)
    again, z = guarded(lambda x, weight, *b: kept(x, weight, b[0] if b else None), *inputs)
    assert torch.equal(again, y)
    assert_value(y, z, inputs, kind)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_many_tiles(taken: ModuleType, dtype: torch.dtype) -> None:
    """More rows of tiles than a group has, and a last group with fewer."""
    inputs = layer((64 * 9 + 1,), 64 * 2 + 3, 20, dtype)
    y, z = guarded(lambda *t: taken.linear_gelu_forward(*t, "none", True), *inputs)
    assert_value(y, z, inputs, "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lies_past_a_row(taken: ModuleType, dtype: torch.dtype) -> None:
    """It is never added up, not even NaN."""
    x, weight, bias = layer((20,), 30, 64, dtype)
    for K in (1, 17, 40):
        x[:, K:], weight[:, K:] = torch.nan, torch.nan
        inputs = [x[:, :K], weight[:, :K], bias]
        assert_value(taken.linear_gelu(*inputs), None, inputs, "none")
        x, weight, bias = layer((20,), 30, 64, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tuned(taken: ModuleType, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """What goes through the tuner is the same; the first of its configurations is that of small products."""
    inputs = layer((70,), 140, 48, dtype)
    monkeypatch.setattr(taken, "LINEAR_GELU_TUNED", 0)
    y = guarded(taken.linear_gelu, *inputs)
    assert_value(y, None, inputs, "none")
    assert taken.LINEAR_GELU_CONFIGS[0].all_kwargs() == taken.LINEAR_GELU_SMALL | {"num_ctas": 1}
    assert taken._linear_gelu_kernel.keys == ["like_m", "N", "K"]


def test_wide_accumulator(taken: ModuleType) -> None:
    """Small products are not lost beside a large one."""
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.full((3, 1024), 2**-6, dtype=dtype, device=DEVICE)
        x[:, 0] = 4096
        weight = torch.ones(2, 1024, dtype=dtype, device=DEVICE)
        expected = torch.full((3, 2), 4096 + 1023 / 64).to(x)
        torch.testing.assert_close(taken.linear_gelu(x, weight), expected, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(7))
def test_every_config(taken: ModuleType, number: int, record_property: Callable[[str, object], None]) -> None:
    """Each configuration is right by itself, for more rows of tiles than a group has."""
    assert len(taken.LINEAR_GELU_CONFIGS) == 7
    config = taken.LINEAR_GELU_CONFIGS[number]
    record_property("config", f"_linear_gelu_kernel {config}")
    plan = config.all_kwargs()
    M, N, K = plan["BLOCK_M"] * 9 - 5, plan["BLOCK_N"] + 3, 100
    inputs = layer((M,), N, K, torch.float16)
    y, z = torch.full((2, M, N), torch.nan, dtype=torch.float16, device=DEVICE)
    sizes = *inputs, y, z, M, N, K, K, K, 256
    known = {"BIAS": True, "KEEP": True, "ACC": taken.tl.float32, "DOT": taken.tl.float16}
    taken._linear_gelu_kernel.fn[(10 * 2,)](*sizes, GELU="none", **known, **plan)
    assert_value(y, z, inputs, "none")


def slope(z: torch.Tensor, kind: str) -> torch.Tensor:
    """Return GELU's derivative in float64."""
    z = z.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(gelu(z, approximate=kind).sum(), z)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=8)
@given(lead=LEADS, N=sizes(128, 300), of_grad=layouts(), of_z=layouts(), scale=st.sampled_from([1, 5]))
def test_gradient(
    taken: ModuleType,
    dtype: torch.dtype,
    kind: str,
    lead: tuple[int, ...],
    N: int,
    of_grad: Layout,
    of_z: Layout,
    scale: int,
) -> None:
    """The backward op is right for any gradient and any z, in any layout."""
    grad, z = of_grad.make((*lead, N), dtype, DEVICE), of_z.make((*lead, N), dtype, DEVICE) * scale
    dz, db = guarded(partial(taken.linear_gelu_backward, approximate=kind), grad, z)
    assert (dz.shape, db.shape, dz.dtype, db.dtype) == (z.shape, (N,), dtype, dtype)
    assert dz.is_contiguous()
    expected = grad.double() * slope(z, kind)
    unit = grad.double().abs() * (1 + z.double().abs()) ** 3
    small = torch.finfo(torch.float32).tiny
    assert_within(dz, expected, unit, roundings=16, floor=small)
    rows = math.prod(lead)
    expected, unit = (tensor.reshape(rows, N).sum(0) for tensor in (expected, unit))
    assert_within(db, expected, unit, roundings=16 + rows, floor=small)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=6)
@given(lead=LEADS, N=sizes(64, 100), K=sizes(16, 60), of=st.tuples(layouts(), layouts(), layouts()), bias=st.booleans())
def test_autograd(
    taken: ModuleType,
    dtype: torch.dtype,
    kind: str,
    lead: tuple[int, ...],
    N: int,
    K: int,
    of: tuple[Layout, Layout, Layout],
    bias: bool,
) -> None:
    """Through autograd the gradients are those of float64, but for the rounding of what the forward keeps."""
    inputs = [tensor.requires_grad_() for tensor in layer(lead, N, K, dtype, of)[: 3 if bias else 2]]
    y = taken.linear_gelu(*inputs, approximate=kind)
    grad = Layout("contiguous", 7).make(tuple(y.shape), dtype, DEVICE)
    found = torch.autograd.grad(y, inputs, grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    z = linear(*wide)
    expected = torch.autograd.grad(gelu(z, approximate=kind), wide, grad.double())
    # What dz may be off by, against which each gradient adds up
    rows = (grad.double().abs() * (1 + z.detach().abs()) ** 3).reshape(math.prod(lead), N)
    x, weight = (tensor.detach().abs() for tensor in wide[:2])
    units = (rows @ weight).reshape(x.shape), rows.T @ x.reshape(len(rows), K), rows.sum(0)
    for one, other, unit in zip(found, expected, units[: len(found)], strict=True):
        assert (one.shape, one.dtype) == (other.shape, dtype)
        allowed = max(2 * torch.finfo(dtype).eps, 2**-17 if dtype.itemsize < 8 else 0) * (K + 8)
        assert ((one.double() - other).abs() <= allowed * unit + 1e-30).all()


def test_gradcheck(taken: ModuleType) -> None:
    """Differences agree with the gradient."""
    inputs = [tensor.requires_grad_() for tensor in layer((2, 3), 4, 5, torch.float64)]
    for kind in KINDS:
        assert torch.autograd.gradcheck(partial(taken.linear_gelu, approximate=kind), inputs)
        assert torch.autograd.gradcheck(lambda *t, kind=kind: taken.linear_gelu(*t, approximate=kind), inputs[:2])


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_only_wanted_gradients(taken: ModuleType, dtype: torch.dtype) -> None:
    """Frozen tensors get none, and the others the same."""
    inputs = layer((6,), 5, 7, dtype)
    every = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad(taken.linear_gelu(*every).sum(), every)
    for wanted in product((False, True), repeat=3):
        some = [t.clone().requires_grad_(w) for t, w in zip(inputs, wanted, strict=True)]
        y = taken.linear_gelu(*some)
        assert y.requires_grad == any(wanted)
        if any(wanted):
            y.sum().backward()
        for tensor, right, one in zip(some, expected, wanted, strict=True):
            assert torch.equal(tensor.grad, right) if one else tensor.grad is None


def test_keeps_only_for_a_gradient(taken: ModuleType) -> None:
    """Without one the product is not stored; a second derivative is refused, not zero."""
    inputs = layer((6,), 5, 7, torch.float64)
    y, z = taken.linear_gelu_forward(*inputs, "none", False)
    assert z.shape == (0,)
    inputs[1].requires_grad_()
    with torch.no_grad():
        assert torch.equal(taken.linear_gelu(*inputs), y)
    with pytest.raises(ValueError, match="keep=True"):
        taken.linear_gelu_forward(*inputs, "none", False)
    (d,) = torch.autograd.grad(taken.linear_gelu(*inputs).square().sum(), inputs[1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        d.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_launchers_serve_gpus(taken: ModuleType, dtype: torch.dtype) -> None:
    """On a GPU a call goes straight to the launcher; it does what the op does."""
    inputs = *layer((3,), 70, 20, dtype), "none", True
    y, z = taken.linear_gelu_forward(*inputs)
    for one, other in zip(at_cuda(taken.linear_gelu_forward, *inputs), (y, z), strict=True):
        assert torch.equal(one, other)
    gradients = taken.linear_gelu_backward(y, z, "tanh")
    for one, other in zip(at_cuda(taken.linear_gelu_backward, y, z, "tanh"), gradients, strict=True):
        assert torch.equal(one, other)


def test_guards_reach_into_the_op(taken: ModuleType) -> None:
    """What the op allocates lies between guards in the tests above."""
    with Guard() as guard:
        y, z = taken.linear_gelu_forward(*layer((3,), 4, 5, torch.float32), "none", True)
        dz, _ = taken.linear_gelu_backward(y, z, "none")
    guards = {buffer.untyped_storage().data_ptr() for buffer in guard.outputs}
    assert {out.untyped_storage().data_ptr() for out in (y, z, dz)} <= guards


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_special_values(taken: ModuleType, dtype: torch.dtype, kind: str) -> None:
    """NaN and infinities are seen, the largest numbers do no harm, and GELU of 0 is 0; so is its slope far out."""
    large, inf, nan = torch.finfo(dtype).max, torch.inf, torch.nan
    z = torch.tensor([nan, inf, -inf, large, -large, 0, 30, -30], dtype=dtype, device=DEVICE)
    one = torch.ones(1, 1, dtype=dtype, device=DEVICE)
    y = taken.linear_gelu(z[:, None], one, approximate=kind)[:, 0]
    expected = torch.tensor([nan, inf, nan, large, 0, 0, 30, 0], dtype=torch.float64).to(z)
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=0, atol=1e-30)
    dz, _ = taken.linear_gelu_backward(torch.ones_like(z), z, kind)
    torch.testing.assert_close(dz[3:], torch.tensor([1, 0, 0.5, 1, 0]).to(z), rtol=0, atol=1e-30)
    assert dz[0].isnan()


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x, weight, bias = layer((6,), 5, 7, torch.float32)
    for wrong in ((x.int(), weight.int()), (x, weight.double()), (x, weight, bias.half()), (x, weight.to("meta"))):
        with pytest.raises(TypeError, match=r"^linear_gelu takes one float dtype and device, not"):
            taken.linear_gelu(*wrong)
    for wrong in ((x, weight.T), (x[0, 0], weight), (x, weight[0]), (x, weight, bias[:4]), (x, weight, bias[:, None])):
        with pytest.raises(ValueError, match=r"^linear_gelu takes shapes \(\.\.\., K\), \(N, K\) and \(N,\), not"):
            taken.linear_gelu(*wrong)
    with pytest.raises(ValueError, match=r"^linear_gelu takes approximate='none' or 'tanh', not 'fast'"):
        taken.linear_gelu(x, weight, approximate="fast")
    for z in (x[0], x.double(), x[0, 0]):
        with pytest.raises(ValueError, match=r"^linear_gelu_backward takes .* for "):
            taken.linear_gelu_backward(x, z, "none")


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
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_opcheck(taken: ModuleType, dtype: torch.dtype) -> None:
    """Both ops pass the whole of opcheck."""
    inputs = [tensor.requires_grad_() for tensor in layer((7,), 40, 48, dtype)]
    grad, z = torch.randn(2, 7, 40, device=DEVICE).to(dtype)
    for op, given_ in (
        (taken.linear_gelu_forward, (*inputs, "none", True)),
        (taken.linear_gelu_backward, (grad, z, "tanh")),
    ):
        assert set(torch.library.opcheck(op, given_).values()) == {"SUCCESS"}


@needs_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(taken: ModuleType, dtype: torch.dtype, dynamic: bool) -> None:
    """torch.compile takes the op, its gradients, and other sizes."""
    torch.compiler.reset()
    compiled = torch.compile(lambda *t: taken.linear_gelu(*t), fullgraph=True, dynamic=dynamic)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5} if dtype == torch.float32 else {}
    for rows, bias in ((100, True), (130, True), (70, False)):
        inputs = [tensor.requires_grad_() for tensor in layer((rows,), 48, 64, dtype)[: 3 if bias else 2]]
        y, expected = compiled(*inputs), taken.linear_gelu(*inputs)
        torch.testing.assert_close(y, expected, **tolerance)
        grads = [torch.autograd.grad(t.square().sum(), inputs) for t in (y, expected)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, **tolerance)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), expected, **tolerance)


@needs_a_gpu
def test_compiled_and_tuned(taken: ModuleType) -> None:
    """Inductor's tuner takes the place of Triton's, both ways."""
    torch.compiler.reset()
    inputs = [tensor.requires_grad_() for tensor in layer((1040,), 512, 512, torch.bfloat16)]
    y = torch.compile(lambda *t: taken.linear_gelu(*t), fullgraph=True)(*inputs)
    torch.testing.assert_close(y, taken.linear_gelu(*inputs), rtol=0.02, atol=0.02)
    found, expected = (torch.autograd.grad(t.sum(), inputs) for t in (y, taken.linear_gelu(*inputs)))
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@needs_a_gpu
def test_same_bits(taken: ModuleType) -> None:
    """Ten runs of the gradients have the same bits, in half precision as well."""
    inputs = [tensor.requires_grad_() for tensor in layer((1031,), 520, 256, torch.bfloat16)]
    first = torch.autograd.grad(taken.linear_gelu(*inputs).sum(), inputs)
    for _ in range(9):
        again = torch.autograd.grad(taken.linear_gelu(*inputs).sum(), inputs)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_gpu(taken: ModuleType) -> None:
    """The op runs where its input is, whichever GPU is the current one."""
    inputs = [tensor.to("cuda:1").requires_grad_() for tensor in layer((5,), 6, 7, torch.float32)]
    y = taken.linear_gelu(*inputs)
    assert_value(y, None, inputs, "none")
    (d,) = torch.autograd.grad(y.sum(), inputs[0])
    assert d.device == y.device


def test_traffic(recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's two kernels read and write what the page says."""
    x, weight, bias = layer((64,), 96, 32, torch.float32)
    with recipe.Traffic() as traffic:
        y = recipe.linear_gelu_torch(x, weight, bias)
    assert traffic.moved == 3 * y.nbytes + y.nbytes + sum(t.nbytes for t in (x, weight, bias)) - y.nbytes
    assert re.findall(r"aten\.(\w+)", capsys.readouterr().out) == ["addmm", "gelu"]


def test_first_kernel(recipe: ModuleType) -> None:
    """It is right for sizes that no block divides."""
    for dtype in (torch.float16, torch.float32):
        inputs = layer((70,), 90, 50, dtype)
        assert_value(recipe.first_linear_gelu(*inputs, block=(32, 64, 16)), None, inputs, "none")


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
    """The rows of the ladder are launches of the op's kernel."""
    names = [name for name, *_ in recipe.steps()]
    assert len(names) == len(set(names)) == 13
    assert "none, 128x128, 8 warps, 3 stages" in names
    inputs = layer((130,), 140, 64, torch.float16)
    for name, call, _ in list(recipe.steps())[:4]:
        y = torch.full((130, 140), torch.nan, dtype=torch.float16, device=DEVICE)
        call(*inputs, y)
        assert_value(y, None, inputs, "tanh" if name.startswith("tanh") else "none")


def test_answers() -> None:
    """The derivative that the first answer keeps is the one of the page."""
    z = torch.linspace(-4, 4, 41, dtype=torch.float64)
    density = torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5
    torch.testing.assert_close(slope(z, "none"), torch.special.ndtr(z) + z * density)


def build(kernel: Any, dtype: str, config: Any = None, undivided: tuple[str, ...] = (), **known: Any) -> Any:
    """Return what the compiler makes of a kernel for an H100, sizes and strides divisible by 16."""
    import triton  # where it is imported first, the choice of the interpreter is made

    plan = config.all_kwargs() if config else {}
    options = {name: plan.pop(name) for name in ("num_warps", "num_ctas", "num_stages") if name in plan}
    known |= plan
    types = {name: f"*{dtype}" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {"partial_ptr": "*fp32"} if "partial_ptr" in types else {}
    aligned = [i for i, name in enumerate(types) if name not in known and name not in undivided]
    source = triton.compiler.ASTSource(
        kernel, types | dict.fromkeys(known, "constexpr"), known, {(i,): [["tt.divisibility", 16]] for i in aligned}
    )
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


def forward(taken: ModuleType, number: int, GELU: str, keep: bool, **more: Any) -> Any:
    """Return what the forward kernel becomes in a configuration, in bfloat16."""
    known = {"GELU": GELU, "BIAS": True, "KEEP": keep, "ACC": taken.tl.float32, "DOT": taken.tl.bfloat16}
    return build(taken._linear_gelu_kernel.fn, "bf16", taken.LINEAR_GELU_CONFIGS[number], **known, **more)


def loops(taken: ModuleType) -> list[tuple[int, int, int]]:
    """Return asynchronous copies, matrix instructions and bytes of a copy: sizes divisible by 16, then not."""
    found = []
    for undivided in ((), ("K", "stride_xm", "stride_wn")):
        made = forward(taken, 0, "none", False, undivided=undivided)
        wide = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)", made.asm["ptx"])
        ttgir = made.asm["ttgir"]
        found.append((ttgir.count("ttg.async_copy_global"), made.asm["ptx"].count("wgmma.mma_async"), len(wide)))
    return found


def epilogues(recipe: ModuleType) -> dict[str, float]:
    """Return the instructions of the epilogues for an element, as the page counts them."""
    config = recipe.LINEAR_GELU_CONFIGS[0]
    return {GELU: recipe.epilogue(forward(recipe, 0, GELU, False), config) for GELU in ("erf", "none", "tanh")}


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """Tiles are copied 16 bytes at a time in the background, where 16 divides K; the polynomial is shorter than erf."""
    (even, odd), counts = on_h100(gallery / "matmul" / "linear_gelu.py", loops, epilogues)
    assert even[0] == 2 * 3
    assert even[1] >= 4
    assert even[2] >= 8
    assert odd[2] == 0
    assert counts["tanh"] < counts["none"] < 28 < 34 < counts["erf"]


def first_two(taken: ModuleType) -> list[tuple[int, int]]:
    """Return registers of all warps of a program and its shared memory, for the first two configurations."""
    found = []
    for number, GELU, keep in product((0, 1), KINDS, (False, True)):
        made = forward(taken, number, GELU, keep)
        found.append((usage(made)[0] * 32 * made.metadata.num_warps, made.metadata.shared))
    return found


def test_two_programs(gallery: Path, on_h100: Ask) -> None:
    """Two programs of the first two configurations fit on a multiprocessor."""
    (found,) = on_h100(gallery / "matmul" / "linear_gelu.py", first_two)
    assert all(2 * registers <= 65536 and 2 * (shared + 1024) <= 228 * 1024 for registers, shared in found)


def spills(taken: ModuleType) -> dict[str, int]:
    """Return the bytes that threads spill, in all configurations and dtypes, both ways."""
    tl, found = taken.tl, {}
    for number, GELU, keep in product(range(len(taken.LINEAR_GELU_CONFIGS)), KINDS, (False, True)):
        found[f"{number} {GELU} {keep}"] = usage(forward(taken, number, GELU, keep))[1]
    wide = taken.triton.Config({k: v for k, v in taken.LINEAR_GELU_WIDE.items() if "num" not in k}, 4, 3)
    for dtype, ACC, GELU in (("fp32", tl.float32, "none"), ("fp64", tl.float64, "erf"), ("fp64", tl.float64, "tanh")):
        known = {"GELU": GELU, "ACC": ACC}
        kernel = taken._linear_gelu_kernel.fn
        made = build(kernel, dtype, wide, BIAS=True, KEEP=True, DOT=ACC, **known)
        found[f"{dtype} {GELU}"] = usage(made)[1]
        eight = taken.triton.Config({"BLOCK_M": 64 if dtype == "fp32" else 16, "BLOCK_N": 128}, 8)
        made = build(taken._linear_gelu_backward_kernel, dtype, eight, **known)
        found[f"{dtype} {GELU} backward"] = usage(made)[1]
    return found


@pytest.mark.thorough
def test_no_register_spills(gallery: Path, on_h100: Ask) -> None:
    """In no configuration, dtype or direction, but for two of 128 x 128 by 4 warps, and a few of the tallest tile."""
    (found,) = on_h100(gallery / "matmul" / "linear_gelu.py", spills)
    assert len(found) == 7 * 4 + 6
    most = {name: {"1": 8, "5": 64}.get(name.split()[0], 0) for name in found}
    assert {name: bytes_ for name, bytes_ in found.items() if bytes_ > most[name]} == {}


def traced(recipe: ModuleType) -> list[list[str]]:
    """Return the graphs, forward and backward, in float32 and bfloat16, of small products and of one that is tuned."""
    found = []
    for dtype, M, N, K in ((torch.float32, 40, 64, 48), (torch.bfloat16, 40, 64, 48), (torch.bfloat16, 1040, 512, 512)):
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((M, K), (N, K), (N,))]
        found += graphs(recipe.linear_gelu, *inputs)
    return found


def test_torch_compile_copies_nothing(gallery: Path, on_h100: Ask) -> None:
    """No input counts as written, either way; backward, two products are left to PyTorch."""
    (found,) = on_h100(gallery / "matmul" / "linear_gelu.py", traced)
    assert len(found) == 6
    for graph in found:
        kernels = [call for call in graph if call.startswith("triton_kernel_wrapper")]
        assert kernels == ["triton_kernel_wrapper_functional"]
        assert not [call for call in graph if re.match(r"aten\.(clone|copy)", call)]
    assert [sum(call.startswith("aten.mm") for call in graph) for graph in found] == [0, 2] * 3


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


# Ops for test_on_gpu.py, with inputs that fit them, and what computes the same.
OPS = [
    (
        "linear_gelu",
        lambda normal, M, N: (normal(M, 96), normal(N, 96), normal(N)),
        lambda x, weight, bias: gelu(linear(x, weight, bias)),
    ),
    (
        "linear_gelu_forward",
        lambda normal, M, N: (normal(M, 96), normal(N, 96), normal(N), "tanh", True),
        lambda x, weight, bias, kind, keep: (gelu(linear(x, weight, bias), approximate=kind), linear(x, weight, bias)),
    ),
    (
        "linear_gelu_backward",
        lambda normal, M, N: (normal(M, N), normal(M, N), "none"),
        lambda grad, z, kind: (grad * slope(z, kind).float(), (grad * slope(z, kind)).sum(0).float()),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("a result stored without a mask", "z * _linear_gelu_phi(z, GELU), mask=mask)", "z * _linear_gelu_phi(z, GELU))"),
    ("z stored without a mask", "tl.store(z_ptr + offs, z, mask=mask)", "tl.store(z_ptr + offs, z)"),
    ("x loaded past a row's end", "x = tl.load(x_ptrs, mask=mask_k[None, :], other=0)", "x = tl.load(x_ptrs)"),
    ("half an accumulator", "    torch.float16: tl.float32,\n", "    torch.float16: tl.float16,\n"),
    ("rows taken for adjacent", "tl.minimum(offs_m, M - 1).to(tl.int64) * stride_xm", "tl.minimum(offs_m, M - 1) * K"),
    (
        "rows of weights taken for adjacent",
        "tl.minimum(offs_n, N - 1).to(tl.int64) * stride_wn",
        "tl.minimum(offs_n, N - 1) * K",
    ),
    ("a last group as large as the others", "tl.minimum(tiles_m - group * GROUP_M, GROUP_M)", "GROUP_M"),
    ("a wrong order of tiles", "group * GROUP_M + place % rows, place // rows", "place % rows, place // rows"),
    ("no bias", "        z += bias[None, :].to(ACC)\n", "        pass\n"),
    ("a coefficient too few", "            p = p * s + 0.104829921\n", ""),
    ("another GELU", "0.1029432395800235 * s", "0.1129432395800235 * s"),
    ("columns in any layout", "return x if x.stride(1) == 1 else x.contiguous()", "return x"),
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
