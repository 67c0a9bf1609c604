r"""Check that a Triton kernel compiles for GPUs, on a machine without one.

    $ python -m triton_gallery_ops.check_compiles scale.py:scale_kernel \
          "x_ptr:*fp32:16" "out_ptr:*fp32:16" factor:fp32 N:i32 BLOCK:1024

Each argument of the kernel is given as ``NAME:TYPE``, a ``tl.constexpr`` as
``NAME:VALUE``. Types are Triton's: ``*fp32`` is a pointer to float32, ``i32``
an integer, ``fp32`` a float. ``:16`` after a type says that the pointer or the
integer is a multiple of 16. An argument that is None or 1 at a launch is
compiled as a constant: ``bias_ptr:None``, ``stride:1``.

The file is not run as a script. Of its top-level statements, only those that
define a name that the kernel uses are executed, each of them whole. So a script
with launches at its top level will do, unless they are in a loop or block that
also defines such a name.

The exit status is 0 if the kernel compiles and fits for every GPU, 1 if it
does not, and 2 if the command is wrong.
"""

import __future__

import argparse
import ast
import builtins
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KIB = 1024
# Bytes of shared memory that a program may have.
GPUS = {
    "sm_80": 163 * KIB,  # A100
    "sm_89": 99 * KIB,  # L4, RTX 40
    "sm_90": 227 * KIB,  # H100, H200
    "sm_100": 227 * KIB,  # B200
    "sm_120": 99 * KIB,  # RTX 50
    "gfx942": 64 * KIB,  # MI300
}
TYPES = (
    "i1 i8 i16 i32 i64 u8 u16 u32 u64 fp16 bf16 fp32 fp64 "
    "fp8e4nv fp8e5 fp8e4b15 fp8e4b8 fp8e5b16"
)
TYPE = re.compile(rf"(\*?(?:{TYPES.replace(' ', '|')}))(:16)?")


class UsageError(Exception):
    """The command is wrong: a missing file, kernel or argument."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m triton_gallery_ops.check_compiles",
        description="Check that a Triton kernel compiles for GPUs, on a "
        "machine without one.",
        epilog='example: scale.py:scale_kernel "x_ptr:*fp32:16" N:i32 '
        "BLOCK:1024",
    )
    parser.add_argument("kernel", metavar="FILE.py:KERNEL")
    parser.add_argument(
        "arguments",
        metavar="NAME:TYPE",
        nargs="*",
        help="an argument of the kernel: a type (*fp32, i32; :16 after it for "
        "multiples of 16) or the value of a tl.constexpr",
    )
    parser.add_argument(
        "--gpu",
        action="append",
        choices=GPUS,
        help="compile for this GPU alone; may be repeated",
    )
    parser.add_argument("--num-warps", type=int)
    parser.add_argument("--num-stages", type=int)
    given = parser.parse_args(arguments)
    options = {
        name: value
        for name in ("num_warps", "num_stages")
        if (value := getattr(given, name)) is not None
    }
    try:
        path, kernel = load_kernel(given.kernel)
        signature = read_signature(kernel, given.arguments)
    except UsageError as error:
        print(f"check_compiles: {error}", file=sys.stderr)
        return 2
    works = [
        check(path, kernel, signature, gpu, options)
        for gpu in given.gpu or GPUS
    ]
    return 0 if all(works) else 1


def load_kernel(place: str) -> tuple[Path, Any]:
    """Return the file and the jitted function that ``FILE.py:KERNEL`` names."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise UsageError(f"{place}: give FILE.py:KERNEL")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}"
        ) from None
    except SyntaxError as error:
        raise UsageError(f"{path}:{error.lineno}: {error.msg}") from None
    functions = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef)
    }
    if name not in functions:
        raise UsageError(f"{path} has no function {name} at its top level")
    # With the interpreter, @triton.jit would not make what the compiler takes.
    os.environ["TRITON_INTERPRET"] = "0"
    module = types.ModuleType(f"check_compiles_{path.stem}")
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent.resolve()))
    futures = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    }
    postponed = "annotations" in futures
    flags = __future__.annotations.compiler_flag if postponed else 0
    for node in _needed(tree.body, name):
        part = compile(ast.Module([node], []), str(path), "exec", flags)
        try:
            exec(part, module.__dict__)  # noqa: S102 - it is the user's own
        except Exception as error:
            raise UsageError(
                f"{path}:{node.lineno}: {type(error).__name__}: {error}"
            ) from error
    from triton import JITFunction

    kernel = getattr(module, name)
    while not isinstance(kernel, JITFunction):  # @triton.autotune, heuristics
        if not hasattr(kernel, "fn"):
            raise UsageError(f"{path}: {name} is not a @triton.jit function")
        kernel = kernel.fn
    return path, kernel


def _needed(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """Return the statements that a name depends on."""
    names, count = {name}, 0
    while count < len(names):
        count = len(names)
        needed = [node for node in body if _binds(node) & {*names, "*"}]
        names |= _uses(*needed) - set(dir(builtins))
    return needed


def _binds(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
        return set()
    return set(_bound(node))


def _bound(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _uses(*trees: ast.AST) -> set[str]:
    """Return the names in code, without those of scopes inside it."""
    names = set()
    for tree in trees:
        parts = list(ast.iter_child_nodes(tree))
        if isinstance(tree, ast.Name):
            names.add(tree.id)
        elif isinstance(tree, ast.FunctionDef | ast.Lambda):
            body = tree.body if isinstance(tree.body, list) else [tree.body]
            local = {
                node.arg
                for node in ast.iter_child_nodes(tree.args)
                if isinstance(node, ast.arg)
            }.union(*map(_bound, body))
            names |= _uses(*body) - local
            # Decorators, defaults and annotations are outside the function.
            names |= _uses(*(part for part in parts if part not in body))
        elif generators := getattr(tree, "generators", None):
            names |= _uses(*parts) - set().union(*map(_bound, generators))
        else:
            names |= _uses(*parts)
    return names


def read_signature(kernel: Any, arguments: list[str]) -> dict[str, Any]:
    """Return the type of each argument, or its value as a 1-tuple."""
    given = dict(argument.partition(":")[::2] for argument in arguments)
    if unknown := sorted({*given} - {*kernel.arg_names}):
        raise UsageError(
            f"{kernel.__name__} has no argument {', '.join(unknown)}; it has "
            f"{', '.join(kernel.arg_names)}"
        )
    signature: dict[str, Any] = {}
    missing = []
    for parameter in kernel.params:
        name = parameter.name
        if name not in given:
            if parameter.has_default:
                signature[name] = (parameter.default,)
            else:
                value = "a value" if parameter.is_constexpr else "a type"
                missing.append(f"{name} ({value})")
        elif parameter.is_constexpr:
            signature[name] = (_value(given[name]),)
        elif TYPE.fullmatch(given[name]):
            signature[name] = given[name]
        elif given[name] in ("None", "1"):
            signature[name] = (_value(given[name]),)
        else:
            raise UsageError(
                f"{name}: {given[name]!r} is not a type; types are "
                f"{TYPES}, and pointers such as *fp32"
            )
    if missing:
        raise UsageError(f"{kernel.__name__} also needs {', '.join(missing)}")
    return signature


def _value(text: str) -> Any:
    """Return the value of a constant: a literal, a dtype, or the text."""
    if text.startswith("tl."):
        import triton.language as tl

        return getattr(tl, text.removeprefix("tl."), text)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def compile_kernel(
    kernel: Any, signature: dict[str, Any], gpu: str, options: dict[str, int]
) -> Any:
    """Return what Triton compiles a kernel to."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds, constants, attributes = {}, {}, {}
    for place, (name, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            kinds[name], constants[name] = "constexpr", kind[0]
            continue
        kinds[name], _, aligned = kind.partition(":")
        if aligned:
            attributes[place,] = [["tt.divisibility", 16]]
    if gpu.startswith("gfx"):
        target = GPUTarget("hip", gpu, 64)
    else:
        target = GPUTarget("cuda", int(gpu.removeprefix("sm_")), 32)
    source = ASTSource(kernel, kinds, constants, attributes)
    return triton.compile(source, target=target, options=options)


def check(
    path: Path,
    kernel: Any,
    signature: dict[str, Any],
    gpu: str,
    options: dict[str, int],
) -> bool:
    """Print whether a kernel compiles for a GPU; return it."""
    try:
        compiled = compile_kernel(kernel, signature, gpu, options)
    except Exception as error:
        print(f"{gpu}: does not compile: {_reason(path, error)}", flush=True)
        return False
    shared = compiled.metadata.shared
    fits = shared <= GPUS[gpu]
    verdict = "compiles" if fits else "does not fit"
    limit = "" if fits else f" of {GPUS[gpu]}"
    facts = [f"{shared}{limit} bytes of shared memory"]
    if registers := _registers(compiled, gpu):
        facts.insert(0, f"{registers} registers a thread")
    print(f"{gpu}: {verdict}, {', '.join(facts)}", flush=True)
    return fits


def _registers(compiled: Any, gpu: str) -> str | None:
    """Return the registers of a thread, if that can be found out."""
    if gpu.startswith("gfx"):
        text, pattern = compiled.asm["amdgcn"], r"; TotalNumVgprs: (\d+)"
    else:
        import triton

        pattern = r"REG:(\d+)"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            try:
                tool = triton.knobs.nvidia.cuobjdump.path
                command = [tool, "--dump-resource-usage", file.name]
                text = subprocess.run(
                    command, capture_output=True, text=True, check=True
                ).stdout
            except (AttributeError, OSError, RuntimeError):
                return None
            except subprocess.CalledProcessError:
                return None
    match = re.search(pattern, text)
    return match and match[1]


def _reason(path: Path, error: BaseException) -> str:
    """Return why a kernel does not compile, and at which line of the file."""
    place = None
    while True:  # from the call of a helper to the helper's own line
        if hasattr(getattr(error, "node", None), "lineno"):
            place = error
        if error.__cause__ is None:
            break
        error = error.__cause__
    message = getattr(error, "error_message", None) or (
        type(error).__name__ if error is place else f"{error}"
    )
    if place is None:
        return f"{type(error).__name__}: {message}"
    code, node = place.src, place.node  # type: ignore[attr-defined]
    text = path.read_text(encoding="utf-8")
    line = code.splitlines()[node.lineno - 1]
    shown = f"{message}\n    {line}\n    {' ' * node.col_offset}^"
    if code not in text:  # a function of another file
        return shown
    first = text[: text.index(code)].count("\n")
    return f"{path}:{first + node.lineno}: {shown}"


if __name__ == "__main__":
    sys.exit(main())
