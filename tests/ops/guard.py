"""Memory with guards: stores out of bounds, outputs not written and inputs changed are found out.

A kernel that stores behind the end of its output usually changes another tensor and nobody notices. Under a `Guard`,
every tensor that the code allocates lies inside a larger buffer. The bytes on both sides have a known pattern, which is
compared at the end; the tensor itself is filled with poison, so that an element nobody wrote is seen in the result.
"""

from collections.abc import Callable
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

PAD = 256 * 1024  # bytes on each side; more than a block of a recipe, times the strides that the tests use
POISON = 0xFF  # NaN in every floating dtype, -1 in signed integers, no valid bool

EMPTY = {
    torch.empty,
    torch.empty_like,
    torch.empty_permuted,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}
FILLED = {
    torch.zeros,
    torch.zeros_like,
    torch.Tensor.new_zeros,
    torch.ones,
    torch.ones_like,
    torch.Tensor.new_ones,
    torch.full,
    torch.full_like,
    torch.Tensor.new_full,
}


class Guard(TorchFunctionMode):
    """Guard the tensors allocated inside the `with`, and those given to `place`."""

    def __init__(self) -> None:
        """Begin with nothing to guard."""
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.changed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; move what it allocated between guards."""
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            func = self._opened(func)
        result = func(*args, **(kwargs or {}))
        if func not in EMPTY and func not in FILLED:
            return result
        if result.device.type == "meta":
            return result
        buffer, tensor = _between_guards(result)
        if func in EMPTY:
            buffer[PAD:-PAD] = POISON
        self.outputs.append(buffer)
        return tensor

    def _opened(self, op: torch._ops.OpOverload | torch._ops.OpOverloadPacket) -> Callable[..., Any]:
        """Return an op, or under this guard the function that it was made of: inside an op no allocation is seen."""
        name = op._qualified_op_name if isinstance(op, torch._ops.OpOverloadPacket) else op._schema.name
        definition = torch._library.custom_ops._maybe_get_opdef(name)
        if definition is None:
            return op

        def run(*args: Any, **kwargs: Any) -> Any:
            with _Inside(self):
                return definition._init_fn(*args, **kwargs)

        return run

    def place(self, tensor: torch.Tensor, changes: bool = False) -> torch.Tensor:
        """Return a copy of an input between guards, with the same strides and offset.

        No byte of it may change; or, where the code changes it in place, none but those of its elements.
        """
        buffer, tensor = _between_guards(tensor)
        if changes:
            self.outputs.append(buffer)
            self.changed.append((buffer, buffer.clone(), tensor))
        else:
            self.inputs.append((buffer, buffer.clone()))
        return tensor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Compare the guards."""
        super().__exit__(kind, error, traceback)
        if kind is not None:
            return
        for buffer in self.outputs:
            pattern = _pattern(buffer.device)
            assert torch.equal(buffer[:PAD], pattern), "a store before the start of an allocated tensor"
            assert torch.equal(buffer[-PAD:], pattern), "a store behind the end of an allocated tensor"
        for buffer, before in self.inputs:
            assert torch.equal(buffer, before), "a store to an input, or next to it"
        for buffer, before, tensor in self.changed:
            _like(tensor, before).copy_(tensor)
            assert torch.equal(buffer, before), "a store next to what is changed in place"


class _Inside(TorchFunctionMode):
    """Guards go on within a call that they opened."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.guard.__torch_function__(func, types, args, kwargs)


def guarded(op: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """Return `op(*inputs)`, called with guarded inputs and under a `Guard`."""
    guard = Guard()
    placed = [guard.place(tensor) for tensor in inputs]
    with guard:
        return op(*placed)


def _like(tensor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return the tensor that lies in another buffer as this one lies in its own."""
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return other.set_(buffer.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


@cache
def _pattern(device: torch.device) -> torch.Tensor:
    """Return the bytes of one guard."""
    index = torch.arange(PAD, device=device)
    return (index * index % 251).to(torch.uint8)


def _between_guards(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a buffer of bytes and, in the middle of it, a copy of a tensor."""
    storage = tensor.untyped_storage()
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    pattern = _pattern(tensor.device)
    buffer = torch.cat([pattern, content, pattern])
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    offset = PAD // tensor.element_size() + tensor.storage_offset()
    return buffer, copy.set_(buffer.untyped_storage(), offset, tensor.shape, tensor.stride())
