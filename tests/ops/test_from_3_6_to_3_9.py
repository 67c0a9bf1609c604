"""The recipe Migrate kernels: its forms of one kernel, what a descriptor takes, and what torch.compile sees."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import TRITON, Ask
from guard import guarded
from hypothesis import given
from inputs import Layout, layouts, sizes

PATH = "first_steps/from_3_6_to_3_9.py"
ROWS, COLUMNS = sizes(16, 40), sizes(128, 300)  # around a block of the recipe, and some of them


@given(M=ROWS, N=COLUMNS, of_x=layouts())
def test_plain_pointers_float32(recipe: ModuleType, M: int, N: int, of_x: Layout) -> None:
    """A maximum is one of its inputs, so all results are equal."""
    x = of_x.make((max(M, 1), max(N, 1)), torch.float32, recipe.DEVICE)
    out = guarded(lambda x: recipe.amax(recipe.pointer_kernel, x, *x.stride()), x)
    assert torch.equal(out, x.abs().amax(1))


@given(M=ROWS, N=COLUMNS, of_x=layouts())
def test_launcher_float32(recipe: ModuleType, M: int, N: int, of_x: Layout) -> None:
    """It takes every layout, through whichever form fits."""
    x = of_x.make((max(M, 1), max(N, 1)), torch.float32, recipe.DEVICE)
    assert torch.equal(guarded(recipe.largest_of_rows, x), x.abs().amax(1))


@given(M=ROWS, N=COLUMNS, of_x=layouts())
def test_what_a_descriptor_takes_float32(recipe: ModuleType, M: int, N: int, of_x: Layout) -> None:
    """The launcher's question has the answer of Triton's own check."""
    x = of_x.make((max(M, 1), max(N, 1)), torch.float32, recipe.DEVICE)
    try:
        recipe.TensorDescriptor.from_tensor(x, [16, 128])
    except AssertionError:
        assert not recipe.fits_descriptor(x)
    else:
        assert recipe.fits_descriptor(x)


def test_each_reason_of_a_refusal_float32(recipe: ModuleType) -> None:
    x = torch.randn(37, 304, 2, device=recipe.DEVICE)
    assert recipe.fits_descriptor(x[:, :, 0].contiguous())
    for reason, refused in (
        ("its last stride is 2", x[:, :, 0]),
        ("its rows have 1212 bytes", torch.randn(37, 303, device=recipe.DEVICE)),
        ("it begins 4 bytes after a multiple of 16", x.view(37, 608)[:, 1:305]),
    ):
        assert not recipe.fits_descriptor(refused), reason


@given(M=ROWS, quarter=sizes(32, 75))
def test_descriptors_float32(recipe: ModuleType, M: int, quarter: int) -> None:
    x = torch.randn(max(M, 1), 4 * max(quarter, 1), device=recipe.DEVICE)
    for form in (recipe.amax_device, recipe.amax_host):
        assert torch.equal(guarded(form, x), x.abs().amax(1))


@pytest.mark.skipif(TRITON >= (3, 9), reason="NOT TESTED: Triton 3.9 has no block pointers")
@given(M=ROWS, N=COLUMNS)
def test_block_pointers(recipe: ModuleType, M: int, N: int) -> None:
    x = torch.randn(max(M, 1), max(N, 1), device=recipe.DEVICE)
    assert torch.equal(recipe.amax(recipe.block_pointer_kernel, x, *x.stride()), x.abs().amax(1))


def test_padding_of_a_maximum_float32(recipe: ModuleType) -> None:
    x = -1 - torch.rand(19, 140, device=recipe.DEVICE)
    assert torch.equal(recipe.row_max(x, repair=True), x.amax(1))
    assert not recipe.row_max(x, repair=False).any()


def written(taken: ModuleType) -> list[str]:
    """Return which arguments of `publish_kernel` torch.compile takes for written."""
    from torch._higher_order_ops import triton_kernel_wrap

    arguments = {"out_ptr": torch.zeros(4), "value": 1.0}
    if hasattr(triton_kernel_wrap, "identify_mutated_tensors"):  # of PyTorch 2.11
        return list(triton_kernel_wrap.identify_mutated_tensors(taken.publish_kernel, arguments, {}))
    accessed = triton_kernel_wrap.identify_accessed_tensors(taken.publish_kernel, arguments, {})
    return [dep.name for dep in accessed.read_writes.writes]


@pytest.mark.skipif(TRITON < (3, 9), reason="NOT TESTED: needs Triton 3.9 as in _build/triton of make newest")
def test_torch_compile_overlooks_an_atomic_store(gallery: Path, on_h100: Ask) -> None:
    """Should PyTorch learn to see it, the page has to say from which version on."""
    assert on_h100(gallery / PATH, written) == [[]]


@pytest.mark.skipif(TRITON < (3, 9), reason="NOT TESTED: needs Triton 3.9 as in _build/triton of make newest")
def test_an_op_says_what_it_writes(recipe: ModuleType) -> None:
    out = torch.compile(recipe.published_by_op, backend="aot_eager")(torch.zeros(4, device=recipe.DEVICE))
    assert out.tolist() == [1] * 4


def test_answers(gallery: Path, load_recipe: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """Each exercise is wrong as it stands, and right with its answer."""
    source = (gallery / PATH).read_text()
    answers = {
        ".reshape((BLOCK_N, BLOCK_M))": ".T",
        "return torch.empty(M, N, device=DEVICE)  # yours": (
            "return torch.empty(M, triton.cdiv(N, 4) * 4, device=DEVICE)[:, :N]"
        ),
    }
    for old, new in answers.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
        assert new.strip("[]()").removeprefix("return ")[:30] in (gallery / PATH).read_text()
    (tmp_path / "answered.py").write_text(source)
    recipe, answered = load_recipe(PATH), load_recipe(str(tmp_path / "answered.py"))
    x = torch.randn(37, 300, device=recipe.DEVICE)
    for module, right in ((recipe, False), (answered, True)):
        out = torch.empty(300, device=recipe.DEVICE)
        desc = module.TensorDescriptor.from_tensor(x, [module.BLOCK_M, module.BLOCK_N])
        module.column_kernel[(3,)](desc, out, 37, 300, BLOCK_M=module.BLOCK_M, BLOCK_N=module.BLOCK_N)
        assert torch.equal(out, x.abs().amax(0)) is right
        assert module.fits_descriptor(module.aligned(37, 301)) is right


BREAKS = [
    ("columns without a mask", "mask = mask_m[:, None] & (offs_n < N)[None, :]", "mask = mask_m[:, None]"),
    (
        "results without a mask",
        "tl.store(out_ptr + offs_m, largest, mask=mask_m)",
        "tl.store(out_ptr + offs_m, largest)",
    ),
    ("last stride not asked for", "        and x.stride(1) == 1\n", ""),
    ("row's bytes not asked for", "        and x.stride(0) * itemsize % 16 == 0\n", ""),
    ("address not asked for", "        and x.data_ptr() % 16 == 0\n", ""),
    ("padding left in a maximum", "        if REPAIR:", "        if False:"),
    (
        "descriptor of too few columns",
        "shape=[M, N],\n        strides=[stride_xm, 1]",
        "shape=[M, N - 1],\n        strides=[stride_xm, 1]",
    ),
]
