"""What the compiler makes of the ops' kernels for an H100, as `make compile` keeps it: it fits, and spills nothing."""

import pytest
from project import ROOT

from triton_gallery.compiled import store
from triton_gallery.compiled.gpus import GPUS
from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.op import op_of

(HOPPER,) = (gpu for gpu in GPUS if gpu.key == "sm_90")
SPILLED = {  # bytes a thread; whether they cost time was not measured
    "_cross_entropy_kernel": 8,
    "_gluon_attention_backward_kernel": 8,
    "_hopper_attention_kernel": 112,
    "_layer_norm_backward_kernel": 144,
    "_linear_attention_kernel": 24,
    "_softmax_backward_kernel": 72,
    "_varlen_attention_dkdv_kernel": 104,
}


@pytest.mark.parametrize(
    "recipe", [recipe for recipe in load(ROOT / "gallery") if op_of(recipe)], ids=lambda recipe: recipe.key
)
def test_kernels_fit_an_h100(recipe: Recipe) -> None:
    kept, op = store.load(ROOT / "docs" / "_compiled", recipe), op_of(recipe)
    if kept is None or not kept.is_fresh(recipe):
        pytest.skip("NOT TESTED: its code has changed since make compile")
    kernels = [kernel for kernel in kept.of(op) if HOPPER.key in kernel.on]
    assert kernels
    for kernel in kernels:
        name, compiled = kernel.launch.kernel, kernel.on[HOPPER.key]
        assert compiled.verdict(HOPPER) == (store.FITS, ""), name
        assert compiled.spilled <= SPILLED.get(name, 0), name
