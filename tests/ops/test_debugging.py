"""The recipe Debugging a kernel: its ten errors and their cures, and its kernel."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from guard import guarded
from hypothesis import given
from inputs import Layout, sizes


def test_ten_cases(recipe: ModuleType) -> None:
    """Ten cases, each with an issue of its own and a change that is one."""
    cases = recipe.read(recipe.REFUSED) + recipe.read(recipe.STOPPED)
    assert len(cases) == 10
    links, messages, broken, fixed = zip(*cases, strict=True)
    assert all(re.fullmatch(r"https://github\.com/triton-lang/triton/issues/\d{3,5}", link) for link in links)
    assert len(set(links)) == len(set(messages)) == 10
    assert not set(broken) & set(fixed)
    for source in broken + fixed:
        compile(source, "case", "exec")
        assert source.count("@triton.jit\ndef kernel(") == 1


def test_prose_links_every_case(recipe: ModuleType, gallery: Path) -> None:
    """The list above the cases leads to the same issues, in the same order."""
    text = (gallery / "first_steps" / "debugging.py").read_text()
    cases = recipe.read(recipe.REFUSED) + recipe.read(recipe.STOPPED)
    numbers = re.findall(r"^# \d+\. `#(\d+) <(.*)>`__", text, flags=re.MULTILINE)
    assert [link for _, link in numbers] == [case[0] for case in cases]
    assert all(link.endswith(f"/{number}") for number, link in numbers)


def test_refused_by_the_compiler(recipe: ModuleType) -> None:
    """Each broken source raises its message, and each fixed one compiles; no GPU is needed."""
    cases = recipe.read(recipe.REFUSED)
    assert len(cases) == 7
    for case, (broken, fixed) in zip(cases, recipe.outcomes(cases), strict=True):
        assert broken is not None, case
        assert case[1] in broken
        assert fixed is None, case


def test_stopped_at_the_launch(recipe: ModuleType) -> None:
    """The same for those that a launch raises."""
    if recipe.DEVICE.type == "cpu":
        pytest.skip("these launches need a GPU")
    cases = recipe.read(recipe.STOPPED)
    for case, (broken, fixed) in zip(cases, recipe.outcomes(cases), strict=True):
        assert broken is not None, case
        assert case[1] in broken
        assert fixed is None, case


def test_answer_compiles(recipe: ModuleType) -> None:
    """The loop of the second answer is accepted."""
    source = (
        "@triton.jit\ndef kernel(x_ptr, N):\n    i = 0\n"
        "    while tl.load(x_ptr + i, mask=i < N, other=-1.0) >= 0:\n        i += 1\n"
        "    tl.store(x_ptr, i)\nbuild(kernel)\n"
    )
    assert recipe.compile_all(source)[1] == [None]


def test_inline_assembly_compiles(recipe: ModuleType) -> None:
    """The kernels for compute-sanitizer get through ptxas, with the barrier and without."""
    build = 'build(exchange_kernel, ASM=SAFE)\nassert "bar.sync" in SAFE\nbuild(exchange_kernel, ASM=RACY)\n'
    assert recipe.compile_all(recipe.EXCHANGE + build)[1] == [None]


def test_false_promise_reaches_the_code(recipe: ModuleType) -> None:
    """`tl.multiple_of` makes the compiler load four elements at once where it would not, so that a GPU faults."""
    # A launch finds out by itself that the tensor is aligned; a compilation has to be told.
    build = """
types = {"x_ptr": "*fp32", "start": "i32", "BLOCK": "constexpr"}
aligned = {(0,): [["tt.divisibility", 16]]}
source = triton.compiler.ASTSource(sum_kernel, types, {"BLOCK": 512}, aligned)
h100 = triton.backends.compiler.GPUTarget("cuda", 90, 32)
for debug in (False, True):
    kernel = triton.compile(source, target=h100, options={"debug": debug})
    print("ld.global.v4" in kernel.asm["ptx"])
"""
    source = recipe.PITFALLS
    honest = re.sub(r"tl\.multiple_of\((start .*), 16\)", r"\1", source)
    assert source != honest
    output, errors = recipe.compile_all(source + build)
    assert (output.split(), errors) == (["True", "True"], [None])
    output, errors = recipe.compile_all(honest + build)
    assert (output.split(), errors) == (["False", "False"], [None])


@given(columns=sizes(64, 64))
def test_max(recipe: ModuleType, columns: int) -> None:
    """The cured kernel is right for negative numbers in rows that are not full."""

    def op(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], device=x.device)
        recipe.max_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=64)
        return out

    x = -1 - Layout("contiguous", columns).make((3, max(columns, 1)), torch.float32, recipe.DEVICE).abs()
    assert torch.equal(guarded(op, x), x.amax(1))
