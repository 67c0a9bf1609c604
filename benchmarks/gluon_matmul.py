"""Workloads of matmul/gluon_matmul beside other libraries."""

from functools import partial
from operator import attrgetter

from triton_gallery.libraries.workload import Function, Product, Workload

SQUARE = [(8192, 8192, 8192), (4096, 4096, 4096), (8192, 2048, 8192), (8192, 512, 8192)]  # M, K and N
LAYERS = [(8192, 4096, 14336), (4096, 7168, 2048), (4096, 2880, 5120), (1024, 4096, 14336)]


def matrices(random: Function, shape: tuple[int, ...], b_t: bool) -> tuple[object, ...]:
    """Return two matrices that can be multiplied, the second by rows or as a transpose."""
    rows, inner, columns = shape
    return random((rows, inner)), random((columns, inner)).T if b_t else random((inner, columns))


WORKLOADS = [
    Workload(
        "matmul/gluon_matmul",
        ours=attrgetter("gluon_matmul"),
        torch=attrgetter("matmul"),
        shapes=shapes,
        inputs=partial(matrices, b_t=b_t),
        forward=lambda shape, itemsize: Product(shape[0], shape[2], shape[1]),
        backward=None,
        variant=variant,
        dtype=dtype,
    )
    for variant, dtype, shapes, b_t in (
        ("fp16", "float16", SQUARE, False),
        ("", "bfloat16", [*SQUARE, *LAYERS], True),
    )
]
