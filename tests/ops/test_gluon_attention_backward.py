"""The op of the recipe The backward of attention on Hopper: by a model of the GPU, as a compiler takes it, on a GPU."""

# ruff: noqa: N806 - lengths and head dimensions have the recipe's names

import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import ModuleType, SimpleNamespace
from typing import Any

import gluon_model
import pytest
import torch
from attentions import exact_backward, of_backward, shapes
from case import Case, Draw, assert_close, in_float64
from compiled import Ask, graphs
from device_key import at_cuda
from guard import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import DEVICE, Layout, layouts

HOPPER = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")

CPU = torch.device("cpu")
RECIPE = Path("attention") / "gluon_attention_backward.py"
HALVES = [torch.float16, torch.bfloat16]
ROOM = 227 * 1024  # bytes of shared memory


@pytest.fixture(scope="module")
def modelled(gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Return the recipe with a model in place of Gluon."""
    source = (gallery / RECIPE).read_text().replace('= "triton_gallery"', '= "modelled"')
    recipe = gluon_model.load(source, tmp_path_factory.mktemp("modelled") / "modelled_attention_backward.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "device_index", lambda _: nullcontext())
        patch.setattr(recipe, "_gluon_attention_backward_gpu", lambda _: None)
        yield recipe
    recipe.GLUON_ATTENTION_BACKWARD_LIBRARY._destroy()  # PyTorch 2.11 refuses a second one


SHAPES = shapes([64, 128], most=400)
# Around the edges of tiles, full or causal; heads alone and in groups; no keys, no queries; a scale of one's own
SIZES = [
    (2, 2, 1, 70, 150, 64, True),
    (1, 4, 2, 129, 65, 128),
    (1, 1, 1, 1, 300, 64),
    (1, 3, 3, 1, 1, 128, True),
]
SIZES += [(1, 2, 1, 5, 0, 64), (1, 2, 1, 0, 5, 64, True), (0, 2, 1, 5, 5, 64), (1, 2, 1, 70, 150, 64, False, 2.5)]
SIZES += [
    (1, 8, 4, *lengths, D, causal)
    for lengths in ((4096, 4096), (1000, 5000), (5000, 700), (1500, 1499))
    for D in (64, 128)
    for causal in (False, True)
]
CONTRACT = [
    Case(
        "gluon_attention_backward",
        of_backward,
        exact_backward,
        sizes=SIZES,
        small=(2, 4, 2, 70, 70, 64, True),
        many=(8, 24, 8, 1031, 131, 64, True),
        shapes=SHAPES,
        dtypes=HALVES,
        floor=lambda dtype: torch.finfo(dtype).eps * torch.finfo(dtype).smallest_normal,
    ),
]


def assert_gradients(module: ModuleType, *arguments: Any) -> None:
    """Assert that gradients are right, whole, and written nowhere else."""
    expected = exact_backward(*in_float64(arguments))
    tensors, (causal, scale) = arguments[:6], arguments[6:]
    results = guarded(partial(module._gluon_attention_backward_launch, causal=causal, scale=scale), *tensors)
    for out, right in zip(results, expected, strict=True):
        assert (out.dtype, out.shape) == (tensors[0].dtype, right.value.shape)
        assert out.is_contiguous()
        assert_close(CONTRACT[0], out.dtype, out, right)


@settings(max_examples=25)
@given(
    size=SHAPES,
    dtype=st.sampled_from(HALVES),
    drawn=st.lists(layouts(), min_size=5, max_size=5),
    seed=st.integers(0, 2**31),
)
def test_accumulator_by_a_model(
    modelled: ModuleType, size: tuple[Any, ...], dtype: torch.dtype, drawn: list[Layout], seed: int
) -> None:
    """Whatever happens first, the op is right: no wait is for ever, and nothing is written while it is read."""
    gluon_model.SEEDS[0] = seed
    assert_gradients(modelled, *of_backward(Draw(dtype, drawn, CPU), *size))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("lengths", [(200, 1000), (1000, 200), (600, 600), (129, 513)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_accumulator_of_many_steps_by_a_model(
    modelled: ModuleType, lengths: tuple[int, int], D: int, causal: bool, seed: int
) -> None:
    """More steps than buffers, of heads that share keys."""
    gluon_model.SEEDS[0] = seed
    arguments = of_backward(Draw(torch.float16, device=CPU, seed=seed), 1, 2, 1, *lengths, D, causal)
    assert_gradients(modelled, *arguments)
