"""What compilers make of kernels for GPUs that are not here: that it is told, and that it is true."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from bs4 import BeautifulSoup
from msgspec import structs
from project import Project

from triton_gallery.compiled import store
from triton_gallery.compiled.compile import Compiler, is_current, launched
from triton_gallery.compiled.compiler_process import Job
from triton_gallery.compiled.gpus import GPUS, KIB, Gpu
from triton_gallery.compiled.machine_code import unwritten
from triton_gallery.compiled.store import FAILED, FITS, TOO_LARGE, UNMEANT, Compiled, Kernel, Targets
from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.kernels import module_of
from triton_gallery.recipe.launches import Launch, typical
from triton_gallery.recipe.op import Op
from triton_gallery.records.files import BadRecordError
from triton_gallery.records.page_cache import Pages
from triton_gallery.records.record_store import Records
from triton_gallery.site import other_gpus

GPU = {gpu.key: gpu for gpu in GPUS}
HEAD = "import os\nimport triton\nimport triton.language as tl\n\n"
DOT = """
@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, K, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    a_ptrs = a_ptr + rows[:, None] * K + rows[None, :]
    b_ptrs = b_ptr + rows[:, None] * BLOCK + rows[None, :]
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for _ in range(0, K, BLOCK):
        acc += tl.dot(tl.load(a_ptrs), tl.load(b_ptrs))
        a_ptrs += BLOCK
        b_ptrs += BLOCK * BLOCK
    tl.store(c_ptr + rows[:, None] * BLOCK + rows[None, :], acc)
"""
HOLD = """
@triton.jit
def hold_kernel(x_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(x_ptr + offs, x - tl.max(x))
"""
PTX = """
@triton.jit
def ptx_kernel(x_ptr):
    tl.store(x_ptr, tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], tl.int32, is_pure=True, pack=1))
"""
COPY = """
@triton.jit
def copy_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < N), mask=offs < N)
"""


def launch(
    kernel: str, kinds: dict[str, str], block: int | None = None, aligned: bool = True, **options: int
) -> Launch:
    """Return a launch with arguments of these types; a constant `BLOCK` comes last."""
    places = [[place] for place in range(len(kinds))] if aligned else []
    constants = [] if block is None else [[[len(kinds)], block]]
    return Launch(kernel, kinds | ({} if block is None else {"BLOCK": "constexpr"}), constants, places, options)


def fits(**numbers: int) -> Compiled:
    """Return what a compiler made of a launch, with these numbers and the others 0."""
    return structs.replace(Compiled.failed(""), failure=None, **numbers)


NARROW = """
@triton.jit
def narrow_kernel(x_ptr, state_ptr, z_ptr, out_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, 64)
    x = tl.load(x_ptr + offs[:, None] * 64 + offs[None, :])
    tile = offs[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    p = tl.dot(x, x.T)
    out = tl.dot(x, tl.load(state_ptr + tile))
    out = tl.dot(tl.exp2(p).to(x.dtype), tl.load(z_ptr + tile), out)
    tl.store(out_ptr + tile, out)
"""


BIG_DOT = launch("dot_kernel", {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "K": "i32"}, 128, num_stages=3)
COPYING = launch("copy_kernel", {"x_ptr": "*bf16", "out_ptr": "*bf16", "N": "i32"}, 1024)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    """Return a compiler with a cache of its own."""
    with Compiler(tmp_path_factory.mktemp("cache")) as compiler:
        yield compiler


def test_too_much_shared_memory_for_one(compiler: Compiler) -> None:
    """Three stages of two tiles fit an H100's multiprocessor and not one of an L4."""
    compiled = {key: compiler.compile(Job(HEAD + DOT, BIG_DOT, GPU[key]))[0] for key in ("sm_89", "sm_90")}
    assert compiled["sm_90"].verdict(GPU["sm_90"]) == (FITS, "")
    word, why = compiled["sm_89"].verdict(GPU["sm_89"])
    assert word == TOO_LARGE
    assert compiled["sm_89"].shared > 99 * KIB
    assert f"{compiled['sm_89'].shared / KIB:.0f} KiB of shared memory" in why
    assert "99 KiB" in why


def test_matrix_instructions_are_named(compiler: Compiler) -> None:
    names = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
    for key, name in names.items():
        compiled, _ = compiler.compile(Job(HEAD + DOT, BIG_DOT, GPU[key]))
        assert compiled.failure is None
        assert any(instruction.startswith(name) for instruction in compiled.matrix), (key, compiled.matrix)


@pytest.mark.parametrize(("block", "right"), [(16, False), (32, False), (64, True)])
def test_wrong_code_of_ptxas_is_told(compiler: Compiler, block: int, right: bool) -> None:
    """Three products, the last two with tiles of 16 or 32 columns: ptxas 12.8 leaves out a part of a descriptor."""
    kinds = dict.fromkeys(("x_ptr", "state_ptr", "z_ptr", "out_ptr"), "*fp16")
    compiled, _ = compiler.compile(Job(HEAD + NARROW, launch("narrow_kernel", kinds, block), GPU["sm_90"]))
    assert (compiled.failure is None) == right
    if not right:
        word, why = compiled.verdict(GPU["sm_90"])
        assert word == FAILED
        assert re.search(r"ptxas: its code reads UR\d+.*, which nothing wrote$", why), why


def sass(*instructions: str) -> str:
    """Return a listing as a disassembler writes one; what ends in a colon is the beginning of a function."""
    lines = (
        line if line.endswith(":") else f"        /*{16 * n:04x}*/    {line} ;" for n, line in enumerate(instructions)
    )
    return "\n".join(lines)


def test_registers_that_nothing_wrote() -> None:
    """Whether read alone, in a pair or in the two descriptors of a product."""
    product = "HGMMA.64x16x16.F32 R56, gdesc[UR8].tnspB, R56"
    assert unwritten(sass("UMOV UR4, URZ", "UIADD3.X UR5, UR6, -0x3ffffff0, URZ, UP0, !UPT")) == ["UR6"]
    assert unwritten(sass("UMOV UR8, UR4", "ULDC.64 UR4, c[0x0][0x210]")) == ["UR4"]
    assert unwritten(sass("UMOV UR8, 0x1", "UIADD3.64 UR10, UR8, 0x2, URZ", product)) == ["UR9"]
    assert unwritten(sass("ULDC.64 UR10, c[0x0][0x210]", product)) == ["UR8", "UR9"]
    # Registers hold the first side: there is one descriptor.
    assert unwritten(sass("ULDC.64 UR10, c[0x0][0x210]", "HGMMA.64x16x16.F32 R56, R32, gdesc[UR8], R56")) == []
    # A predicate may stand before what is written, and a comparison writes predicates alone.
    assert unwritten(sass("ULOP3.LUT UP0, UR4, URZ, 0x1, URZ, 0xc0, !UPT", "UMOV UR5, UR4")) == []
    assert unwritten(sass("UISETP.NE.AND UP0, UPT, UR4, URZ, UPT", "UMOV UR4, URZ")) == ["UR4"]
    # LDS.64 reads a pair of words of memory, at an address in one register.
    assert unwritten(sass("UMOV UR6, 0x400", "LDS.64 R8, [R18+UR6]")) == []
    # A function returns its result in a register.
    called = "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64)", "UMOV UR4, UR32", "EXIT"
    assert unwritten(sass(*called, "$__internal_0_$__cuda_sm20_div_s64:", "UMOV UR32, UR25")) == []
    assert unwritten(sass(*called)) == ["UR32"]


def test_spilling_is_told(compiler: Compiler) -> None:
    """A row of 8192 words that one warp holds is 256 words for each thread, which has 255 registers."""
    kinds = {"x_ptr": "*i32"}
    many, _ = compiler.compile(Job(HEAD + HOLD, launch("hold_kernel", kinds, 8192, num_warps=1), GPU["sm_90"]))
    few, _ = compiler.compile(Job(HEAD + HOLD, launch("hold_kernel", kinds, 128), GPU["sm_90"]))
    assert many.spilled > 0
    assert few.spilled == 0
    assert many.registers == 255


def test_what_amd_cannot_compile_is_told(compiler: Compiler) -> None:
    """Inline PTX is for NVIDIA's GPUs."""
    work = launch("ptx_kernel", {"x_ptr": "*i32"})
    for_nvidia, _ = compiler.compile(Job(HEAD + PTX, work, GPU["sm_90"]))
    for_amd, listings = compiler.compile(Job(HEAD + PTX, work, GPU["gfx942"]))
    assert for_nvidia.verdict(GPU["sm_90"])[0] == FITS
    word, why = for_amd.verdict(GPU["gfx942"])
    assert word == FAILED
    assert why
    assert "\n" not in why
    assert listings == {}


GLUON = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def gluon_kernel(x_ptr, out_ptr, BLOCK: gl.constexpr, layout: gl.constexpr):
    offs = gl.arange(0, BLOCK, layout=layout)
    gl.store(out_ptr + offs, gl.load(x_ptr + offs) + 1.0)
"""


BLOCKED = "BlockedLayout(size_per_thread=[4], threads_per_warp=[32], warps_per_cta=[4], order=[0])"
ROWS = "BlockedLayout(size_per_thread=[4, 1], threads_per_warp=[32, 1], warps_per_cta=[4, 1], order=[0, 1])"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [(BLOCKED, "sizePerThread = [4]"), (f"SliceLayout(dim=1, parent={ROWS})", "sizePerThread = [4, 1]")],
)
def test_gluon_is_compiled_too(compiler: Compiler, layout: str, expected: str) -> None:
    """It has no interpreter, so a launch is noted on a GPU alone; its layouts are for warps of 32 threads here."""
    work = launch("gluon_kernel", {"x_ptr": "*fp32", "out_ptr": "*fp32"}, 512)
    work.signature["layout"] = "constexpr"
    work.constants.append([[3], {"layout": layout}])
    module = module_of(HEAD + GLUON, "gluon_kernel")
    compiled, listings = compiler.compile(Job(module, work, GPU["sm_90"]))
    assert compiled.verdict(GPU["sm_90"]) == (FITS, "")
    assert (compiled.loads, compiled.stores) == ({"16": 1}, {"16": 1})
    assert expected in listings["ttgir"]
    assert compiler.compile(Job(module, work, GPU["gfx942"]))[0].verdict(GPU["gfx942"])[0] == FAILED


def test_interpreter_of_this_process_does_not_matter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with Compiler(tmp_path) as compiler:
        assert compiler.compile(Job(HEAD + COPY, COPYING, GPU["sm_90"]))[0].failure is None
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_compiler_that_crashes_costs_its_launch_alone(compiler: Compiler) -> None:
    crashed, _ = compiler.compile(Job(HEAD + "os.abort()\n" + COPY, COPYING, GPU["sm_90"]))
    assert crashed.failure == "the compiler crashed with exit status -6"
    assert compiler.compile(Job(HEAD + COPY, COPYING, GPU["sm_90"]))[0].failure is None


def test_figures_are_those_of_cuobjdump(compiler: Compiler, tmp_path: Path) -> None:
    """The tool of Triton's wheel, run here, says the same of a cubin made here in another way."""
    program = (
        "import sys, triton, copying; from triton.backends.compiler import GPUTarget\n"
        "types = {'x_ptr': '*bf16', 'out_ptr': '*bf16', 'N': 'i32', 'BLOCK': 'constexpr'}\n"
        "aligned = {(place,): [['tt.divisibility', 16]] for place in range(3)}\n"
        "source = triton.compiler.ASTSource(copying.copy_kernel, types, {(3,): 1024}, aligned)\n"
        "made = triton.compile(source, target=GPUTarget('cuda', 90, 32))\n"
        "open('kernel.cubin', 'wb').write(made.asm['cubin'])\n"
        "print(triton.knobs.nvidia.cuobjdump.path, triton.knobs.nvidia.nvdisasm.path)\n"
    )
    (tmp_path / "copying.py").write_text(HEAD + COPY)
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DISABLE_LINE_INFO": "1"}
    cuobjdump, nvdisasm = python(tmp_path, program, variables).split()
    text = subprocess.check_output([cuobjdump, "-res-usage", tmp_path / "kernel.cubin"], text=True)
    code = subprocess.check_output([nvdisasm, tmp_path / "kernel.cubin"], text=True)
    compiled, listings = compiler.compile(Job(HEAD + COPY, COPYING, GPU["sm_90"]))
    usage = dict(re.findall(r"(REG|STACK|SHARED):(\d+)", text))
    assert usage == {"REG": str(compiled.registers), "STACK": str(compiled.spilled), "SHARED": str(compiled.shared)}
    assert compiled.loads == {"16": code.count("LDG.E.128")} == {"16": 1}
    assert compiled.stores == {"16": code.count("STG.E.128")} == {"16": 1}
    assert "LDG.E.128" in listings["sass"]
    assert "ld.global" in listings["ptx"]
    assert "#blocked" in listings["ttgir"]


def python(folder: Path, program: str, variables: dict[str, str]) -> str:
    """Run a program in a folder; return what it printed."""
    environment = {**os.environ, **variables}
    return subprocess.check_output([sys.executable, "-c", program], cwd=folder, env=environment, text=True)


def test_alignment_is_part_of_a_launch(compiler: Compiler) -> None:
    aligned, _ = compiler.compile(Job(HEAD + COPY, COPYING, GPU["sm_90"]))
    unaligned = launch("copy_kernel", {"x_ptr": "*bf16", "out_ptr": "*bf16", "N": "i32"}, 1024, aligned=False)
    misaligned, _ = compiler.compile(Job(HEAD + COPY, unaligned, GPU["sm_90"]))
    assert set(aligned.loads) == {"16"}
    assert set(misaligned.loads) == {"2"}


@pytest.mark.parametrize(
    ("gpu", "warps", "registers", "shared", "expected"),
    [
        ("sm_90", 4, 32, 0, (1.0, "registers, warps")),  # 16 programs of 4 warps
        ("sm_90", 8, 64, 0, (0.5, "registers")),  # 65536 / (64 * 32) = 32 warps
        ("sm_90", 8, 33, 0, (0.75, "registers")),  # 33 registers are rounded to 40: 51 warps, 6 programs
        ("sm_90", 4, 32, 100 * KIB, (2 * 4 / 64, "shared memory")),  # two programs in 228 KiB
        ("sm_89", 4, 32, 0, (1.0, "warps")),
        ("sm_90", 1, 16, 0, (0.5, "warps")),  # 32 programs at the most
        ("gfx942", 4, 64, 0, (1.0, "registers, warps")),  # 512 / 64 = 8 warps on each of four units
        ("gfx942", 4, 128, 0, (0.5, "registers")),
        ("gfx942", 4, 32, 40 * KIB, (4 / 32, "shared memory")),
    ],
)
def test_occupancy(gpu: str, warps: int, registers: int, shared: int, expected: tuple[float, str]) -> None:
    part, limit = GPU[gpu].occupancy(warps, registers, shared)
    assert (part, limit) == (expected[0], expected[1])


def test_more_threads_than_a_program_has() -> None:
    """Thirty-two warps are 1024 threads on NVIDIA's GPUs and 2048 on AMD's."""
    compiled = fits(registers=32, warps=32)
    assert compiled.verdict(GPU["sm_90"])[0] == FITS
    assert compiled.verdict(GPU["gfx942"]) == (TOO_LARGE, "32 warps of 64 threads are more than the 1024 of a program")


def test_typical_launch() -> None:
    """Types that models use come first, then alignment, then the larger tile."""
    kinds = {"x_ptr": "*bf16", "out_ptr": "*bf16", "N": "i32"}
    double = launch("copy_kernel", dict.fromkeys(kinds, "*fp64"), 4096)
    odd, small = launch("copy_kernel", kinds, 2048, aligned=False), launch("copy_kernel", kinds, 512)
    other = launch("hold_kernel", {"x_ptr": "*i32"}, 128)
    assert typical([small, double, COPYING, odd, other]) == [COPYING, other]
    assert typical([double]) == [double]


SCRIPT = """
import triton
import triton.language as tl

SCALE = tl.constexpr(2.0)
OTHER = 3


@triton.jit
def twice(x):
    return x * SCALE


@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=["N"])
@triton.jit
def twice_kernel(x_ptr, N, BLOCK: tl.constexpr):
    OTHER = tl.arange(0, BLOCK)
    tl.store(x_ptr + OTHER, twice(tl.load(x_ptr + OTHER, mask=OTHER < N)), mask=OTHER < N)


print("not of the kernel")
"""


def test_module_of_a_kernel() -> None:
    module = module_of(SCRIPT, "twice_kernel")
    assert "def twice(x)" in module
    assert "SCALE = " in module
    assert "autotune" not in module
    assert "@triton.jit\ndef twice_kernel" in module
    assert "OTHER = 3" not in module, "a name of the kernel's own was taken for the module's"
    assert "print" not in module
    within = module_of(
        SCRIPT + "\ndef make():\n    @triton.jit\n    def inner_kernel(x_ptr):\n        twice(1)\n", "inner_kernel"
    )
    assert "def twice(x)" in within
    assert "\n@triton.jit\ndef inner_kernel" in within
    with pytest.raises(LookupError, match="the recipe does not define nothing"):
        module_of(SCRIPT, "nothing")


RECIPE = """
import os

import torch

os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < N), mask=offs < N)


@triton.jit
def one_kernel(out_ptr):
    tl.store(out_ptr, 1)


x = torch.arange(100).half()
out = torch.empty_like(x)
copy_kernel[(2,)](x, out, 100, BLOCK=64, num_warps=2)
assert torch.equal(x, out)
one_kernel[(1,)](out)
"""


@pytest.fixture(scope="module")
def project(make_project: Callable[..., Project]) -> Project:
    """Return a project of two recipes, one of which launches two kernels."""
    project = make_project()
    project.write(copies=RECIPE, talks='print("no kernel")')
    return project


@pytest.fixture(scope="module")
def made(project: Project) -> tuple[Recipe, Targets]:
    """Return the recipe and what was kept of it."""
    status, output = project.run("compile")
    assert status == 0, output
    assert "compiled 12 launches of 2 recipes" in output
    (recipe, _) = load(project.root / "gallery")
    targets = store.load(project.root / "docs" / "_compiled", recipe)
    assert targets is not None
    return recipe, targets


def test_launches_are_noted_as_a_recipe_runs(made: tuple[Recipe, Targets]) -> None:
    _, targets = made
    assert [kernel.launch.kernel for kernel in targets.kernels] == ["copy_kernel", "one_kernel"]
    assert targets.launched_by == "Triton's interpreter on CPU"


def test_every_gpu_is_compiled_for(made: tuple[Recipe, Targets]) -> None:
    _, targets = made
    for kernel in targets.kernels:
        assert list(kernel.on) == [gpu.key for gpu in GPUS]
        assert {kernel.verdict(gpu)[0] for gpu in GPUS} == {FITS}


def test_made_again_it_is_the_same(project: Project, made: tuple[Recipe, Targets]) -> None:
    folder = project.root / "docs" / "_compiled" / "things"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == {"copies.json", "talks.json"}
    status, output = project.run("compile")
    assert (status, "2 recipes had not changed" in output) == (0, True), output
    status, output = project.run("compile", "--force")
    assert status == 0, output
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_page_shows_them(project: Project, made: tuple[Recipe, Targets]) -> None:
    status, output = project.build()
    assert status == 0, output
    page = BeautifulSoup(project.page("copies"), "html.parser")
    marks = page.select(".glance .targets .target")
    assert [mark.get_text() for mark in marks] == [gpu.name for gpu in GPUS]
    assert all("fits" in mark["class"] for mark in marks)
    tables = page.select("#on-other-gpus table.targets")
    assert len(tables) == 2
    rows = [[cell.get_text() for cell in row.select("td")] for row in tables[0].select("tbody tr")]
    assert [row[0] for row in rows] == [gpu.name for gpu in GPUS]
    compiled = made[1].kernels[0].on["sm_90"]
    assert rows[2][1:4] == ["ttgir ptx sass", "fits", str(compiled.registers)]
    assert (project.root / "_build/html/listings/things/copies/copy_kernel.js").is_file()
    assert not BeautifulSoup(project.page("talks"), "html.parser").select("#on-other-gpus, .target")


def test_listings_are_made_again(project: Project, made: tuple[Recipe, Targets], tmp_path: Path) -> None:
    """Without them a page has the figures alone; they come from what is kept, and no recipe is executed for them."""
    copy = project.copy(tmp_path / "copy")
    shutil.rmtree(copy.root / "_build")
    shutil.rmtree(copy.root / "docs/recipes", ignore_errors=True)
    status, output = copy.build()
    assert status == 0, output
    section = BeautifulSoup(copy.page("copies"), "html.parser").select_one("#on-other-gpus")
    assert section
    assert not section.select("button, div.listing")
    assert "code" not in [cell.get_text() for cell in section.select("th")]
    assert not (copy.root / "_build/html/listings/things/copies").exists()
    executed = copy.root / "docs/recipes"
    shutil.rmtree(executed)
    status, output = copy.run("listings")
    assert (status, "2 of 2 recipes have listings, 0 had them before" in output) == (0, True), output
    assert not executed.exists()
    texts = store.load_texts(store.listing(copy.root / "_build/listings", made[1]))
    assert "s_endpgm" in texts["copy_kernel/gfx942.amdgcn"]
    assert {"copy_kernel/sm_90.sass", "one_kernel/sm_90.ptx"} <= texts.keys()
    assert "2 had them before" in copy.run("listings")[1]
    assert copy.build()[0] == 0
    assert BeautifulSoup(copy.page("copies"), "html.parser").select("#on-other-gpus button.listing")
    assert (copy.root / "_build/html/listings/things/copies/copy_kernel.js").is_file()


def test_listings_of_other_code(project: Project, made: tuple[Recipe, Targets], tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "copy")
    shutil.rmtree(copy.root / "_build/listings")
    copy.write(copies=RECIPE.replace("tl.store(out_ptr, 1)", "tl.store(out_ptr, 2)"))
    status, output = copy.run("listings")
    assert status == 0, output
    assert "things/copies gets no listings: its figures are of other code; run make compile" in output
    assert "1 of 2 recipes have listings" in output


def test_of_older_code(project: Project, made: tuple[Recipe, Targets], tmp_path: Path) -> None:
    """A changed recipe's figures stay, say so, and are made anew by the next call."""
    copy = project.copy(tmp_path / "copy")
    copy.write(copies=RECIPE.replace("tl.store(out_ptr, 1)", "tl.store(out_ptr, 2)"))
    assert copy.build()[0] == 0
    assert "of older code" in copy.page("copies")
    assert "of older code" in copy.run("compiled")[1]
    output = copy.run("compile")[1]
    assert "compiled 12 launches of 1 recipes" in output
    assert "1 recipes had not changed" in output
    assert "of older code" not in copy.run("compiled")[1]


def test_terminal_and_json(project: Project, made: tuple[Recipe, Targets]) -> None:
    status, output = project.run("compiled", "things/copies")
    assert status == 0
    assert "copy_kernel(fp16, BLOCK=64, num_warps=2, not divisible by 16: N)" in output
    status, output = project.run("compiled", "--json")
    entry = json.loads(output)["things/copies"]["kernels"][0]["on"]["sm_90"]
    assert entry["verdict"] == FITS
    assert entry["occupancy"] == made[1].kernels[0].on["sm_90"].occupancy(GPU["sm_90"])[0]


def test_check_fails_if_a_kernel_no_longer_fits(project: Project, made: tuple[Recipe, Targets], tmp_path: Path) -> None:
    copy = project.copy(tmp_path / "copy")
    large = RECIPE.replace("copy_kernel[(2,)](x, out, 100, BLOCK=64, num_warps=2)", LARGE)
    copy.write(copies=large)
    kept = {path.name: path.read_bytes() for path in (copy.root / "docs/_compiled/things").iterdir()}
    status, output = copy.run("compile", "--check")
    assert status == 1, output
    assert (
        "error: things/copies: copy_kernel does not fit on MI300, though it fitted before: 32 warps of 64 threads"
        in output
    )
    assert kept == {path.name: path.read_bytes() for path in (copy.root / "docs/_compiled/things").iterdir()}
    _commit(copy.root)
    assert copy.run("compile")[0] == 0
    _commit(copy.root)
    status, output = copy.run("compile", "--check")
    assert status == 1, "keeping the worse figures hides them"
    assert "error: things/copies: copy_kernel does not fit on MI300" in output
    _commit(copy.root)
    assert copy.run("compile", "--check")[0] == 0


def _commit(folder: Path) -> None:
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for arguments in (["init", "-q"], ["add", "docs/_compiled"], ["commit", "-q", "--allow-empty", "-m", "figures"]):
        subprocess.run([*git, *arguments], cwd=folder, check=True)


LARGE = "copy_kernel[(1,)](x, out, 100, BLOCK=1024, num_warps=32)"


def test_what_is_worse() -> None:
    small, spills = fits(registers=32, warps=4), fits(registers=255, spilled=16, warps=4)
    fails = Compiled.failed("no")

    def kept(compiled: Compiled) -> Targets:
        return Targets("0" * 16, "", "", [Kernel(COPYING, {"sm_90": compiled})])

    assert list(store.worse(kept(small), kept(small))) == []
    assert list(store.worse(kept(fails), kept(spills))) == []
    ((is_error, message),) = store.worse(kept(small), kept(spills))
    assert (is_error, message) == (False, "copy_kernel spills 16 bytes a thread on H100, H200, before 0")
    ((is_error, message),) = store.worse(kept(small), kept(fails))
    assert (is_error, message) == (True, "copy_kernel does not compile on H100, H200, though it fitted before: no")
    # A record brought another launch: that one fits less is told, and stops nobody.
    ((is_error, message),) = store.worse(kept(small), structs.replace(kept(fails), launched_by="Test GPU"))
    assert not is_error
    assert message.endswith("fitted before: no (as Test GPU launched it; before,  did)")


def test_not_meant_for(make_project: Callable[..., Project]) -> None:
    """What a recipe declares not to be for a GPU is not compiled for it, and is no fault there."""
    project = make_project()
    project.write(copies=RECIPE)
    assert "compiled 12 launches" in project.run("compile")[1]
    script = project.root / "gallery" / "things" / "copies.py"
    declared = '# /// script\n# [tool.triton-gallery.not_for]\n# copy_kernel = ["gfx942"]\n# ///\n'
    script.write_text(declared + script.read_text())
    assert "compiled 11 launches" in project.run("compile")[1]
    (recipe,) = load(project.root / "gallery")
    targets = store.load(project.root / "docs" / "_compiled", recipe)
    assert targets
    copies, one_kernel = targets.kernels
    assert [kernel.verdict(GPU["gfx942"])[0] for kernel in (copies, one_kernel)] == [UNMEANT, FITS]
    assert targets.verdict(GPU["gfx942"], None) == (FITS, "")
    assert structs.replace(targets, kernels=[copies]).verdict(GPU["gfx942"], None) == (UNMEANT, "")


def test_the_kernels_of_the_op_count() -> None:
    """What a page's other kernels come to is no fault of its op."""
    gpu = GPU["sm_90"]
    compiled = {"_op_kernel": fits(), "first_kernel": Compiled.failed("no")}
    both = Targets(
        "code", "a GPU", "3.7.1", [Kernel(launch(name, {}), {gpu.key: outcome}) for name, outcome in compiled.items()]
    )
    assert both.verdict(gpu, Op("op", "An op", [], "@triton.jit\ndef _op_kernel():\n    pass\n")) == (FITS, "")
    assert both.verdict(gpu, None) == (FAILED, "first_kernel")
    assert both.verdict(gpu, Op("op", "An op without kernels", [], "")) == (FAILED, "first_kernel")


def box(monkeypatch: pytest.MonkeyPatch, recorded: list[str], on: dict[str, list[str]]) -> tuple[str, list[str]]:
    """Return the line of marks and the lines below it of an op, given its kernels and the GPUs that each is for."""
    kernels = [Kernel(launch(name, {}), {key: fits() for key in keys}) for name, keys in on.items()]
    op = Op("op", "An op", [], "".join(f"def {name}():\n    pass\n" for name in on))
    monkeypatch.setattr(other_gpus, "kept", lambda *_: Targets("code", "an H200", "3.7.1", kernels))
    monkeypatch.setattr(other_gpus, "op_of", lambda *_: op)
    measured = [
        SimpleNamespace(recipe="op", environment=SimpleNamespace(name=name, capability="9.0")) for name in recorded
    ]
    monkeypatch.setattr(other_gpus.page_context, "beside_libraries", lambda _: measured[1:])
    (line,) = other_gpus.strip(None, SimpleNamespace(recipe=SimpleNamespace(key="op"), records=measured[:1]))
    return line.astext(), [text.astext() for text in other_gpus.misfits(None, None)]


def test_marks_tell_what_ran_and_what_was_only_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    line, _ = box(monkeypatch, ["NVIDIA H200"], {"_op_kernel": [*GPU]})
    ran, compiled = (re.findall(r">([^<>]+)</span>", part) for part in line.split("Compiled, not run:"))
    assert "Run on" in line
    assert ran == ["H200"]
    assert compiled == ["A100", "L4, RTX 40", "H100", "B200", "RTX 50", "MI300"]
    line, _ = box(monkeypatch, [], {"_op_kernel": [*GPU]})
    assert "Run on" not in line
    assert "H100, H200</span>" in line
    line, _ = box(monkeypatch, ["NVIDIA H200", "NVIDIA H100 80GB HBM3"], {"_op_kernel": ["sm_90"]})
    assert "Run on H100, H200 " in re.sub("<.+?>", "", line), "the op was measured beside libraries"
    line, _ = box(monkeypatch, ["NVIDIA H200"], {"_op_kernel": ["sm_90", "sm_100"]})
    assert (
        re.sub("<.+?>", "", line)
        == "Run on H200 Compiled, not run: H100 B200 Not supported: A100 L4, RTX 40 RTX 50 MI300"
    )


def test_kernel_that_is_not_for_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no GPU takes is left out."""
    most = [key for key in GPU if key not in {"sm_89", "sm_120"}]
    line, lines = box(monkeypatch, [], {"_op_kernel": [*GPU], "_op_backward_kernel": most, "_op_never_kernel": []})
    assert 'class="target partly" title="not _op_backward_kernel">L4, RTX 40: 1 of 2 kernels</span>' in line
    assert 'class="target fits" title="fits">A100</span>' in line
    (text,) = lines
    assert text.startswith(
        "L4, RTX 40; RTX 50: with the launch recorded on an H200, 1 of 2 kernels is not meant for these GPUs: "
    )
    assert "_op_backward_kernel. " in text


def test_bad_file_is_refused(project: Project, made: tuple[Recipe, Targets], tmp_path: Path) -> None:
    recipe, targets = made
    path = store.write(tmp_path, recipe, targets)
    assert store.load(tmp_path, recipe) == targets
    content = json.loads(path.read_text())
    content["kernels"][0]["on"]["sm_90"]["registers"] = "many"
    path.write_text(json.dumps(content))
    reason = f"{path}: Expected `int`, got `str` - at `$.kernels[0].on[...].registers`"
    with pytest.raises(BadRecordError, match=re.escape(reason)):
        store.load(tmp_path, recipe)


def test_launches_of_a_record_come_first(project: Project, made: tuple[Recipe, Targets], tmp_path: Path) -> None:
    """What a GPU launched, at the sizes and with the configs that were best there, says more than small checks."""
    recipe, targets = made
    run = Pages(project.root / "docs" / "recipes").run(recipe.key)
    assert run
    assert launched(recipe, run, Records(tmp_path)) == (run.launches, "Triton's interpreter on CPU")
    gpu = structs.replace(run.environment, name="Test GPU", capability="9.0", memory=1)
    on_gpu = structs.replace(run, environment=gpu, launches=[COPYING])
    Records(tmp_path).write(recipe, on_gpu, {}, None)
    assert launched(recipe, run, Records(tmp_path)) == ([COPYING], "Test GPU")
    assert not is_current(recipe, targets, Records(tmp_path))
    assert is_current(recipe, structs.replace(targets, launched_by="Test GPU"), Records(tmp_path))


def test_gpus_are_distinct() -> None:
    assert len({gpu.key for gpu in GPUS}) == len({gpu.name for gpu in GPUS}) == len(GPUS)
    assert Gpu("sm_100", "", "", 1, 1, 1, 1).capability == "10.0"
    assert GPU["gfx942"].capability is None
