"""Every op takes inputs of any strides, overlapping ones too, and writes every element of what it returns.

Each op runs twice, on inputs laid out in some way and on contiguous copies of them, with all that it allocates filled
with NaN. Results, what it writes, and gradients where it has them have to be the same.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import DEVICE, first_quickly
from own import collect, gradients, is_real, runs_here
from torch.utils._pytree import tree_leaves

OPS = [(recipe, *entry[:2]) for recipe, entry in collect("OPS") if len(entry) == 3]
WRITTEN = {"cross_entropy_in_place_": [0], "kv_cache_write_": [3, 4]}
# Arguments that stay as they are, since an op takes and says which strides of them it wants
KEPT = WRITTEN | {"decode_attention": [1, 2]}
ALIGNED = {"gluon_matmul", "persistent_matmul"}  # so of all of theirs


def unfolded(t: torch.Tensor) -> torch.Tensor:
    """Return what `x.unfold` of long vectors gives: each row begins one element after the one before it."""
    if t.ndim < 2 or not t.numel():
        return t
    rows = t.reshape(-1, *t.shape[-2:])
    long = torch.cat([rows[:, :, 0], rows[:, 0, 1:]], 1)
    steps, step = [1, 1], long.shape[1]
    for extent in reversed(t.shape[:-2]):
        steps.insert(0, step)
        step *= extent
    return long.as_strided(t.shape, steps)


def expanded(t: torch.Tensor) -> torch.Tensor:
    """Return the first of the first axis for all."""
    return t[:1].expand(t.shape) if t.ndim else t


def turned(t: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, the last axis outermost in memory."""
    return t.movedim(-1, 0).contiguous().movedim(0, -1) if t.ndim else t


def spread(t: torch.Tensor) -> torch.Tensor:
    """Return the same numbers with NaN, or zeros, between and before them."""
    if not t.ndim:
        return t
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1] + 1), torch.nan if is_real(t) else 0)
    wide[..., 1::2] = t
    return wide[..., 1::2]


def in_order(t: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy."""
    return t.clone(memory_format=torch.contiguous_format)


OVERLAPPING = [unfolded, expanded]


def run(
    name: str, op: Callable[..., Any], inputs: list[Any], lay: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Return the results and gradients of an op, and what it wrote; gradients of its results are laid out, too."""
    leaves = [t.detach() if is_real(t) else t for t in inputs]
    wanted = [t.requires_grad_() for t in leaves[: gradients(name)] if is_real(t)]
    out = tree_leaves(op(*leaves))
    out += [leaves[index] for index in WRITTEN.get(name, [])]
    if not wanted:
        return out
    results = [t for t in out if is_real(t) and t.requires_grad]
    generator = torch.Generator(DEVICE).manual_seed(1)
    grads = [lay(torch.randn(t.shape, dtype=t.dtype, device=DEVICE, generator=generator)) for t in results]
    return [*out, *torch.autograd.grad(results, wanted, grads)]


@pytest.mark.parametrize("lay", first_quickly(unfolded, expanded, turned, spread), ids=lambda lay: lay.__name__)
@pytest.mark.parametrize(("recipe", "name", "make"), OPS, ids=lambda value: value if isinstance(value, str) else "")
def test_any_strides(
    load_op: Callable[[str], ModuleType],
    poison: None,
    recipe: str,
    name: str,
    make: Callable[..., tuple[Any, ...]],
    lay: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    if not runs_here(recipe):
        pytest.skip(f"NOT TESTED: {recipe} needs another GPU")
    op = getattr(load_op(f"{recipe}.py"), name)
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = list(make(lambda *shape: torch.randn(shape, device=DEVICE, generator=generator), 51, 53))
    for index, t in enumerate(inputs):
        # Of integers, as of pages and positions, each may occur once only.
        lays = is_real(t) or (isinstance(t, torch.Tensor) and lay not in OVERLAPPING)
        if lays and index not in KEPT.get(name, []):
            inputs[index] = lay(t)
    copies = [in_order(t) if isinstance(t, torch.Tensor) else t for t in inputs]
    if name in ALIGNED and lay is not turned:
        with pytest.raises(ValueError, match=r"multiples of 16 bytes"):
            op(*inputs)
        return
    expected = run(name, op, copies, in_order if lay not in OVERLAPPING else lambda t: in_order(lay(t)))
    for one, right in zip(run(name, op, inputs, lay), expected, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "name", "make", "reference"),
    [(recipe, *entry) for recipe, entry in collect("OPS") if len(entry) == 3],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_like_pytorch(
    load_op: Callable[[str], ModuleType],
    recipe: str,
    name: str,
    make: Callable[..., tuple[Any, ...]],
    reference: Callable[..., Any],
) -> None:
    """The result of one call is what PyTorch computes: an example for any version of Triton."""
    if not runs_here(recipe):
        pytest.skip(f"NOT TESTED: {recipe} needs another GPU")
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = make(lambda *shape: torch.randn(shape, device=DEVICE, generator=generator), 48, 64)
    copies = [in_order(t) if isinstance(t, torch.Tensor) else t for t in inputs]
    found, expected = tree_leaves(getattr(load_op(f"{recipe}.py"), name)(*inputs)), tree_leaves(reference(*copies))
    for one, right in zip(found, expected, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gated_delta_rule", "linear_attention"])
def test_state_of_no_tokens(load_op: Callable[[str], ModuleType], name: str) -> None:
    """The last state is contiguous, as docstrings say, where it is the first one that was not."""
    op = getattr(load_op(f"attention/{name}.py"), name)
    q, k, v = torch.zeros(3, 2, 0, 3, 8, device=DEVICE)
    gates = [torch.zeros(2, 0, 3, device=DEVICE)] * (2 if name == "gated_delta_rule" else 1)
    state = torch.randn(2, 3, 8, 8, device=DEVICE).mT
    out, last = op(q, k, v, *gates, initial_state=state)
    assert out.shape == v.shape
    assert last.is_contiguous()
    assert torch.equal(last, state)
