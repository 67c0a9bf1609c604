"""Joins the ranks of a lesson for several GPUs, and shares memory among them where there is no GPU.

A lesson imports what it uses. Its page, and the script and the notebook that readers take, have the text instead. This
text counts as the lesson's own code: after a change, the lessons that use it have to be recorded again.
"""

import datetime
import os
import shutil
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem


def join_ranks(seconds=100):
    """Join the processes that ``torchrun`` started, each with a GPU of its own.

    Returns this one's rank, and how many there are. Without ``torchrun`` this
    process is rank 0 of 1. Nothing waits for another rank for longer than
    ``seconds``.
    """
    rank = int(os.environ.get("RANK", "0"))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        options = {"timeout": datetime.timedelta(seconds=seconds)}
        if on_gpu:
            options["device_id"] = torch.device("cuda", torch.cuda.current_device())
        if ranks == 1:  # nobody has said where the others would be met
            options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if on_gpu else "gloo", **options)
    return rank, ranks


def meet_ranks():
    """Wait until this GPU has done its work, and every other rank's."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def replays(calls, times):
    """Return replays of CUDA graphs, each of so many of a call in a row.

    Ranks do not begin at the same moment, and wait for each other. Only the
    first call of a row waits for that.
    """

    def graph_of(call):
        """Return the replay of a graph of a call."""
        call()  # compiled before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(times):
                call()
        return graph.replay

    return {name: graph_of(call) for name, call in calls.items()}


def shared_on_cpu(numel, flags=256):
    """Return memory of all ranks that every rank has in its address space.

    It is the model of symmetric memory without a GPU: for each rank a tensor of
    ``numel`` floats and one of flags, all zero, in files that all ranks map.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(place)

    def mapped(name, size, dtype):
        """Return a tensor in a file of the common folder."""
        file = os.path.join(place[0], name)
        return torch.from_file(file, shared=True, size=size, dtype=dtype)

    tensors = [mapped(f"floats{r}", numel, torch.float32) for r in range(ranks)]
    pads = [mapped(f"flags{r}", flags, torch.int32) for r in range(ranks)]
    dist.barrier()  # all have them
    if rank == 0:
        shutil.rmtree(place[0])
    return tensors, pads


def symmetric_floats(numel):
    """Return ``numel`` floats on each rank, and where they and the pads are.

    ``mine`` is this rank's tensor; ``buffers`` and ``pads`` are tables of the
    addresses of all ranks' tensors and signal pads, for a kernel.
    """
    ranks = dist.get_world_size()
    if torch.cuda.is_available():
        here = torch.device("cuda", torch.cuda.current_device())
        mine = symm_mem.empty(numel, dtype=torch.float32, device=here)
        kept = symm_mem.rendezvous(mine, dist.group.WORLD.group_name)
        places = kept.buffer_ptrs, kept.signal_pad_ptrs
    else:
        kept = tensors, pads = shared_on_cpu(numel)
        mine = tensors[dist.get_rank()]
        places = [[t.data_ptr() for t in of] for of in (tensors, pads)]
    buffers, pads = (torch.tensor(list(of)[:ranks], dtype=torch.int64, device=mine.device) for of in places)
    return SimpleNamespace(mine=mine, buffers=buffers, pads=pads, kept=kept)


def shared_bytes(size):
    """Return each rank's tensor of bytes, all zero, which every rank can use.

    It is symmetric memory; without a GPU, files that all ranks map.
    """
    if not torch.cuda.is_available():
        floats, _ = shared_on_cpu((size + 3) // 4)
        return [part.view(torch.uint8)[:size] for part in floats]
    here = torch.device("cuda", torch.cuda.current_device())
    mine = symm_mem.empty(size, dtype=torch.uint8, device=here).zero_()
    handle = symm_mem.rendezvous(mine, dist.group.WORLD.group_name)
    every = range(dist.get_world_size())
    parts = [handle.get_buffer(rank, (size,), torch.uint8) for rank in every]
    parts[dist.get_rank()] = mine  # the memory lasts as long as this
    meet_ranks()
    return parts
