"""Records: what is written, what is shown of it, and what is refused.

No GPU is needed: a run that passed here is written as if a GPU had executed it.
"""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from project import Project

from triton_gallery import chart
from triton_gallery.formats import BadRecordError
from triton_gallery.outputs import Frame, Output
from triton_gallery.pages import Pages, Run
from triton_gallery.recipes import Recipe, cell_hash, load
from triton_gallery.records import Records
from triton_gallery.tables import Table

GUARDED = """
x = 1

# %%
# A cell that only a GPU gives an output.

if x > 1:
    print("never here")

# %%
# Another one.

if x > 2:
    results = None
"""
EVIL = '<script>alert("evil")</script>'
TABLE = Table(
    "results",
    "N",
    "GB/s",
    [1024.0, 2048.0],
    {"Triton": [10.0, 300.0], "PyTorch": [20.0, 100.0], "torch.compile": [None, 150.0], "Roof": [400.0, 400.0]},
)


@pytest.fixture(scope="module")
def built(make_project: Callable[..., Project]) -> Project:
    """Return a built gallery of one recipe whose outputs need a GPU."""
    project = make_project()
    project.write(guarded=GUARDED)
    status, output = project.build()
    assert status == 0, output
    return project


@pytest.fixture
def project(built: Project, tmp_path: Path) -> Project:
    """Return a copy of it."""
    return Project(Path(shutil.copytree(built.root, tmp_path / "project", symlinks=True)))


def recipe(project: Project) -> Recipe:
    """Return the one recipe."""
    return load(project.root / "gallery")[0]


def as_if_on_a_gpu(project: Project) -> Run:
    """Return the recipe's run, with the outputs and the environment that a GPU would give."""
    run = Pages(project.root / "docs" / "recipes").run("things/guarded")
    assert run
    environment = dataclasses.replace(
        run.environment, name="Test GPU 9000", visible="0", capability="9.0", memory=1, driver="1.2", cuda="13.0"
    )
    first, second, third = run.outputs
    second = dataclasses.replace(second, text=EVIL, frame=Frame(["a"], [[EVIL]]))
    third = dataclasses.replace(third, tables=[TABLE])
    return dataclasses.replace(run, environment=environment, outputs=[first, second, third])


def write(project: Project) -> Path:
    """Write the record; return its file."""
    records = Records(project.root / "docs" / "_records")
    return records.write(recipe(project), as_if_on_a_gpu(project), {}, None)


def command(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the project."""
    return subprocess.run(
        [*project.command, *arguments],
        cwd=project.root,
        env=project.environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_record_is_shown_where_there_is_no_output(project: Project) -> None:
    path = write(project)
    assert path == project.root / "docs" / "_records" / "test-gpu-9000" / "things" / "guarded.json"
    status, output = project.build()
    assert status == 0, output
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    text, chart = page.select(".recorded")
    assert text.select_one(".recorded-label").text.startswith("Recorded on Test GPU 9000, 20")
    assert EVIL in text.select_one("pre").text
    assert EVIL in text.select_one("table.dataframe").text
    assert not page.find("script", string="alert")
    assert not page.select(".stale")
    assert {label.text for label in chart.select("svg text")} >= {"Triton", "PyTorch", "torch.compile", "Roof", "GB/s"}
    rows = [[cell.text.strip() for cell in row.select("td")] for row in chart.select("table.benchmark tbody tr")]
    assert rows == [
        ["1024", "10", "20", "-", "400", "0.50", "0.03"],
        ["2048", "300", "100", "150", "400", "2.00", "0.75"],
    ]
    strip = page.select_one(".recipe-strip").text
    assert "GPU outputs recorded on Test GPU 9000 · driver 1.2" in strip


def test_rest_of_an_output_is_shown(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(guarded=GUARDED.replace("x = 1", 'print("on any machine")\n\nx = 1'))
    project.build()
    run = as_if_on_a_gpu(project)
    first = dataclasses.replace(run.outputs[0], text="on any machine\nand on a GPU")
    run = dataclasses.replace(run, outputs=[first, *run.outputs[1:]])
    Records(project.root / "docs" / "_records").write(recipe(project), run, {}, None)
    project.build()
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    live, rest = page.select(".sphx-glr-script-out pre")[:2]
    assert live.text.strip() == "on any machine"
    assert rest.text.strip() == "and on a GPU"
    assert rest.find_parent(class_="recorded")


def test_stale_record_is_labelled(project: Project) -> None:
    write(project)
    project.write(guarded=GUARDED.replace("x = 1", "x = 0"))
    status, output = project.build()
    assert status == 0, output
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    assert len(page.select(".recorded .stale")) == 2
    assert "of older code" in page.select_one(".recipe-strip").text
    listed = command(project, "check-records")
    assert listed.returncode == 1
    assert "things/guarded" in listed.stdout
    assert "stale" in listed.stdout


def test_prose_and_comments_do_not_make_a_record_stale(project: Project) -> None:
    write(project)
    project.write(guarded=GUARDED.replace("Another one.", "Other prose.").replace("x = 1", "x = 1  # a comment"))
    assert command(project, "check-records").returncode == 0


def test_output_of_a_changed_cell_is_not_shown(project: Project) -> None:
    write(project)
    project.write(guarded=GUARDED.replace("x > 2", "x > 3"))
    project.build()
    (kept,) = BeautifulSoup(project.page("guarded"), "html.parser").select(".recorded")
    assert EVIL in kept.text


def test_page_follows_its_record(project: Project) -> None:
    path = write(project)
    project.build()
    path.unlink()
    project.build()
    assert not BeautifulSoup(project.page("guarded"), "html.parser").select(".recorded")


def test_missing_record_is_listed(project: Project) -> None:
    listed = command(project, "check-records")
    assert listed.returncode == 1
    assert "missing" in listed.stdout


def test_moving_a_border_between_cells_changes_the_code() -> None:
    assert cell_hash("x = 1  # one") == cell_hash("x  =  1\n\n# two")
    assert cell_hash("x = 1") != cell_hash("x = 2")


BREAKS = {
    "cut short": (lambda text: text[: len(text) // 2], "not JSON, perhaps cut short"),
    "wrong schema": (lambda text: text.replace('"schema": 1', '"schema": 2'), r"\$\.schema: 1 was expected"),
    "unknown field": (lambda text: text.replace('"commit"', '"evil": 1, "commit"'), "'evil' was unexpected"),
    "missing figure": (
        lambda text: text.replace('"figures": []', '"figures": ["gone.png"]', 1),
        "its figure gone.png is missing",
    ),
    "figure elsewhere": (lambda text: text.replace('"figures": []', '"figures": ["../x.png"]', 1), "does not match"),
    "text for a number": (lambda text: text.replace("300.0", '"<b>"'), "is not of type"),
    "short series": (lambda text: text.replace("300.0", "300.0, 1.0"), "a series is not as long as its x"),
    "other code": (
        lambda text: re.sub(r'"code": "[0-9a-f]{16}"', '"code": "0123456789abcdef"', text, count=1),
        "the hash of its code is not that of its cells",
    ),
}


@pytest.mark.parametrize("how", BREAKS)
def test_bad_record_is_refused(project: Project, how: str) -> None:
    change, reason = BREAKS[how]
    path = write(project)
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    with pytest.raises(BadRecordError, match=reason) as refused:
        Records(project.root / "docs" / "_records").all()
    assert str(path) in str(refused.value)


def test_bad_record_stops_the_build(project: Project) -> None:
    path = write(project)
    path.write_text(path.read_text()[:100])
    status, output = project.build()
    assert status != 0
    assert "guarded.json: not JSON, perhaps cut short" in " ".join(output.split())


def test_failed_run_is_not_recorded(project: Project) -> None:
    run = dataclasses.replace(as_if_on_a_gpu(project), failure="raised ValueError")
    with pytest.raises(ValueError, match="did not pass on a GPU"):
        Records(project.root / "docs" / "_records").write(recipe(project), run, {}, None)
    assert not (project.root / "docs" / "_records").exists()


def test_recording_needs_a_gpu(project: Project) -> None:
    refused = command(project, "record")
    assert refused.returncode == 2
    assert "no GPU here" in refused.stdout


def test_unknown_recipe_is_named(project: Project) -> None:
    refused = command(project, "check-records", "things/none")
    assert refused.returncode == 2
    assert "no such recipe: things/none" in refused.stdout


def test_results_lists_every_figure(project: Project) -> None:
    write(project)
    rows = json.loads(command(project, "results", "--json").stdout)
    assert len(rows) == 7  # eight less the missing one
    assert {"recipe": "things/guarded", "series": "Triton", "value": 300.0, "x": 2048.0}.items() <= rows[1].items()
    assert all(row["state"] == "fresh" and row["unit"] == "GB/s" for row in rows)


def test_compare_finds_what_is_slower(project: Project) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
            cwd=project.root,
            check=True,
            capture_output=True,
        )

    path = write(project)
    git("init", "-q")
    git("add", "docs/_records")
    git("commit", "-qm", "record")
    unknown = command(project, "compare", "HEAD")
    assert unknown.returncode == 2
    assert "how far two runs differ is not known" in " ".join(unknown.stdout.split())
    (path.parents[1] / "spread.json").write_text('{"one": 0.1, "another": 0.1}')
    same = command(project, "compare", "HEAD")
    assert same.returncode == 0, same.stdout
    path.write_text(path.read_text().replace("300.0", "200.0"))
    slower = command(project, "compare", "HEAD")
    assert slower.returncode == 1
    assert "0.667" in slower.stdout
    assert command(project, "compare", "nothing").returncode == 2


def test_spread_is_that_of_two_runs(project: Project) -> None:
    run = as_if_on_a_gpu(project)
    first, second, third = run.outputs
    for folder, figure in (("first", 100.0), ("second", 105.0)):
        table = Table("results", "N", "GB/s", [1.0, 2.0], {"Triton": [figure, 10.0], "PyTorch": [5.0, 5.0]})
        changed = dataclasses.replace(run, outputs=[first, second, dataclasses.replace(third, tables=[table])])
        Records(project.root / folder).write(recipe(project), changed, {}, None)
    measured = command(project, "spread", "first", "second")
    assert measured.returncode == 0, measured.stdout
    kept = json.loads((project.root / "docs" / "_records" / "test-gpu-9000" / "spread.json").read_text())
    assert kept["things/guarded results N=1.0 Triton"] == 0.0476
    assert kept["things/guarded results N=2.0 Triton"] == 0
    assert len(kept) == 4
    assert command(project, "spread", "first", "nowhere").returncode == 2


def test_output_knows_whether_it_is_empty() -> None:
    assert not Output("0")
    assert Output("0", text="x")
    assert Output("0", tables=[TABLE])


BENCHMARK = """
import pandas

print("first")
results = pandas.DataFrame({"N": [1.0, 2.0], "Triton (GB/s)": [3.0, 4.0], "Roof (GB/s)": [5.0, 5.0]})
print("bench:")
print(results.to_string())
print("last")

# %%
# A frame at the end of a cell.

pandas.DataFrame({"meaning": ["b"]}, index=["a"])
"""


def test_live_benchmark_is_one_chart_and_one_table(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(bench=BENCHMARK)
    status, output = project.build()
    assert status == 0, output
    run = Pages(project.root / "docs" / "recipes").run("things/bench")
    assert run
    assert [output.text for output in run.outputs] == ["first\nlast", ""]
    assert run.outputs[1].frame == Frame(["", "meaning"], [["a", "b"]])
    page = BeautifulSoup(project.page("bench"), "html.parser")
    assert len(page.select(".chart svg")) == len(page.select("table.benchmark")) == 1
    (text,) = page.select(".sphx-glr-script-out pre")
    assert text.text.strip() == "first\nlast"
    thumbnail = project.root / "docs" / "recipes" / "things" / "images" / "thumb" / "sphx_glr_bench_thumb.png"
    assert thumbnail.stat().st_size > 5000, "the chart is not the recipe's picture"


def test_table_without_a_unit_fails_its_recipe(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(bench='import pandas\n\nresults = pandas.DataFrame({"N": [1.0], "Triton": [3.0]})')
    status, output = project.build()
    assert status != 0
    assert "the column 'Triton' names no unit" in output


def test_two_devices_stand_side_by_side(project: Project) -> None:
    write(project)
    run = as_if_on_a_gpu(project)
    other = dataclasses.replace(run, environment=dataclasses.replace(run.environment, name="Other GPU"))
    Records(project.root / "docs" / "_records").write(recipe(project), other, {}, None)
    (project.root / "docs" / "performance.md").write_text("# Performance\n\n```{performance}\n```\n")
    index = project.root / "docs" / "index.md"
    index.write_text(index.read_text().replace("recipes/index", "recipes/index\nperformance"))
    status, output = project.build()
    assert status == 0, output
    site = project.root / "_build" / "html"
    page = BeautifulSoup((site / "performance.html").read_text(), "html.parser")
    rows = [[cell.text.strip() for cell in row.select("td")] for row in page.select("table.performance tbody tr")]
    assert sorted(row[6] for row in rows) == ["Other GPU", "Test GPU 9000"]
    for row in rows:
        assert row[:6] == ["guarded", "N = 2048", "300 GB/s", "torch.compile: 150", "2.00", "0.75"]
    assert page.select_one(".chart svg").text.count("guarded, N = 2048") == 2
    assert "Other GPU, Test GPU 9000" in page.select_one(".chart svg").text
    assert len(json.loads((site / "performance.json").read_text())) == 14
    assert len((site / "performance.csv").read_text().splitlines()) == 15


@pytest.mark.parametrize(
    ("sizes", "shown", "hidden"),
    [
        ([256, 3000, 4096, 131072], {"256", "3000", "128K"}, "4096"),
        ([1000, 32000, 50257, 256000], {"1000", "32000", "256000"}, "50257"),
    ],
)
def test_names_on_an_axis_do_not_overlap(sizes: list[int], shown: set[str], hidden: str) -> None:
    """Of two sizes that lie close together only one is named."""
    series = {name: [1.0, 2.0, 2.0, 3.0] for name in ("Triton", "Roof")}
    table = Table("results", "N", "GB/s", [float(size) for size in sizes], series)
    names = {text.text for text in BeautifulSoup(chart.svg(table), "html.parser").select("text")}
    assert names >= shown
    assert hidden not in names
