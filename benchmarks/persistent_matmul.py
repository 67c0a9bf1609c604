"""Workloads of matmul/persistent_matmul beside other libraries."""

from functools import partial
from operator import attrgetter
from typing import Any

from triton_gallery.libraries.workload import Function, Product, Workload, layers

SQUARE = [(8192, 8192, 8192), (4096, 4096, 4096), (8192, 2048, 8192), (8192, 512, 8192)]  # M, K and N
LAYERS = [(8192, 4096, 14336), (4096, 7168, 2048), (4096, 2880, 5120), (1024, 4096, 14336)]


def products(shape: tuple[int, ...], itemsize: int, times: int = 1) -> Product:
    """Return the work of so many products of a size."""
    rows, inner, columns = shape
    return Product(rows, columns, times * inner)


def matrices(random: Function, shape: tuple[int, ...], a_t: bool = False, b_t: bool = True) -> tuple[Any, ...]:
    """Return two matrices that can be multiplied, each by rows or as a transpose."""
    rows, inner, columns = shape
    a = random((inner, rows)).detach().T if a_t else random((rows, inner)).detach()
    b = random((columns, inner)).detach().T if b_t else random((inner, columns)).detach()
    return a.requires_grad_(), b.requires_grad_()


WORKLOADS = [
    Workload(
        "matmul/persistent_matmul",
        ours=attrgetter("persistent_matmul"),
        torch=attrgetter("matmul"),
        shapes=shapes,
        inputs=partial(matrices, a_t=a_t, b_t=b_t),
        forward=products,
        backward=partial(products, times=2) if variant == "" else None,
        variant=variant,
        dtype=dtype,
    )
    for variant, dtype, shapes, a_t, b_t in (
        ("fp16", "float16", SQUARE, False, False),
        ("", "bfloat16", [*SQUARE, *LAYERS], False, True),
        ("tokens", "bfloat16", layers(128, 512, 2048, 16384), False, True),
        ("a transposed", "bfloat16", SQUARE[:2], True, False),
        ("both transposed", "bfloat16", SQUARE[:2], True, True),
    )
]
