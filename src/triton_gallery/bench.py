"""The clock of all benchmarks, and the table of what it measured.

A lesson imports them. Its page, and the script and the notebook that readers take, have their text instead. A record
counts for one version of the clock: raise VERSION with a change after which old figures would mislead.
"""

import time

import torch

VERSION = 1
DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")  # a script has its own


def time_turns(calls, turns, warm_up=5, prepare=None):
    """Time each of a dictionary of calls in rotation, with the L2 cache emptied.

    Returns for each a list of its GPU time in milliseconds, its CPU time in
    microseconds, and whether the GPU had to wait for the CPU. The GPU sleeps
    before a call: that hides the launch. ``prepare`` is called before that.
    """
    cache = torch.empty(2**28, dtype=torch.int8, device=DEVICE)
    seen = {name: [] for name in calls}
    for turn in range(-warm_up, turns):
        for name, call in calls.items():
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            if prepare:
                prepare()
            torch.cuda._sleep(3_000_000)  # cycles of its clock, about 1.5 ms
            cache.zero_()
            start.record()
            began = time.perf_counter()
            call()
            cpu = time.perf_counter() - began
            end.record()
            late = start.query()  # the GPU got there before the CPU was done
            torch.cuda.synchronize()
            if turn >= 0:  # those before compile, tune and warm up
                seen[name].append((start.elapsed_time(end), cpu * 1e6, late))
    return seen


def gpu_time(calls, turns=50, prepare=None):
    """Time a dictionary of calls in rotation, each with the L2 cache emptied.

    Returns for each the median of its GPU time in milliseconds, the 20th and
    the 80th percentile, its CPU time in microseconds, and whether the GPU had
    to wait for the CPU.
    """
    low, middle, high = turns // 5, turns // 2, turns * 4 // 5
    found = {}
    for name, rows in time_turns(calls, turns, prepare=prepare).items():
        gpu, cpu, late = map(sorted, zip(*rows, strict=True))
        found[name] = gpu[middle], gpu[low], gpu[high], cpu[middle], late[high]
    return found


def rate_table(times, x, unit, work):
    """Return a data frame of rates: work(size) for each millisecond.

    ``times`` has, for each size, what ``gpu_time`` returned.
    """
    import pandas as pd

    rows = []
    for size, calls in times.items():
        for name, (median, fast, slow, cpu, late) in calls.items():
            rates = [work(size) / ms for ms in (median, slow, fast)]
            rows.append([size, name, *rates, cpu, late])
    columns = [x, "series", unit, "low", "high", "CPU us", "late"]
    return pd.DataFrame(rows, columns=columns)
