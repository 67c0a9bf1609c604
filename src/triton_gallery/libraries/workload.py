"""What is measured beside other libraries: an op at several sizes, and how much it does there.

Those of a recipe stand in `benchmarks/<recipe>.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import ModuleType
from typing import Any, ClassVar

from triton_gallery.recipe.tables import BYTES, OPERATIONS

Function = Callable[..., Any]


@dataclass(frozen=True)
class Bytes:
    """Workload that moves bytes, counted as the algorithm needs them, whatever a library really moves."""

    read: float
    written: float
    unit: ClassVar[str] = BYTES

    def rate(self, milliseconds: float) -> float:
        """Return the gigabytes in a second."""
        return (self.read + self.written) * 1e-6 / milliseconds

    def roof(self, dtype: Any, device: Any) -> Function:
        """Return what moves as many bytes and does nothing else: a copy, or an addition where more is read."""
        import torch

        moved = 3 if self.read > self.written > 0 else 2
        size = max(1, round((self.read + self.written) / moved / dtype.itemsize))
        out, source, other = (torch.randn(size, dtype=dtype, device=device) for _ in range(3))
        return partial(torch.add, source, other, out=out) if moved == 3 else partial(out.copy_, source)


@dataclass(frozen=True)
class Product:
    """Workload that computes: as many operations as the product of an M x K and a K x N matrix.

    Workload of another kind names a product of as many operations that the vendor's library does well.
    """

    M: int
    N: int
    K: int
    unit: ClassVar[str] = OPERATIONS

    def rate(self, milliseconds: float) -> float:
        """Return the tera-operations in a second."""
        return 2 * self.M * self.N * self.K * 1e-9 / milliseconds

    def roof(self, dtype: Any, device: Any) -> Function:
        """Return the vendor's product."""
        import torch

        random = partial(torch.randn, dtype=dtype, device=device)
        return partial(torch.matmul, random(self.M, self.K), random(self.N, self.K).T)


Amount = Callable[[tuple[int, ...], int], Bytes | Product]


def tensors(read: int, written: int) -> Amount:
    """Return the work of reading and writing so many tensors of the size `shape`."""

    def amount(shape: tuple[int, ...], itemsize: int) -> Bytes:
        size = math.prod(shape) * itemsize
        return Bytes(read * size, written * size)

    return amount


COPY, ADD = tensors(1, 1), tensors(2, 1)


@dataclass(frozen=True)
class Workload:
    """One op at several sizes, forward and backward.

    All functions take what `inputs` returns, then `constants`.

    Attributes:
        recipe: `section/name` of ours.
        ours: returns our op, given the recipe's module.
        torch: the same in plain PyTorch, given the module `torch`.
        compiles: whether `torch.compile` gets it too.
        shapes: the sizes.
        inputs: returns the tensors, given what makes random ones of a shape, and one of `shapes`.
        constants: further arguments.
        forward: returns how much is done, given one of `shapes` and the bytes of an element.
        backward: the same; None where only the forward is measured.
        libraries: of a name in LIBRARIES, what returns that library's function, given its module.
        variant: what tells it from the recipe's other rows. On pages, what follows "drawn" is left out.
        dtype: of the random tensors.
        called: returns how PyTorch's function, the compiled one and a library's is called, where not as it is.
        alike: returns what of two results, a library's and ours, has to be the same.
    """

    recipe: str
    ours: Callable[[ModuleType], Function]
    torch: Callable[[Any], Function]
    shapes: Sequence[tuple[int, ...]]
    inputs: Callable[[Function, tuple[int, ...]], tuple[Any, ...]]
    compiles: bool = True
    constants: tuple[Any, ...] = ()
    forward: Amount = COPY
    backward: Amount | None = ADD
    libraries: dict[str, Callable[[ModuleType], Function]] = field(default_factory=dict)
    variant: str = ""
    dtype: str = "bfloat16"
    called: Callable[[Function], Function] = lambda function: function
    alike: Callable[[Any, Any], tuple[Any, Any]] = lambda output, ours: (output, ours)

    @property
    def directions(self) -> dict[str, bool]:
        """Which ways it is measured: what the rows are called, and whether they are of the backward."""
        name = ", ".join(filter(None, [self.recipe.rpartition("/")[2], self.variant]))
        return {name: False} if self.backward is None else {f"{name}, forward": False, f"{name}, backward": True}

    def amount(self, shape: tuple[int, ...], itemsize: int, backward: bool) -> Bytes | Product:
        """Return how much is done at a size, one way."""
        counted = self.backward if backward and self.backward else self.forward
        return counted(shape, itemsize)


def drawn_size(random: Random, least: int, most: int) -> int:
    """Return a size, drawn alike over its logarithm."""
    return round(math.exp(random.uniform(math.log(least), math.log(most))))


def drawn_rows(
    seed: int, rows: tuple[int, int], columns: tuple[int, int], most: int, unit: int = 1, rest: int = 0
) -> tuple[int, int]:
    """Return a number of rows and their length, each drawn between two bounds.

    They are no more than `most` numbers, and `unit` divides the length but for `rest`.
    """
    random = Random(seed)  # noqa: S311 - no secret
    M, N = drawn_size(random, *rows), drawn_size(random, *columns)  # noqa: N806 - sizes
    return min(M, max(1, most // N)), max(unit, (N - rest) // unit * unit + rest)


def floats(output: Any, ours: Any) -> tuple[Any, Any]:
    """Return two results to compare if they are floats: PyTorch may choose other indices of equal values than we."""
    return (output, ours) if output.is_floating_point() else (ours, ours)


def layers(*tokens: int) -> list[tuple[int, int, int]]:
    """Return sizes M, K and N of models' layers, for so many tokens each, with results of less than 2**31 elements."""
    weights = [(4096, 14336), (7168, 2048), (2880, 5120), (5120, 151936)]
    return [(M, K, N) for K, N in weights for M in tokens if M * N < 2**31]


def hidden(*more: tuple[int, int]) -> list[tuple[int, int]]:
    """Return sizes of activations: 4096 tokens of the hidden sizes of models, and further ones."""
    return [*((4096, size) for size in (768, 2048, 2880, 3584, 4096, 5120, 7168, 12288, 16384)), *more]
