"""Workloads of several_gpus/all_reduce: none of one process. As a program, it times the op in a process for each GPU.

`torchrun --nproc-per-node=2 -m benchmarks.all_reduce` prints microseconds of a call: of the op as it chooses, in one
shot and in two, and of NCCL and PyTorch's kernels for symmetric memory; then those of the fused op and of its parts.
"""

from functools import partial
from typing import Any

from triton_gallery.libraries.workload import Workload

WORKLOADS: list[Workload] = []
SIZES = [2**power for power in range(10, 26)]  # elements of bfloat16: 2 KB to 64 MB
TOKENS, HIDDEN = (1, 2, 8, 32, 128, 512), 8192


def main() -> None:
    """Time both ops at all sizes, on all ranks, and leave the process group."""
    import faulthandler
    import gc

    import torch.distributed as dist

    from triton_gallery.ranks import join_ranks, meet_ranks

    rank, ranks = join_ranks()  # type: ignore[no-untyped-call]
    measure(rank, ranks)
    # PyTorch's issue 115388: destroy_process_group waits while a CUDA graph that captured NCCL's kernels is alive. The
    # graphs and the symmetric memory of `measure` end with it. Then the ranks meet, as the lesson's do after its last
    # graph. This program has hung at its end, and why is not known: a rank that still waits prints where, and ends.
    gc.collect()
    meet_ranks()  # type: ignore[no-untyped-call]
    faulthandler.dump_traceback_later(100, exit=True)
    dist.destroy_process_group()


def measure(rank: int, ranks: int) -> None:
    """Time both ops at all sizes; the first rank prints."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symm_mem

    from triton_gallery.bench import gpu_time
    from triton_gallery.ranks import replays
    from triton_gallery_ops.all_reduce import all_reduce, all_reduce_check, all_reduce_memory, all_reduce_rms_norm
    from triton_gallery_ops.rms_norm import rms_norm_residual

    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    memory = all_reduce_memory(SIZES[-1], dtype)
    group = dist.distributed_c10d._get_default_group().group_name
    shared = symm_mem.empty(SIZES[-1], dtype=dtype, device=device)
    symm_mem.rendezvous(shared, group)
    shared.zero_()
    one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_

    calls: dict[str, Any]

    def show(size: str, calls: dict[str, Any]) -> None:
        """Time calls and print a line."""
        times = gpu_time(replays(calls, 20), prepare=dist.barrier)  # type: ignore[no-untyped-call]
        all_reduce_check(memory)
        if rank == 0:
            shown = ", ".join(f"{name} {1e3 / 20 * found[0]:.1f}" for name, found in times.items())
            print(f"{ranks} ranks, {size}: {shown} us", flush=True)

    for size in SIZES:
        x = torch.randn(size, device=device).to(dtype)
        calls = {
            name: partial(all_reduce, x, memory, shots)
            for name, shots in (("op", None), ("op, one shot", 1), ("op, two shots", 2))
        }
        calls |= {"NCCL": partial(dist.all_reduce, shared[:size])}
        calls |= {"PyTorch, one shot": partial(one, shared[:size], "sum", group)}
        calls |= {"PyTorch, two shots": partial(two, shared[:size], "sum", group)}
        show(f"{size * dtype.itemsize} bytes", calls)
    weight = torch.ones(HIDDEN, device=device, dtype=dtype)
    for tokens in TOKENS:
        x, residual = torch.randn(2, tokens, HIDDEN, device=device).to(dtype)

        def parts(reduce: Any, x: Any = x, residual: Any = residual) -> Any:
            """Return the same from an all-reduce and the gallery's norm."""
            total = reduce(x)
            return rms_norm_residual(x if total is None else total, residual, weight, 1e-6)

        calls = {
            name: partial(all_reduce_rms_norm, x, residual, weight, 1e-6, memory, shots)
            for name, shots in (("fused", None), ("fused, one shot", 1), ("fused, two shots", 2))
        }
        calls |= {"op and norm": partial(parts, partial(all_reduce, memory=memory))}
        calls |= {"NCCL and norm": partial(parts, dist.all_reduce)}
        show(f"{tokens} tokens of {HIDDEN}", calls)


if __name__ == "__main__":
    main()
