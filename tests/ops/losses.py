"""What losses over classes have to be: shared by the tests of the cross entropies."""

# ruff: noqa: N806 - a row has N elements, as in the recipes

import torch
from case import Draw, Exact, accumulator
from inputs import DEVICE, FLOATS

# What is no normal number in the accumulator may be zero.
FLUSHED = {dtype: torch.finfo(accumulator(dtype)).tiny for dtype in FLOATS}


def targets(draw: Draw, lead: tuple[int, ...], N: int, share: float, other: int) -> torch.Tensor:
    """Make targets, of which a share is another number than a class."""

    def to_classes(t: torch.Tensor) -> torch.Tensor:
        classes = torch.floor(t / 2**40).remainder(max(N, 1))
        return classes.masked_fill(torch.floor(t / 2**20).remainder(1000) < 1000 * share, other)

    return draw(*lead, dtype=torch.int64, of=to_classes)


def zeros(draw: Draw, *shape: int) -> torch.Tensor:
    """Make targets, the first class of each row."""
    return draw(*shape, dtype=torch.int64).zero_()


def capped(x: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Return the logits that a loss with a softcap is of."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def hits(x: torch.Tensor, target: torch.Tensor, used: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Return the distribution that a row is compared with: NaN where its target is no class."""
    N = x.shape[-1]
    known = (target >= 0) & (target < N)
    hit = (torch.arange(N, device=x.device) == target[..., None]).double() * (1 - smoothing) + smoothing / max(N, 1)
    return hit.masked_fill((used & ~known)[..., None], torch.nan)


def exact_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss in float64, and the magnitudes of its terms."""
    used = target != ignore_index
    x = capped(x, softcap)
    losses = -(hits(x, target, used, smoothing) * torch.log_softmax(x, -1)).sum(-1)
    losses = (losses if x.shape[-1] else losses.fill_(torch.nan)).where(used, 0)
    largest = (x.abs().amax(-1) if x.shape[-1] else torch.zeros_like(losses)).where(used, 0) + losses.abs()
    largest = largest + (softcap or 0)
    if lse_square_scale and x.shape[-1]:
        lse = torch.logsumexp(x, -1).where(used, 0)
        losses = losses + lse_square_scale * lse**2
        largest = largest * (1 + 2 * lse_square_scale * lse.abs()) + lse_square_scale * lse**2
    if reduction == "none":
        return losses, largest
    count = used.sum() if reduction == "mean" else 1
    return losses.sum() / count, largest.sum() / count


def exact_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
) -> list[Exact]:
    """Return the gradient of the logits, and the magnitudes of what it is the difference of."""
    used = target != ignore_index
    scale = grad / used.sum() if reduction == "mean" else grad
    scale = scale.expand(target.shape)[..., None]
    x = capped(x, softcap)
    p, hit = torch.softmax(x, -1), hits(x, target, used, smoothing)
    if x.shape[-1]:
        p = p * (1 + 2 * lse_square_scale * torch.logsumexp(x, -1, keepdim=True))
    slope = 1 if softcap is None else 1 - (x / softcap) ** 2
    d, terms = ((part * scale).where(used[..., None], 0) for part in ((p - hit) * slope, p.abs() + hit))
    return [Exact(d, terms.abs())]


def special_rows(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make rows with NaN, infinities and the lowest numbers, and their targets.

    With label smoothing, PyTorch's sum overflows in the last three rows.
    """
    N, large = 3001, torch.finfo(dtype).max
    x = torch.zeros(12, N, dtype=dtype, device=DEVICE)
    x[0, 5], x[1, N - 1], x[2, 7], x[2, 8] = torch.nan, torch.inf, torch.inf, -torch.inf
    x[3], x[4, :2000], x[5, 1:], x[6, :-1] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    x[7, 0] = x[8, N - 1] = torch.nan
    x[9], x[10, 1::2], x[11, 0] = -large, -large, large
    target = torch.zeros(len(x), dtype=torch.int64, device=DEVICE)
    target[6] = N - 1
    return [(part, target.clamp(max=part.shape[1] - 1)) for part in (x, x[:, :5])]


def ignored_rows(draw: Draw) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make rows with NaN and an infinity where targets are -1; in the second case all targets are."""
    x = draw(4, 1000)
    x[1, 3], x[2, 0] = torch.nan, torch.inf
    return [(x, torch.tensor(classes, device=DEVICE)) for classes in ([5, -1, -1, 7], [-1] * 4)]


def rising_rows(dtype: torch.dtype) -> list[torch.Tensor]:
    """Return rows of which each block has a new maximum, or none has, and one whose sum is of many ones."""
    rising = torch.linspace(-6, 6, 40_001, dtype=torch.float64, device=DEVICE).to(dtype)
    return [rising, rising.flip(0), rising.roll(20_000), torch.zeros_like(rising), rising + 1000]


def reference(
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str = "mean",
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
) -> torch.Tensor:
    """Return PyTorch's loss, without what is ignored."""
    ignored = target == ignore_index
    x = capped(x.to(accumulator(x.dtype)).masked_fill(ignored[:, None], 0), softcap)
    loss = torch.nn.functional.cross_entropy(
        x, target, ignore_index=ignore_index, label_smoothing=smoothing, reduction=reduction
    )
    if not lse_square_scale:
        return loss
    squares = (lse_square_scale * torch.logsumexp(x, -1) ** 2).masked_fill(ignored, 0)
    if reduction == "none":
        return loss + squares
    return loss + squares.sum() / ((~ignored).sum() if reduction == "mean" else 1)
