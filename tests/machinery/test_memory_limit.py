"""A recipe that uses too much memory is stopped, alone or as the largest of several."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from project import Project, wait_until

from triton_gallery.execute import memory

LIMIT = 2.5e9  # bytes, for all recipes that run on this machine
# Takes memory piece by piece, in a child that left its session.
EATS_APART = """
import subprocess, sys

EATS = '''
import time

held = []
while len(held) < 60:
    held.append(b"x" * 100_000_000)
    time.sleep(0.05)
time.sleep(1000)
'''
subprocess.run([sys.executable, "-c", EATS], start_new_session=True)
"""
# Six processes that share what they hold: each seems to have all of it.
SHARES = """
import os, time

held = b"x" * 700_000_000
for _ in range(5):
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
for _ in range(5):
    os.wait()
"""


@pytest.fixture
def limited(make_project: Callable[..., Project]) -> Callable[..., Project]:
    """Return a function that makes a project whose recipes may use little memory."""

    def make(**recipes: str) -> Project:
        project = make_project()
        with open(project.root / "conf.py", "a") as conf:
            conf.write(f"recipe_memory_limit = {LIMIT / memory.size()}\n")
        project.write(**recipes)
        return project

    return make


def test_recipe_that_eats_memory_is_stopped(limited: Callable[..., Project]) -> None:
    """What its children hold counts."""
    _, output = limited(eats=EATS_APART).build()
    table = output.partition("Recipes that failed")[2]
    # Other tests may run recipes beside it, which count: then it is the one that used the most
    assert re.search(r"stopped: (it|recipes) used more than 2.5 GB of memory", " ".join(table.split())), table
    assert 'File "gallery/things/eats.py", line 18' in table, "where it was is not told"


def test_shared_memory_counts_once(limited: Callable[..., Project]) -> None:
    status, output = limited(shares=SHARES).build()
    assert status == 0, output


HOLDS = """
import time
from pathlib import Path

held = b"x" * {size}
Path({began!r}).touch()
while not Path({go!r}).exists():
    time.sleep(0.1)
"""


def test_largest_of_several_is_stopped(limited: Callable[..., Project], tmp_path: Path) -> None:
    """Of two builds at once, each of which alone would not use too much."""
    go, builds = str(tmp_path / "go"), {}
    for name, size in {"large": 1_700_000_000, "small": 1_200_000_000}.items():
        project = limited(**{name: HOLDS.format(size=size, began=str(tmp_path / name), go=go)})
        builds[name] = project.start()
        wait_until((tmp_path / name).exists)
    output, _ = builds["large"].communicate(timeout=60)
    assert builds["small"].poll() is None
    Path(go).touch()
    assert "stopped: recipes used more than 2.5 GB of memory together, this one the most, 1." in " ".join(
        output.split()
    )
    output, _ = builds["small"].communicate(timeout=60)
    assert builds["small"].returncode == 0, output


@pytest.mark.parametrize("limit", ["0", "1.5", "'a lot'"])
def test_bad_limit_is_refused(make_project: Callable[..., Project], limit: str) -> None:
    project = make_project()
    with open(project.root / "conf.py", "a") as conf:
        conf.write(f"recipe_memory_limit = {limit}\n")
    project.write(good="print('good')")
    status, output = project.build()
    assert status != 0
    assert f"recipe_memory_limit is {limit}; it takes a share of the machine's memory" in " ".join(output.split())
