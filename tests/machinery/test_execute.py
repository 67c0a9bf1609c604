"""Recipes are executed apart from each other: what each fault costs, and when a recipe runs again.

One small gallery has a recipe for each fault and a good one; it is built a few times.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from bs4 import BeautifulSoup
from msgspec import structs
from project import HANGS, LEAVES, Project, is_alive, wait_until

from triton_gallery.execute import settings
from triton_gallery.execute.execute import refresh
from triton_gallery.recipe.contents import load
from triton_gallery.records.page_cache import Pages

LIMIT = 12
FAULTS = {
    "raises": (
        'print("said before")\n\n# %%\n# Second cell.\n\nraise ValueError("bad <script>")',
        "raised ValueError: bad <script>",
    ),
    "differs": (
        "import torch\n\ntorch.testing.assert_close(torch.zeros(3), torch.ones(3))",
        "raised AssertionError: Tensor-likes are not close!",
    ),
    "repeats": (
        'raise RuntimeError("a warning\\nTraceback (most recent call last):\\n  File\\nValueError: its cause")',
        "raised ValueError: its cause",
    ),
    "dies": ("import os\n\nos.kill(os.getpid(), 40)", "killed by signal 40"),
    "segfaults": ("import ctypes\n\nctypes.string_at(0)", "killed by signal 11 (SIGSEGV)"),
    "hangs": ("import time\n\nwhile True:\n    time.sleep(1)", f"stopped after {LIMIT} s"),
    "exits": ("import sys\n\nsys.exit(0)", "called sys.exit(0)"),
    "exits_at_once": ("import os\n\nos._exit(0)", "ended with status 0 before its last cell"),
    "floods": ('print("x" * 100_000_000)', "printed too much"),
}
GOOD = 'import os\n\nprint("this recipe is", "good", os.getpid())'


@pytest.fixture(scope="module")
def project(make_project: Callable[..., Project]) -> Project:
    """Return a gallery with one recipe for each fault."""
    project = make_project(limit=LIMIT)
    project.write(good=GOOD, **{name: text for name, (text, _) in FAULTS.items()})
    return project


@pytest.fixture(scope="module")
def built(project: Project) -> tuple[int, str]:
    """Build it; return the exit status and the terminal's text."""
    return project.build()


def executed(output: str) -> set[str]:
    """Return the recipes that a build reported as executed."""
    return {line.split()[0].removeprefix("things/") for line in output.splitlines() if line.startswith("  things/")}


def test_faults_cost_the_exit_status(built: tuple[int, str]) -> None:
    status, output = built
    assert status != 0
    assert executed(output) == {"good", *FAULTS}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_told(project: Project, built: tuple[int, str], name: str) -> None:
    table = built[1].partition("Recipes that failed")[2]
    message = FAULTS[name][1]
    (row,) = [line for line in table.splitlines() if f"things/{name} " in line]
    assert message in " ".join(row.split())
    page = BeautifulSoup(project.page(name), "html.parser")
    assert message in page.select_one(".admonition.danger").text
    assert page.select_one(".recipe-strip"), "the strip is missing"
    assert not page.find("script", string="bad"), "the message was not escaped"
    assert page.select(".highlight-Python"), "the page lost its code"


def test_traceback_stands_in_table_and_page(project: Project, built: tuple[int, str]) -> None:
    table = built[1].partition("Recipes that failed")[2]
    for where in (table, BeautifulSoup(project.page("raises"), "html.parser").text):
        assert 'File "gallery/things/raises.py", line 11' in where
    assert 'File "gallery/things/hangs.py", line 9' in table, "where a recipe hung is not told"
    assert "said before" in project.page("raises"), "the output before the fault is missing"


def test_the_others_survive(project: Project, built: tuple[int, str]) -> None:
    page = BeautifulSoup(project.page("good"), "html.parser")
    assert "this recipe is good" in page.text
    assert not page.select(".admonition.danger")


def test_only_failures_run_again(project: Project, built: tuple[int, str]) -> None:
    status, output = project.build()
    assert status != 0
    assert executed(output) == set(FAULTS)


@pytest.fixture(scope="module")
def healthy(project: Project, built: tuple[int, str]) -> Project:
    """Return the gallery after its faults were repaired."""
    project.write(**{name: f"print({name!r})" for name in FAULTS})
    status, output = project.build()
    assert status == 0, output
    assert executed(output) == set(FAULTS)
    assert output.rstrip().splitlines()[-1] == "Open _build/html/index.html"
    return project


def test_nothing_changed_executes_nothing(healthy: Project) -> None:
    status, output = healthy.build()
    assert status == 0
    assert executed(output) == set()


def test_one_changed_runs_alone(healthy: Project) -> None:
    healthy.write(good=GOOD + "\nprint('and new')")
    status, output = healthy.build()
    assert status == 0
    assert executed(output) == {"good"}
    assert "and new" in BeautifulSoup(healthy.page("good"), "html.parser").text


SHOWS = """import os
import matplotlib.pyplot as plt
import pandas as pd

# %%
# Some prose.

print("process", os.getpid())
plt.plot([1, 2])
plt.show()

# %%
# More.

pd.DataFrame({"a": [1]})
"""


def test_changed_prose_is_laid_out_without_a_run(make_project: Callable[..., Project]) -> None:
    """What the cells put out, with its figures, stays as it was; so with comments, docstrings and other machinery."""
    project = make_project()
    project.write(shows=SHOWS)
    status, output = project.build()
    assert status == 0, output
    before = BeautifulSoup(project.page("shows"), "html.parser")
    project.write(shows=SHOWS.replace("Some prose", "Other prose").replace("print", "# a comment\nprint"))
    status, output = project.build()
    assert status == 0, output
    assert executed(output) == set()
    assert "code has not changed: 1\n" in output
    after = BeautifulSoup(project.page("shows"), "html.parser")
    assert "Other prose" in after.text
    assert "# a comment" in after.text
    shown = [
        [node.text for node in page.select(".sphx-glr-script-out, table, .recipe-strip")] for page in (before, after)
    ]
    assert shown[0] == shown[1]
    assert any("process" in text for text in shown[0])
    assert [len(page.select("img.sphx-glr-single-img")) for page in (before, after)] == [1, 1]
    notebook = json.loads(next((project.root / "_build" / "html").glob("_downloads/*/shows.ipynb")).read_text())
    assert any("process" in json.dumps(cell.get("outputs", "")) for cell in notebook["cells"])
    assert project.build()[1].count("laid out again") == 0


def test_changed_environment_runs_again(healthy: Project) -> None:
    path = healthy.root / "docs" / "recipes" / "things" / "good.run.json"
    run = json.loads(path.read_text())
    run["device"]["torch"] = "1.0"
    path.write_text(json.dumps(run))
    _, output = healthy.build()
    assert executed(output) == {"good"}


def test_changed_machinery_runs_all(healthy: Project) -> None:
    with open(healthy.root / "conf.py", "a") as conf:
        conf.write('sphinx_gallery_conf["capture_repr"] = ("__repr__",)\n')
    _, output = healthy.build()
    assert executed(output) == {"good", *FAULTS}


def test_half_written_page_is_not_taken_for_done(healthy: Project) -> None:
    (healthy.root / "docs" / "recipes" / "things" / "good.run.json").unlink()
    _, output = healthy.build()
    assert executed(output) == {"good"}


def test_removed_recipe_leaves_nothing(healthy: Project) -> None:
    healthy.remove("floods")
    status, output = healthy.build()
    assert status == 0, output
    assert not list((healthy.root / "docs" / "recipes").glob("**/*floods*"))
    assert not list((healthy.root / "_build" / "html").glob("**/floods.html"))


def test_warning_is_said_until_it_is_mended(healthy: Project) -> None:
    page = healthy.root / "docs" / "lonely.md"
    page.write_text("# In no table of contents\n")
    try:
        for _ in range(2):
            status, output = healthy.build()
            assert status != 0
            assert "lonely" in output
    finally:
        page.unlink()
    status, output = healthy.build()
    assert status == 0, output


def test_unlisted_recipe_is_refused(healthy: Project) -> None:
    extra = healthy.root / "gallery" / "things" / "unlisted.py"
    extra.write_text('"""\nUnlisted\n========\n"""\n')
    try:
        status, output = healthy.build()
        assert status != 0
        assert "unlisted.py is not listed in contents.toml" in " ".join(output.split())
        assert "Open" not in output
    finally:
        extra.unlink()


@pytest.fixture
def hanging(make_project: Callable[..., Project], tmp_path: Path) -> tuple[Project, Path]:
    """Return a gallery whose one recipe hangs, and where it notes its processes."""
    project = make_project(limit=100)
    notes = tmp_path / "pids"
    project.write(hangs=HANGS.format(notes=str(notes)))
    return project, notes


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_build_leaves_no_child(hanging: tuple[Project, Path], by: signal.Signals) -> None:
    project, notes = hanging
    build = project.start()
    wait_until(lambda: notes.exists() and notes.read_text().endswith("\n"))
    pids = [int(pid) for pid in notes.read_text().split()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    os.kill(build.pid, by)
    build.wait(30)
    assert build.returncode != 0
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_killed_build_keeps_what_ended(make_project: Callable[..., Project], tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    project = make_project()
    project.write(
        kept="import matplotlib.pyplot as plt\n\nplt.plot([1, 2])\nplt.show()",
        lost=f"import os, time\n\nwhile os.path.exists({str(waits)!r}):\n    time.sleep(0.1)",
    )
    waits.touch()
    build = project.start()
    wait_until((project.root / "docs" / "recipes" / "things" / "kept.run.json").exists)
    build.kill()
    assert executed(build.communicate(timeout=30)[0]) <= {"kept"}
    waits.unlink()
    status, output = project.build()
    assert status == 0, output
    assert executed(output) == {"lost"}
    whole = site(project)
    shutil.rmtree(project.root / "_build")
    project.build()
    assert whole == site(project)


def site(project: Project) -> dict[str, bytes]:
    """Return the files of a built site, by their paths."""
    folder = project.root / "_build" / "html"
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(name): (folder / name).read_bytes() for name in names if name.parts[0] != ".doctrees"}


def test_page_is_whole_or_not_there(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(good="import matplotlib.pyplot as plt\n\nplt.plot([1, 2])\nplt.show()")
    pages = Pages(project.root / "docs" / "recipes")
    recipes = load(project.root / "gallery")
    ((recipe, run),) = refresh(recipes, pages, settings.read(project.root), lambda *_: None, print)
    written = [path for path in pages.folder.glob("**/*") if path.is_file() and path != pages.run_file(recipe.key)]
    files = {str(path.relative_to(pages.folder)): path.read_bytes() for path in written}
    assert len(files) > 4
    for name in files:
        with pytest.raises(TypeError):
            pages.install(recipe, {**files, name: None}, run)  # it ends at this file
        assert pages.run(recipe.key) is None
    with pytest.raises(TypeError):
        pages.install(recipe, files, structs.replace(run, detail=object()))
    assert pages.run(recipe.key) is None
    pages.install(recipe, files, run)
    assert pages.run(recipe.key) == run


ENDS = {
    "ends": "",
    "raises": "raise ValueError",
    "crashes": "os.kill(os.getpid(), 11)",
    "exits": "os._exit(0)",
    "hangs": "time.sleep(1000)",
    "hangs_deaf": "import signal\n\nsignal.signal(signal.SIGABRT, signal.SIG_IGN)\ntime.sleep(1000)",
}


def test_ended_recipe_leaves_no_child(make_project: Callable[..., Project], tmp_path: Path) -> None:
    """Nor do those stay that left its session, however it ends."""
    project = make_project(limit=LIMIT)
    project.write(**{name: LEAVES.format(notes=str(tmp_path / name)) + end for name, end in ENDS.items()})
    project.build()
    pids = {name: [int(pid) for pid in (tmp_path / name).read_text().split()] for name in ENDS}
    assert all(len(noted) == 4 for noted in pids.values())
    assert not {name: noted for name, noted in pids.items() if any(map(is_alive, noted))}


def test_recipe_ends_with_its_parent(make_project: Callable[..., Project], tmp_path: Path) -> None:
    project, notes = make_project(limit=100), tmp_path / "pid"
    kills = f"import os, time\n\nwith open({str(notes)!r}, 'w') as notes:\n    notes.write(str(os.getpid()))\n"
    project.write(kills=kills + "os.kill(os.getppid(), 9)\ntime.sleep(1000)")
    _, output = project.build()
    assert "killed by signal 9 (SIGKILL)" in " ".join(output.split())
    wait_until(lambda: not is_alive(int(notes.read_text())))


# A recipe that notes what its process has of the one that it is a fork of.
FORKED = """
import sys

imported = {{"torch", "torch._dynamo", "triton"}} <= set(sys.modules), "pandas" in sys.modules

import os, tempfile
from pathlib import Path
import numpy
import torch
import triton
import triton.language

server = Path(f"/proc/{{os.getppid()}}/stat").read_text().rpartition(")")[2].split()[1]
threads = len(os.listdir(f"/proc/{{server}}/task"))
interpreted = not isinstance(triton.language.sum, triton.JITFunction)
quick = type(triton.runtime.interpreter._patch_lang).__name__ == "Patch"
found = *imported, interpreted, quick, threads, torch.cuda.is_initialized(), os.environ.get("TRITON_INTERPRET")
Path({notes!r}).write_text(f"{{found}}\\n{{tempfile.gettempdir()}}\\n{{numpy.random.rand()}}")
"""
KILLS = """
import os, signal
from pathlib import Path

server = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
if b"multiprocessing.forkserver" in Path(f"/proc/{server}/cmdline").read_bytes():  # no other recipe was faster
    os.kill(int(server), signal.SIGKILL)
"""


def test_recipes_share_imports_alone(make_project: Callable[..., Project], tmp_path: Path) -> None:
    project, names = make_project(), ["one", "other"]
    project.write(**{name: FORKED.format(notes=str(tmp_path / name)) for name in names})
    status, output = project.build()
    assert status == 0, output
    shared, *separate = zip(*((tmp_path / name).read_text().splitlines() for name in names), strict=True)
    assert set(shared) == {str((True, False, True, True, 1, False, None))}
    assert all(first != second for first, second in separate)


def test_warnings_of_torch_are_not_on_the_page(make_project: Callable[..., Project]) -> None:
    """They say where it lies on the machine. A recipe's own are."""
    project = make_project()
    of_torch = 'warnings.warn_explicit("of torch", UserWarning, "graph.py", 1, module="torch.autograd.graph")'
    project.write(warns=f'import warnings\n\n{of_torch}\nwarnings.warn("of mine", stacklevel=1)')
    status, output = project.build()
    assert status == 0, output
    page = project.page("warns")
    assert "UserWarning: of mine" in page
    assert "UserWarning: of torch" not in page


def test_what_forks_recipes_may_end(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(**{f"kills_{number}": KILLS for number in range(2 * (os.cpu_count() or 1))})
    status, output = project.build()
    assert status == 0, output


def test_page_without_its_text_is_made_again(healthy: Project) -> None:
    pages = healthy.root / "docs" / "recipes" / "things"
    (pages / "good.rst").unlink()
    (pages / "stray.rst").write_text("Stray\n=====\n")
    status, output = healthy.build()
    assert status == 0, output
    assert executed(output) == {"good"}
    assert not (pages / "stray.rst").exists()


def test_bad_time_limit_is_refused(make_project: Callable[..., Project]) -> None:
    project = make_project(limit=0)
    project.write(good=GOOD)
    status, output = project.build()
    assert status != 0
    assert "recipe_time_limit is 0; it takes a positive number of seconds" in output


def test_builds_take_turns(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(good=GOOD)
    builds = [project.start(), project.start()]
    outputs = [build.communicate(timeout=120)[0] for build in builds]
    assert [build.returncode for build in builds] == [0, 0], outputs
    assert sorted(len(executed(output)) for output in outputs) == [0, 1], outputs


def test_recipe_is_the_first_to_go_when_memory_runs_out(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(memory='from pathlib import Path\n\nprint("score", Path("/proc/self/oom_score_adj").read_text())')
    status, output = project.build()
    assert status == 0, output
    assert "score 1000" in BeautifulSoup(project.page("memory"), "html.parser").text
