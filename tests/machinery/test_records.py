"""Records: what is written, what is shown of it, and what is refused.

No GPU is needed: a run that passed here is written as if a GPU had executed it.
"""

import ast
import json
import re
import subprocess
from base64 import b64decode
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from bs4 import BeautifulSoup
from fake_gpus import GpuProject
from msgspec import structs
from project import Project

from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.hashes import cell_hash, code_hash, tree_hash
from triton_gallery.recipe.outputs import Frame, Output
from triton_gallery.recipe.tables import Table
from triton_gallery.records.files import BadRecordError
from triton_gallery.records.output_diff import side_by_side
from triton_gallery.records.page_cache import Pages, Run
from triton_gallery.records.record_store import Records
from triton_gallery.site import chart
from triton_gallery.site import panels as panels_module
from triton_gallery.site.notebook import OURS

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
    p20={},
    p80={},
    cpu={},
    cpu_bound={},
)


@pytest.fixture(scope="module")
def built(make_project: Callable[..., Project]) -> Project:
    """Return a built gallery of one recipe whose outputs need a GPU."""
    project = make_project()
    project.write(guarded=GUARDED)
    status, output = project.build()
    assert status == 0, output
    return project


def recipe(project: Project) -> Recipe:
    """Return the one recipe."""
    return load(project.root / "gallery")[0]


def as_if_on_a_gpu(project: Project) -> Run:
    """Return the recipe's run, with the outputs and the environment that a GPU would give."""
    run = Pages(project.root / "docs" / "recipes").run("things/guarded")
    assert run
    environment = structs.replace(
        run.environment, name="Test GPU 9000", capability="9.0", memory=1, driver="1.2", cuda="13.0"
    )
    first, second, third = run.outputs
    second = structs.replace(second, text=EVIL, frame=Frame(["a"], [[EVIL]]))
    third = structs.replace(third, tables=[TABLE])
    return structs.replace(run, environment=environment, outputs=[first, second, third])


def write(project: Project) -> Path:
    """Write the record; return its file."""
    records = Records(project.root / "docs" / "_records")
    return records.write(recipe(project), as_if_on_a_gpu(project), {}, None)


def add_performance(project: Project) -> None:
    """Give the project a performance page."""
    (project.root / "docs" / "performance.md").write_text("# Performance\n\n```{performance}\n```\n")
    index = project.root / "docs" / "index.md"
    index.write_text(index.read_text().replace("recipes/index", "recipes/index\nperformance"))


def test_record_is_shown_where_there_is_no_output(project: Project) -> None:
    path = write(project)
    assert path == project.root / "docs" / "_records" / "test-gpu-9000" / "things" / "guarded.json"
    status, output = project.build()
    assert status == 0, output
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    text, chart = page.select(".recorded")
    assert text.select_one(".recorded-label").text.startswith(
        f"Recorded on Test GPU 9000, Triton {version('triton')}, 20"
    )
    assert EVIL in text.select_one("pre").text
    assert EVIL in text.select_one("table.dataframe").text
    assert not page.find("script", string="alert")
    assert not page.select(".stale")
    legend = [span.text.strip() for span in chart.select(".legend span")]
    assert legend[:-1] == ["GB/s", "Triton", "PyTorch", "torch.compile", "Roof"]
    rows = [[cell.text.strip() for cell in row.select("td")] for row in chart.select("table.benchmark tbody tr")]
    assert rows == [
        ["1024", "0.50", "0.03", "10", "20", "-", "400"],
        ["2048", "2.00", "0.75", "300", "100", "150", "400"],
    ]
    strip = page.select_one(".recipe-strip").text
    assert "GPU outputs recorded on Test GPU 9000 · driver 1.2" in strip


def notebook(project: Project) -> list[list[dict]]:
    """Return the outputs of the recipe's notebook, as it is offered for download, by the cells of its page."""
    (path,) = (project.root / "_build" / "html" / "_downloads").glob("*/guarded.ipynb")
    content = nbformat.read(path, as_version=4)
    nbformat.validate(content)
    installs, *cells = [cell for cell in content.cells if cell.cell_type == "code"]
    assert installs.metadata["tags"] == [OURS]
    return [cell.outputs for cell in cells]


def test_notebook_has_what_was_recorded(project: Project) -> None:
    """Labelled, and as data; once the record is gone, no more."""
    path = write(project)
    project.write(guarded=GUARDED.replace("x = 1", "x = 0"))
    assert project.build()[0] == 0
    first, (label, text, frame), (also_label, chart, table) = notebook(project)
    assert first == []
    assert label.text == also_label.text
    assert re.fullmatch(
        r"Recorded on Test GPU 9000, Triton \S+, \d{4}-\d\d-\d\d · stale: this recipe has changed since:\n", label.text
    )
    assert text.text == f"{EVIL}\n"
    assert frame.data["text/plain"].split() == ["a", *EVIL.split()]
    assert "<script" not in frame.data["text/html"]
    assert BeautifulSoup(frame.data["text/html"], "html.parser").select_one("tbody td").text == EVIL
    assert b64decode(chart.data["image/png"]).startswith(b"\x89PNG")
    assert table.data["text/plain"].splitlines()[2].split() == ["2048", "2.00", "0.75", "300", "100", "150", "400"]
    path.unlink()
    assert project.build()[0] == 0
    assert notebook(project) == [[], [], []]


def test_rest_of_an_output_is_shown(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(guarded=GUARDED.replace("x = 1", 'print("on any machine")\n\nx = 1'))
    project.build()
    run = as_if_on_a_gpu(project)
    first = structs.replace(run.outputs[0], text="on any machine\nand on a GPU")
    run = structs.replace(run, outputs=[first, *run.outputs[1:]])
    Records(project.root / "docs" / "_records").write(recipe(project), run, {}, None)
    project.build()
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    live, rest = page.select(".sphx-glr-script-out pre")[:2]
    assert live.text.strip() == "on any machine"
    assert rest.text.strip() == "and on a GPU"
    assert rest.find_parent(class_="recorded")


CELLS = """
print("on a CPU")

# %%
# The same everywhere.

print("same on cpu")

# %%
# The beginning.

print("begins")

# %%
# A number that begins alike.

print("took 1")

# %%
# Twice the same cell.

x = 1

# %%
# The second of them.

x = 1

# %%
# Only here.

print("only here")

# %%
# A picture, of which the page hides a line.

import matplotlib.pyplot as plt

# sphinx_gallery_start_ignore
x = 2
# sphinx_gallery_end_ignore
plt.plot([1, 2])
plt.show()

# %%
# A frame, and a cell of which the page shows nothing.

import pandas

pandas.DataFrame({"a": ["here"]})

# %%
# It is this one.

# sphinx_gallery_start_ignore
x = 3
# sphinx_gallery_end_ignore

# %%
# After it.

x = 4

# %%
# And the last.

# sphinx_gallery_thumbnail_number = 1
"""


@pytest.mark.parametrize(
    ("text", "figures", "expected"),
    [
        ("error 1e-7", ["figure_2.png"], ([], ["figure_2.png"])),
        ("error 1e-7", [], (["figure_1.png"], [])),
        ("error 1e-7, and more", ["figure_2.png"], (["figure_1.png"], ["figure_2.png"])),
    ],
    ids=["in numbers", "fewer figures", "in words"],
)
def test_recorded_figures_take_the_place_of_those_made_here(
    tmp_path: Path, text: str, figures: list[str], expected: tuple[list[str], list[str]]
) -> None:
    """Where texts differ in numbers alone, and figures with them; otherwise all figures are shown."""
    (tmp_path / "figure_2.png").write_bytes(b"recorded")
    here = Output("cell", "error 2e-8", ["figure_1.png"], None, [])
    environment = SimpleNamespace(is_gpu=False)
    run: Any = SimpleNamespace(outputs=[here], environment=environment)
    record: Any = SimpleNamespace(outputs=[Output("cell", text, figures, None, [])], path=tmp_path / "record.json")
    (shown,) = side_by_side(run, record, is_fresh=True, figures={"figure_1.png": b"here"})
    assert (shown.here.figures, shown.there.figures) == expected


def test_outputs_of_two_machines_stand_side_by_side(make_project: Callable[..., Project]) -> None:
    """What is equal but for the device is shown once, what differs twice, labelled; a record loses nothing it has."""
    project = make_project()
    project.write(guarded=CELLS)
    status, output = project.build()
    assert status == 0, output
    pages = Pages(project.root / "docs" / "recipes")
    run = pages.run("things/guarded")
    assert run
    recorded = dict(enumerate(run.outputs))
    for index, changes in {
        0: {"text": "on a GPU"},
        1: {"text": "same on cuda:0"},
        2: {"text": "begins\nand ends", "tables": [TABLE], "frame": Frame(["b"], [["framed"]])},
        3: {"text": "took 16"},
        4: {"text": "first"},
        5: {"text": "second"},
        6: {"text": ""},
        8: {"frame": Frame(["", "a"], [["0", "there"]])},
        10: {"text": "after"},
    }.items():
        recorded[index] = structs.replace(recorded[index], **changes)
    gpu = structs.replace(run.environment, name="Test GPU", capability="9.0", memory=1)
    run = structs.replace(run, environment=gpu, outputs=list(recorded.values()))
    records = Records(project.root / "docs" / "_records")
    records.write(recipe(project), run, pages.figures(recipe(project)), None)
    (record,) = records.of(recipe(project))
    assert record.is_fresh(recipe(project)), "it is stale at birth"
    status, output = project.build()
    assert status == 0, output
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    here = [box.text.split() for box in page.select(".here")]
    label = f"Here, without a GPU, Triton {version('triton')}"
    assert here == [text.split() for text in (f"{label} on a CPU", f"{label} a here")]
    boxes = page.select(".recorded")
    assert all(box.p.text.startswith(f"Recorded on Test GPU, Triton {version('triton')}, 20") for box in boxes)
    texts = [" ".join(pre.text.strip() for pre in box.select("pre")) for box in boxes]
    assert texts == ["on a GPU", "and ends", "took 16", "first", "second", "", "after"]
    assert boxes[1].select("svg")
    assert "framed" in boxes[1].text
    assert "there" in boxes[5].text
    assert all(box.find_previous_sibling(class_="here") for box in (boxes[0], boxes[5]))
    assert not page.find_all("pre", string=re.compile("took 1$")), "it differs from the record in a number alone"
    assert [pre.text.strip() for pre in page.select(".sphx-glr-script-out pre")].count("same on cpu") == 1
    assert len(page.select("img.sphx-glr-single-img")) == 1
    cells = notebook(project)
    recorded_on = boxes[0].p.text
    assert [output.text for output in cells[0]] == [f"{label}:\n", "on a CPU\n", f"{recorded_on}:\n", "on a GPU\n"]
    assert [output.text for output in cells[1]] == ["same on cpu\n"]
    assert [output.get("text") for output in cells[2]][:2] == ["begins\n", f"{recorded_on}:\n"]
    assert [list(output.data) for output in cells[7]] == [["image/png"]]
    assert [output.data["text/plain"].split()[-1] for output in cells[8] if "data" in output] == ["here", "there"]


def test_gpu_shows_its_own_outputs(make_gpu_project: Callable[..., GpuProject]) -> None:
    """What ran on a GPU is not set beside what was recorded; what it did not put out is."""
    project = make_gpu_project(guarded='print("live")\n\n# %%\n# Another.\n\nx = 1')
    status, output = project.build()
    assert status == 0, output
    run = Pages(project.root / "docs" / "recipes").run("things/guarded")
    assert run
    outputs = [structs.replace(output, text=text) for output, text in zip(run.outputs, ["other", "more"], strict=True)]
    Records(project.root / "docs" / "_records").write(recipe(project), structs.replace(run, outputs=outputs), {}, None)
    status, output = project.build()
    assert status == 0, output
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    assert [pre.text.strip() for pre in page.select(".recorded pre")] == ["more"]
    assert not page.select(".here")


def test_stale_record_is_labelled(project: Project) -> None:
    write(project)
    project.write(guarded=GUARDED.replace("x = 1", "x = 0"))
    status, output = project.build()
    assert status == 0, output
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    assert len(page.select(".recorded .stale")) == 2
    assert "of older code" in page.select_one(".recipe-strip").text
    status, listed = project.run("check-records")
    assert status == 1
    assert "things/guarded" in listed
    assert "stale" in listed


def test_prose_and_comments_do_not_make_a_record_stale(project: Project) -> None:
    write(project)
    project.write(guarded=GUARDED.replace("Another one.", "Other prose.").replace("x = 1", "x = 1  # a comment"))
    assert project.run("check-records")[0] == 0


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
    status, listed = project.run("check-records")
    assert status == 1
    assert "missing" in listed


def test_layout_and_comments_change_no_cell() -> None:
    assert cell_hash("x = 1  # one") == cell_hash("x  =  1\n\n# two")
    assert cell_hash("x = 1") != cell_hash("x = 2")


def test_versions_of_python_agree_on_a_nested_format() -> None:
    """From Python 3.12 on, its tree ends in an empty text."""
    tree = ast.parse('f"{x:{width}}"')
    (spec,) = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)][1:]
    spec.values = [*spec.values[:1], ast.Constant("")]
    assert tree_hash(tree) == cell_hash('f"{x:{width}}"')


def test_moving_a_border_between_cells_changes_the_code() -> None:
    """The same statements in other cells are another recipe: each cell's output belongs to it."""
    cells = [["x = 1", "y = 2\nz = 3"], ["x = 1\ny = 2", "z = 3"], ["x = 1\ny = 2\nz = 3"]]
    codes = [code_hash(map(cell_hash, parts)) for parts in cells]
    assert len(set(codes)) == 3
    assert codes[0] == code_hash(cell_hash(part + "  # said") for part in cells[0])


BREAKS = {
    "cut short": (lambda text: text[: len(text) // 2], "not JSON, perhaps cut short"),
    "newer schema": (
        lambda text: text.replace('"schema": 2', '"schema": 3, "more": 1'),
        "its schema is of version 3, this project reads version 2",
    ),
    "older schema": (lambda text: text.replace('"schema": 2', '"schema": 1'), "its schema is of version 1"),
    "wrong schema": (lambda text: text.replace('"schema": 2', '"schema": "2"'), r"got `str` - at `\$\.schema`"),
    "no schema": (lambda text: text.replace('"schema": 2,', ""), "missing required field `schema`"),
    "unknown field": (lambda text: text.replace('"commit"', '"evil": 1, "commit"'), "contains unknown field `evil`"),
    "unknown field of a table": (
        lambda text: text.replace('"unit"', '"evil": 1, "unit"'),
        r"contains unknown field `evil` - at `\$\.outputs\[2\]\.tables\[0\]`",
    ),
    "missing field": (lambda text: text.replace('"commit": null,', ""), "missing required field `commit`"),
    "missing field of an output": (
        lambda text: text.replace('"text": "",', "", 1),
        r"missing required field `text` - at `\$\.outputs\[0\]`",
    ),
    "missing field of a table": (lambda text: text.replace('"high": {},', ""), "missing required field `high`"),
    "bad hash": (
        lambda text: re.sub(r'"code": "[0-9a-f]{16}"', '"code": "0"', text, count=1),
        r"matching regex .* - at `\$\.code`",
    ),
    "bad date": (lambda text: re.sub('"date": "[^"]*"', '"date": "today"', text), r"matching regex .* - at `\$\.date`"),
    "bad commit": (lambda text: text.replace('"commit": null', '"commit": "HEAD"'), r"regex .* - at `\$\.commit`"),
    "no GPU": (lambda text: text.replace('"capability": "9.0"', '"capability": null'), "its device is no GPU"),
    "unknown tool": (lambda text: text.replace('"sanitized": []', '"sanitized": ["none"]'), r"at `\$\.sanitized\[0\]`"),
    "missing figure": (
        lambda text: text.replace('"figures": []', '"figures": ["gone.png"]', 1),
        "its figure gone.png is missing",
    ),
    "figure elsewhere": (
        lambda text: text.replace('"figures": []', '"figures": ["../x.png"]', 1),
        r"'\.\./x\.png' is no name of a figure",
    ),
    "text for a number": (
        lambda text: text.replace("300.0", '"<b>"'),
        r"Expected `float \| null`, got `str` - at `\$\.outputs\[2\]\.tables\[0\]\.series\[\.\.\.\]\[1\]`",
    ),
    "zero rate": (lambda text: text.replace("300.0", "0.0"), "results: a rate is not between 1e-18 and 1e"),
    "negative rate": (lambda text: text.replace("300.0", "-1.0"), "results: a rate is not between"),
    "number too large": (lambda text: text.replace("300.0", "1" + 400 * "0"), "Number out of range"),
    "not a number": (lambda text: text.replace("300.0", "NaN"), "not JSON"),
    "not finite": (lambda text: text.replace("300.0", "1e999"), "Number out of range"),
    "not finite elsewhere": (
        lambda text: re.sub(r'"seconds": [\d.]+', '"seconds": -Infinity', text),
        "not JSON",
    ),
    "x too large": (lambda text: text.replace("2048.0", "1e300"), r"results: a value of N is not finite, or above 1e"),
    "x twice": (lambda text: text.replace("2048.0", "1024"), "results: a value of N stands twice"),
    "no rows": (lambda text: re.sub(r"(?<=: )\[[^a-z\[\]]*\d\.0[^a-z\[\]]*\]", "[]", text), "results: it has no rows"),
    "half a character": (lambda text: text.replace("GB/s", r"\ud800"), "not JSON"),
    "long row": (lambda text: text.replace('"columns": [', '"columns": ["b",'), "a row of a frame is not as long as"),
    "too deep": (lambda text: 100_000 * "[" + text, "Expected `object`, got `array`"),
    "too deep in a field": (
        lambda text: text.replace('"text": ""', '"text": ' + 100_000 * "[", 1),
        "not JSON",
    ),
    "short series": (lambda text: text.replace("300.0", "300.0, 1.0"), "a series is not as long as its x"),
    "other code": (
        lambda text: re.sub(r'"code": "[0-9a-f]{16}"', '"code": "0123456789abcdef"', text, count=1),
        "the hash of its code is not that of its cells",
    ),
}


def spoil(project: Project, how: str) -> tuple[Path, str]:
    """Write a bad record; return its file, and why it is refused."""
    change, reason = BREAKS[how]
    path = write(project)
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    return path, reason


@pytest.mark.parametrize("how", BREAKS)
def test_bad_record_is_refused(project: Project, how: str) -> None:
    path, reason = spoil(project, how)
    with pytest.raises(BadRecordError, match=reason) as refused:
        Records(project.root / "docs" / "_records").all()
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.thorough] if number else []) for number, how in enumerate(BREAKS)]
)
def test_bad_record_stops_the_build(project: Project, how: str) -> None:
    _, reason = spoil(project, how)
    status, output = project.build()
    assert status != 0
    assert "docs/_records/test-gpu-9000/things/guarded.json: " in " ".join(output.split())
    assert re.search(reason, " ".join(output.split()))
    assert output.lstrip().startswith("Configuration error")


ODD = {
    "backslash": lambda table: table.update(x=r"\g<9> \d"),
    "formula": lambda table: table.update(series={r"Triton, $\foo$": [1.0, 2.0], r"\$": [2.0, 1.0]}),
    "formula of all": lambda table: table.update(
        x=r"$\foo$", unit=r"$\bar$", xs=["$^$", r"$\$$"], name=r"results_$\a$"
    ),
    "markup": lambda table: table.update(x="</svg><script>", series={"--><b>": [1.0, 2.0]}),
    "no roof": lambda table: table["series"].pop("Roof"),
    "no figures": lambda table: table.update(series={"Triton": [None, None]}),
    "nobody": lambda table: table.update(series={}),
    "one row": lambda table: table.update(xs=[0], series={"Triton": [1e-18], "Roof": [1e18]}),
    "far apart": lambda table: table.update(xs=[-1e18, 1e18], series={"Triton": [1e18, 1e-18], "Roof": [1e-18, 1]}),
    "mixed": lambda table: table.update(xs=[1, "two"]),
    "control characters": lambda table: table.update(x="\x1b[1m\n\0", unit=""),
}


@pytest.mark.parametrize("how", ODD)
def test_odd_table_is_drawn(project: Project, how: str) -> None:
    path = write(project)
    content = json.loads(path.read_text())
    table = content["outputs"][2]["tables"][0]
    ODD[how](table)
    path.write_text(json.dumps(content))
    add_performance(project)
    status, output = project.build()
    assert status == 0, output
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    text = page.select_one(".chart").text
    names = [table["unit"], table["x"], *(name for name, values in table["series"].items() if values != [None, None])]
    assert all(line.strip() in text for name in names for line in re.split(r"[\x00-\x1f]", name))
    assert len(page.select("table.benchmark tbody tr")) == len(table["xs"])
    assert not page.select("article script")


def test_folder_of_records_holds_no_pages(project: Project) -> None:
    write(project).with_name("page.md").write_text("# A page\n\n<script>live()</script>\n")
    status, output = project.build()
    assert status == 0, output
    assert not list((project.root / "_build").glob("**/page.html"))


def test_failed_run_is_not_recorded(project: Project) -> None:
    run = structs.replace(as_if_on_a_gpu(project), failure="raised ValueError")
    with pytest.raises(ValueError, match="did not pass on a GPU"):
        Records(project.root / "docs" / "_records").write(recipe(project), run, {}, None)
    assert not (project.root / "docs" / "_records").exists()


def test_recording_needs_a_gpu(project: Project) -> None:
    status, refusal = project.run("record")
    assert status == 2
    assert "no GPU here" in refusal


def test_unknown_recipe_is_named(project: Project) -> None:
    status, refusal = project.run("check-records", "things/none")
    assert status == 2
    assert "no such recipe: things/none" in refusal


def test_results_lists_every_figure(project: Project) -> None:
    write(project)
    results = json.loads(project.run("results", "--json")[1])
    rows = results["figures"]
    assert results["libraries"] == []
    assert len(rows) == 7  # eight less the missing one
    assert {"recipe": "things/guarded", "series": "Triton", "value": 300.0, "x": 2048.0}.items() <= rows[1].items()
    assert {"low": None, "cpu_us": None, "late": False, "torch": rows[0]["torch"], "date": rows[0]["date"]}.items() <= (
        rows[1].items()
    )
    assert all(row["state"] == "fresh" and row["unit"] == "GB/s" for row in rows)


def git(project: Project, *arguments: str) -> None:
    """Run git in a project."""
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
        cwd=project.root,
        check=True,
        capture_output=True,
    )


BANDED = structs.replace(
    TABLE,
    p20={"Triton": [9.9, 297.0], "PyTorch": [19.0, 99.0]},
    p80={"Triton": [10.1, 303.0], "PyTorch": [21.0, 101.0]},
    cpu={"Triton": [61.0, 60.0], "PyTorch": [8.0, 9.0]},
    cpu_bound={"Triton": [False, False], "PyTorch": [True, False]},
)


def write_again(project: Project, table: Table, date: str) -> Path:
    """Write the record of another run, with another table."""
    run = as_if_on_a_gpu(project)
    *others, last = run.outputs
    changed = structs.replace(run, date=date, outputs=[*others, structs.replace(last, tables=[table])])
    return Records(project.root / "docs" / "_records").write(recipe(project), changed, {}, None)


def slowed(factor: float, **band: dict[str, list[float | None]]) -> Table:
    """Return the table with our last figure slower by a factor."""
    series = {**BANDED.series, "Triton": [10.0, 300.0 * factor]}
    return structs.replace(BANDED, series=series, **band)


@pytest.fixture
def recorded(project: Project) -> Project:
    """Return a project with a record that is committed."""
    write_again(project, BANDED, "2026-01-01T00:00:00+00:00")
    git(project, "init", "-q")
    git(project, "add", "docs/_records")
    git(project, "commit", "-qm", "record")
    return project


LATER = "2026-01-02T00:00:00+00:00"


@pytest.mark.parametrize(
    ("table", "status", "message"),
    [
        (slowed(1.0), 0, "0 of 2 figures of ours are slower"),
        (slowed(0.98), 0, "0 of 2 figures of ours are slower"),
        (slowed(0.95), 1, "1 of 2 figures of ours are slower"),
        (slowed(1.5), 0, "faster"),
        (slowed(0.95, p20={"Triton": [9.9, 240.0]}), 0, "0 of 2 figures of ours are slower"),
        (slowed(1.0, p20={}, p80={}), 1, "2 could not be judged"),
        (slowed(1.0, cpu_bound={"Triton": [True, False]}), 1, "1 could not be judged"),
    ],
    ids=["same", "within 3 %", "5 % slower", "faster", "within its band", "without a band", "the CPU's"],
)
def test_compare_judges_each_figure_by_its_own_band(recorded: Project, table: Table, status: int, message: str) -> None:
    write_again(recorded, table, LATER)
    judged, output = recorded.run("compare", "HEAD")
    assert judged == status, output
    assert message in output


def test_compare_leaves_out_what_was_not_recorded_again(recorded: Project) -> None:
    status, output = recorded.run("compare", "HEAD")
    assert status == 0
    assert "0 of 0 figures" in output
    assert recorded.run("compare", "nothing")[0] == 2


def test_bands_and_clocks_are_shown(project: Project) -> None:
    write_again(project, BANDED, LATER)
    project.build()
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    (shown,) = [box for box in page.select(".recorded") if box.svg]
    rows = [[cell.text.strip() for cell in row.select("td")] for row in shown.select("table.benchmark tbody tr")]
    assert rows == [
        ["1024", "0.50 †", "0.03", "10", "20 †", "-", "400"],
        ["2048", "2.00", "0.75", "300", "100", "150", "400"],
    ]
    late, cpu = (note.text for note in shown.select("p.clocks"))
    assert late.startswith("†, in the chart a ring: the GPU had to wait for the CPU")
    assert "in microseconds: Triton 60.5 · PyTorch 8.5." in cpu
    assert chart.chart(BANDED).count('class="band"') == 2
    assert chart.chart(TABLE).count('class="band"') == 0


def test_settled_sizes_are_those_that_the_cpu_left_alone() -> None:
    assert TABLE.settled == [0, 1]
    assert BANDED.settled == [1]
    everywhere = structs.replace(BANDED, cpu_bound={"Triton": [True, True]})
    assert everywhere.settled == [0, 1]


FRAME = """
import pandas

columns = ["N", "series", "GB/s", "low", "high", "CPU us", "late"]
rows = [[1024, "Triton", 10.0, 9.0, 11.0, 60.0, False], [1024, "Roof", 20.0, 19.0, 21.0, 7.0, True]]
rows.append([4096, "Triton", 12.0, 11.0, 13.0, 61.0, False])
results = pandas.DataFrame(rows, columns=columns)
print("first", "rows of 64:", results.to_string(), "last", sep="\\n")
"""


def test_frame_of_rates_is_a_table(make_project: Callable[..., Project]) -> None:
    project = make_project()
    project.write(timed=FRAME, twice=FRAME + "\nresults = pandas.concat([results, results])")
    _, output = project.build()
    assert "two figures of one series for one N" in output
    run = Pages(project.root / "docs" / "recipes").run("things/timed")
    assert run
    (made,) = run.outputs
    assert made.text == "first\nlast"
    series = {"Triton": [10.0, 12.0], "Roof": [20.0, None]}
    assert made.tables == [
        Table(
            "results",
            "N",
            "GB/s",
            [1024.0, 4096.0],
            series,
            p20={"Triton": [9.0, 11.0], "Roof": [19.0, None]},
            p80={"Triton": [11.0, 13.0], "Roof": [21.0, None]},
            cpu={"Triton": [60.0, 61.0], "Roof": [7.0, None]},
            cpu_bound={"Triton": [False, False], "Roof": [True, False]},
            title="rows of 64",
        )
    ]


def test_table_says_what_it_is() -> None:
    """By its title, which need not repeat the name of the variable."""
    named = {
        ("results", ""): "",
        ("results", "forward"): "forward",
        ("results_of_rows", ""): "of rows",
        ("results_of_64", "heads of 64"): "heads of 64",
        ("results_backward_of_64", "heads of 64"): "backward, heads of 64",
        ("results_backward", "backward"): "backward",
    }
    for (name, title), kind in named.items():
        assert structs.replace(TABLE, name=name, title=title).kind == kind


def test_output_knows_whether_it_is_empty() -> None:
    assert not Output.empty("0")
    assert structs.replace(Output.empty("0"), text="x")
    assert structs.replace(Output.empty("0"), tables=[TABLE])


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
    assert len(page.select(".chart")) == len(page.select("table.benchmark")) == 1
    (text,) = page.select(".sphx-glr-script-out pre")
    assert text.text.strip() == "first\nlast"


def test_bad_table_fails_its_recipe(make_project: Callable[..., Project]) -> None:
    """It does not fail the build."""
    project = make_project()
    bench = 'import pandas\n\nresults = pandas.DataFrame({"N": [1.0], "%s": [%s]})'
    project.write(unit=bench % ("Triton", 3.0), zero=bench % ("Triton (GB/s)", 0.0))
    status, output = project.build()
    assert status != 0
    assert "the column 'Triton' names no unit" in output
    assert "results: a rate is not between" in output
    assert "results: a rate is not between" in project.page("zero")


def test_data_files_have_two_devices(project: Project) -> None:
    write(project)
    run = as_if_on_a_gpu(project)
    other = structs.replace(run, environment=structs.replace(run.environment, name="Other GPU"))
    Records(project.root / "docs" / "_records").write(recipe(project), other, {}, None)
    add_performance(project)
    status, output = project.build()
    assert status == 0, output
    site = project.root / "_build" / "html"
    page = BeautifulSoup((site / "performance.html").read_text(), "html.parser")
    assert page.select("article a[href='recipes/things/guarded.html']"), "a lesson without an op is named alone"
    assert not page.select("table.performance")
    assert len(json.loads((site / "performance.json").read_text())["figures"]) == 14
    assert len((site / "performance.csv").read_text().splitlines()) == 15


@pytest.mark.parametrize(
    ("sizes", "title"),
    [
        ([256, 1024, 4096, 16384], "N"),
        ([1, 2, 3, 4], "N"),
        ([1000, 32000, 50257, 128256], "N (not to scale)"),
    ],
)
def test_every_size_is_named(sizes: list[int], title: str) -> None:
    """They stand at equal distances, and the axis says so where these are not equal steps."""
    series = {name: [1.0, 2.0, None, 3.0] for name in ("Triton", "Roof")}
    table = Table("results", "N", "GB/s", [float(size) for size in sizes], series, {}, {}, {}, {})
    drawn = BeautifulSoup(chart.chart(table), "html.parser")
    names = drawn.select(".sizes text")
    assert [name.text for name in names] == list(map(str, sizes))
    assert [name["x"] for name in names] == ["12.5%", "37.5%", "62.5%", "87.5%"]
    assert drawn.select_one(".axis").text == title
    assert drawn.select_one(".rates text").text == "0"
    assert [series["data-rates"] for series in drawn.select(".legend .series")] == ["1 2 - 3", "1 2 - 3"]


def test_chart_is_small() -> None:
    """A chart of eight sizes and five series has less than 80 elements."""
    rates = [float(size) for size in range(1, 9)]
    series = dict.fromkeys(("Triton", "Triton, persistent", "PyTorch", "torch.compile", "Roof"), rates)
    bands = dict.fromkeys(series, rates)
    late = {"Triton": [True] + 7 * [False]}
    table = Table("results", "N", "GB/s", rates, series, bands, bands, {}, late)
    assert len(BeautifulSoup(chart.chart(table), "html.parser").find_all()) < 80


@pytest.mark.parametrize("rates", [[5000.0, 400.0, 3.0], [3.0, 400.0, 5000.0]], ids=["falls", "rises"])
def test_axis_that_does_not_begin_at_zero_says_so(rates: list[float]) -> None:
    """Rates that fall or rise so far have a logarithmic axis; a rise to a roof, as of most pages, has none."""
    both = [rates, [110.0, 400.0, 5000.0]]
    tables = (Table("results", "N", "GB/s", [1.0, 2.0, 3.0], {"Triton": each}, {}, {}, {}, {}) for each in both)
    steep, even = (BeautifulSoup(chart.chart(table), "html.parser") for table in tables)
    assert steep.select_one(".legend span").text == "GB/s, logarithmic"
    assert [tick.text for tick in steep.select(".rates text")] == ["1", "10", "100", "1000", "10000"]
    assert even.select_one(".legend span").text == "GB/s"


def test_figure_has_buttons_for_what_differs() -> None:
    """Panels differ in GPU and direction; where one value is all there is, no button offers it."""
    panels = [
        panels_module.Panel(panels_module.about_table(structs.replace(TABLE, name=name), gpu), [])
        for gpu in ("GPU 7", "GPU 8")
        for name in ("results", "results_backward")
    ]
    shown = BeautifulSoup("".join(node.astext() for node in panels_module.figure_of(panels)), "html.parser")
    groups = {
        group["aria-label"]: [button.text for button in group.select("button")]
        for group in shown.select("[role=group]")
    }
    assert groups == {"GPU": ["GPU 7", "GPU 8"], "Direction": ["forward", "backward"]}
    assert len(shown.select(".panel")) == 4
    (chosen,) = shown.select(".panel.chosen")
    assert (chosen["data-gpu"], chosen["data-direction"]) == ("GPU 7", "forward")
    assert not panels_module.figure_of(panels[:1])[0].astext().count("button")


def test_other_gpus_are_panels_of_the_same_figure(project: Project) -> None:
    """Each says its GPU, date and whether it is stale."""
    write(project)
    run = as_if_on_a_gpu(project)
    older = structs.replace(
        run, environment=structs.replace(run.environment, name="Other GPU"), date="2025-01-01T00:00:00+00:00"
    )
    path = Records(project.root / "docs" / "_records").write(recipe(project), older, {}, None)
    content = json.loads(path.read_text())
    content["measured"] = "0" * len(content["measured"])
    path.write_text(json.dumps(content))
    project.build()
    page = BeautifulSoup(project.page("guarded"), "html.parser")
    (figure,) = [figure for figure in page.select("figure.panels") if figure.select("table.benchmark")]
    labels = [panel.select_one(".gpu-label").text for panel in figure.select(".panel")]
    assert len(labels) == 2
    assert labels[0].startswith("Recorded on Test GPU 9000")
    assert "Recorded on Other GPU" in labels[1]
    assert "2025-01-01" in labels[1]
    assert "stale" in labels[1]
    assert "stale" not in labels[0]
