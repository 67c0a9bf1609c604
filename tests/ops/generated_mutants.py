"""The trivial mutants of an op's kernels: a mask, a cast, a choice, or one side of a condition is left out.

`generated_mutants.json` has those that were tried, and whether the tests noticed them.
`python tests/ops/generated_mutants.py --each 8`
tries more, until there are so many of each op; all, some nine hundred, take a day.
"""

import argparse
import ast
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import NamedTuple
from zlib import crc32

import torch
from collect_cases import definitions, runs_here
from mutants import WORDS, run_tests
from project import ROOT

from triton_gallery.recipe.contents import Recipe, lay_out, load
from triton_gallery.recipe.op import op_of

TRIED = Path(__file__).with_name("generated_mutants.json")


class Mutant(NamedTuple):
    """A script that is broken in one place.

    Attributes:
        name: the kernel, what stands there, and what takes its place.
        source: the broken script.
    """

    name: str
    source: str


def mutants(source: str, op: str) -> list[Mutant]:
    """Return all mutants of the kernels of an op in a script; their names are unique."""
    text = source.encode()  # in which the parser counts columns
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    count = Counter[str]()
    made = []
    for kernel in ast.parse(source).body:
        if isinstance(kernel, ast.FunctionDef) and kernel.name.startswith(f"_{op}_") and _is_jitted(kernel):
            for node, other in _changes(kernel):
                name = f"{kernel.name}: {ast.unparse(node)} -> {ast.unparse(other)}"
                count[name] += 1
                begin = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                broken = text[:begin] + f"({ast.unparse(other)})".encode() + text[end:]
                made.append(Mutant(f"{name} ({count[name]})" if count[name] > 1 else name, broken.decode()))
    return made


def of_recipe(recipe: Recipe) -> dict[str, str]:
    """Return the mutants of the op that a recipe hands over: each broken script by its name, in an order of chance."""
    op = op_of(recipe)
    made = mutants(recipe.text, op.name) if op else []
    return {mutant.name: mutant.source for mutant in sorted(made, key=lambda mutant: crc32(mutant.name.encode()))}


def is_noticed(gallery: Path, recipe: str, source: str) -> bool:
    """Whether the tests of a recipe fail of a broken script in another gallery, which is written there.

    Raises:
        RuntimeError: if they took too long, or ended in some other way.
    """
    (gallery / f"{recipe}.py").write_text(definitions(source))
    status, output = run_tests(gallery, recipe, f"{WORDS} or bfloat16")
    if status not in (0, 1, -signal.SIGSEGV):
        raise RuntimeError(f"the tests of {recipe} ended with {status}: {output[-1000:]}")
    return status != 0


def _is_jitted(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _changes(kernel: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each expression that is left out, and what takes its place."""
    for node in ast.walk(kernel):
        match node:
            case ast.Call(ast.Attribute(attr="load" | "store" as way), arguments, keywords):
                given = arguments[: 1 if way == "load" else 2]  # a mask may follow
                others = [keyword for keyword in keywords if keyword.arg not in {"mask", "other"}]
                if len(given) < len(arguments) or any(keyword.arg == "mask" for keyword in keywords):
                    yield node, ast.Call(node.func, given, others)
            case ast.Call(ast.Attribute(value, "to"), [dtype], []) if ast.unparse(dtype) != "tl.int64":
                yield node, value  # that one counts beyond 2**31 elements alone, on a GPU
            case ast.Call(ast.Attribute(attr="where"), [_, chosen, _], []):
                yield node, chosen
            case ast.BinOp(left, ast.BitAnd(), right):
                yield node, right
                yield node, left


def main() -> None:
    """Try mutants that have not been tried, of each op in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, required=True, help="how many of each op there shall be")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after so many")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # of the processes that import Triton from now on
    end = time.monotonic() + chosen.seconds
    tried: dict[str, dict[str, bool]] = json.loads(TRIED.read_text()) if TRIED.exists() else {}
    made = {recipe.key: of_recipe(recipe) for recipe in load(ROOT / "gallery") if runs_here(recipe.key)}
    wanted = [
        (recipe, name)
        for place in range(chosen.each)
        for recipe, of_one in made.items()
        for name in [*of_one][place : place + 1]
        if name not in tried.get(recipe, {})
    ]

    lock = Lock()

    with TemporaryDirectory() as folder:
        gallery = Path(folder, "gallery")
        lay_out(ROOT / "gallery", gallery)
        first = next(iter(made))
        if is_noticed(gallery, first, (gallery / f"{first}.py").read_text()):
            raise SystemExit(f"the tests of {first} fail as it is: mutants would show nothing")

    def try_one(which: tuple[str, str]) -> None:
        recipe, name = which
        if time.monotonic() > end:
            return
        with TemporaryDirectory() as folder:
            gallery = Path(folder, "gallery")
            lay_out(ROOT / "gallery", gallery)
            try:
                noticed = is_noticed(gallery, recipe, made[recipe][name])
            except RuntimeError as error:
                print(recipe, name, f"NOT TRIED: {error}", flush=True)
                return
        print(recipe, name, "noticed" if noticed else "NOT NOTICED", flush=True)
        with lock:
            tried.setdefault(recipe, {})[name] = noticed
            TRIED.write_text(json.dumps(tried, indent=1, sort_keys=True) + "\n")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(try_one, wanted))


if __name__ == "__main__":
    main()
