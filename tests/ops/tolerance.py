"""How far a result may be off: by the roundings in its accumulator, and by the last one, to its own dtype."""

import torch


def assert_within(
    out: torch.Tensor,
    expected: torch.Tensor,
    magnitude: torch.Tensor,
    roundings: int,
    floor: float | torch.Tensor = 0,
) -> None:
    """Assert that a result differs from the float64 `expected` by no more than that.

    Args:
        out: the result, accumulated in float64 if that is its dtype, else in float32.
        expected: the exact result.
        magnitude: for each element, the sum of the absolute values of what is added up: that may cancel, errors do not.
        roundings: how many a term goes through in the accumulator, one after another.
        floor: what may be lost besides, for results too small for the accumulator.
    """
    unit = 2**-53 if out.dtype == torch.float64 else 2**-24
    # The last rounding: a whole unit, since the interpreter cuts where a GPU rounds.
    last = torch.finfo(out.dtype)
    allowed = roundings * unit * magnitude + last.eps * expected.abs() + last.tiny * last.eps + floor
    # An infinity is one, and the same.
    allowed = allowed.masked_fill(expected.isinf(), 0)
    number = out.detach().double()
    # What may be beyond the largest number may be an infinity, too.
    beyond = (expected.abs() + allowed > last.max) & (number == expected.sign() * torch.inf)
    error = (number - expected).abs().masked_fill((number == expected) | beyond, 0)
    assert (error <= allowed).all(), f"off by {(error / allowed).max().item():.1f} times the tolerance"
