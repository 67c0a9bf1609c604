"""All threads of a program store to one word of shared memory and load it, without a barrier; racecheck has to find it.

Triton places barriers by itself, so the race is in inline assembly.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.inline_asm_elementwise(
        "{ .shared .align 4 .b32 word; st.shared.b32 [word], $1; ld.shared.b32 $0, [word]; }",
        "=r,r",
        [offs],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out_ptr + offs, x)


out = torch.zeros(1024, dtype=torch.int32, device="cuda")
kernel[(1,)](out, BLOCK=1024)
torch.cuda.synchronize()
