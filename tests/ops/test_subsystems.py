"""The op of the recipe An op and PyTorch's subsystems, and what the page says of each registration."""

# ruff: noqa: N806 - extents are called M, N and K, as in the recipe

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import FLOATS, Layout, layouts, sizes

ROWS = st.integers(0, 7)  # each element of the output is a program
COLUMNS = sizes(64, 200)
NO_GPU_TENSOR = r"0 active drivers|cannot be accessed from Triton"
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")


def random(recipe: ModuleType, M: int, N: int, K: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return random inputs of a layer."""
    return [torch.randn(shape, dtype=dtype, device=recipe.DEVICE) for shape in ((M, K), (N, K))]


@pytest.fixture(scope="module")
def layer(recipe: ModuleType) -> list[torch.Tensor]:
    """Return small inputs."""
    torch.manual_seed(0)
    return random(recipe, 5, 3, 7)


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


def assert_right(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Assert that a layer's output is as good as its accumulator and its dtype."""
    exact = [tensor.double() for tensor in (x, weight)]
    assert out.dtype == x.dtype
    assert out.shape == (x.shape[0], weight.shape[0])
    assert out.is_contiguous()
    # Each of K terms is off by half a unit of the sum of magnitudes at most (twice that: the reference errs too).
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
    shapes = (M, K), (N, K)
    return [layout.make(each, dtype, recipe.DEVICE) for layout, each in zip(input_layouts, shapes, strict=True)]


of_two = st.tuples(layouts(), layouts())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=15)
@given(M=ROWS, N=ROWS, K=COLUMNS, drawn=of_two)
def test_kernel(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, K: int, drawn: tuple[Layout, ...]) -> None:
    """The kernel stays within its memory and is right for any shape and layout."""
    inputs = make(recipe, (M, N, K), dtype, drawn)
    assert_right(guarded(recipe.fused, *inputs), *inputs)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=15)
@given(M=ROWS, N=ROWS, K=COLUMNS, drawn=of_two)
def test_op(recipe: ModuleType, dtype: torch.dtype, M: int, N: int, K: int, drawn: tuple[Layout, ...]) -> None:
    """The op is right for tensors on the device, and for those on the CPU."""
    inputs = make(recipe, (M, N, K), dtype, drawn)
    assert_right(recipe.linear_relu(*inputs), *inputs)
    inputs = [tensor.cpu() for tensor in inputs]
    assert_right(recipe.linear_relu(*inputs), *inputs)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, in the interpreter
def test_special_values(recipe: ModuleType) -> None:
    """NaN and infinities do what they do in PyTorch, and stay in their row and column."""
    x, weight = (torch.ones(shape, device=recipe.DEVICE) for shape in ((7, 40), (6, 40)))
    x[1, 39], x[2, 0], x[3, 5], weight[5, 0] = torch.nan, -torch.inf, torch.inf, torch.nan
    expected = recipe.in_pytorch(x, weight)
    torch.testing.assert_close(recipe.fused(x, weight), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_wide_accumulator(recipe: ModuleType, dtype: torch.dtype) -> None:
    """In half precision 2048 + 1 is 2048; with an accumulator like that, the ones in the middle would be lost."""
    x = torch.tensor([2048, 1, -2048], dtype=dtype, device=recipe.DEVICE).repeat_interleave(64).expand(2, -1)
    ones = torch.ones(1, 192, dtype=dtype, device=recipe.DEVICE)
    assert recipe.fused(x, ones).tolist() == [[64]] * 2


def test_float32_is_not_rounded_to_tf32(recipe: ModuleType) -> None:
    """1 + 2**-20 has more bits than TF32."""
    x = torch.full((16, 16), 1 + 2**-20, device=recipe.DEVICE)
    eye = torch.eye(16, device=recipe.DEVICE)
    assert torch.equal(recipe.fused(x, eye), x)


def test_refuses(recipe: ModuleType, layer: list[torch.Tensor]) -> None:
    """What the op does not take, it names: in the kernel's launcher and on the CPU."""
    for op in (recipe.bare, recipe.linear_relu):
        for to in (recipe.DEVICE, "cpu"):
            x, weight = (tensor.to(to) for tensor in layer)
            with pytest.raises(TypeError, match=r"not torch\.float32, torch\.float64"):
                op(x, weight.double())
            with pytest.raises(TypeError, match=r"not torch\.int32"):
                op(x.int(), weight.int())
            for wrong in ((x[0], weight), (x, weight.T), (x, weight[0]), (x[None], weight)):
                with pytest.raises(ValueError, match=r"takes \(M, K\) and \(N, K\), on one device"):
                    op(*wrong)
    with pytest.raises(ValueError, match="one device"):
        recipe.fused(layer[0].to("meta"), layer[1])


def test_backward(recipe: ModuleType, bare: Callable[..., torch.Tensor]) -> None:
    """The formula is the derivative, twice; without it PyTorch says so."""
    inputs = [tensor.requires_grad_() for tensor in random(recipe, 3, 4, 5, torch.float64)]
    assert torch.autograd.gradcheck(recipe.linear_relu, inputs)
    assert torch.autograd.gradgradcheck(recipe.linear_relu, inputs)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        bare(*inputs).sum().backward()


def test_backward_treats_zero_and_nan_like_pytorch(recipe: ModuleType) -> None:
    """At zero the gradient of relu is zero, and a NaN passes it on."""
    x = torch.tensor([[0.0], [1.0], [torch.nan]], device=recipe.DEVICE)
    weight = torch.ones(1, 1, device=recipe.DEVICE)
    grads = [
        torch.autograd.grad(op(x.requires_grad_(), weight).sum(), x)[0]
        for op in (recipe.linear_relu, recipe.in_pytorch)
    ]
    assert grads[0].tolist() == grads[1].tolist() == [[0], [1], [1]]


def test_opcheck(recipe: ModuleType, layer: list[torch.Tensor], no_interpreter: None) -> None:
    """The registrations agree with each other."""
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    options = {} if recipe.DEVICE.type == "cuda" else {"test_utils": some}
    leaves = [tensor.clone().requires_grad_() for tensor in layer]
    assert set(torch.library.opcheck(recipe.linear_relu, leaves, **options).values()) == {"SUCCESS"}


def test_cpu(recipe: ModuleType, bare: Callable[..., torch.Tensor], no_interpreter: None) -> None:
    """The CPU implementation serves eager calls, torch.compile passes over it, a body that chooses serves both."""
    with pytest.raises((RuntimeError, ValueError), match=NO_GPU_TENSOR):
        bare(*recipe.on_cpu)
    assert_right(recipe.linear_relu(*recipe.on_cpu), *recipe.on_cpu)
    with pytest.raises((RuntimeError, ValueError), match=NO_GPU_TENSOR):
        recipe.compiled(recipe.linear_relu, *recipe.on_cpu)
    assert_right(recipe.compiled(recipe.chooses, *recipe.on_cpu), *recipe.on_cpu)


def test_another_device(recipe: ModuleType, bare: Callable[..., torch.Tensor]) -> None:
    """A device without Triton runs its own fallback; without one the body fails there."""
    x, weight = (recipe.to_other_device(tensor) for tensor in recipe.on_cpu)
    assert x.device.type == "privateuseone"
    out = recipe.linear_relu(x, weight)
    assert out.device.type == "privateuseone"
    assert_right(out.host, *recipe.on_cpu)
    with pytest.raises(NotImplementedError, match=r"'aten::empty\.memory_format' .* 'PrivateUse1'"):
        bare(x, weight)


# What each way to have a fallback makes of each use: PyTorch in the body, NumPy there, NumPy registered, and no op.
FALLBACKS = {
    "call": ["right"] * 4,
    "gradients": ["right", "right", "right", "error: RuntimeError: element 0 of tensors does not require grad"],
    "vmap": ["right", "right", "right", "error: RuntimeError: Cannot access data pointer"],
    "bfloat16": ["right", *["error: TypeError: Got unsupported ScalarType BFloat16"] * 3],
    "fake": ["right", "error: RuntimeError: .numpy() is not supported", "right", "error: RuntimeError: .numpy()"],
    "torch.compile": ["right", "error", "error", "right"],
    "torch.export": ["right", "error: RuntimeError: .numpy()", "right", "error: RuntimeError: .numpy()"],
    "recorded": ["right", "right", "right", "wrong: Tensor-likes are not close!"],
}


@pytest.mark.parametrize("use", FALLBACKS)
def test_fallback_of_numpy(recipe: ModuleType, no_interpreter: None, use: str) -> None:
    """If one of these differs, the conclusions on the page are to be written anew."""
    assert list(recipe.USES) == list(FALLBACKS)
    expected = recipe.USES[use](recipe.in_pytorch)
    outcomes = [recipe.outcome(recipe.USES[use], op, expected) for op in recipe.WAYS.values()]
    for outcome, start in zip(outcomes, FALLBACKS[use], strict=True):
        assert outcome.startswith(start)


def test_numpy_without_an_op_is_recorded_as_a_constant(recipe: ModuleType) -> None:
    x, weight = recipe.on_cpu
    graph = recipe.make_fx(recipe.in_numpy)(x, weight)
    assert torch.equal(graph(2 * x, weight), graph(x, weight))


def test_has_triton(recipe: ModuleType) -> None:
    """It asks whether there is a GPU; and no public module has it."""
    assert recipe.has_triton() == torch.cuda.is_available()
    assert recipe.has_triton_package()
    names = [name for name in list(sys.modules) if name.split(".")[0] == "torch" and "._" not in name]
    assert [name for name in names if "has_triton" in dir(sys.modules[name])] == []


def test_meta_for_free(layer: list[torch.Tensor], bare: Callable[..., torch.Tensor], no_interpreter: None) -> None:
    """Without the interpreter the body of a triton_op is its fake rule."""
    assert bare(*(tensor.to("meta") for tensor in layer)).shape == (5, 3)


@given(M=st.integers(0, 9), N=st.integers(0, 9), K=st.integers(0, 9))
def test_flops(recipe: ModuleType, M: int, N: int, K: int) -> None:
    """A product is counted with its op; a training step is three of them."""
    inputs = random(recipe, M, N, K)
    count = recipe.count
    assert count(recipe.linear_relu, *inputs).get_total_flops() == 2 * M * N * K
    assert count(recipe.gradients, recipe.linear_relu, *inputs).get_total_flops() == 6 * M * N * K


def test_flops_without_data(recipe: ModuleType, layer: list[torch.Tensor], no_interpreter: None) -> None:
    counter = recipe.count(recipe.linear_relu, *(tensor.to("meta") for tensor in layer))
    assert counter.get_total_flops() == 2 * 5 * 3 * 7


def test_table_of_flops(
    recipe: ModuleType, layer: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counter prints what `tabulate` draws, and without that package it fails."""
    rows = []
    module = SimpleNamespace(tabulate=lambda values, headers, colalign: rows.extend(values) or str(headers))
    monkeypatch.setitem(sys.modules, "tabulate", module)
    recipe.count(recipe.Layer(recipe.linear_relu, layer[1]), layer[0], display=True)
    assert capsys.readouterr().out == "['Module', 'FLOP', '% Total']\n"
    counts = [(name, float(flops), percent) for name, flops, percent in rows]
    assert counts == [("Layer", 210, "100.00%"), (" - triton_gallery.linear_relu", 210, "100.00%")]
    monkeypatch.setitem(sys.modules, "tabulate", None)
    with pytest.raises(ModuleNotFoundError, match="tabulate"):
        recipe.count(recipe.linear_relu, *layer, display=True)


def test_flops_missing_or_wrong(
    recipe: ModuleType, bare: Callable[..., torch.Tensor], layer: list[torch.Tensor]
) -> None:
    """Without a formula nothing is counted, the tutorial's form fails at the count, and there is only one."""
    assert recipe.count(bare, *layer).get_total_flops() == 0
    packet = torch.ops.triton_gallery.linear_relu_test
    recipe.register_flop_formula(packet)(lambda x_shape, weight_shape: 1)
    try:
        with pytest.raises(TypeError, match="unexpected keyword argument 'out_shape'"):
            recipe.count(bare, *layer)
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


def any_batch(dims: tuple[int | None, ...]) -> bool:
    """Return whether one of the inputs is a batch."""
    return dims != (None, None)


@given(
    B=st.integers(1, 3),
    M=st.integers(0, 4),
    dims=st.tuples(*[st.sampled_from([None, 0, 1, 2])] * 2).filter(any_batch),
)
def test_vmap(recipe: ModuleType, B: int, M: int, dims: tuple[int | None, ...]) -> None:
    """Samples and weights, in any dimension, alone and together."""
    inputs = random(recipe, M, 3, 5, torch.float64)
    batched = [
        t if dim is None else torch.stack([t + i for i in range(B)], dim) for t, dim in zip(inputs, dims, strict=True)
    ]
    with recipe.Calls() as calls:
        out = torch.vmap(recipe.linear_relu, dims)(*batched)
    torch.testing.assert_close(out, by_loop(recipe.in_pytorch, dims, batched))
    assert calls.count == (1 if dims[1] is None else B)


def test_vmap_of_vmap(recipe: ModuleType) -> None:
    """Two batches of samples are rows, too."""
    x, weight = random(recipe, 4, 3, 5, torch.float64)
    xs = torch.randn(2, 3, *x.shape, dtype=torch.float64, device=recipe.DEVICE)
    once = torch.vmap(recipe.linear_relu, (0, None))
    with recipe.Calls() as calls:
        out = torch.vmap(once, (0, None))(xs, weight)
    torch.testing.assert_close(out, torch.relu(xs @ weight.T))
    assert calls.count == 1


def test_vmap_has_gradients(recipe: ModuleType) -> None:
    """The backward of a batch is the sum over its samples."""
    x, weight = random(recipe, 4, 3, 5, torch.float64)
    xs = torch.stack([x, x + 1])
    mapped = torch.vmap(recipe.linear_relu, (0, None))
    expected = recipe.gradients(lambda xs, weight: torch.relu(xs @ weight.T), xs, weight)
    torch.testing.assert_close(recipe.gradients(mapped, xs, weight), expected)


def test_vmap_without_rule(recipe: ModuleType, bare: Callable[..., torch.Tensor], layer: list[torch.Tensor]) -> None:
    """It is right, and calls the op once for each sample."""
    x, weight = layer
    with recipe.Calls() as calls:
        out = torch.vmap(bare, (0, None))(torch.stack([x] * 4), weight)
    assert calls.count == 4
    assert_right(out[3], *layer)


def test_autocast(recipe: ModuleType, bare: Callable[..., torch.Tensor], layer: list[torch.Tensor]) -> None:
    """Inputs become bfloat16 whatever the region asks for, gradients keep the parameters' dtype."""
    half = [tensor.bfloat16() for tensor in layer]
    expected = recipe.in_pytorch(*(tensor.double() for tensor in half))
    for device in {"cpu", recipe.DEVICE.type}:
        inputs = [tensor.to(device) for tensor in layer]
        with torch.autocast(device, torch.bfloat16):
            out = recipe.linear_relu(inputs[0].bfloat16(), inputs[1])
            assert recipe.linear_relu(*(tensor.double() for tensor in inputs)).dtype == torch.float64
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.double(), expected.to(device), rtol=2**-7, atol=1e-6)
    with torch.autocast(recipe.DEVICE.type, torch.float16):
        assert recipe.linear_relu(*layer).dtype == torch.bfloat16
        assert bare(*layer).dtype == torch.float32
    with torch.autocast(recipe.DEVICE.type, torch.bfloat16):
        grads = recipe.gradients(recipe.linear_relu, *layer)
    assert grads.dtype == torch.float32
    expected = recipe.gradients(recipe.in_pytorch, *layer)
    assert (grads - expected).norm() < 0.02 * expected.norm()


def test_autocast_registered_twice(
    recipe: ModuleType, bare: torch._library.custom_ops.CustomOpDef, layer: list[torch.Tensor]
) -> None:
    """The first registration stays."""
    bare.register_kernel("cpu", recipe.in_pytorch)
    bare.register_autocast("cpu", torch.bfloat16)
    bare.register_autocast("cpu", torch.float16)
    with torch.autocast("cpu", torch.float16):
        assert bare(*(tensor.cpu() for tensor in layer)).dtype == torch.bfloat16


def test_subclass(recipe: ModuleType, bare: Callable[..., torch.Tensor], layer: list[torch.Tensor]) -> None:
    """An int8 weight passes through the registered op, backward included, and not through the bare one."""
    x, weight = layer
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    int8 = recipe.Int8Weight((weight / scale).round().to(torch.int8), scale)
    assert (int8.shape, int8.dtype, int8.device) == (weight.shape, weight.dtype, weight.device)
    assert (int8.dequantize() - weight).abs().max() <= scale.max() / 2 * 1.01
    assert_right(recipe.linear_relu(x, int8), x, int8.dequantize())
    grads = [
        recipe.gradients(lambda x, op=op, w=w: op(x, w), x)
        for op, w in ((recipe.linear_relu, int8), (recipe.in_pytorch, int8.dequantize()))
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError, match="returned NotImplemented"):
        bare(x, int8)


def test_function(recipe: ModuleType) -> None:
    """What torch.func cannot do with the op, or does wrongly, it does or refuses with the Function."""
    x, weight = random(recipe, 4, 3, 5, torch.float64)

    def sample_gradients(op: Callable[..., torch.Tensor]) -> torch.Tensor:
        def loss(weight: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
            return op(sample[None], weight).square().sum()

        return torch.vmap(torch.func.grad(loss), (None, 0))(weight, x)

    torch.testing.assert_close(sample_gradients(recipe.LinearReLU.apply), sample_gradients(recipe.in_pytorch))
    with pytest.raises((RuntimeError, NotImplementedError), match="forward mode AD"):
        torch.func.jvp(lambda x: recipe.LinearReLU.apply(x, weight), (x,), (x,))


def test_what_no_registration_covers(recipe: ModuleType, layer: list[torch.Tensor]) -> None:
    """If one of these fails, PyTorch has mended it: say so on the page."""
    x, weight = layer
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: recipe.linear_relu(x, weight).sum())(x)
    _, tangent = torch.func.jvp(lambda x: recipe.linear_relu(x, weight), (x,), (x,))
    assert not tangent.any()


def test_outcome(recipe: ModuleType, layer: list[torch.Tensor]) -> None:
    """The page's judge tells right from wrong."""
    expected = recipe.in_pytorch(*layer)

    def judge(op: Callable[..., torch.Tensor]) -> str:
        return recipe.outcome(lambda op: op(*layer), op, expected)

    assert judge(recipe.in_pytorch) == "right"
    for wrong in (0 * expected, torch.nan * expected, 1.1 * expected):
        assert judge(lambda *_, out=wrong: out).startswith("wrong: Tensor-likes are not close!")
    assert "torch.float64 != torch.float32" in judge(lambda *_: expected.double())
    assert judge(lambda *_: 1 / 0) == "error: ZeroDivisionError: division by zero"


@gpu
def test_together(recipe: ModuleType) -> None:
    """On a GPU, vmap and autocast compile into one graph around the kernel."""
    x, weight = random(recipe, 40, 70, 96)
    xs = torch.stack([x, x + 1])
    mapped = torch.vmap(recipe.linear_relu, (0, None))

    @torch.compile(fullgraph=True)
    def layer(xs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return mapped(xs, weight)

    out = layer(xs)
    assert out.dtype == torch.bfloat16
    expected = torch.relu(xs.double() @ weight.double().T)
    assert (out.double() - expected).norm() < 0.01 * expected.norm()


@gpu
def test_kernel_and_cpu_agree(recipe: ModuleType) -> None:
    """The two implementations of the op give the same numbers."""
    inputs = random(recipe, 70, 130, 200)
    on_cpu = recipe.linear_relu(*(tensor.cpu() for tensor in inputs))
    torch.testing.assert_close(recipe.linear_relu(*inputs).cpu(), on_cpu, rtol=1e-4, atol=1e-4)


@pytest.mark.needs_gpu_memory(10)
def test_beyond_int32(recipe: ModuleType) -> None:
    """Either input may have more than 2**31 elements."""
    for M, N in ((2**16 + 1, 1), (1, 2**16 + 1)):
        x, weight = (torch.zeros(rows, 2**15, dtype=torch.float16, device=recipe.DEVICE) for rows in (M, N))
        x[-1, -1], weight[-1, -1] = 3, 2
        out = recipe.linear_relu(x, weight)
        assert out[-1, -1] == 6
        assert out.sum(dtype=torch.float32) == 6


def test_loads_twice(load_recipe: Callable[[str], ModuleType], recipe: ModuleType, layer: list[torch.Tensor]) -> None:
    """A second import takes the place of the first, whose ops are gone: so this test comes last."""
    again = load_recipe("pytorch/subsystems.py")
    assert again.count(again.linear_relu, *layer).get_total_flops() == 2 * 5 * 3 * 7
    assert_right(again.linear_relu(*layer), *layer)


# Ops for test_on_gpu.py, with inputs that fit them.
OPS = [
    ("linear_relu", lambda normal, M, N: (normal(M, 257), normal(N, 257))),
]

# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("the ragged end of a product", "mask = offs_k < K", "mask = offs_k < BLOCK_K"),
    ("the weight's row", "weight_ptr + column * K", "weight_ptr + row * K"),
]
