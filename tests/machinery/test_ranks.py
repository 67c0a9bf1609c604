"""A recipe for several GPUs: a process for each, what each fault costs, and where its record goes.

The processes are real, and meet as those do that `torchrun` starts; the GPUs are not there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from fake_gpus import GpuProject
from msgspec import structs
from project import ROOT, Project, is_alive

from triton_gallery.execute import memory
from triton_gallery.execute.recording import kinds
from triton_gallery.recipe import device
from triton_gallery.recipe.contents import load
from triton_gallery.recipe.device import Environment, Slot, links, together

LIMIT = 12
MEMORY = 2.5e9  # bytes
BLOCK = "# /// script\n# [tool.triton-gallery]\n# gpus = {}\n# ///\n"
JOINS = """
import datetime, os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
rank = dist.get_rank()
"""
SUMS = f"""{JOINS}
total = torch.tensor(float(rank + 1))
dist.all_reduce(total)
multicast = os.environ["NCCL_NVLS_ENABLE"], os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"]
assert multicast == ("0", "1") and os.environ["LOCAL_RANK"] == str(rank)
print(f"rank {{rank}} of {{dist.get_world_size()}}: {{total.item():g}}")
dist.destroy_process_group()
"""
NOTES = """
with open({notes!r}, "a") as notes:
    notes.write(f"{{os.getpid()}} ")
dist.barrier()
"""
FAULTS = {  # each with what is told of it, and a line of the log or the traceback
    "rank_1_raises": (
        "if rank == 1:\n    raise ValueError('its own')\ndist.barrier()",
        "rank 1 raised ValueError: its own",
        "rank_1_raises.py",
    ),
    "rank_0_raises": (
        "if rank == 0:\n    raise ValueError('the first')\ndist.barrier()",
        "raised ValueError: the first",
        "rank_0_raises.py",
    ),
    "rank_1_raises_last": (
        "dist.barrier()\ntime.sleep(2 * rank)\nassert rank == 0, 'too late'",
        "rank 1 raised AssertionError: too late",
        "rank_1_raises_last.py",
    ),
    "rank_1_dies": (
        "if rank == 1:\n    import ctypes\n    ctypes.string_at(0)\ndist.barrier()",
        "rank 1 killed by signal 11 (SIGSEGV)",
        "Segmentation fault",
    ),
    "rank_0_dies": (
        "if rank == 0:\n    os.kill(os.getpid(), 40)\ndist.barrier()",
        "killed by signal 40",
        "",
    ),
    "rank_1_exits": (
        "if rank == 1:\n    sys.exit(3)\ndist.barrier()",
        "rank 1 called sys.exit(3)",
        "",
    ),
    "rank_1_hangs": (
        "if rank == 1:\n    time.sleep(1000)\ndist.barrier()",
        f"stopped after {LIMIT} s",
        "rank 1:",
    ),
}


def write(project: Project, gpus: int = 2, **recipes: str) -> None:
    """Write recipes that declare so many GPUs."""
    project.write(**recipes)
    for name in recipes:
        file = project.root / "gallery" / "things" / f"{name}.py"
        file.write_text(BLOCK.format(gpus) + file.read_text())


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where ranks note their process numbers."""
    return tmp_path_factory.mktemp("notes")


@pytest.fixture(scope="module")
def built(make_project: Callable[..., Project], notes: Path) -> tuple[Project, str]:
    """Build a gallery with a recipe for each fault and a good one; return it with the terminal's text."""
    project = make_project(limit=LIMIT)
    faults = {name: JOINS + NOTES.format(notes=str(notes / name)) + text for name, (text, *_) in FAULTS.items()}
    write(project, good=SUMS, **faults)
    status, output = project.build()
    assert status != 0
    return project, output


def test_ranks_meet(built: tuple[Project, str]) -> None:
    """Without a GPU there are as many as the recipe declares; the first one's output is on the page."""
    page = BeautifulSoup(built[0].page("good"), "html.parser")
    assert [block.text.strip() for block in page.select(".sphx-glr-script-out")] == ["rank 0 of 2: 3"]
    assert not page.select(".danger")


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_a_rank_is_told(built: tuple[Project, str], notes: Path, name: str) -> None:
    """It costs its page alone, the page says which rank it was, and no process is left."""
    _, message, detail = FAULTS[name]
    page = BeautifulSoup(built[0].page(name), "html.parser")
    (box,) = page.select(".danger")
    assert f"when this page was built: {message}" in box.text
    assert detail in box.text
    pids = (notes / name).read_text().split()
    assert len(pids) == 2
    assert not any(is_alive(int(pid)) for pid in pids)


def test_ranks_that_hang_are_told_where(built: tuple[Project, str]) -> None:
    _, of_other = (
        BeautifulSoup(built[0].page("rank_1_hangs"), "html.parser").select_one(".danger").text.split("rank 1:")
    )
    assert 'rank_1_hangs.py", line 22' in of_other
    assert "runpy" not in of_other


def test_rank_that_outlives_the_first_is_told(make_project: Callable[..., Project]) -> None:
    project = make_project()
    write(project, stays=f"{JOINS}\ndist.barrier()\ntime.sleep(1000 * rank)")
    status, output = project.build()
    assert status != 0
    assert "rank 1 had not ended 10 s after rank 0" in " ".join(output.partition("what happened")[2].split())


def test_memory_of_all_ranks_counts(make_project: Callable[..., Project]) -> None:
    project = make_project()
    with open(project.root / "conf.py", "a") as conf:
        conf.write(f"recipe_memory_limit = {MEMORY / memory.size()}\n")
    eats = "held = []\nwhile rank == 1:\n    held.append(b'x' * 100_000_000)\n    time.sleep(0.05)\ndist.barrier()"
    write(project, eats=JOINS + eats)
    _, output = project.build()
    assert "of memory" in output.partition("Recipes that failed")[2]


@pytest.mark.parametrize("gpus", ["0", "9", "1.5", '"2"'])
def test_number_of_gpus_is_checked(make_project: Callable[..., Project], gpus: str) -> None:
    project = make_project()
    write(project, bad="print('ran')")
    file = project.root / "gallery" / "things" / "bad.py"
    file.write_text(file.read_text().replace("gpus = 2", f"gpus = {gpus}"))
    run = project.run("needs")[1]
    assert "its script metadata is not in order" in run


ALONE = Environment("Test GPU", "9.0", 1, None, "13.0", "2", "3", "3.12")
MATRIX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47
GPU1\tNV18\t X \tSYS\tPIX\t0-47
GPU2\tSYS\tSYS\t X \tSYS\t48-95
NIC0\tPIX\tPIX\tSYS\t X

Legend:
  X    = Self
"""


@pytest.mark.parametrize(("count", "taken"), [(2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (12, 8)])
def test_gpus_together_are_a_power_of_two(monkeypatch: pytest.MonkeyPatch, count: int, taken: int) -> None:
    monkeypatch.setattr(device, "_links", lambda names: f"{len(names)} links")
    other = structs.replace(ALONE, name="Another GPU")
    slots = [*(Slot(ALONE, str(index)) for index in range(count)), Slot(other, "20")]
    environment, visible = together(slots)
    assert visible == ",".join(map(str, range(taken)))
    assert (environment.name, environment.gpus) == (f"{taken} x Test GPU", taken)
    assert environment.links == f"{taken} links"


@pytest.mark.parametrize("slots", [[Slot(ALONE, "0")], [Slot(ALONE, None)] * 4])
def test_one_gpu_or_those_of_other_machines_are_not_together(slots: list[Slot]) -> None:
    """What a cluster has may be on several hosts."""
    assert together(slots) is None


@pytest.mark.parametrize(
    ("names", "found"), [("01", "NV18"), ("02", "SYS"), ("012", "NV18, SYS"), (["GPU-12ab", "GPU-34cd"], "NV18, SYS")]
)
def test_what_connects_gpus(names: str | list[str], found: str) -> None:
    assert links(MATRIX, [*names]) == found
    assert links("no such command", [*names]) is None


def test_record_is_of_so_many_gpus(make_gpu_project: Callable[..., GpuProject]) -> None:
    """Each number of GPUs has a record, beside those of one GPU; the page shows them."""
    project = make_gpu_project(one="print('for one')")
    table = "\nimport pandas as pd\n\nresults = pd.DataFrame({'N': [1, 2], 'Triton (GB/s)': [1.0, 2.0]})\n"
    write(project, several=SUMS + table)
    four = {"TEST_GPU": ",".join(["Test GPU"] * 5), "CUDA_VISIBLE_DEVICES": "3,4,5,6,7"}
    two = {"TEST_GPU": "Test GPU,Test GPU", "CUDA_VISIBLE_DEVICES": "0,1"}

    status, output = project.record()
    assert status == 1, output
    assert "things/several was not recorded, its environment lacks 2 GPUs of one host (here is one)" in output
    for variables in (two, four):
        status, output = project.record("things/several", **variables)
        assert status == 0, output
    assert project.recorded().keys() == {"one"}
    for count, total in ((2, 3), (4, 10)):
        (record,) = project.recorded(f"{count}-x-test-gpu").values()
        assert record["device"]["name"] == f"{count} x Test GPU"
        assert record["device"]["gpus"] == count
        assert record["outputs"][0]["text"] == f"rank 0 of {count}: {total}"
    status, output = project.record("--only-stale", **two)
    assert (status, output.strip()) == (0, "every record is of the present code")

    status, output = project.run("html", CUDA_VISIBLE_DEVICES="0")
    assert status == 0, output
    page = BeautifulSoup(project.page("several"), "html.parser")
    assert "lacks 2 GPUs of one host (here is one)" in page.select_one(".recipe-strip").text
    assert {"2 x Test GPU", "4 x Test GPU"} <= {button.text for button in page.select(".panels button")}


def test_gpus_are_used_together_when_no_recipe_has_one(make_gpu_project: Callable[..., GpuProject]) -> None:
    """And the others run on a GPU each, as ever."""
    gpu = "import os, time\n\nprint('GPU', os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('RANK'))\ntime.sleep(1)"
    project = make_gpu_project(one=gpu, two=gpu)
    write(project, several=gpu)
    status, output = project.record(TEST_GPU="Test GPU,Test GPU", CUDA_VISIBLE_DEVICES="0,1", RANK="7")
    assert status == 0, output
    assert output.index("things/several") > max(output.index("things/one"), output.index("things/two"))
    texts = {record["outputs"][0]["text"] for record in project.recorded().values()}
    assert texts == {"GPU 0 None", "GPU 1 None"}
    (record,) = project.recorded("2-x-test-gpu").values()
    assert record["outputs"][0]["text"] == "GPU 0,1 0"


def test_notebook_runs_the_script_on_all_gpus(built: tuple[Project, str], tmp_path: Path) -> None:
    """Its cells are one process; where GPUs are missing, its first cell says so."""
    (path,) = (built[0].root / "_build" / "html" / "_downloads").glob("*/good.ipynb")
    (cell,) = (cell for cell in json.loads(path.read_text())["cells"] if "run_on_all_gpus" in "".join(cell["source"]))
    source = "".join(cell["source"])
    pretends = "import torch; torch.cuda.device_count = lambda: {}\n"
    started = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "1"}
    for gpus, said in ((1, "this needs 2 GPUs, here are 1"), (3, "rank 0 of 2: 3")):
        command = [sys.executable, "-c", pretends.format(gpus) + source]
        ended = subprocess.run(command, cwd=tmp_path, env=started, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert said in ended.stdout
    assert (tmp_path / "good.py").read_text() == load(built[0].root / "gallery")[0].text


def test_unlike_gpus_are_kinds_apart() -> None:
    other = structs.replace(ALONE, name="Another GPU")
    assert len(kinds([Slot(ALONE, "0"), Slot(ALONE, "1"), Slot(other, "2")], per_gpu_model=True)) == 2


def test_script_runs_under_torchrun(tmp_path: Path) -> None:
    """What is on the page is what a reader starts."""
    script = tmp_path / "good.py"
    script.write_text(SUMS)
    variables = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    # A rank writes its text and the end of its line apart, so another's text may come between.
    assert sorted(ended.stdout.replace("\n", "").split("rank ")) == ["", "0 of 2: 3", "1 of 2: 3"]
