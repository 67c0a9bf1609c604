"""Compiles launches for GPUs, each in a process that ends with it: a compiler's fault costs that launch alone.

A process of the pool in `compile` imports Triton once and forks for each job. It needs no GPU, and must not have
Triton's interpreter.
"""

import ast
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from triton_gallery.compiled import machine_code
from triton_gallery.compiled.gpus import GPUS, Gpu
from triton_gallery.compiled.store import Compiled
from triton_gallery.recipe.launches import ALIGNED, DTYPE, FLOAT, FUNCTION, LAYOUT, TUPLE, Launch

ENDED = "the compiler"  # begins what is said of one that gave no answer
LIMIT = 120  # seconds for one launch on one GPU
REASON = 300  # characters at the most
HOPPER = "sm_90"  # whose code tells which registers are never written
SMALL = [["tt.pointer_range", 32]]  # tells AMD's compiler, as a launch does, that a tensor has less than 2 GB


@dataclass(frozen=True)
class Job:
    """What is to be compiled.

    Attributes:
        module: the text of a module with the kernel.
        launch: of it.
        gpu: for which.
    """

    module: str
    launch: Launch
    gpu: Gpu


def start() -> None:
    """Have this process import Triton for its forks; it may not have been imported yet."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TRITON_INTERPRET"] = "0"
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    triton_key()  # reads all of Triton; what it returns is kept, as what backends do
    for gpu in GPUS:
        make_backend(_target(gpu)).hash()


def _end_with_parent() -> None:
    """End this process when the one that has the pool has ended, however: it would wait for jobs for ever."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def compile_apart(job: Job) -> tuple[Compiled, dict[str, str]]:
    """Return what the compiler makes of a job and its texts, made in a fork of this process."""
    answer, child_end = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(LIMIT)
            child_end.send(_answer(job))
            os._exit(0)
        finally:
            os._exit(1)
    child_end.close()
    with answer, suppress(EOFError, OSError):
        made: tuple[Compiled, dict[str, str]] = answer.recv()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == -signal.SIGALRM:
        return Compiled.failed(f"{ENDED} was stopped after {LIMIT} s"), {}
    if status:
        return Compiled.failed(f"{ENDED} crashed with exit status {status}"), {}
    return made


def _answer(job: Job) -> tuple[Compiled, dict[str, str]]:
    """Return what the compiler makes of a job and its texts, or why it does not compile."""
    with tempfile.TemporaryDirectory(prefix="triton-gallery-") as folder:
        try:
            return _compiled(job, Path(folder))
        except Exception as error:
            return Compiled.failed(_reason(error)), {}


def _compiled(job: Job, folder: Path) -> tuple[Compiled, dict[str, str]]:
    import triton

    triton.knobs.cache.dir = str(folder)
    triton.knobs.compilation.disable_line_info = True  # a listing of the kernel, not of what a debugger needs
    gpu = job.gpu
    kernel = getattr(_imported(job.module, folder), job.launch.kernel)
    made = triton.compile(_source(kernel, job.launch, gpu), target=_target(gpu), options=job.launch.options)
    warps = made.metadata.num_warps
    known = {"warps": warps, "shared": made.metadata.shared, "tensor_memory": getattr(made.metadata, "tmem_size", 0)}
    texts = {"ttgir": made.asm["ttgir"]}
    if gpu.is_amd:
        texts["amdgcn"] = code = made.asm["amdgcn"]
        registers, spilled = machine_code.amd_usage(code)
    else:
        file = folder / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        texts |= {"ptx": made.asm["ptx"], "sass": _said(triton.knobs.nvidia.nvdisasm.path, "--print-code", file)}
        code = texts["sass"]
        registers, spilled = machine_code.nvidia_usage(
            _said(triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file)
        )
    instructions = machine_code.opcodes(code, gpu.is_amd)
    if gpu.key == HOPPER and (wrong := machine_code.unwritten(code)):
        raise ValueError(f"an error of ptxas: its code reads {', '.join(wrong)}, which nothing wrote")
    return (
        Compiled(
            failure=None,
            registers=registers,
            spilled=spilled,
            **known,
            matrix=machine_code.matrix(instructions),
            loads=machine_code.widths(instructions, "loads"),
            stores=machine_code.widths(instructions, "stores"),
        ),
        texts,
    )


def _target(gpu: Gpu) -> Any:
    """Return a GPU as Triton's compiler has it."""
    from triton.backends.compiler import GPUTarget

    if gpu.is_amd:
        return GPUTarget("hip", gpu.key, gpu.warp)
    return GPUTarget("cuda", int(gpu.key.removeprefix("sm_")), gpu.warp)


def _imported(text: str, folder: Path) -> Any:
    file = folder / "kernel_module.py"
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _source(kernel: Any, launch: Launch, gpu: Gpu) -> Any:
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    signature = {name: _type(value) for name, value in launch.signature.items()}
    constants = {tuple(place): _constant(value, kernel) for place, value in launch.constants}
    attributes = {tuple(place): [[ALIGNED, 16]] for place in launch.aligned}
    if gpu.is_amd:
        for place, argument_type in enumerate(signature.values()):
            if str(argument_type).startswith("*"):
                attributes[place,] = attributes.get((place,), []) + SMALL
    return kind(kernel, signature, constants, attributes)


def _type(value: Any) -> Any:
    return tuple(map(_type, value)) if isinstance(value, list) else value


def _constant(value: Any, kernel: Any) -> Any:
    """Return a constant as Triton has it, of what a launch keeps of it."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == TUPLE:
        return tuple(_constant(item, kernel) for item in content)
    if kind == FLOAT:
        return float(content)
    if kind == DTYPE:
        from triton.language import dtype

        return dtype(content)
    if kind == LAYOUT:
        return _layout(content)
    if kind == FUNCTION:
        return kernel.fn.__globals__[content]
    raise ValueError(f"a constant of an unknown kind: {kind}")


def _layout(text: str) -> Any:
    """Return one of Gluon's layouts, given its `repr`; ValueError if it is anything else. Nothing in it is executed."""
    return _made_layout(ast.parse(text, mode="eval").body)


def _made_layout(call: ast.expr) -> Any:
    from triton.experimental.gluon import language

    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id.endswith("Layout")):
        raise ValueError(f"no layout: {ast.unparse(call)}")
    values = {field.arg: field.value for field in call.keywords if field.arg}
    fields = {
        name: _made_layout(value) if isinstance(value, ast.Call) else ast.literal_eval(value)
        for name, value in values.items()
    }
    return getattr(language, call.func.id)(**fields)


def _said(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


def _reason(error: BaseException) -> str:
    """Return an error in one line: what a compiler says last of why it stopped."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    message = next((line for line in lines if "error" in line.lower()), lines[-1])
    return f"{type(error).__name__}: {message}"[:REASON]
