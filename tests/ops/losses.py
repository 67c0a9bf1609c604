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


def class_weights(draw: Draw, N: int) -> torch.Tensor:
    """Make a positive weight for each class."""
    return draw(N, of=lambda w: w.abs() + 0.25)


def of_targets(weight: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the weight of each target, 0 where it is ignored or no class."""
    known = (target != ignore_index) & (target >= 0) & (target < len(weight))
    return torch.cat([weight, weight.new_zeros(1)])[target.where(known, len(weight))]


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
    weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss in float64, and the magnitudes of its terms."""
    used = target != ignore_index
    count = used.sum() if reduction == "mean" else 1
    total = count if weight is None or reduction != "mean" else of_targets(weight, target, ignore_index).sum()
    x = capped(x, softcap)
    factors = hits(x, target, used, smoothing) * (1 if weight is None else weight)
    losses = -(factors * torch.log_softmax(x, -1)).sum(-1)
    losses = (losses if x.shape[-1] else losses.fill_(torch.nan)).where(used, 0)
    largest = (x.abs().amax(-1) if x.shape[-1] else torch.zeros_like(losses)).where(used, 0)
    if weight is not None and x.shape[-1]:
        largest = largest * weight.max()
    largest = largest + losses.abs()
    squares = torch.zeros_like(losses)
    if lse_square_scale and x.shape[-1]:
        lse = torch.logsumexp(x, -1).where(used, 0)
        squares = lse_square_scale * lse**2
        largest = largest * (1 + 2 * lse_square_scale * lse.abs())
    if reduction == "none":
        return losses + squares, largest + squares
    squares = squares.sum() / count
    return losses.sum() / total + squares, largest.sum() / total + squares


def exact_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str,
    softcap: float | None = None,
    lse_square_scale: float = 0.0,
    weight: torch.Tensor | None = None,
) -> list[Exact]:
    """Return the gradient of the logits, and the magnitudes of what it is the difference of."""
    used = target != ignore_index
    of_rows = grad / used.sum() if reduction == "mean" else grad
    scale = of_rows
    x = capped(x, softcap)
    p, hit = torch.softmax(x, -1), hits(x, target, used, smoothing)
    of_lse = torch.ones_like(hit[..., :1])
    if weight is not None:
        if reduction == "mean":
            scale = grad / of_targets(weight, target, ignore_index).sum()
        hit = hit * weight
        of_lse = hit.sum(-1, keepdim=True)
    of_rows, scale = (factor.expand(target.shape)[..., None] for factor in (of_rows, scale))
    of_lse = of_lse * scale
    if x.shape[-1]:
        of_lse = of_lse + 2 * lse_square_scale * torch.logsumexp(x, -1, keepdim=True) * of_rows
    slope = 1 if softcap is None else 1 - (x / softcap) ** 2
    parts = p * of_lse, hit * scale
    d, terms = ((parts[0] - parts[1]) * slope, parts[0].abs() + parts[1].abs())
    return [Exact(d.where(used[..., None], 0), terms.where(used[..., None], 0))]


def rows_of_equals(dtype: torch.dtype, N: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make rows in which several logits are the largest, and targets: one is -1, one such a logit, one another."""
    generator = torch.Generator().manual_seed(N)
    x = torch.randint(-3, 4, (7, N), generator=generator).to(DEVICE, dtype)
    x[4], x[5] = 0, -torch.inf
    target = torch.randint(0, N, (7,), generator=generator).to(DEVICE)
    target[0], target[1], target[2] = x[0].argmax(), -1, x[2].argmin()
    return x, target


def predictions(x: torch.Tensor, target: torch.Tensor, reduction: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how often the first of the largest logits is the target, and which it is; -1 is ignored."""
    first = torch.stack([(row == row.max()).nonzero()[0, 0] for row in x]).where(target != -1, -1)
    hits = (first == target).float().where(target != -1, 0)
    return hits if reduction == "none" else hits.sum() / (target != -1).sum(), first


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
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return PyTorch's loss, without what is ignored."""
    ignored = target == ignore_index
    x = capped(x.to(accumulator(x.dtype)).masked_fill(ignored[:, None], 0), softcap)
    loss = torch.nn.functional.cross_entropy(
        x,
        target,
        None if weight is None else weight.to(x.dtype),
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction=reduction,
    )
    if not lse_square_scale:
        return loss
    squares = (lse_square_scale * torch.logsumexp(x, -1) ** 2).masked_fill(ignored, 0)
    if reduction == "none":
        return loss + squares
    return loss + squares.sum() / ((~ignored).sum() if reduction == "mean" else 1)
