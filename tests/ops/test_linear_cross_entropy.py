"""The op of the recipe Linear cross entropy, its gradients, and what it holds in memory."""

# ruff: noqa: N806 - T tokens, D features, V words, as in the recipe

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compiled import Ask, ptx, stack
from guard import guarded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inputs import DEVICE, FLOATS, Layout, layouts, sizes
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # of NumPy's infinities, in the interpreter


@pytest.fixture(scope="module")
def taken(load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op as whoever takes it imports it."""
    return load_op("fusion/linear_cross_entropy.py")


@pytest.fixture(params=[3, 2048])
def chunk(request: pytest.FixtureRequest, taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> int:
    """Have the op take so many tokens at a time."""
    monkeypatch.setattr(taken, "LINEAR_CROSS_ENTROPY_CHUNK", request.param)
    return request.param


def inputs(T: int, D: int, V: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return x, a weight that makes logits of about 1, and targets, one of five ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64) * max(1, D) ** -0.5
    targets = torch.randint(V, (T,), generator=generator)
    targets[torch.rand(T, generator=generator) < 0.2] = -100
    return x.to(dtype).to(DEVICE), weight.to(dtype).to(DEVICE), targets.to(DEVICE)


def exact(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss and both gradients in float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    logits = leaves[0].reshape(-1, weight.shape[1]) @ leaves[1].T
    loss = functional.cross_entropy(logits, targets.flatten())
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def ours(taken: ModuleType, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return the op's loss and both gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    loss = taken.linear_cross_entropy(*leaves, targets)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def assert_right(taken: ModuleType, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> None:
    """Assert that loss and gradients are as good as logits and gradients that are rounded to their dtype."""
    V, D = weight.shape
    T = targets.numel()
    rows, columns = x.detach().double().reshape(T, D), weight.detach().double()
    logits = rows @ columns.T
    counts = (targets.flatten() != -100).double()
    # Of each logit's gradient, the two terms, which may cancel
    terms = torch.softmax(logits, -1) + functional.one_hot(targets.flatten().clamp_min(0), V)
    terms = terms * (counts / counts.sum().clamp(min=1))[:, None]
    size = logits.abs().amax() + torch.tensor(float(V)).log() if T else torch.zeros(())
    magnitudes = [size, (terms @ columns.abs()).view(x.shape), terms.T @ rows.abs()]
    # A logit is off by its own rounding, which its exponential multiplies; then each chunk is rounded. A product over
    # the words rounds each of its sums: those errors grow with the root of their number.
    unit = torch.finfo(x.dtype).eps
    sums = V**0.5 * torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps / unit
    roundings = 4 + size.item() + D + chunks_of(taken, T) + sums
    least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    for one, other, magnitude in zip(
        ours(taken, x, weight, targets), exact(x, weight, targets), magnitudes, strict=True
    ):
        assert one.shape == other.shape
        assert torch.equal(one.isnan(), other.isnan())
        allowed = roundings * (unit * magnitude + least)
        assert ((one.double() - other).abs() <= allowed)[~other.isnan()].all()


def chunks_of(taken: ModuleType, T: int) -> int:
    """Return how many chunks the op takes."""
    return -(-T // taken.LINEAR_CROSS_ENTROPY_CHUNK)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=12)
@given(T=st.integers(0, 9), D=st.integers(1, 20), V=sizes(4096, 9000).filter(bool), seed=st.integers(0, 2**31))
@example(T=7, D=5, V=4096, seed=0)
@example(T=7, D=5, V=4097, seed=0)
def test_value_and_gradients(taken: ModuleType, dtype: torch.dtype, T: int, D: int, V: int, seed: int) -> None:
    """Loss and gradients are right for any size, with chunks of three tokens."""
    x, weight, targets = inputs(T, D, V, dtype, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taken, "LINEAR_CROSS_ENTROPY_CHUNK", 3)
        assert_right(taken, x, weight, targets)
        found = ours(taken, x, weight, targets)
        launch = partial(taken._linear_cross_entropy_launch, ignore_index=-100, of_x=True, of_weight=True)
        again = guarded(launch, x, weight, targets)
    torch.testing.assert_close([*again], found, rtol=0, atol=0, equal_nan=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [one.dtype for one in found] == [wide, dtype, dtype]


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@settings(max_examples=12)
@given(lead=st.sampled_from([(), (4,), (2, 3)]), of_x=layouts(), of_weight=layouts())
def test_layouts(taken: ModuleType, dtype: torch.dtype, lead: tuple[int, ...], of_x: Layout, of_weight: Layout) -> None:
    """Tensors of any layout and rank."""
    x, weight = of_x.make((*lead, 6), dtype, DEVICE), of_weight.make((50, 6), dtype, DEVICE)
    targets = torch.arange(x.numel() // 6, device=DEVICE).view(lead)
    assert_right(taken, x, weight, targets)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_alone(taken: ModuleType, dtype: torch.dtype, chunk: int) -> None:
    """Without one of the gradients, or without both, the rest is the same bits."""
    x, weight, targets = inputs(8, 16, 100, dtype)
    loss, of_x, of_weight = ours(taken, x, weight, targets)
    assert torch.equal(taken.linear_cross_entropy(x, weight, targets), loss)
    leaf = x.clone().requires_grad_()
    found = taken.linear_cross_entropy(leaf, weight, targets)
    assert torch.equal(found, loss)
    assert torch.equal(torch.autograd.grad(found, leaf)[0], of_x)
    leaf = weight.clone().requires_grad_()
    found = taken.linear_cross_entropy(x, leaf, targets)
    assert torch.equal(torch.autograd.grad(found, leaf)[0], of_weight)
    with torch.no_grad():
        assert not taken.linear_cross_entropy(x, leaf, targets).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_special_targets(taken: ModuleType, dtype: torch.dtype, chunk: int) -> None:
    """Another index to ignore; wrong targets are seen in everything; nothing that counts is NaN, as in PyTorch."""
    x, weight, targets = inputs(8, 16, 100, dtype)
    targets = targets.clamp_min(0)
    targets[2] = 7
    kept = targets != 7
    loss = taken.linear_cross_entropy(x, weight, targets, ignore_index=7)
    torch.testing.assert_close(loss, exact(x[kept], weight, targets[kept])[0].to(dtype))
    for wrong in (100, -1, 2**40):
        loss, of_x, of_weight = ours(taken, x, weight, targets.index_fill(0, torch.tensor(3, device=DEVICE), wrong))
        assert loss.isnan()
        assert of_x.isnan().any(1).tolist() == [token == 3 for token in range(8)]
        assert of_weight.isnan().all()
    for some, none in ((x, torch.full_like(targets, -100)), (x[:0], targets[:0])):
        found, expected = ours(taken, some, weight, none), exact(some, weight, none)
        torch.testing.assert_close(found, [one.to(dtype) for one in expected], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_special_logits(taken: ModuleType, dtype: torch.dtype) -> None:
    """Logits of 1e4 do not overflow; NaN and infinities stay in their row, but for the weight's gradient."""
    x, weight, targets = inputs(6, 4, 5000, dtype)
    targets = targets.clamp_min(0)
    assert_right(taken, 1e4 * x, weight, targets)
    x[1, 0], x[3, 1] = torch.nan, torch.inf
    loss, of_x, _ = ours(taken, x, weight, targets)
    assert loss.isnan()
    assert of_x.isnan().any(1).tolist() == [False, True, False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float16], ids=str)
def test_small_probabilities(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided by many tokens, a gradient is still no zero in float16."""
    monkeypatch.setattr(taken, "LINEAR_CROSS_ENTROPY_CHUNK", 256)
    x, weight, _ = inputs(1024, 1, 2000, dtype)
    x = x.abs() + 1
    targets = torch.zeros(1024, dtype=torch.int64, device=DEVICE)
    _, _, found = ours(taken, x, weight, targets)
    _, _, expected = exact(x, weight, targets)
    torch.testing.assert_close(found.double()[1:], expected[1:], rtol=2e-2, atol=2**-22)
    assert (found[1:] != 0).all()


def test_gradient_of_the_loss(taken: ModuleType) -> None:
    """A gradient other than one multiplies both; a second backward of one loss is refused."""
    x, weight, targets = inputs(8, 16, 100, torch.float64)
    _, *expected = ours(taken, x, weight, targets)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    loss = taken.linear_cross_entropy(*leaves, targets)
    found = torch.autograd.grad(-2.5 * loss, leaves, retain_graph=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, -2.5 * other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: f"{dtype} by torch.float32")
@given(size=sizes(4096, 9000), factor=st.sampled_from([1.0, 0.3, 2.0**17]))
def test_scale(taken: ModuleType, dtype: torch.dtype, size: int, factor: float) -> None:
    """A gradient is multiplied in the loss's precision, in which its factor is finite; what is behind is kept."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(size)
    room = torch.randn(size + 5000, generator=generator, dtype=torch.float64).mul(0.1).to(dtype).to(DEVICE)
    grad = torch.tensor(factor, dtype=wide, device=DEVICE)
    expected = room[:size].to(wide) * grad
    behind = room[size:].clone()
    taken._linear_cross_entropy_scale(room[:size], grad)
    torch.testing.assert_close(room[:size], expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    assert torch.equal(room[size:], behind)


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
def test_few_that_count(taken: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of many: what its gradient is multiplied by on the way is still a number of float16."""
    scales = []

    class Seen:
        """Stands where the kernel stands: a program for each of so many tokens would take minutes here."""

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *arguments, **known: scales.append(arguments[3].item())

    monkeypatch.setattr(taken, "_linear_cross_entropy_kernel", Seen())
    T = 2**17
    x, weight = (torch.ones(size, 1, dtype=dtype, device=DEVICE) for size in (T, 2))
    targets = torch.full((T,), -100, device=DEVICE)
    targets[7] = 0
    taken._linear_cross_entropy_launch(x, weight, targets, -100, True, True)
    assert set(scales) == {2.0**15}


def test_compiled(taken: ModuleType) -> None:
    """In torch.compile, values and gradients are those of eager calls, without a graph break."""
    x, weight, targets = inputs(8, 16, 100, torch.float32)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    step = torch.compile(lambda x, w, t: 2 * taken.linear_cross_entropy(x, w, t), fullgraph=True, backend="aot_eager")
    loss = step(*leaves, targets)
    expected = ours(taken, x, weight, targets)
    torch.testing.assert_close([loss, *torch.autograd.grad(loss, leaves)], [2 * one for one in expected])


def test_opcheck(taken: ModuleType) -> None:
    """What PyTorch asks of an op."""
    x, weight, targets = inputs(8, 16, 100, torch.float32)
    op = taken._linear_cross_entropy_forward
    which = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for wanted in ((True, True), (False, True), (False, False)):
        leaves = [tensor.clone().requires_grad_(want) for tensor, want in zip((x, weight), wanted, strict=True)]
        torch.library.opcheck(op, (*leaves, targets, -100, *wanted), test_utils=which)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest storage that is made."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Look at what an operator returns."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes())
        return out


def test_memory(taken: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is larger than the logits of a chunk, with or without gradients."""
    monkeypatch.setattr(taken, "LINEAR_CROSS_ENTROPY_CHUNK", 8)
    x, weight, targets = inputs(64, 4, 1001, torch.float32)
    for wanted in (False, True):
        with Largest() as largest:
            taken._linear_cross_entropy_launch(x, weight, targets, -100, wanted, wanted)
        assert largest.size == 8 * 1008 * 4


def test_backward_takes_no_memory(taken: ModuleType) -> None:
    """It multiplies in place, and nothing is made for the results that have no gradient."""
    x, weight, targets = (t.requires_grad_(t.is_floating_point()) for t in inputs(64, 400, 101, torch.float32))
    loss = taken.linear_cross_entropy(x, weight, targets)
    with Largest() as largest:
        torch.autograd.grad(2 * loss, (x, weight))
    assert largest.size <= 8


def test_refuses(taken: ModuleType) -> None:
    """What the op does not take, it names."""
    x, weight, targets = inputs(4, 8, 9, torch.float32)
    op = taken.linear_cross_entropy
    for wrong in ((x, weight.half(), targets), (x.long(), weight.long(), targets), (x, weight, targets.int())):
        with pytest.raises(TypeError, match="linear_cross_entropy takes x and weight of one float dtype and int64"):
            op(*wrong)
    for wrong in (
        (x, weight[:, 1:], targets),
        (x, weight[0], targets),
        (x, weight, targets[1:]),
        (x, weight[:0], targets),
        (x[..., :0], weight[:, :0], targets),
    ):
        with pytest.raises(ValueError, match=r"linear_cross_entropy takes x \(\.\.\., D\), weight \(V, D\) with V"):
            op(*wrong)


def at_launch(taken: ModuleType, dtype: str) -> dict[str, Any]:
    """Return what the kernel is compiled with at a launch."""
    import triton.language as tl

    acc = tl.float64 if dtype == "fp64" else tl.float32
    known = {"ACC": acc, "GRADIENT": True, "BLOCK_V": taken.LINEAR_CROSS_ENTROPY_BLOCK}
    pointers = {"targets_ptr": "i64", "losses_ptr": str(acc), "scale_ptr": str(acc)}
    options = {"num_warps": taken.LINEAR_CROSS_ENTROPY_WARPS, "multiples": ["room"]}
    return {"dtype": dtype} | known | pointers | options


def compiled_code(taken: ModuleType) -> dict[str, tuple[bool, bool, int]]:
    """Return, for each dtype, whether it loads and stores 16 bytes at once, and the bytes it spills."""
    found = {}
    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        known = at_launch(taken, dtype)
        code = ptx(taken._linear_cross_entropy_kernel, **known)
        wide = (re.search(rf"{way}\.global\.v[24]\.b(32|64)", code) is not None for way in ("ld", "st"))
        found[dtype] = (*wide, stack(taken._linear_cross_entropy_kernel, **known))
    return found


def test_compiled_code(gallery: Path, on_h100: Ask) -> None:
    """A vocabulary of any size is loaded and stored 16 bytes at once, and no register spills."""
    (found,) = on_h100(gallery.resolve() / "fusion" / "linear_cross_entropy.py", compiled_code)
    assert found == dict.fromkeys(("fp16", "bf16", "fp32", "fp64"), (True, True, 0))


def test_refuses_devices(taken: ModuleType) -> None:
    """Tensors of two devices."""
    x, weight, targets = inputs(4, 8, 9, torch.float32)
    with pytest.raises(ValueError, match="on one device"):
        taken._linear_cross_entropy_check(x, weight.to("meta"), targets)


# Ops for test_on_gpu.py and test_taken.py, with inputs that fit them, and the same through PyTorch.
OPS = [
    (
        "linear_cross_entropy",
        lambda normal, M, N: (normal(M, 24), normal(N, 24), torch.arange(M, device=DEVICE) % N),
        lambda x, weight, targets: functional.cross_entropy(functional.linear(x, weight), targets),
    ),
]

# Mutants for test_bite.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    (
        "sums over the room",
        'return tl.where(offs < V, z, -float("inf"))',
        "return z",
    ),
    (
        "sums that are not corrected",
        "s = s * tl.exp(m - larger) + tl.sum(tl.exp(z - larger), axis=0)\n        m = larger\n    loss",
        "s = s + tl.sum(tl.exp(z - larger), axis=0)\n        m = larger\n    loss",
    ),
    ("no one at the target", "d = tl.exp(z - m) / s - (offs == target).to(ACC)", "d = tl.exp(z - m) / s"),
    ("ignored tokens in the gradients", "d = tl.where(counts, d * scale, 0.0)", "d = d * scale"),
    ("ignored tokens multiplied by zero", "d = tl.where(counts, d * scale, 0.0)", "d = d * scale * counts.to(ACC)"),
    (
        "ignored tokens in the loss",
        "loss = tl.where(counts, m + tl.log(s) - chosen, 0.0)",
        "loss = m + tl.log(s) - chosen",
    ),
    ("wrong targets read", "known = counts & (target >= 0) & (target < V)", "known = counts"),
    ("wrong targets have gradients", 's = tl.where(chosen == chosen, s, float("nan"))', "s = s * 1.0"),
    (
        "the last chunk alone",
        "d_weight[some].addmm_(d.T, x[part], alpha=alpha)",
        "d_weight[some].addmm_(d.T, x[part], beta=0, alpha=alpha)",
    ),
    (
        "the last words left out of the gradient of x",
        "words = [slice(*edge) for edge in edges]\n    buffer",
        "words = [slice(*edge) for edge in edges[:1]]\n    buffer",
    ),
    ("ignored tokens in the mean", "count = (targets != ignore_index).sum()", "count = torch.ones_like(targets).sum()"),
    ("too large for float16", "total = min(max(T, 1), 2**15)", "total = max(T, 1)"),
    ("the loss's gradient left out", "if factor != 1.0:", "if factor != factor:"),
    (
        "a gradient multiplied past its end",
        "tl.store(d_ptr + offs, d * factor, mask=offs < numel)",
        "tl.store(d_ptr + offs, d * factor)",
    ),
    (
        "multiplied in half precision",
        "d = tl.load(d_ptr + offs, mask=offs < numel).to(factor.dtype)",
        "d = tl.load(d_ptr + offs, mask=offs < numel)\n        factor = factor.to(d.dtype)",
    ),
]
