"""The recipe Ahead of time, a C function: its kernel, what Triton's tools make of it, and the C program around that.

Where there is no GPU, the program runs on a stand-in for the driver, which keeps the GPU's memory in that of the CPU.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from compiled import TRITON
from guard import guarded
from hypothesis import given
from hypothesis import strategies as st
from inputs import Layout, sizes
from tolerance import assert_within

BLOCK = 1024  # of the recipe's kernel
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: make test-gpu")
needs_cc = pytest.mark.skipif(
    not (shutil.which("nm") and any(map(shutil.which, ("cc", "gcc", "clang")))), reason="needs a C compiler"
)

# What the program calls of the driver. A module is the place of its cubin; the first one loaded is that for multiples
# of 16, as the linker sorts them. A launch reads its arguments as the kernel would: four bytes of alpha.
STAND_IN = r"""
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *loaded[2];
CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int n) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "no image"; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    if (getenv("STAND_IN_REFUSES")) return CUDA_ERROR_NO_BINARY_FOR_GPU;
    *module = (CUmodule)image;
    loaded[loaded[0] != NULL] = *module;
    return memcmp(image, "\177ELF", 4) ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)module;
    return strcmp(name, "scale_add_kernel") ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr *place, size_t bytes) {
    *place = (CUdeviceptr)aligned_alloc(256, (bytes + 255) / 256 * 256);
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr place) { free((void *)place); return CUDA_SUCCESS; }
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t n) { memcpy((void *)to, from, n); return CUDA_SUCCESS; }
CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t n) { memcpy(to, (void *)from, n); return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void **args, void **extra) {
    CUdeviceptr at[3];
    float alpha;
    int n, version = (void *)f != loaded[0];
    for (int i = 0; i < 3; i++) {
        memcpy(&at[i], args[i], 8);
        if (!version && at[i] % 16) return CUDA_ERROR_MISALIGNED_ADDRESS;
    }
    memcpy(&alpha, args[3], 4);
    memcpy(&n, args[4], 4);
    if (*(CUdeviceptr *)args[5] || *(CUdeviceptr *)args[6] || gy * gz != 1 || bx * by * bz != 128)
        return CUDA_ERROR_INVALID_VALUE;
    if (n != 1024) fprintf(stderr, "version %d\n", version); /* these are not timed */
    for (int i = 0; i < (int)gx * 1024 && i < n; i++)
        ((float *)at[2])[i] = alpha * ((float *)at[0])[i] + ((float *)at[1])[i];
    return CUDA_SUCCESS;
}
"""


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@given(N=sizes(BLOCK, 4 * BLOCK), alpha=st.sampled_from([0.0, 1.0, -2.5, 1e-3]), seed=st.integers(0, 2**31))
def test_scale_add(recipe: ModuleType, dtype: torch.dtype, N: int, alpha: float, seed: int) -> None:
    """Right for vectors of any length, and nothing else is touched."""
    x, y = (Layout("contiguous", seed + k).make((N,), dtype, recipe.DEVICE) for k in range(2))
    out = guarded(lambda x, y: recipe.scale_add(x, y, alpha), x, y)
    terms = (alpha * x.double()).abs() + y.double().abs()
    assert_within(out, alpha * x.double() + y.double(), terms, roundings=3)


def test_unaligned_float32(recipe: ModuleType) -> None:
    """Vectors at addresses that 16 does not divide are right too."""
    x, y = (Layout("offset", k).make((BLOCK + 5,), torch.float32, recipe.DEVICE) for k in range(2))
    torch.testing.assert_close(recipe.scale_add(x, y, 2.0), 2 * x + y)


def test_refuses(recipe: ModuleType) -> None:
    """What the launcher does not take, it names."""
    x = torch.ones(6, device=recipe.DEVICE)
    for bad in (x.double(), torch.ones(12, device=recipe.DEVICE)[::2]):
        with pytest.raises(TypeError, match="scale_add takes contiguous float32 vectors"):
            recipe.scale_add(x, bad, 1.0)
    for bad in (x[:5], x.view(2, 3)):
        with pytest.raises(ValueError, match="scale_add takes two vectors of one length"):
            recipe.scale_add(x, bad, 1.0)


@pytest.fixture(scope="module")
def built(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the C files for the GPU at hand, or an H100."""
    folder = tmp_path_factory.mktemp("files") / "built"
    recipe.build(folder, recipe.ARCH)
    return folder


@pytest.fixture(scope="module")
def trap(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return such a folder, with the types as Triton's tools write them by themselves."""
    folder = tmp_path_factory.mktemp("files") / "trap"
    recipe.build(folder, recipe.ARCH, float_type="")
    return folder


def test_cubins(recipe: ModuleType, built: Path) -> None:
    """The version for multiples of 16 loads 16 bytes at once; both take the same arguments."""
    table = recipe.look(built)
    assert [re.findall(r"\d+ LDG[.\w]*", loads) for loads in table["loads"]] == [["4 LDG.E.128"], ["16 LDG.E"]]
    assert set(table["arguments"]) == {"8 8 8 4 4 8 8"}
    assert {arch.removesuffix("a") for arch in table["for"]} == {f"sm_{recipe.ARCH}"}


def test_what_the_duties_say(built: Path) -> None:
    """An empty grid has no return, an error of loading ends the program, and the kernel is a global variable."""
    (launcher, _) = sorted(built.glob("scale_add.*.c"))
    text = launcher.read_text()
    assert re.search(r"if\(gX \* gY \* gZ > 0\)\s+return cuLaunchKernel[^\n]*\n\}", text)
    assert "exit(code)" in text
    assert re.search(r"(?m)^CUfunction \w+_func = NULL;", text)


def test_target_as_text(recipe: ModuleType, tmp_path: Path) -> None:
    """With a driver, or what stands in its place, the tool's own target fails up to Triton 3.8."""
    compiler = recipe.COMPILE.replace("grid=grid,", 'grid=grid, target="cuda:90:32",')
    assert compiler != recipe.COMPILE
    recipe.begin(tmp_path / "text")
    command = [sys.executable, "-c", compiler, "90", "float", recipe.GRID, recipe.ANY]
    status, output = recipe.child(tmp_path / "text", *command)
    if TRITON >= (3, 9):
        assert status == 0, output
    else:
        assert status != 0
        assert "'str' and 'int'" in output


@needs_cc
def test_objects(recipe: ModuleType, built: Path) -> None:
    """The generated files and the program compile, and need the driver and the C library alone."""
    objects = recipe.compile_c(built)
    assert {"main.o", "scale_add.o"} < set(objects)
    names = recipe.needed(built, objects)
    assert "cuLaunchKernel" in names
    assert "scale_add_default" not in names
    assert "scale_add_default" in recipe.needed(built, ["main.o"])


@needs_cc
def test_nothing_to_warn_of(recipe: ModuleType, built: Path) -> None:
    """The compiler has nothing to say of the page's own program."""
    (built / "main.c").write_text(recipe.MAIN)
    include = Path(recipe.triton.__file__).parent / "backends" / "nvidia" / "include"
    flags = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{include}"]
    status, output = recipe.child(built, recipe.CC, *flags, "main.c")
    assert status == 0, output


@pytest.fixture
def stand_in(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have programs linked with a stand-in for the driver, and find it as they run."""
    (tmp_path / "stand_in.c").write_text(STAND_IN)
    include = Path(recipe.triton.__file__).parent / "backends" / "nvidia" / "include"
    command = [recipe.CC, "-shared", "-fPIC", f"-I{include}", "stand_in.c", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", "libcuda.so.1"], cwd=tmp_path, check=True)
    monkeypatch.setattr("triton.backends.nvidia.driver.libcuda_dirs", lambda: [str(tmp_path)])
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


@needs_cc
@pytest.mark.usefixtures("stand_in")
def test_program(recipe: ModuleType, built: Path) -> None:
    """The program's three cases are right, each by the version that the linker chose, and it times 100 batches."""
    status, output = recipe.child(built, recipe.link_c(built))
    assert status == 0, output
    assert re.findall(r"version (\d)", output) == ["0", "1", "1"]
    lines = [line for line in output.splitlines() if "version" not in line]
    *cases, times = lines
    assert cases == [f"{n} numbers from element {first}: 0 wrong" for n, first in ((4096, 0), (1003, 16), (4096, 17))]
    assert times.startswith("microseconds: ")
    assert len(times.split()) == 101
    assert all(float(word) > 0 for word in times.split()[1:])


@needs_cc
@pytest.mark.usefixtures("stand_in")
def test_program_says_what_is_wrong(recipe: ModuleType, trap: Path, built: Path, tmp_path: Path) -> None:
    """With the double, a grid too small, or a cubin that the driver refuses."""
    _, output = recipe.child(trap, recipe.link_c(trap))
    counts = [int(wrong) for wrong in re.findall(r"(\d+) wrong", output)]
    assert 4000 < counts[0] < 4096
    assert all(counts)

    small = Path(shutil.copytree(built, tmp_path / "small"))
    for launcher in small.glob("scale_add.*.c"):
        launcher.write_text(launcher.read_text().replace("gX = (N + 1023u) / 1024", "gX = 1"))
    _, output = recipe.child(small, recipe.link_c(small))
    assert re.findall(r"(\d+) wrong", output) == ["3072", "0", "3072"]

    program = recipe.link_c(built)
    status, output = recipe.child(built, "env", "STAND_IN_REFUSES=1", program)
    assert (status, "Triton Error [CUDA]: no image" in output) == (209, True)


def test_answer_variants(recipe: ModuleType, tmp_path: Path) -> None:
    """Versions of other warps are another variant, and the first one is the default."""
    compiler = recipe.COMPILE.replace("num_warps=4", "num_warps=warps")
    compiler = compiler.replace("for signature in signatures:\n", "for warps, signature in each:\n")
    each = "each = [(warps, signature) for warps in (4, 8) for signature in signatures]\n"
    compiler = compiler.replace("for warps,", each + "for warps,")
    recipe.COMPILE, kept = compiler, recipe.COMPILE
    try:
        recipe.build(tmp_path / "variants", 90)
    finally:
        recipe.COMPILE = kept
    assert len(list((tmp_path / "variants").glob("scale_add.*.h"))) == 4
    text = (tmp_path / "variants" / "scale_add.c").read_text()
    (listed,) = re.findall(r"scale_add_kernels\[\] = \{\n(.*?)\};", text, re.DOTALL)
    assert len(listed.split()) == 2
    assert re.search(r"scale_add_default\(.*\{\n  return scale_add\(.*, 0\);", text)


@needs_cc
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_answer_cpp(recipe: ModuleType, built: Path) -> None:
    """C++ looks for a name with types in it, unless the header stands in extern "C"."""
    include = Path(recipe.triton.__file__).parent / "backends" / "nvidia" / "include"
    text = '{}\n#include "scale_add.h"\n{}\nint main() {{ scale_add_default(0, 0, 0, 0, 1, 1); }}\n'
    results = []
    for around in (("", ""), ('#include <cuda.h>\nextern "C" {', "}")):
        (built / "call.cpp").write_text(text.format(*around))
        status, output = recipe.child(built, "c++", "-c", f"-I{include}", "call.cpp")
        assert status == 0, output
        results.append("scale_add_default" in recipe.needed(built, ["call.o"]))
    assert results == [False, True]


def test_clock(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 means of 100 calls, in microseconds."""
    now, calls = [0.0], []

    def call() -> None:
        calls.append(now[0])
        now[0] += 3e-6

    monkeypatch.setattr(recipe.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert recipe.cpu_time(call) == [pytest.approx(3)] * 100
    assert len(calls) == 10_000


@gpu
def test_program_on_the_gpu(recipe: ModuleType, built: Path) -> None:
    """The program runs without Python, and its three cases are right."""
    program = recipe.link_c(built)
    status, output = recipe.child(built, program)
    assert status == 0, output
    assert re.findall(r"(\d+) wrong", output) == ["0", "0", "0"]
    libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    assert "libcuda.so.1" in libraries
    assert "python" not in libraries.lower()


@gpu
def test_trap_on_the_gpu(recipe: ModuleType, trap: Path) -> None:
    """A float that is declared as a double arrives as another number."""
    _, output = recipe.child(trap, recipe.link_c(trap))
    assert int(re.findall(r"(\d+) wrong", output)[0]) > 4000


@gpu
def test_foreign_cubin_on_the_gpu(recipe: ModuleType, tmp_path: Path) -> None:
    """The driver refuses a cubin for another architecture, and the launcher ends the program."""
    recipe.build(tmp_path / "foreign", recipe.OTHER)
    status, output = recipe.child(tmp_path / "foreign", recipe.link_c(tmp_path / "foreign"))
    assert status != 0
    assert "no kernel image is available" in output


# Mutants for test_mutants.py: what is taken out of the recipe, and what takes its place.
BREAKS = [
    ("stored without a mask", "alpha * x + y, mask=mask)", "alpha * x + y)"),
    ("alpha left out", "alpha * x + y, mask=mask)", "x + y, mask=mask)"),
    ("a program too few", "grid = (triton.cdiv(N, BLOCK),)", "grid = (N // BLOCK,)"),
]
