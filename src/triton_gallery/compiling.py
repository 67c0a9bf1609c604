"""Runs functions of a lesson where Triton compiles kernels, with or without a GPU.

A lesson imports what it uses. Its page, and the script and the notebook that readers take, have the text instead. This
text counts as the lesson's own code: after a change, the lessons that use it have to be recorded again.
"""

import ast
import contextlib
import functools
import inspect
import os
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
import types
from pathlib import Path
from unittest import mock

import torch


def compile_only(function):
    """Run a function in a process where kernels are compiled for an H100.

    The interpreter is off there, and the GPU is a stand-in: a kernel's
    ``warmup`` compiles and returns the compiled kernel; a launch fails when it
    loads the code. The names that the function uses go along: kernels,
    functions, ops of ``triton_op`` (without a backward, which the function must
    register), constants and modules. Its arguments and result are pickled.

    Raises:
        TypeError: if it uses something that cannot go along.
        RuntimeError: if it fails, with the error of the other process.
    """

    @functools.wraps(function)
    def run(*arguments):
        with tempfile.TemporaryDirectory() as folder:
            script, data = Path(folder, "page.py"), Path(folder, "data")
            script.write_text(program(function))
            data.write_bytes(pickle.dumps(arguments))
            # Without a GPU here, the other process must not interpret either.
            env = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, script, data]
            options = {"env": os.environ | env, "capture_output": True}
            done = subprocess.run(command, text=True, check=False, **options)
            if done.returncode:
                raise RuntimeError(done.stderr.strip() or "it crashed")
            print(done.stdout, end="")
            return pickle.loads(data.read_bytes())

    return run


def program(function):
    """Return a script that calls a function on the arguments in a file."""
    head = """
    import gc
    gc.disable()  # imports are faster without it
    import pickle, sys, types, pathlib
    import torch, torch.utils._triton, triton, triton.language as tl
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    stand_in = types.SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(stand_in)
    torch.utils._triton.has_triton = lambda: True  # torch.compile asks
    compile_only = lambda function: function
    """
    tail = f"""
    data = pathlib.Path(sys.argv[1])
    result = {function.__name__}(*pickle.loads(data.read_bytes()))
    data.write_bytes(pickle.dumps(result))
    """
    parts, seen = [], {"compile_only"}

    def add(name, value):
        """Add what defines a name, after what this uses in its turn."""
        if name in seen:
            return
        seen.add(name)
        code = inspect.unwrap(value) if callable(value) else value
        while hasattr(code, "fn"):  # a kernel's function
            code = code.fn
        code = getattr(code, "_abstract_fn", code)  # a triton_op's function
        if inspect.ismodule(value):
            parts.append(f"import {value.__name__} as {name}")
        elif getattr(code, "__module__", None) == function.__module__:
            source = source_of(code)
            for used in names(source) & function.__globals__.keys():
                add(used, function.__globals__[used])
            parts.append(source)
        elif hasattr(code, "__qualname__"):  # of another module
            origin = f"from {code.__module__} import {code.__name__}"
            parts.append(f"{origin} as {name}")
        else:
            constant = getattr(value, "value", value)
            text = repr(constant)
            try:
                same = ast.literal_eval(text) == constant
            except (ValueError, SyntaxError):
                same = False
            if not same:
                raise TypeError(f"{name} cannot go to another process")
            wrapped = f"tl.constexpr({text})"
            parts.append(f"{name} = {text if constant is value else wrapped}")

    add(function.__name__, function)
    ends = textwrap.dedent(head), textwrap.dedent(tail)
    return "\n".join([ends[0], *parts, ends[1]])


def source_of(code):
    """Return the text of a function or a class."""
    if not inspect.isclass(code):
        return textwrap.dedent(inspect.getsource(code))
    # Where a script is not a module, Python finds methods, not their class.
    methods = (getattr(code, name) for name in vars(code))
    (file, *_) = {inspect.getfile(m) for m in methods if inspect.isfunction(m)}
    text = Path(file).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == code.__name__:
            return ast.get_source_segment(text, node)
    raise TypeError(f"{code.__name__} is not in {file}")


def names(source):
    """Return the names that a function or a class takes from its module."""
    nodes = [*ast.walk(ast.parse(source))]
    used = [node for node in nodes if isinstance(node, ast.Name)]
    stored = {node.id for node in used if isinstance(node.ctx, ast.Store)}
    given = {node.arg for node in nodes if isinstance(node, ast.arg)}
    inner = {n.name for n in nodes[2:] if isinstance(n, ast.FunctionDef)}
    return {node.id for node in used} - stored - given - inner


def generated_code(function, *calls, **options):
    """Return the programs that ``torch.compile`` writes for calls of a function.

    Each call is a tuple of tensors on the CPU; options are those of
    ``torch.compile``. Nothing runs. A program for a backward comes after the
    program of its forward. This is for functions that are compile_only.
    """
    codes = []

    def stop(*inputs):
        """Be where the program would run."""
        raise InterruptedError

    def generate(graph):
        """Return a module without the program, which is for a GPU."""
        code, _ = graph.codegen()
        codes.append(code.value)
        return types.SimpleNamespace(call=stop)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, **options)
    settings = {"force_disable_caches": True, "cpp.vec_isa_ok": False}
    lowering = "torch._inductor.graph.GraphLowering"
    with (
        mock.patch(f"{lowering}.compile_to_module", generate),
        torch._inductor.config.patch(settings),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
    ):
        for inputs in calls:
            with contextlib.suppress(InterruptedError):
                compiled(*inputs)
    return codes


def launches(code):
    """Return the calls of kernels in a program that ``torch.compile`` wrote."""
    calls = re.findall(r"^ +((?:\w+_\d+|\w+\.run)\(\w.*)\)$", code, re.M)
    return [call.partition(", stream=")[0] + ")" for call in calls]
