"""What all tests share: the gallery under test, the built site, and small projects to build."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from farm import Cluster, Farm
from project import ROOT, Project

# A shell starts what it puts in the background deaf to Ctrl-C, and so would be what the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a test run the tests of a recipe on a changed copy of the gallery."""
    parser.addoption(
        "--gallery", type=Path, default=ROOT / "gallery", help="the gallery to test (default: %(default)s)"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process, for what they share, and all that look at the built site.

    Those that start a process of their own may run anywhere.
    """
    for item in items:
        if item.get_closest_marker("anywhere") is None:
            shares = "site" if "site" in getattr(item, "fixturenames", ()) else item.location[0]
            item.add_marker(pytest.mark.xdist_group(shares))


@pytest.fixture(scope="session")
def gallery(pytestconfig: pytest.Config) -> Path:
    """Return the gallery under test."""
    return pytestconfig.getoption("--gallery")


@pytest.fixture(scope="session")
def make_project(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Project]:
    """Return a function that makes a `Project`; its argument is the time limit in seconds."""

    def make(limit: int = 60) -> Project:
        root = tmp_path_factory.mktemp("project")
        shutil.copy(ROOT / "conf.py", root)
        with open(root / "conf.py", "a") as conf:
            conf.write(f"\nrecipe_time_limit = {limit}\n")
        (root / "src").symlink_to(ROOT / "src")
        things = root / "gallery" / "things"
        things.mkdir(parents=True)
        (things.parent / "GALLERY_HEADER.rst").write_text("Recipes\n=======\n")
        (things / "GALLERY_HEADER.rst").write_text("Things\n======\n")
        (root / "docs").mkdir()
        (root / "docs" / "_static").symlink_to(ROOT / "docs" / "_static")
        (root / "docs" / "index.md").write_text("# Small\n\n```{toctree}\nrecipes/index\n```\n")
        return Project(root)

    return make


@pytest.fixture(scope="session")
def make_farm(make_project: Callable[..., Project]) -> Callable[..., Farm]:
    """Return a function that makes a `Farm` of recipes."""

    def make(**recipes: str) -> Farm:
        farm = Farm(make_project().root)
        farm.fake_gpus()
        farm.write(**recipes)
        return farm

    return make


@pytest.fixture(scope="module")
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Return a function that starts a `Cluster`; it ends with the tests."""
    clusters = []

    def make(protocol: str = "tcp", **variables: str) -> Cluster:
        clusters.append(Cluster(tmp_path_factory.mktemp("cluster"), protocol, **variables))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.end()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the whole site with plain `sphinx-build`, warnings being errors; return its folder, `…/gallery`."""
    out = tmp_path_factory.mktemp("served") / "gallery"
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "-c", ".", "-E", "-W", "--keep-going", "-n", "docs", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout
    return out
