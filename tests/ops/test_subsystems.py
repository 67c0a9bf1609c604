"""The op of the recipe An op and PyTorch's subsystems, and what the page says of each registration."""

# ruff: noqa: N806 - extents are called M, N and K, as in the recipe

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, sizes

TILE = 64  # of float32
ROWS = st.sampled_from([0, 1, 2, 31, TILE, TILE + 1])
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")


@pytest.fixture(scope="module")
def layer(recipe: ModuleType) -> list[torch.Tensor]:
    """Return small inputs."""
    torch.manual_seed(0)
    return recipe.random(5, 3, 7)


@pytest.fixture
def bare(recipe: ModuleType) -> torch._library.custom_ops.CustomOpDef:
    """Return a new op without registrations."""
    return recipe.make_op("triton_gallery::linear_relu_test", recipe.fused)


@pytest.fixture
def no_interpreter(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the launcher use the kernel as it is on a GPU."""
    kernel = recipe.triton.JITFunction(recipe.linear_relu_kernel.fn)
    monkeypatch.setattr(recipe, "linear_relu_kernel", kernel)
    torch._logging.set_logs(dynamo=40)
    yield
    torch._logging.set_logs()
    torch.compiler.reset()


def assert_right(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Assert that a layer's output is as good as its accumulator and its dtype."""
    exact = [tensor.double() for tensor in (x, weight, bias)]
    assert out.dtype == x.dtype
    assert out.shape == (x.shape[0], weight.shape[0])
    assert out.is_contiguous()
    # Each of K + 1 terms is off by half a unit of the sum of magnitudes at most (twice that: the reference errs too).
    # The last rounding, to the dtype, is cut in the interpreter; what is subnormal there is off by a unit of those.
    expected = torch.relu(torch.nn.functional.linear(*exact))
    magnitudes = torch.nn.functional.linear(*(tensor.abs() for tensor in exact))
    last = torch.finfo(out.dtype).eps
    allowed = 2 * (x.shape[1] + 2) * (2**-53 if out.dtype == torch.float64 else 2**-24) * magnitudes
    allowed += last * expected + torch.finfo(out.dtype).tiny * last
    error = (out.double() - expected).abs()
    assert (error <= allowed).all(), f"off by {(error / allowed).max().item():.1f} times the tolerance"


def make(
    recipe: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype, input_layouts: tuple[Layout, ...]
) -> list[torch.Tensor]:
    """Return the inputs of a layer."""
    M, N, K = shape
    shapes = (M, K), (N, K), (N,)
    return [layout.make(each, dtype, recipe.DEVICE) for layout, each in zip(input_layouts, shapes, strict=True)]


of_three = st.tuples(layouts(), layouts(), layouts())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=15)
@given(M=ROWS, N=ROWS, K=sizes(TILE, 3 * TILE), drawn=of_three)
def test_kernel(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, K: int, drawn: tuple[Layout, ...]) -> None:
    """The kernel stays within its memory and is right for any shape and layout."""
    if dtype == torch.bfloat16 and recipe.DEVICE.type == "cpu":
        pytest.skip("the interpreter multiplies the bits of bfloat16")
    inputs = make(recipe, (M, N, K), dtype, drawn)
    assert_right(guarded(recipe.fused, *inputs), *inputs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=15)
@given(M=ROWS, N=ROWS, K=sizes(TILE, 3 * TILE), drawn=of_three)
def test_op(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, K: int, drawn: tuple[Layout, ...]) -> None:
    """The op is right for tensors on the device, and for those on the CPU."""
    inputs = make(recipe, (M, N, K), dtype, drawn)
    assert_right(recipe.linear_relu(*inputs), *inputs)
    inputs = [tensor.cpu() for tensor in inputs]
    assert_right(recipe.linear_relu(*inputs), *inputs)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_special_values(recipe: ModuleType) -> None:
    """NaN and infinities do what they do in PyTorch, and stay in their row and column."""
    x, weight, bias = (torch.ones(shape, device=recipe.DEVICE) for shape in ((70, 40), (66, 40), (66,)))
    x[1, 39], x[2, 0], x[3, 5], bias[65] = torch.nan, -torch.inf, torch.inf, torch.nan
    expected = recipe.in_pytorch(x, weight, bias)
    torch.testing.assert_close(recipe.fused(x, weight, bias), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(recipe: ModuleType, dtype: torch.dtype) -> None:
    """In half precision 2048 + 1 is 2048; with an accumulator like that, the ones in the middle would be lost."""
    x = torch.tensor([2048, 1, -2048], dtype=dtype, device=recipe.DEVICE).repeat_interleave(64).expand(2, -1)
    ones = torch.ones(1, 192, dtype=dtype, device=recipe.DEVICE)
    assert recipe.fused(x, ones, ones[0, :1]).tolist() == [[65]] * 2


def test_float32_is_not_rounded_to_tf32(recipe: ModuleType) -> None:
    """1 + 2**-20 has more bits than TF32."""
    x = torch.full((16, 16), 1 + 2**-20, device=recipe.DEVICE)
    eye = torch.eye(16, device=recipe.DEVICE)
    assert torch.equal(recipe.fused(x, eye, 0 * eye[0]), x)


def test_refuses(recipe: ModuleType, layer: list[torch.Tensor]) -> None:
    """What the op does not take, it names: in the kernel's launcher, on the CPU, and without data."""
    x, weight, bias = layer
    for op in (recipe.bare, recipe.linear_relu):
        for to in (recipe.DEVICE, "cpu", "meta"):
            if op is recipe.bare and to == "meta":
                continue
            x, weight, bias = (tensor.to(to) for tensor in layer)
            with pytest.raises(TypeError, match=r"not torch\.float32, torch\.float64, torch\.float32"):
                op(x, weight.double(), bias)
            with pytest.raises(TypeError, match=r"not torch\.int32"):
                op(x.int(), weight.int(), bias.int())
            for wrong in ((x[0], weight, bias), (x, weight.T, bias), (x, weight, bias[1:]), (x, weight, x), (x, x, x)):
                with pytest.raises(ValueError, match=r"takes \(M, K\), \(N, K\) and \(N,\), not \[\("):
                    op(*wrong)
    with pytest.raises(ValueError, match="one device"):
        recipe.fused(layer[0].to("meta"), *layer[1:])


def test_backward(recipe: ModuleType, bare: Callable[..., torch.Tensor]) -> None:
    """The formula is the derivative, twice; without it PyTorch says so."""
    inputs = [tensor.requires_grad_() for tensor in recipe.random(3, 4, 5, torch.float64)]
    assert torch.autograd.gradcheck(recipe.linear_relu, inputs)
    assert torch.autograd.gradgradcheck(recipe.linear_relu, inputs)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        bare(*inputs).sum().backward()


def test_backward_treats_zero_and_nan_like_pytorch(recipe: ModuleType) -> None:
    """At zero the gradient of relu is zero, and a NaN passes it on."""
    x = torch.tensor([[0.0], [1.0], [torch.nan]], device=recipe.DEVICE)
    weight = torch.ones(1, 1, device=recipe.DEVICE)
    grads = [
        torch.autograd.grad(op(x.requires_grad_(), weight, 0 * weight[0]).sum(), x)[0]
        for op in (recipe.linear_relu, recipe.in_pytorch)
    ]
    assert grads[0].tolist() == grads[1].tolist() == [[0], [1], [1]]


def test_opcheck(recipe: ModuleType, layer: list[torch.Tensor]) -> None:
    """The registrations agree with each other; a fake rule with other strides, the first exercise, does not."""
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    options = {} if recipe.DEVICE.type == "cuda" else {"test_utils": some}
    leaves = [tensor.clone().requires_grad_() for tensor in layer]
    assert set(torch.library.opcheck(recipe.linear_relu, leaves, **options).values()) == {"SUCCESS"}
    wrong = recipe.make_op("triton_gallery::linear_relu_wrong_strides", recipe.fused)
    wrong.register_fake(lambda x, weight, bias: x.new_empty(weight.shape[0], x.shape[0]).T)
    with pytest.raises(torch.testing._internal.optests.OpCheckError, match=r"[Ss]tride"):
        torch.library.opcheck(wrong, layer, test_utils=("test_faketensor",))


def test_cpu(recipe: ModuleType, bare: Callable[..., torch.Tensor], no_interpreter: None) -> None:
    """The CPU implementation serves eager calls, torch.compile passes over it, a body that chooses serves both."""
    inputs = recipe.random(5, 3, 7, device="cpu")
    with pytest.raises((RuntimeError, ValueError), match=r"0 active drivers|cannot be accessed from Triton"):
        bare(*inputs)
    assert_right(recipe.linear_relu(*inputs), *inputs)

    def either(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (recipe.in_pytorch if x.device.type == "cpu" else recipe.fused)(x, weight, bias)

    chooses = recipe.make_op("triton_gallery::linear_relu_chooses", either)
    compiled = [
        torch.compile(lambda *args, op=op: op(*args), backend="aot_eager") for op in (recipe.linear_relu, chooses)
    ]
    with pytest.raises((RuntimeError, ValueError), match=r"0 active drivers|cannot be accessed from Triton"):
        compiled[0](*inputs)
    assert_right(compiled[1](*inputs), *inputs)


def test_meta(recipe: ModuleType, layer: list[torch.Tensor], bare: Callable[..., torch.Tensor]) -> None:
    """The shape needs no data, with the rule in the interpreter too."""
    out = recipe.linear_relu(*(tensor.to("meta") for tensor in layer))
    assert (out.is_meta, out.shape, out.dtype) == (True, (5, 3), torch.float32)
    if recipe.DEVICE.type == "cpu":
        with pytest.raises(NotImplementedError, match="meta"):
            bare(*(tensor.to("meta") for tensor in layer))


def test_meta_for_free(layer: list[torch.Tensor], bare: Callable[..., torch.Tensor], no_interpreter: None) -> None:
    """Without the interpreter the body of a triton_op is its fake rule."""
    assert bare(*(tensor.to("meta") for tensor in layer)).shape == (5, 3)


@given(M=st.integers(0, 9), N=st.integers(0, 9), K=st.integers(0, 9))
def test_flops(recipe: ModuleType, M: int, N: int, K: int) -> None:
    """A product is counted with its op; a training step is three of them."""
    inputs = recipe.random(M, N, K, device="cpu")
    assert recipe.flops(recipe.linear_relu, *inputs) == 2 * M * N * K
    assert recipe.flops(recipe.gradients, recipe.linear_relu, *inputs) == 6 * M * N * K
    assert recipe.flops(recipe.linear_relu, *(tensor.to("meta") for tensor in inputs)) == 2 * M * N * K


def test_flops_missing_or_wrong(
    recipe: ModuleType, bare: Callable[..., torch.Tensor], layer: list[torch.Tensor]
) -> None:
    """Without a formula nothing is counted, the tutorial's form fails at the count, and there is only one."""
    assert recipe.flops(bare, *layer) == 0
    packet = torch.ops.triton_gallery.linear_relu_test
    recipe.register_flop_formula(packet)(lambda x_shape, weight_shape, bias_shape: 1)
    try:
        with pytest.raises(TypeError, match="unexpected keyword argument 'out_shape'"):
            recipe.flops(bare, *layer)
        with pytest.raises(RuntimeError, match="duplicate"):
            recipe.register_flop_formula(packet)(lambda *args, **kwargs: 1)
    finally:
        del torch.utils.flop_counter.flop_registry[packet]


def by_loop(op: Callable[..., torch.Tensor], dims: tuple[int | None, ...], inputs: list[torch.Tensor]) -> torch.Tensor:
    """Return what vmap should, one sample at a time."""
    (size,) = {tensor.shape[dim] for tensor, dim in zip(inputs, dims, strict=True) if dim is not None}
    samples = [
        [t if dim is None else t.select(dim, i) for t, dim in zip(inputs, dims, strict=True)] for i in range(size)
    ]
    return torch.stack([op(*sample) for sample in samples])


dims_of_matrix = st.sampled_from([None, 0, 1, 2])


@given(
    B=st.integers(1, 3),
    M=st.integers(0, 4),
    dims=st.tuples(dims_of_matrix, dims_of_matrix, st.sampled_from([None, 0, 1])),
)
def test_vmap(recipe: ModuleType, B: int, M: int, dims: tuple[int | None, ...]) -> None:
    """Samples, weights and biases, in any dimension, alone and together."""
    if dims == (None, None, None):
        dims = (0, None, None)
    inputs = recipe.random(M, 3, 5, torch.float64)
    batched = [
        t if dim is None else torch.stack([t + i for i in range(B)], dim) for t, dim in zip(inputs, dims, strict=True)
    ]
    with recipe.Calls() as calls:
        out = torch.vmap(recipe.linear_relu, dims)(*batched)
    torch.testing.assert_close(out, by_loop(recipe.reference, dims, batched))
    assert calls.count == (1 if dims[1:] == (None, None) else B)


def test_vmap_of_vmap(recipe: ModuleType) -> None:
    """Two batches of samples are rows, too."""
    x, weight, bias = recipe.random(4, 3, 5, torch.float64)
    xs = torch.randn(2, 3, *x.shape, dtype=torch.float64, device=recipe.DEVICE)
    once = torch.vmap(recipe.linear_relu, (0, None, None))
    with recipe.Calls() as calls:
        out = torch.vmap(once, (0, None, None))(xs, weight, bias)
    torch.testing.assert_close(out, recipe.reference(xs, weight, bias))
    assert calls.count == 1


def test_vmap_has_gradients(recipe: ModuleType) -> None:
    """The backward of a batch is the sum over its samples."""
    x, weight, bias = recipe.random(4, 3, 5, torch.float64)
    xs = torch.stack([x, x + 1])
    mapped = torch.vmap(recipe.linear_relu, (0, None, None))
    torch.testing.assert_close(
        recipe.gradients(mapped, xs, weight, bias), recipe.gradients(recipe.reference, xs, weight, bias)
    )


def test_vmap_without_rule(recipe: ModuleType, bare: Callable[..., torch.Tensor], layer: list[torch.Tensor]) -> None:
    """It is right, and calls the op once for each sample."""
    x, weight, bias = layer
    with recipe.Calls() as calls:
        out = torch.vmap(bare, (0, None, None))(torch.stack([x] * 4), weight, bias)
    assert calls.count == 4
    assert_right(out[3], *layer)


def test_autocast(recipe: ModuleType, bare: Callable[..., torch.Tensor], layer: list[torch.Tensor]) -> None:
    """Inputs become bfloat16 whatever the region asks for, gradients keep the parameters' dtype."""
    half = [tensor.bfloat16() for tensor in layer]
    expected = recipe.reference(*half)
    for device in {"cpu", recipe.DEVICE.type}:
        inputs = [tensor.to(device) for tensor in layer]
        with torch.autocast(device, torch.bfloat16):
            out = recipe.linear_relu(inputs[0].bfloat16(), *inputs[1:])
            assert recipe.linear_relu(*(tensor.double() for tensor in inputs)).dtype == torch.float64
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected.to(device), rtol=2**-7, atol=1e-6)
    with torch.autocast(recipe.DEVICE.type, torch.float16):
        assert recipe.linear_relu(*layer).dtype == torch.bfloat16
        assert bare(*layer).dtype == torch.float32
    grads = recipe.autocast(recipe.gradients, recipe.linear_relu, *layer)
    assert grads.dtype == torch.float32
    expected = recipe.gradients(recipe.reference, *layer)
    assert (grads - expected).norm() < 0.02 * expected.norm()


def test_autocast_registered_twice(bare: torch._library.custom_ops.CustomOpDef, layer: list[torch.Tensor]) -> None:
    """The first registration stays."""
    bare.register_kernel("cpu", lambda x, weight, bias: torch.relu(x @ weight.T + bias))
    bare.register_autocast("cpu", torch.bfloat16)
    bare.register_autocast("cpu", torch.float16)
    with torch.autocast("cpu", torch.float16):
        assert bare(*(tensor.cpu() for tensor in layer)).dtype == torch.bfloat16


def test_subclass(recipe: ModuleType, bare: Callable[..., torch.Tensor], layer: list[torch.Tensor]) -> None:
    """An int8 weight passes through the registered op, backward included, and not through the bare one."""
    x, weight, bias = layer
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    int8 = recipe.Int8Weight((weight / scale).round().to(torch.int8), scale)
    assert (int8.shape, int8.dtype, int8.device) == (weight.shape, weight.dtype, weight.device)
    assert (int8.dequantize() - weight).abs().max() <= scale.max() / 2 * 1.01
    assert_right(recipe.linear_relu(x, int8, bias), x, int8.dequantize(), bias)
    grads = [
        recipe.gradients(lambda x, bias, op=op, w=w: op(x, w, bias), x, bias)
        for op, w in ((recipe.linear_relu, int8), (recipe.reference, int8.dequantize()))
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="returned NotImplemented"):
        bare(x, int8, bias)


def test_function(recipe: ModuleType) -> None:
    """What torch.func cannot do with the op, or does wrongly, it does or refuses with the Function."""
    x, weight, bias = recipe.random(4, 3, 5, torch.float64)

    def sample_gradients(op: Callable[..., torch.Tensor]) -> torch.Tensor:
        def loss(weight: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            return op(sample[None], weight, bias).square().sum()

        return torch.vmap(torch.func.grad(loss), (None, 0))(weight, x)

    torch.testing.assert_close(sample_gradients(recipe.LinearReLU.apply), sample_gradients(recipe.reference))
    with pytest.raises(RuntimeError, match="forward mode AD"):
        torch.func.jvp(lambda x: recipe.LinearReLU.apply(x, weight, bias), (x,), (x,))


def test_what_no_registration_covers(recipe: ModuleType, layer: list[torch.Tensor]) -> None:
    """If one of these fails, PyTorch has mended it: say so on the page."""
    x, weight, bias = layer
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: recipe.linear_relu(x, weight, bias).sum())(x)
    _, tangent = torch.func.jvp(lambda x: recipe.linear_relu(x, weight, bias), (x,), (x,))
    assert not tangent.any()


def test_outcome(recipe: ModuleType, layer: list[torch.Tensor]) -> None:
    """The page's judge tells right from wrong."""
    outcome = recipe.outcome
    assert outcome(recipe.call, recipe.in_pytorch, *layer).startswith("float32, error ")
    assert outcome(recipe.call, lambda *inputs: 0 * recipe.in_pytorch(*inputs), *layer) == "float32, wrong: all zeros"
    assert (
        outcome(recipe.call, lambda *inputs: torch.nan * recipe.in_pytorch(*inputs), *layer) == "float32, wrong by nan%"
    )
    assert outcome(recipe.call, lambda *inputs: 1 / 0) == "ZeroDivisionError: division by zero"


@gpu
def test_together(recipe: ModuleType) -> None:
    """On a GPU, vmap and autocast compile into one graph around the kernel."""
    x, weight, bias = recipe.random(40, 70, 96)
    xs = torch.stack([x, x + 1])
    mapped = torch.vmap(recipe.linear_relu, (0, None, None))

    @torch.compile(fullgraph=True)
    def layer(xs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return mapped(xs, weight, bias)

    out = layer(xs)
    assert out.dtype == torch.bfloat16
    expected = recipe.reference(xs, weight, bias)
    assert (out.double() - expected).norm() < 0.01 * expected.norm()


@gpu
def test_kernel_and_cpu_agree(recipe: ModuleType) -> None:
    """The two implementations of the op give the same numbers."""
    inputs = recipe.random(70, 130, 200)
    on_cpu = recipe.linear_relu(*(tensor.cpu() for tensor in inputs))
    torch.testing.assert_close(recipe.linear_relu(*inputs).cpu(), on_cpu, rtol=1e-4, atol=1e-4)


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(recipe: ModuleType) -> None:
    """Input and output may have more than 2**31 elements, and a row more than 65535 tiles."""
    for M, N, K in ((2**25 + 1, 64, 8), (2**16 + 1, 8, 2**15), (2, 2**23 + 1, 8)):
        x = torch.zeros(M, K, dtype=torch.float16, device=recipe.DEVICE)
        weight = torch.zeros(N, K, dtype=torch.float16, device=recipe.DEVICE)
        x[-1, -1], weight[-1, -1] = 3, 2
        out = recipe.linear_relu(x, weight, weight[:, 0])
        assert out[-1, -1] == 6
        assert out.sum(dtype=torch.float32) == 6


def test_loads_twice(load_recipe: Callable[[str], ModuleType], recipe: ModuleType, layer: list[torch.Tensor]) -> None:
    """A second import takes the place of the first, whose ops are gone: so this test comes last."""
    again = load_recipe("pytorch/subsystems.py")
    assert again.flops(again.linear_relu, *layer) == 2 * 5 * 3 * 7
    assert_right(again.linear_relu(*layer), *layer)


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("linear_relu", lambda normal, M, N: (normal(M, 257), normal(N, 257), normal(N))),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("tiles stored with half a mask", "acc, mask=mask_m & mask_n)", "acc, mask=mask_m)"),
    ("the ragged end of a product", "mask_k = offs_k < K - k", "mask_k = offs_k < K"),
]
