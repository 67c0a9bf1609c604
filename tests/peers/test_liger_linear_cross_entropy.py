"""Liger-Kernel: test/transformers/test_fused_linear_cross_entropy.py."""

import torch
import torch.nn.functional as F
from comparing import check, leaves, near
from losses import predictions
from losses import reference as loss_of
from setting import BF16, DEVICE, F16, F32, each, pick, rand, randint, randn

from triton_gallery_ops.linear_cross_entropy import linear_cross_entropy

SIZES = pick([(8, 128, 1024, 4096), (4, 47, 31, 123)], [(2, 16, 64, 300), (4, 47, 31, 123)])
in_sizes = each("sizes", *SIZES)
in_dtypes = each("dtype, atol, rtol", (BF16, 5e-3, 5e-2), (F32, 1e-5, 5e-4))


def problem(sizes, dtype, ignore_index=-100, draw=rand):
    B, T, H, V = sizes
    x, weight, target = randn(B * T, H, dtype=dtype), draw(V, H, dtype=dtype), randint(0, V, (B * T,))
    if ignore_index is not None and B * T > 4:
        target[torch.randperm(B * T, device=DEVICE)[: int(torch.randint(1, B * T // 2, ()))]] = ignore_index
    return x, weight, target


def compare(x, weight, target, atol, rtol, ignore_index=-100, needs=(True, True)):
    a, b = leaves(x, weight), leaves(x, weight)
    for tensor, needed in zip([*a, *b], needs * 2, strict=True):
        tensor.requires_grad_(needed)
    found = linear_cross_entropy(*a, target, ignore_index)
    expected = F.cross_entropy(F.linear(*b).float(), target, ignore_index=ignore_index)
    near(found, expected, atol, rtol, "loss")
    found.backward()
    expected.backward()
    for what, one, right, needed in zip(("x", "weight"), a, b, needs, strict=True):
        if needed:
            near(one.grad, right.grad, atol, rtol, f"gradient of {what}")
        else:
            assert one.grad is None


@in_sizes
@in_dtypes
@each("ignore_index", -100, 42, 2)
@each("needs", (True, True), (True, False), (False, True))
def test_correctness(sizes, dtype, atol, rtol, ignore_index, needs):
    compare(*problem(sizes, dtype, ignore_index), atol, rtol, ignore_index, needs)


@each("sizes", (2, 2, 8, 8), (9, 7, 41, 41))
@in_dtypes
def test_functional(sizes, dtype, atol, rtol):
    compare(*problem(sizes, dtype, draw=randn), atol, rtol)


@in_sizes
@in_dtypes
def test_forward_only(sizes, dtype, atol, rtol):
    x, weight, target = problem(sizes, dtype)
    with torch.no_grad():
        found = linear_cross_entropy(*leaves(x, weight), target)
    near(found, F.cross_entropy(F.linear(x, weight).float(), target), atol, rtol, "loss")
    assert not found.requires_grad


@in_sizes
@each("cast", BF16, F16)
@each("by_hand", False, True)
def test_amp(sizes, cast, by_hand):
    """Under autocast, with float32 leaves, which the op casts; also cast before."""
    x, weight, target = problem(sizes, F32, None)
    a, b = leaves(x, weight), leaves(x, weight)
    with torch.autocast(DEVICE.type, dtype=cast):
        found = linear_cross_entropy(*((t.to(cast) for t in a) if by_hand else a), target)
        expected = F.cross_entropy(F.linear(*b).float(), target)
    near(found, expected, 5e-3, 5e-2, "loss")
    found.backward()
    expected.backward()
    for what, one, right in zip(("x", "weight"), a, b, strict=True):
        near(one.grad, right.grad, 5e-3, 5e-2, f"gradient of {what}")


OPTION = ["bias", "ce_weight", "label_smoothing", "lse_square_scale", "softcap", "sum", "none"]
OPTION += ["token_accuracy", "predicted_tokens", "use_token_scaling", "accum_dtype"]


@in_sizes
@each("what", *OPTION)
def test_option(sizes, what):
    """In float32, as Liger's functional tests; accum_dtype in bfloat16, where it is of use."""
    dtype = BF16 if what == "accum_dtype" else F32
    x, weight, target = problem(sizes, dtype, -1, randn)
    weight = weight / sizes[2] ** 0.5
    V = sizes[3]
    if what in ("token_accuracy", "predicted_tokens"):
        found = linear_cross_entropy(x, weight, target, -1, **{f"return_{what}": True})
        expected = predictions(F.linear(x, weight), target, "mean")[what == "predicted_tokens"]
        near(found[0], loss_of(F.linear(x, weight), target, -1, 0.0), 1e-5, 5e-4, "loss")
        near(found[1], expected, 1e-6, 1e-6, what)
        return
    options = {
        "ce_weight": {"ce_weight": rand(V)},
        "label_smoothing": {"label_smoothing": 0.1},
        "lse_square_scale": {"lse_square_scale": 1e-3},
        "softcap": {"softcap": 30.0},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        "use_token_scaling": {"use_token_scaling": True},
        "accum_dtype": {"accum_dtype": F32},
    }.get(what, {})

    def reference(x, weight, bias=None):
        logits, get = F.linear(x, weight, bias), options.get
        known = get("reduction", "mean"), get("softcap"), get("lse_square_scale", 0.0), get("ce_weight")
        if what != "use_token_scaling":
            return loss_of(logits, target, -1, get("label_smoothing", 0.0), *known)
        losses = loss_of(logits, target, -1, 0.0, "none")
        return (losses * (-losses.detach()).exp()).sum() / (target != -1).sum()

    def call(x, weight, bias=None):
        return linear_cross_entropy(x, weight, target, -1, bias=bias, **options)

    inputs = (x, weight, randn(V)) if what == "bias" else (x, weight)
    atol, rtol = (1e-5, 5e-4) if dtype == F32 else (5e-3, 5e-2)
    check(call, reference, inputs, atol, rtol)
