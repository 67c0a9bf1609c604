"""A load of memory that nobody has written; initcheck has to find it."""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs))


x = torch.empty(1024, device="cuda")
out = torch.zeros(1024, device="cuda")
kernel[(1,)](x, out, BLOCK=1024)
torch.cuda.synchronize()
