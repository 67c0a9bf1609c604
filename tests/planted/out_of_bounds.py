"""A store one block behind the end of its tensor; memcheck has to find it."""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + BLOCK + tl.arange(0, BLOCK), 1.0)


out = torch.zeros(1024, device="cuda")
kernel[(1,)](out, BLOCK=1024)
torch.cuda.synchronize()
