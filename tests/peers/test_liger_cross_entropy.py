"""Liger-Kernel: test/transformers/test_cross_entropy.py, test/megatron/test_cross_entropy.py."""

import torch
import torch.nn.functional as F
from comparing import check, leaves, near
from losses import predictions
from losses import reference as loss_of
from setting import BF16, DEVICE, F16, F32, composed, each, not_taken, pick, rand, randint, randn

from triton_gallery_ops.cross_entropy import cross_entropy
from triton_gallery_ops.cross_entropy_in_place import cross_entropy_in_place_

# They take 2 * 4096 tokens; 2 * 1024 leave room for several processes, and one case below has all.
SIZES = pick([(2, 1024, 32000), (3, 423, 32000)], [(2, 8, 1000), (3, 5, 1003)])
REDUCTIONS = ("sum", "mean", "none")
in_sizes = each("B, T, V", *SIZES)
in_dtypes = each("dtype, atol, rtol", (BF16, 1e-8, 5e-2), (F32, 1e-8, 1e-6))
also_in_place = each("in_place", False, True)


class InPlace(torch.autograd.Function):
    """The op whose gradient takes the place of the logits, as its page says to call it."""

    @staticmethod
    def forward(ctx, logits, options):
        grad = logits.detach().clone()
        loss = cross_entropy_in_place_(grad, **options)
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx, given):
        return ctx.saved_tensors[0] * (given[..., None] if given.ndim else given), None


def ours(logits, targets, in_place=False, **options):
    if in_place:
        return InPlace.apply(logits, {"targets": targets, **options})
    return cross_entropy(logits, targets, **options)


def problem(B, T, V, dtype, ignore_index=None):
    x, target = randn(B * T, V, dtype=dtype), randint(0, V, (B * T,))
    if ignore_index is not None:
        target[torch.randperm(B * T, device=DEVICE)[: int(torch.randint(1, B * T // 2, ()))]] = ignore_index
    return x, target


def compare(x, target, atol, rtol, in_place=False, factor=1, softcap=None, lse_square_scale=0.0, **options):
    given = torch.ones_like if factor == 1 else torch.rand_like
    known = {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean", **options}
    ignore_index, smoothing, reduction, *others = known.values()
    extra = softcap, lse_square_scale, *others
    shape = x.shape[:-1] if reduction == "none" else ()
    more = {"softcap": softcap, "lse_square_scale": lse_square_scale}

    def reference(x):
        loss = loss_of(x.flatten(0, -2), target.flatten(), ignore_index, smoothing, reduction, *extra)
        return loss.view(shape) * factor

    call = lambda x: ours(x, target, in_place, **more, **options) * factor  # noqa: E731
    check(call, reference, (x,), atol, rtol, given(torch.empty(shape, device=DEVICE)))


# test_correctness, _with_ignore_index, _with_label_smoothing and _not_last_layer
CASES = [(size, {"reduction": r, "in_place": p}) for size in SIZES for r in REDUCTIONS for p in (False, True)]
CASES += [
    (size, {"ignore_index": i, "reduction": r}) for size, i in zip(SIZES, (2, -123), strict=True) for r in REDUCTIONS
]
CASES += [
    (SIZES[n], {"ignore_index": ignored, "label_smoothing": smoothing, "in_place": p})
    for n, ignored, smoothing in ((0, -100, 0.1), (1, -100, 0.1), (0, 1, 0.1), (1, -300, 0.2))
    for p in (False, True)
]
CASES += [(size, {"factor": 3, "reduction": reduction}) for size in SIZES for reduction in ("sum", "mean")]


@each("size, options", *CASES)
@in_dtypes
def test_correctness(size, options, dtype, atol, rtol):
    compare(*problem(*size, dtype, options.get("ignore_index")), atol, rtol, **options)


def test_all_their_tokens():
    compare(*problem(*pick((2, 4096, 32000), (2, 16, 1000)), BF16), 1e-8, 5e-2)


@each("size, ignore_index", *zip(SIZES, (-100, 2), strict=True))
@each("reduction", *REDUCTIONS)
@each("dtype, tol", (F32, 1e-4), (F16, 1e-2), (BF16, 1e-2))
def test_forward_only(size, ignore_index, reduction, dtype, tol):
    x, target = problem(*size, dtype)
    with torch.no_grad():
        found = ours(x, target, ignore_index=ignore_index, reduction=reduction)
        near(found, loss_of(x, target, ignore_index, 0.0, reduction), tol, tol, "loss")
    assert not found.requires_grad


@each("dtype", BF16, F16)
@each("smoothing", 0.0, 0.1)
@each("reduction", "sum", "mean")
@also_in_place
def test_confident_predictions(dtype, smoothing, reduction, in_place):
    """The gradient at the right class is a small difference: it may lose no more than PyTorch's own."""
    rows, V = 128, pick(4096, 512)
    x, target, at = randn(rows, V), randint(0, V, (rows,)), torch.arange(rows, device=DEVICE)
    x[at, target] = x.max(-1).values + 10
    a, b, (c,) = *leaves(x.to(dtype)), *leaves(x.to(dtype)), leaves(x.to(dtype), dtype=F32)
    ours(a, target, in_place, label_smoothing=smoothing, reduction=reduction).backward()
    for one in (b, c):
        F.cross_entropy(one, target, label_smoothing=smoothing, reduction=reduction).backward()
    mine, plain, right = (one.grad[at, target].double() for one in (a, b, c))
    error, theirs = (mine - right).abs().max().item(), (plain - right).abs().max().item()
    assert error <= max(4 * theirs, torch.finfo(dtype).tiny), f"error {error:.3g}, PyTorch's {theirs:.3g}"


@each("size", *SIZES)
def test_target_out_of_range(size):
    """Theirs is an assertion on the CPU; ours is documented to make the loss and the row's gradient NaN."""
    x, target = problem(*size, BF16)
    target[1] = size[2] + 3
    (a,) = leaves(x)
    loss = ours(a, target)
    loss.backward()
    assert loss.isnan()
    assert a.grad[1].isnan().all()
    assert not a.grad[0].isnan().any()


OPTIONS = ("softcap", "z_loss", "weight", "token_accuracy", "predicted_tokens")


@in_sizes
@in_dtypes
@each("what, in_place", *((what, False) for what in OPTIONS), *((what, True) for what in OPTIONS[:2]))
def test_option(B, T, V, dtype, atol, rtol, what, in_place):
    """In theirs, all are of one op; the soft cap and the z-loss are asked of the one in place too."""
    x, target = problem(B, T, V, dtype, -1)
    if what in OPTIONS[:3]:
        options = {"softcap": {"softcap": 30.0}, "z_loss": {"lse_square_scale": 1e-4}, "weight": {"weight": rand(V)}}
        compare(
            x, target, atol, rtol, in_place, ignore_index=-1, label_smoothing=0.0, reduction="mean", **options[what]
        )
        return
    found = ours(x, target, ignore_index=-1, **{f"return_{what}": True})
    expected = dict(zip(OPTIONS[3:], predictions(x, target, "mean"), strict=True))[what]
    near(found[0], loss_of(x, target, -1, 0.0), 1e-2, 1e-2, "loss")
    near(found[1], expected, 1e-6, 1e-6, what)


# --- Megatron: logits of (tokens, batch, vocabulary), a loss for each; the reference is in float32


@each("s, b, v", (8, 2, 128), (16, 4, 4096), (32, 1, 32000))
@each("dtype, atol, rtol", (F32, 1e-6, 1e-5), (BF16, 1e-2, 1e-2))
def test_megatron(s, b, v, dtype, atol, rtol):
    compare(randn(s, b, v, dtype=dtype) * 0.5, randint(0, v, (s, b)), atol, rtol, reduction="none")


@each("ignore_index, smoothing", (0, 0.0), (-100, 0.1))
def test_megatron_options(ignore_index, smoothing):
    x, target = randn(16, 2, 1024), randint(0, 1024, (16, 2))
    target.view(-1)[:8] = ignore_index
    compare(x, target, 1e-6, 1e-5, ignore_index=ignore_index, label_smoothing=smoothing, reduction="none")


def test_megatron_parallel():
    not_taken("parallel")


@composed
def test_megatron_smoothing():
    """Megatron's smoothing leaves out the target: it is that of more, V / (V - 1) times."""
    V, smoothing = 1024, 0.1
    x, target = randn(16, V), randint(0, V, (16,))

    def theirs(x):
        logs = torch.log_softmax(x, -1)
        right = logs.gather(-1, target[:, None])[:, 0]
        return -(1 - smoothing) * right - smoothing * (logs.sum(-1) - right) / (V - 1)

    call = lambda x: ours(x, target, label_smoothing=smoothing * V / (V - 1), reduction="none")  # noqa: E731
    check(call, theirs, (x,), 1e-6, 1e-5)
