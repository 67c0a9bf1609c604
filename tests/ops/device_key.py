"""What a call of an op reaches on a GPU, asked on any machine."""

from typing import Any

import torch


def at_cuda(op: Any, *inputs: torch.Tensor) -> Any:
    """Return what an op's function for GPUs returns, of tensors on any device; it has to have one of its own.

    Args:
        op: as `torch.library.triton_op` makes it.
        inputs: its arguments.
    """
    overload = op._opoverload
    assert torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CUDA"), f"{overload} has none"
    return overload.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *inputs)
