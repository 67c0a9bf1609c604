"""What a page hands over: its op as a file that stands alone, and the box that says what it comes to."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from docutils import nodes
from msgspec import structs
from project import ROOT, Project, deferred, whole_page

from triton_gallery.figures.ratios import Summary
from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.new import create
from triton_gallery.recipe.tables import Table
from triton_gallery.records.page_cache import Pages
from triton_gallery.records.record_store import Records
from triton_gallery.site.summary_box import ratios

TABLE = Table(
    "results",
    "N",
    "GB/s",
    [1024.0, 2048.0, 4096.0],
    {"Triton": [10.0, 300.0, 500.0], "PyTorch": [20.0, 100.0, 250.0], "Roof": [400.0, 400.0, 500.0]},
    p20={},
    p80={},
    cpu={"Triton": [31.0, 30.0, 32.0], "PyTorch": [8.0, 9.0, 10.0]},
    cpu_bound={},
)


@pytest.fixture(scope="module")
def project(make_project: Callable[..., Project]) -> Project:
    """Return a project with a new recipe between two others, built as one without a GPU whose recipe has a record."""
    project = make_project()
    project.write(after='print("after")', before='print("before")')
    (project.root / "tests" / "ops").mkdir(parents=True)
    create(project.root, "things/square")
    (project.root / "gallery" / "contents.toml").write_text('things = ["before", "square", "after"]\n')
    assert project.build()[0] == 0
    recipe = load(project.root / "gallery")[1]
    run = Pages(project.root / "docs" / "recipes").run(recipe.key)
    assert run
    gpu = structs.replace(run.environment, name="Test GPU", capability="9.0", memory=1)
    outputs = [*run.outputs[:-1], structs.replace(run.outputs[-1], tables=[TABLE])]
    records = Records(project.root / "docs" / "_records")
    records.write(recipe, structs.replace(run, environment=gpu, outputs=outputs), {}, None)
    records.set_sanitized(recipe, "Test GPU", ["memcheck"])
    status, output = project.build()
    assert status == 0, output
    return project


@pytest.fixture(scope="module")
def page(project: Project) -> BeautifulSoup:
    """Return the page of the recipe."""
    return BeautifulSoup(project.page("square"), "html.parser")


@pytest.fixture(scope="module")
def taken(project: Project) -> Path:
    """Return the file of the op."""
    return project.root / "_build" / "html" / "ops" / "square_op.py"


def python(folder: Path, program: str) -> str:
    """Run a program in a folder, with nothing of this project; return what it printed."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


WORKS = """
import sys, torch
from one.square_op import square as one
from two.square_op import square as two

x = torch.tensor([2.0, 3.0], requires_grad=True)
print(one(x).tolist(), two(x).tolist(), torch.autograd.grad(one(x).sum(), x)[0].tolist())
print({"pandas", "matplotlib"} & set(sys.modules), torch.ops.mine.square(x).tolist())
"""


def test_op_stands_alone_and_beside_another_version_of_it(taken: Path, tmp_path: Path) -> None:
    """Two packages vendor it; one of them has its own namespace and has changed the kernel."""
    text = taken.read_text()
    mine = text.replace('"triton_gallery"', '"mine"').replace("x * x, mask=mask", "x * x * x, mask=mask")
    for name, content in {"one": text, "two": mine}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "square_op.py").write_text(content)
    first, second = python(tmp_path, WORKS).splitlines()
    assert first == "[4.0, 9.0] [8.0, 27.0] [4.0, 6.0]"
    assert second == "set() [8.0, 27.0]"


def test_op_says_what_it_is(taken: Path) -> None:
    head = taken.read_text().partition("\n\n")[0].splitlines()
    assert head[0] == "# Square: an op of the Triton Gallery, ops/square.html"
    assert "# SPDX-License-Identifier: MIT" in head
    assert "# Needs torch>=2.11 and triton>=3.6. SQUARE_NAMESPACE is yours to set, to a Python identifier." in head
    assert "# Without a GPU, set TRITON_INTERPRET=1 before triton is imported." in head
    place = next(place for place, line in enumerate(head) if line.startswith("# Test GPU, torch "))
    assert head[place].endswith(": GB/s")
    assert [line.split() for line in head[place + 1 :]] == [
        ["#", "N", "Triton", "PyTorch", "Roof"],
        ["#", "1024", "10", "20", "400"],
        ["#", "2048", "300", "100", "400"],
        ["#", "4096", "500", "250", "500"],
        ["#", "CPU", "us", "31", "9"],
    ]


def test_ops_are_offered_together(taken: Path, project: Project) -> None:
    """Recipes without an op add nothing."""
    with zipfile.ZipFile(taken.with_name("triton_gallery_ops.zip")) as archive:
        names = {name.partition("/")[2]: archive.read(name).decode() for name in archive.namelist()}
    assert names == {"LICENSE": (ROOT / "LICENSE").read_text(), "__init__.py": "", "square_op.py": taken.read_text()}
    assert not BeautifulSoup(project.page("before"), "html.parser").select(".take")


def test_page_offers_the_op(page: BeautifulSoup, taken: Path, project: Project) -> None:
    link, button = page.select(".glance .take")
    built = project.root / "_build" / "html" / "recipes" / "things" / link["href"]
    assert built.resolve() == taken
    assert deferred(built.parent / button["data-from"].rpartition("/")[2]) == taken.read_text()


def test_box_names_what_there_is() -> None:
    """A benchmark without a name is the forward where there is a backward; a ratio that nothing has takes no room."""
    device = Environment("Test GPU", "9.0", 1, None, None, "2.11", "3.6", "3.12")
    recipe = Recipe("things", "square", Path("square.py"))
    roofless = structs.replace(TABLE, series={name: TABLE.series[name] for name in ("Triton", "PyTorch")})

    def shown(*tables: Table) -> list[list[str]]:
        items = [Summary(recipe, table.kind, table, device, "2026-01-01", True, True) for table in tables]
        return [[cell.astext() for cell in row.findall(nodes.entry)] for row in ratios(items).findall(nodes.row)]

    (_, *titles), (name, *values) = shown(TABLE)
    assert (titles, name, len(values)) == (["speed / best other", "speed / roof"], "this page", 2)
    (_, *titles), (name, *values) = shown(roofless)
    assert (titles, name, len(values)) == (["speed / best other"], "this page", 1)
    both = shown(TABLE, structs.replace(roofless, name="results_backward"))
    assert [name for name, *_ in both[1:]] == ["forward", "backward"]
    assert [len(row) for row in both] == [3, 3, 3]


def test_box_says_what_the_op_comes_to(page: BeautifulSoup, project: Project) -> None:
    """On the lesson where it was made; on the op's page how it comes out beside each of the others."""
    box = page.select_one(".glance")
    assert not box.select("table, .legend")
    text = " ".join(box.text.split())
    assert "Takes float16, bfloat16, float32, float64 · with a backward · deterministic" in text
    assert "GPU outputs recorded on Test GPU" in text
    assert "memcheck clean" in text
    of_op = BeautifulSoup(whole_page(project.root / "_build" / "html" / "ops" / "square.html"), "html.parser")
    box = of_op.select_one(".glance")
    assert (
        box.select_one("p:not(.rubric)").text
        == "On Test GPU, at 3 of the lesson\N{RIGHT SINGLE QUOTATION MARK}s sizes."
    )
    rows = [[cell.text for cell in row.select("td")] for row in box.select("table.ratios tbody tr")]
    assert rows == [["PyTorch", "2.00 (0.50 to 3.00)", ""], ["Roof", "0.75 (0.03 to 1.00)", ""]]
    assert "CPU time of a call, in microseconds: Triton 31 · PyTorch 9." in " ".join(box.text.split())


def test_path_leads_on_and_back(page: BeautifulSoup, project: Project) -> None:
    links = {link.text: link["href"] for link in page.select(".recipe-path a")}
    assert links == {"before": "before.html", "after": "after.html"}
    first = BeautifulSoup(project.page("before"), "html.parser").select_one(".recipe-path").text
    assert first.split() == ["Next:", "Square", "Related:", "after"]


def test_opening_is_folded(page: BeautifulSoup) -> None:
    fold = page.select_one("details.fold:not(.glance *)")
    assert "def gpu_time(" in fold.text
    assert "def plain_kernel(" not in fold.text
    assert not fold.has_attr("open")
