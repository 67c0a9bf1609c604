"""Calls functions of a lesson, each call in a process of its own, and returns what became of each.

An error, a crash or a hang then ends that process alone: it is an outcome, as a result is. A lesson imports what it
uses. Its page, and the script and the notebook that readers take, have the text instead. This text counts as the
lesson's own code: after a change, the lessons that use it have to be recorded again.
"""

import ast
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from pathlib import Path

import torch


def outcomes(calls, device, limit=180):
    """Call functions of the lesson, each call in a process of its own.

    Each of ``calls`` is a function and its arguments: strings, or functions.
    Triton compiles in these processes, also where the lesson is interpreted. If
    ``device`` is "cpu", they see no GPU. They load what the lesson defines, and
    leave out its statements ``if`` and ``for``.

    Returns for each call what the function returned, or "ok" for None. If
    ``torch.testing.assert_close`` raised, that is "wrong: " and by how much.
    Another error, a process that died, or more than ``limit`` seconds are
    "fails: " and why.
    """
    # A function goes there as a list with its name.
    texts = [[[p.__name__] if callable(p) else p for p in c] for c in calls]
    function = calls[0][0]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = function.__code__.co_filename
        if cells := function.__globals__.get("In"):  # in a notebook
            file = f"{folder}/lesson.py"
            Path(file).write_text("\n".join(cells))
        environment = os.environ | {
            "TRITON_INTERPRET": "0",
            "TMPDIR": folder,
            "TRITON_HOME": folder,
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "0",  # asking takes long
            "OMP_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a fork may use the GPU then
        }
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        head = "import gc; gc.disable()  # imports take half as long\n"
        head += "import ast, json, os, signal, sys, traceback, types\n"
        head += "from pathlib import Path\n"
        head += "import torch, torch._inductor.compile_fx\n"
        functions = serve_calls, call_alone, outcome_of
        arguments = file, texts, device, limit
        call = f"serve_calls(*{arguments!r})"
        program = "\n".join([head, *map(inspect.getsource, functions), call])
        command = [sys.executable, "-W", "ignore", "-c", program]
        options = {"cwd": folder, "env": environment, "text": True}
        server = subprocess.run(command, capture_output=True, **options)
    if server.returncode:
        raise RuntimeError(server.stderr)
    lines = [line for line in server.stdout.splitlines() if line[:1] == "["]
    found = dict(map(json.loads, lines))
    return [found[number] for number in range(len(calls))]


def serve_calls(file, calls, device, limit):
    """Import what a lesson imports, then make each call in a fork."""
    imports, rest = [], []
    for node in ast.parse(Path(file).read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif not isinstance(node, (ast.If, ast.For)):
            rest.append(node)
    lesson = sys.modules["lesson"] = types.ModuleType("lesson")
    exec(compile(ast.Module(imports, []), file, "exec"), vars(lesson))
    config = torch._inductor.config
    # What one call has tuned is not for others to find.
    config.autotune_local_cache = config.fx_graph_cache = False
    # What is compiled runs once: let the C++ compiler be quick.
    config.cpp_cache_precompile_headers = False
    config.aot_inductor.precompile_headers = False
    config.aot_inductor.compile_wrapper_opt_level = "O0"
    if device == "cpu":  # forks then find the rest of the compiler imported
        torch.compile(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))
    gc.freeze()
    code = compile(ast.Module(rest, []), file, "exec")
    waiting, running = list(enumerate(calls)), {}
    while waiting or running:
        while waiting and len(running) < os.cpu_count():
            number, call = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                signal.alarm(limit)  # ends this process
                call_alone(lesson, code, number, call)
            running[pid] = number
        pid, status = os.wait()
        number, status = running.pop(pid), os.waitstatus_to_exitcode(status)
        if status == 99:
            sys.exit("a process could not load the lesson")
        if status:
            hung = status == -signal.SIGALRM
            why = f"no end in {limit} s" if hung else f"exit code {status}"
            print(json.dumps([number, f"fails: {why}"]), flush=True)


def call_alone(lesson, code, number, call):
    """Load the rest of a lesson, make a call, print what became of it, end."""
    status = 99
    try:
        folder = f"call_{number}"  # for the files of this call
        os.mkdir(folder)
        os.chdir(folder)
        exec(code, vars(lesson))
        status = 1
        parts = []
        for part in call:
            is_function = isinstance(part, list)
            parts.append(getattr(lesson, *part) if is_function else part)
        said = outcome_of(*parts)
        os.write(1, (json.dumps([number, said]) + "\n").encode())
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def outcome_of(function, *arguments):
    """Call a function; return what became of it."""
    try:
        return function(*arguments) or "ok"
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        if lines[0].endswith(("not close!", "not equal!")):
            return f"wrong: {lines[2]}"
        return f"fails: {type(error).__name__}: {lines[0]}"


def tried(attempt, rows, columns, device, reasons=True):
    """Call ``attempt(row, column, device)`` for each cell of a table.

    Returns the outcomes by row and column; prints how many were ok, and why the
    others were not, each reason once.
    """
    cells = [(row, column) for row in rows for column in columns]
    said = outcomes([(attempt, *cell, device) for cell in cells], device)
    found, seen = dict(zip(cells, said, strict=True)), {}
    for cell in cells:
        if ": " in found[cell]:
            seen.setdefault(found[cell], []).append(cell)
    if reasons:
        bad = sum(map(len, seen.values()))
        print(f"{len(cells) - bad} of {len(cells)} calls are ok")
        for outcome, (first, *others) in seen.items():
            more = f" (and {len(others)} more)" if others else ""
            print(f"{first[0]}, {first[1]}{more}")
            line = textwrap.shorten(outcome, 150)
            indent = {"initial_indent": "    ", "subsequent_indent": "    "}
            print(textwrap.fill(line, 76, **indent))
    return found


def outcome_table(found):
    """Return a data frame with a word for each outcome."""
    import pandas as pd

    words = {}
    for (row, column), outcome in found.items():
        words.setdefault(row, {})[column] = outcome.partition(":")[0]
    return pd.DataFrame(words).T


def run_package(package, x):
    """Run a package of AOTInductor in a process that has PyTorch alone."""
    torch.save(x, "x.pt")
    # Why libstdc++ and this loader: see the lesson on AOTInductor.
    code = f"""import atexit, ctypes, gc
gc.disable()
atexit.register(gc.freeze)
ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
import torch
load = torch._C._aoti.AOTIModelPackageLoader
run = load({package!r}, "model", False, 1, -1).boxed_run
torch.save(run([torch.load("x.pt")])[0], "y.pt")"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise RuntimeError(said.splitlines()[-1].removeprefix("RuntimeError: "))
    return torch.load("y.pt")
