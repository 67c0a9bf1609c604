"""How the peers compare results."""

import pytest
import torch
from setting import BF16, F64, GPU


def leaves(*tensors, dtype=None):
    """Return copies that require a gradient; None stays."""
    return [None if t is None else t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors]


def several(x):
    return list(x) if isinstance(x, tuple | list) else [x]


def grads(outs, inputs, given):
    outs, given = several(outs), several(given)
    return torch.autograd.grad(outs, inputs, [g.to(o.dtype) for g, o in zip(given, outs, strict=True)])


def near(found, expected, atol, rtol, what="result"):
    """As torch.allclose, for tensors of any dtype and size."""
    if text := differs(found, expected, atol, rtol, what):
        pytest.fail(text)


def differs(found, expected, atol, rtol, what):
    """Say by how much two tensors differ, or return None."""
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    if not GPU and found.dtype == BF16:  # Triton's interpreter cuts bfloat16 off, and does not round
        rtol = rtol + torch.finfo(BF16).eps
    a, b = found.detach().reshape(-1), expected.detach().reshape(-1)
    for n in range(0, a.numel(), 1 << 24):
        x, y = a[n : n + (1 << 24)].double(), b[n : n + (1 << 24)].double()
        bad = ~torch.isclose(x, y, atol=atol, rtol=rtol)
        if bad.any():
            worst = ((x - y).abs() - rtol * y.abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).argmax().item()
            return (
                f"{what}: {int(bad.sum())} of {x.numel()} differ by more than atol {atol}, rtol {rtol}; "
                f"at {n + worst}: {x[worst].item()!r}, not {y[worst].item()!r}"
            )
    return None


def check(call, reference, inputs, atol, rtol, given=None, factors=None):
    """Compare results and gradients with the reference in the inputs' dtypes, as the peers do.

    Where they differ by more than the tolerance, the reference in float64 decides: PyTorch in half precision may be
    further from it than the op is. ``factors`` multiply atol for the gradients.
    """
    a, b = leaves(*inputs), leaves(*inputs)
    outs, rights = several(call(*a)), several(reference(*b))
    given = [torch.randn_like(x) for x in rights] if given is None else several(given)
    found, expected = [*outs, *grads(outs, a, given)], [*rights, *grads(rights, b, given)]
    bounds = [atol * f for f in [1.0] * len(outs) + list(factors or [1.0] * len(a))]
    names = [f"output {n}" for n in range(len(outs))] + [f"gradient {n}" for n in range(len(a))]
    rows = list(zip(names, found, expected, bounds, strict=True))
    wrong = {n: text for n, (what, x, y, bound) in enumerate(rows) if (text := differs(x, y, bound, rtol, what))}
    if wrong:
        c = leaves(*inputs, dtype=F64)
        exact = several(reference(*c))
        exact = [*exact, *grads(exact, c, given)]
        for n in wrong:
            if text := differs(found[n], exact[n], bounds[n], rtol, names[n]):
                pytest.fail(f"{wrong[n]}; and with float64: {text}")


def furthest(a, b):
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def within(found, reference, plain, factor, extra=0.0, what="output"):
    """FlashAttention's criterion: our error is at most so many times PyTorch's own in this dtype."""
    assert found.shape == reference.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(reference.shape)}"
    ours, theirs = furthest(found, reference), furthest(plain, reference)
    if not GPU and found.dtype == BF16 and found.numel():  # the interpreter cuts it off
        extra += torch.finfo(BF16).eps * reference.abs().max().item()
    assert not found.isnan().any(), f"{what}: NaN"
    assert ours <= factor * theirs + extra, f"{what}: error {ours:.3g}, PyTorch's {theirs:.3g}, extra {extra:.1g}"


def arithmetic(x):
    """The rounding of any arithmetic on x, as FlashAttention's tests take it."""
    return ((x + 0.3 - 0.3) - x).abs().max().item() if x.numel() else 0.0


def all_within(outs, inputs, upstream, factors, extra):
    """Compare output and gradients of ours, of the reference and of PyTorch in the dtype, given all three outputs.

    The bounds are those of FlashAttention 3, which leave room for the rounding of any arithmetic.
    """
    within(*outs, factors[0], extra[0] + 2 * arithmetic(outs[1]))
    upstream = torch.randn_like(outs[1]) if upstream is None else upstream
    for n, (one, right, rough) in enumerate(zip(*(grads(x, inputs, upstream) for x in outs), strict=True)):
        # Of sinks: their gradient is that of the rounded result, and of so few numbers PyTorch's may be right by luck.
        if right.ndim == 1:
            extra = extra[0], extra[1] + torch.finfo(right.dtype).eps * right.abs().max().item()
        within(one, right, rough, factors[1], extra[1] + 2 * arithmetic(right), f"gradient {n}")


def ratio(found, reference, most, what="result", atol=1e-6):
    """FLA's criterion: the root mean square of the error, by that of the reference."""
    assert found.shape == reference.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(reference.shape)}"
    assert not found.isnan().any(), f"{what}: NaN"
    error, size = (x.detach().double() for x in (found.double() - reference.double(), reference))
    if error.numel() and error.abs().max().item() > atol:
        rate = error.square().mean().sqrt().item() / (size.square().mean().sqrt().item() + 1e-8)
        assert rate < most, f"{what}: rate {rate:.5f}, at most {most}; largest error {error.abs().max().item():.3g}"


def same_bits(call, inputs, upstream, turns):
    """Results and gradients agree bit for bit from call to call."""
    first = None
    for _ in range(turns):
        out = call()
        found = (out, *grads(out, inputs, upstream))
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
