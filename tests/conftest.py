"""What all tests share: which of them run, the gallery under test, the built site, and small projects to build."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from bs4 import BeautifulSoup
from fake_gpus import Cluster, GpuProject
from memory import processes
from project import ROOT, Project, whole_page
from selection import examples, left_out, recipe_of, select

from triton_gallery.execute.execute import make_tasks
from triton_gallery.execute.settings import read
from triton_gallery.recipe.contents import lay_out, load
from triton_gallery.recipe.device import detect
from triton_gallery.records.page_cache import Pages, Run

pytest_plugins = ["op_fixtures"]

# A shell starts what it puts in the background deaf to Ctrl-C, and so would be what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say which tests run, and let one run the tests of a recipe on a changed copy of the gallery."""
    parser.addoption("--gallery", type=Path, help="another gallery to test, of whole scripts")
    parser.addoption(
        "--thorough",
        default="",
        help="recipes to prove thoroughly: 'section/name ...', all, or changed",
    )
    parser.addoption("--recipe", help="run the tests of this recipe alone, section/name, all of them")
    parser.addoption("--examples-of", help="run the tests of these recipes alone, 'section/name ...', in one dtype")


def pytest_xdist_auto_num_workers() -> int | None:
    """Start as many processes as the GPU has memory for; without one, one more than cores, as some tests wait."""
    memory, cores = detect()[0].environment.memory, os.cpu_count() or 1
    return min(processes(memory), cores) if memory else cores + 1


LEFT_OUT = pytest.StashKey[int]()  # how many thorough tests


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not asked for; keep in one process what shares something.

    Those are the tests of a recipe or else a file, all that look at the built site, and all that compile for another
    GPU. Those that start a process of their own may run anywhere.
    """
    runs, others = select(config.getoption("--thorough"), config.getoption("--recipe")).split(items)
    if keys := config.getoption("--examples-of"):
        runs = examples(runs, keys)
        others = [item for item in items if item not in runs]
    alone = config.getoption("--recipe") or config.getoption("--examples-of")
    config.stash[LEFT_OUT] = 0 if alone else len(others)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]
    config.hook.pytest_deselected(items=others)
    items[:] = runs
    for item in items:
        recipe = recipe_of(item)
        if recipe:
            item.user_properties.append(("recipe", recipe))
        if item.get_closest_marker("anywhere") is None:
            used = getattr(item, "fixturenames", ())
            shares = next((name for name in ("site", "on_h100") if name in used), recipe or item.location[0])
            item.add_marker(pytest.mark.xdist_group(shares))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process of pytest-xdist says of what it left out."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out."""
    if count := terminalreporter.config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(left_out(count))


@pytest.fixture(scope="session")
def gallery(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the gallery under test, with whole scripts, as readers take them."""
    if chosen := pytestconfig.getoption("--gallery"):
        return chosen.resolve()
    folder = tmp_path_factory.mktemp("whole") / "gallery"
    lay_out(ROOT / "gallery", folder)
    return folder


@pytest.fixture(scope="session")
def run_of_page(gallery: Path) -> Callable[[str], Run | None]:
    """Return a function for the run of a recipe's page, given `section/name`; None if it is not of the present code."""
    pages, environments = Pages(ROOT / "docs" / "recipes"), [slot.environment for slot in detect()]
    hashes = {task.recipe.key: task.source_hash for task in make_tasks(load(gallery), read(ROOT))}

    def find(key: str) -> Run | None:
        run = pages.run(key)
        return run if run and run.passed(hashes[key], environments) else None

    return find


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Project]:
    """Return a function that makes a `Project`; its argument is the time limit in seconds."""

    def make(limit: int = 60) -> Project:
        root = tmp_path_factory.mktemp("project")
        shutil.copy(ROOT / "conf.py", root)
        shutil.copy(ROOT / "LICENSE", root)
        with open(root / "conf.py", "a") as conf:
            conf.write(f"\nrecipe_time_limit = {limit}\n")
            conf.write('extensions.remove("sphinxext.opengraph")  # it imports matplotlib, and they are built often\n')
        (root / "src").mkdir()
        (root / "src" / "triton_gallery").symlink_to(ROOT / "src" / "triton_gallery")
        things = root / "gallery" / "things"
        things.mkdir(parents=True)
        (things.parent / "GALLERY_HEADER.rst").write_text("Recipes\n=======\n")
        (things / "GALLERY_HEADER.rst").write_text("Things\n======\n")
        (root / "docs").mkdir()
        for name in ("_static", "_templates"):
            (root / "docs" / name).symlink_to(ROOT / "docs" / name)
        (root / "docs" / "index.md").write_text("# Small\n\n```{toctree}\nrecipes/index\n```\n")
        return Project(root)

    return make


@pytest.fixture
def project(built: Project, tmp_path: Path) -> Project:
    """Return a copy of the project that a module has built once."""
    return built.copy(tmp_path / "project")


@pytest.fixture(scope="session")
def make_gpu_project(make_project: Callable[..., Project]) -> Callable[..., GpuProject]:
    """Return a function that makes a `GpuProject` of recipes."""

    def make(**recipes: str) -> GpuProject:
        project = GpuProject(make_project().root)
        project.fake_gpus()
        project.write(**recipes)
        return project

    return make


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Return a function that starts a `Cluster`; it ends with the test, as processes that wait take time too."""
    clusters = []

    def make(protocol: str = "tcp", **variables: str) -> Cluster:
        clusters.append(Cluster(tmp_path_factory.mktemp("cluster"), protocol, **variables))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.end()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the whole site with plain `sphinx-build`, warnings being errors; return its folder, `…/gallery`.

    One recipe has listings, for the test that opens one.
    """
    out = tmp_path_factory.mktemp("served") / "gallery"
    if (ROOT / "gallery" / "fusion" / "softmax.py").exists():
        subprocess.run([sys.executable, "-m", "triton_gallery", "listings", "fusion/softmax"], cwd=ROOT, check=True)
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "-c", ".", "-j", "auto", "-W", "--keep-going", "-n", "docs", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout
    return out


@pytest.fixture(scope="session")
def parsed(site: Path) -> Callable[[str], BeautifulSoup]:
    """Return a function that parses a page of the site with all its folds, by its address, once for all tests."""
    return cache(lambda address: BeautifulSoup(whole_page(site / address), "html.parser"))
