"""The recipe When the assembler is wrong: its kernel, what it finds in machine code, and what it advises."""

import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from collect_cases import require
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import Layout

from triton_gallery.compiled import machine_code

PATH = "under_the_hood/wrong_code.py"
require(PATH.removesuffix(".py"))
# On a GPU narrower tiles may be wrong: that is what the page is about.
WIDTHS = [64] if torch.cuda.is_available() else [16, 32, 64]

Codes = dict[tuple[int, int], str]


@pytest.fixture(scope="module")
def codes(recipe: ModuleType) -> Codes:
    """Return the machine code of each width, of Triton's assembler for an H100 (0) and of the newer one (1)."""
    jobs = [(recipe.TYPES, {"BLOCK": block}, {}) for block in recipe.WIDTHS]
    made = recipe.machine_code(recipe.three_products_kernel, *jobs)
    return {(recipe.WIDTHS[number // 2], number % 2): sass for number, (_, _, sass) in enumerate(made)}


@given(block=st.sampled_from(WIDTHS), seed=st.integers(0, 2**31))
def test_kernel_and_its_accumulator(recipe: ModuleType, block: int, seed: int) -> None:
    """It is as good as a rounding of the weights and one of the result, and stores nowhere else."""
    x, y, z = (
        Layout("contiguous", seed + k).make((64, columns), torch.float32, recipe.DEVICE).div(divisor).half()
        for k, (columns, divisor) in enumerate([(64, 8), (block, 1), (block, 1)])
    )
    out = guarded(recipe.three_products, x, y, z)
    x, y, z = x.double(), y.double(), z.double()
    weights = torch.exp2(x @ x.T)
    terms = weights @ z.abs() + x.abs() @ y.abs()
    assert ((out.double() - weights @ z - x @ y).abs() <= 2**-10 * terms).all()


def test_only_narrow_tiles_of_the_older_assembler_are_wrong(recipe: ModuleType, codes: Codes) -> None:
    wrong = {key for key, sass in codes.items() if recipe.unwritten(sass)}
    assert wrong == {(16, 0), (32, 0)}


def test_it_finds_what_the_build_finds(recipe: ModuleType, codes: Codes) -> None:
    for sass in codes.values():
        named = {name for line in recipe.unwritten(sass) for name in re.findall(r"UR\d+", line.partition(": ")[2])}
        assert named == set(machine_code.unwritten(sass))


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        (["UMOV UR4, URZ", "UIADD3.X UR5, UR6, -0x3f, URZ, UP0, !UPT"], ["UR6"]),
        (["ULDC.64 UR8, c[0x0][0x210]", "ULDC.64 UR10, c[0x0][0x218]", "HGMMA.64x16x16.F32 R8, gdesc[UR8], R8"], []),
        (["ULDC.64 UR8, c[0x0][0x210]", "HGMMA.64x16x16.F32 R8, gdesc[UR8].tnspB, R8"], ["UR10, UR11"]),
        (["ULDC.64 UR10, c[0x0][0x218]", "HGMMA.64x16x16.F32 R8, R32, gdesc[UR8], R8"], []),
        (["UMOV UR6, 0x400", "@!P5 STS.128 [R73+UR6+0x800], R28"], []),
        (["STS.128 [R73+UR6+0x800], R28"], ["UR6"]),
        (["ULOP3.LUT UP0, UR4, URZ, 0x1, URZ, 0xc0, !UPT", "UMOV UR5, UR4"], []),
        (["UISETP.NE.AND UP0, UPT, UR4, URZ, UPT"], ["UR4"]),
    ],
)
def test_unwritten_before_an_accumulator(recipe: ModuleType, instructions: list[str], expected: list[str]) -> None:
    """Descriptors are four registers, or two where registers hold the first side."""
    sass = "\n".join(f"        /*{16 * n:04x}*/    {instruction} ;" for n, instruction in enumerate(instructions))
    assert [line.partition(": ")[2].removesuffix(" unwritten") for line in recipe.unwritten(sass)] == expected


def test_newer_assembler_can_be_named(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page says: Triton's own for Blackwell, in a variable. Triton's choice for an H100 is that one then."""
    look = "import triton, sys; sys.stdout.write(triton.knobs.nvidia.ptxas_blackwell.path)"
    monkeypatch.setenv("TRITON_PTXAS_PATH", recipe.child(look).stdout)
    for assembler, _, sass in recipe.machine_code(recipe.three_products_kernel, (recipe.TYPES, {"BLOCK": 16}, {})):
        assert not assembler.startswith("ptxas 12.8")
        assert "HGMMA" in sass
        assert recipe.unwritten(sass) == []


def test_options_of_a_launch(recipe: ModuleType) -> None:
    """Eight warps are two groups, which share the columns: an instruction has half of them."""
    job = recipe.TYPES, {"BLOCK": 64}, {"num_warps": 8}
    sass = recipe.machine_code(recipe.three_products_kernel, job)[0][2]
    assert "HGMMA.64x32x16" in sass


def test_origin(recipe: ModuleType) -> None:
    ptx = "\tmov.b32 \t%r1, global_smem;\n\tcvt.u64.u32 \t%rd2, %r1;\n\tadd.s64 \t%rd3, %rd2, 32;\n"
    assert recipe.origin(ptx, "%rd3") == ["add.s64 %rd3, %rd2, 32", "cvt.u64.u32 %rd2, %r1", "mov.b32 %r1, global_smem"]
    assert recipe.origin(ptx, "%rd4") == ["nothing writes %rd4"]


def test_child_that_ends_is_told(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last line of its error, or its exit status."""
    monkeypatch.setattr(recipe, "RUN", "raise RuntimeError('an illegal address')")
    assert recipe.run(16) == "RuntimeError: an illegal address"
    monkeypatch.setattr(recipe, "RUN", "import os; os._exit(7)")
    assert recipe.run(16) == "exit status 7"


def test_page(printed: Callable[[str], str]) -> None:
    """It names the register, and the verdict has the six codes."""
    text = printed("under_the_hood/wrong_code")
    assert re.search(r"UIADD3\S* UR\d+, .*: UR\d+ unwritten", text)
    verdict = text[text.index("bytes of a row") :].splitlines()[1:7]
    assert [line.split()[0] for line in verdict] == ["16", "16", "32", "32", "64", "64"]


BREAKS = [
    ("weights not powers of two", "weights = tl.exp2(tl.dot(x, x.T))", "weights = tl.exp(tl.dot(x, x.T))"),
    ("no second product", "out = tl.dot(weights.to(tl.float16), z, out)", "out = tl.dot(weights.to(tl.float16), z)"),
    ("z is y", "z = tl.load(z_ptr + tile)", "z = tl.load(y_ptr + tile)"),
    ("a descriptor of two registers", "(4 if descriptor else 1)", "(2 if descriptor else 1)"),
    ("both sides always in memory", 'name.startswith("HGMMA") and', "False and"),
    ("one register of a pair", "{first, first + 1} if pair", "{first} if pair"),
    ("predicates are in the way", r"(?:U?P\d\s*,\s*)?UR", "UR"),
]
