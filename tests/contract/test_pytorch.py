"""An op is at home in PyTorch: the dispatcher, opcheck, autocast, torch.compile, CUDA graphs, streams, several GPUs."""

from collections.abc import Callable, Sequence
from itertools import cycle
from types import ModuleType
from typing import Any

import pytest
import torch
from case import Case, Draw, at, bits, check, copy, differentiable, with_gradients
from cases import each_case, each_dtype
from collect_cases import is_real
from device_key import at_cuda
from inputs import DEVICE
from torch.utils._pytree import tree_leaves

# NumPy's, of infinities, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
Load = Callable[[Case], ModuleType]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # of opcheck
needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")


def is_helper(case: Case) -> bool:
    """Whether a launcher calls the function, which leaves the GPU and torch.compile to it."""
    return case.plain and case.call.startswith("_")


def of_squares(results: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the squares of those results that have any."""
    return torch.autograd.grad([out.square().sum() for out in differentiable(results)], leaves)


def close_sums(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that gradients are close. One whose terms cancel is off by a rounding of those, which are far larger."""
    room = {}
    if expected.dtype == torch.float32 and expected.numel() > 0:
        room = {"rtol": 1.3e-6, "atol": max(1e-5, torch.finfo(torch.float32).eps * expected.abs().max().item())}
    torch.testing.assert_close(actual, expected, **room)


@each_case(lambda case: case.launcher and not case.plain)
def test_launcher_float32(load_op: Load, case: Case) -> None:
    """On a GPU a call goes straight to the launcher, which does what the op does."""
    op = load_op(case)
    function, arguments = case.function(op), case.arguments(Draw(case.usual), *case.small)
    changed = [copy(value) for value in case.changed(arguments)]
    results = case.results(at_cuda(function, *case.with_changed(arguments, changed)), changed)
    torch.testing.assert_close(results, case.on_copies(op)(*arguments), rtol=0, atol=0)


@each_case()
def test_deterministic_algorithms(load_op: Load, case: Case) -> None:
    """PyTorch then refuses what is not deterministic, and fills with NaN what is allocated; results stay right."""
    op = load_op(case)
    torch.use_deterministic_algorithms(True)
    try:
        check(case, op, case.usual, case.arguments(Draw(case.usual), *case.small))
        leaves, arguments = with_gradients(case, case.arguments(Draw(case.usual), *case.small))
        if leaves:
            grads = of_squares(tree_leaves(case.function(op)(*arguments)), leaves)
            assert all(grad.isfinite().all() for grad in grads)
    finally:
        torch.use_deterministic_algorithms(False)


@each_case()
@pytest.mark.parametrize("asked", [torch.float16, torch.bfloat16], ids=str)
def test_autocast(load_op: Load, case: Case, asked: torch.dtype) -> None:
    """Under torch.autocast it takes floats of several dtypes, and does what it does of those that autocast makes."""
    if not case.autocast and asked not in case.dtypes:
        pytest.skip(f"it takes no {asked}")
    function = case.on_copies(load_op(case))
    dtype = torch.float32 if case.autocast == torch.float32 else asked
    mixed = [torch.float32 if dtype == asked else asked, dtype] if case.autocast else [dtype]
    drawn = case.arguments(Draw(asked), *case.small)

    def in_dtypes(dtypes: Sequence[torch.dtype], wide_dtype: torch.dtype) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        turn = cycle(dtypes)

        def cast(value: Any) -> Any:
            if not is_real(value):
                return value
            # What is always wide, as a state, may come narrow.
            return value.to(next(turn)) if value.dtype == asked else value.to(asked).to(wide_dtype)

        return with_gradients(case, tuple(map(cast, drawn)) if case.autocast else drawn)

    (leaves, given), (exact_leaves, exact) = in_dtypes(mixed, asked), in_dtypes([dtype], torch.float32)
    with torch.autocast(DEVICE.type, asked):
        results = function(*given)
    expected = function(*exact)
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    if leaves:
        grads = of_squares(expected, exact_leaves)
        cast = [grad.to(leaf.dtype) for grad, leaf in zip(grads, leaves, strict=True)]
        torch.testing.assert_close(of_squares(results, leaves), tuple(cast), rtol=0, atol=0)


@each_case(lambda case: torch.float64 in case.dtypes)
def test_float64_under_autocast(load_op: Load, case: Case) -> None:
    """It stays float64."""
    function = case.on_copies(load_op(case))
    arguments = case.arguments(Draw(torch.float64), *case.small)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        results = function(*arguments)
    torch.testing.assert_close(results, function(*arguments), rtol=0, atol=0)


@each_case(lambda case: case.autocast == "asked")
def test_devices_under_autocast_float32(load_op: Load, case: Case) -> None:
    """Tensors on two devices are refused there, too."""
    first, *others = case.arguments(Draw(case.usual), *case.small)
    function = case.function(load_op(case))
    with torch.autocast(DEVICE.type, torch.bfloat16), pytest.raises((TypeError, ValueError), match="device"):
        function(first.to("meta"), *others)


@needs_a_gpu
@each_case()
def test_many_programs(load_op: Load, case: Case) -> None:
    """Where programs wait for a place, results are right too, and ten calls give the same."""
    op, arguments = load_op(case), case.arguments(Draw(case.usual), *case.many)
    first = check(case, op, case.usual, arguments)
    for _ in range(9):
        again = case.on_copies(op)(*arguments)
        assert all(torch.equal(bits(actual), bits(expected)) for actual, expected in zip(again, first, strict=True))


@needs_a_gpu
@each_dtype(lambda case: not case.plain)
def test_opcheck(load_op: Load, case: Case, dtype: torch.dtype) -> None:
    """PyTorch's own checks of an op pass: schema, autograd registration, fake tensors, AOT dispatch."""
    _, arguments = with_gradients(case, case.arguments(Draw(dtype), *case.small))
    # That of the schema compares arguments, which PyTorch does not do in float8.
    checks = CHECKS[1:] if any(is_real(value) and value.itemsize == 1 for value in arguments) else CHECKS
    outcomes = torch.library.opcheck(case.function(load_op(case)), arguments, test_utils=checks)
    assert set(outcomes.values()) == {"SUCCESS"}


@needs_a_gpu
@each_case(lambda case: not is_helper(case))
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(load_op: Load, case: Case, dynamic: bool, no_compile_cache: None) -> None:
    """torch.compile takes the op whole, with its gradient, at several sizes."""
    function = case.on_copies(load_op(case))
    torch.compiler.reset()
    compiled = torch.compile(lambda *arguments: function(*arguments), fullgraph=True, dynamic=dynamic)
    for size in (case.small, *case.sizes[:2]):
        with at(size):
            leaves, arguments = with_gradients(case, case.arguments(Draw(case.usual), *size))
            ways = [way(*arguments) for way in (compiled, function)]
            torch.testing.assert_close(*ways)
            if leaves:
                for ours, theirs in zip(*(of_squares(results, leaves) for results in ways), strict=True):
                    close_sums(ours, theirs)


@needs_a_gpu
@each_case(lambda case: case.autocast)
def test_compiled_autocast(load_op: Load, case: Case, no_compile_cache: None) -> None:
    """torch.compile keeps the rule for autocast, for results and gradients."""
    function = case.on_copies(load_op(case))
    dtype = torch.float32 if case.autocast == "asked" else torch.bfloat16
    leaves, arguments = with_gradients(case, case.arguments(Draw(dtype), *case.small))
    torch.compiler.reset()
    compiled = torch.compile(lambda *arguments: function(*arguments), fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        ways = [way(*arguments) for way in (compiled, function)]
    torch.testing.assert_close(*ways)
    if leaves:
        # What was computed in bfloat16 is compared so: Inductor may round what is around an op elsewhere.
        computed = torch.bfloat16 if case.autocast == "asked" else torch.float32
        torch.testing.assert_close(
            *(tuple(grad.to(computed) for grad in of_squares(results, leaves)) for results in ways)
        )


@needs_a_gpu
@each_case()
def test_cuda_graph(load_op: Load, case: Case) -> None:
    """A CUDA graph captures a call, and replays it for other values."""
    function = case.on_copies(load_op(case))
    arguments, others = (case.arguments(Draw(case.usual, seed=seed), *case.sizes[0]) for seed in (0, 100))
    function(*arguments)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(*arguments)
    for place, value in zip(tree_leaves(arguments), tree_leaves(others), strict=True):
        if isinstance(place, torch.Tensor):
            place.copy_(value)
    graph.replay()
    torch.testing.assert_close(results, function(*others), rtol=0, atol=0)


@needs_a_gpu
@each_case()
def test_stream(load_op: Load, case: Case) -> None:
    """It launches on the current stream: what was put there before is read, after a wait of some milliseconds."""
    function = case.on_copies(load_op(case))
    arguments = case.arguments(Draw(case.usual), *case.sizes[0])
    expected = function(*arguments)
    late = [value.clone().zero_() if isinstance(value, torch.Tensor) else value for value in arguments]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        for place, value in zip(late, arguments, strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(value)
        results = function(*late)
    torch.cuda.synchronize()
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_case(lambda case: not is_helper(case))
def test_another_gpu(load_op: Load, case: Case) -> None:
    """It runs where its arguments are, whichever GPU is the current one."""
    function = case.on_copies(load_op(case))
    on_first_gpu, on_second_gpu = (
        case.arguments(Draw(case.usual, device=torch.device(name)), *case.small) for name in ("cuda:0", "cuda:1")
    )
    leaves, on_second_gpu = with_gradients(case, on_second_gpu)
    results = function(*on_second_gpu)
    assert all(t.device == torch.device("cuda:1") for t in results)
    torch.testing.assert_close([t.cpu() for t in results], [t.cpu() for t in function(*on_first_gpu)])
    if leaves:
        grads = of_squares(results, leaves)
        assert all(grad.device == torch.device("cuda:1") for grad in grads)
