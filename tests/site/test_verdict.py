"""What is said of an op's records: who is faster, where, and that bands which overlap make nobody faster."""

import dataclasses
from pathlib import Path

from docutils import nodes
from msgspec import structs

from triton_gallery.figures.ratios import Summary, headline, pooled
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.tables import Table
from triton_gallery.site.verdict import BACKWARD, NOTHING, OLDER, ROOFS, UNKNOWN, UNMEASURED, distribution, table

H200 = Environment("Test H200", "9.0", 1, None, None, "2.11", "3.6", "3.12")
H100 = structs.replace(H200, name="Test H100")
RECIPE = Recipe("things", "square", Path("square.py"))
SERIES = {
    "Triton": [100.0, 200.0, 300.0],
    "PyTorch": [50.0, 210.0, 100.0],
    "Liger": [100.5, None, 250.0],
    "Roof": [400.0, 400.0, 400.0],
}


def bands(share: float) -> dict[str, dict[str, list[float | None]]]:
    """Return bands that reach this share of each figure to both sides."""
    return {
        name: {key: [value and value * factor for value in values] for key, values in SERIES.items()}
        for name, factor in (("p20", 1 - share), ("p80", 1 + share))
    }


TABLE = Table("results", "size", "GB/s", ["one", "two", "three"], SERIES, **bands(0.01), cpu={}, cpu_bound={})


def item(kind: str = "forward, beside libraries", **others: object) -> Summary:
    """Return a benchmark beside other libraries."""
    made = Summary(RECIPE, kind, TABLE, H200, "2026-01-01", is_fresh=True, is_page=False, dtype="bfloat16")
    return dataclasses.replace(made, **others)


def said(*items: Summary) -> tuple[list[str], list[list[list[str]]]]:
    """Return the paragraphs, and the rows of the tables."""
    shown = [*table(items)]
    paragraphs = [node.astext() for node in shown if isinstance(node, nodes.paragraph)]
    tables = [node for node in shown if not isinstance(node, nodes.paragraph)]
    return paragraphs, [
        [[cell.astext() for cell in row.findall(nodes.entry)] for row in one.findall(nodes.row)] for one in tables
    ]


def test_each_library_has_a_row_the_closest_first() -> None:
    (of, words), (rows,) = said(item())
    assert of == "On Test H200 in bfloat16, at 3 shapes that models use."
    assert rows == [
        ["beside", "forward: ratio", "slower at"],
        ["Liger", "1.10 (1.00 to 1.20)", "0 of 2; equal at 1 of 2"],
        ["PyTorch", "2.00 (0.95 to 3.00)", "1 of 3, most at two"],
        ["Roof", "0.50 (0.25 to 0.75)", ""],
    ]
    assert ROOFS[True] in words
    assert item().fastest == "Liger"


def test_bands_that_overlap_make_nobody_faster() -> None:
    _, (rows,) = said(item(table=structs.replace(TABLE, **bands(0.03))))
    outcomes = {name: outcome for name, _, outcome in rows}
    assert outcomes["PyTorch"] == "0 of 3; equal at 1 of 3"


def test_without_bands_nobody_is_called_faster() -> None:
    (_, words), (rows,) = said(item(table=structs.replace(TABLE, p20={}, p80={})))
    assert UNKNOWN in words
    assert [outcome for _, _, outcome in rows[1:]] == ["", "", ""]


def test_where_the_cpu_decided_no_library_is_compared() -> None:
    late = {name: [True, True, False] for name in ("PyTorch", "Liger")}
    series = {**SERIES, "PyTorch": [50.0, 210.0, None], "Liger": [1.0, None, None]}
    page = item("", table=structs.replace(TABLE, series=series, cpu_bound=late), is_page=True, dtype="")
    (of, words), (rows,) = said(page)
    assert of == "On Test H200, at 1 of the lesson's sizes."
    assert sorted(rows[1:]) == [
        ["Liger", UNMEASURED, "the GPU waited for the CPU"],
        ["PyTorch", UNMEASURED, "the GPU waited for the CPU"],
        ["Roof", "0.75", ""],
    ]
    assert "Roof:" not in words, "the lesson says what it is"
    assert page.fastest is None


def test_what_is_old_or_missing_is_said() -> None:
    stale = item(is_fresh=False)
    assert said() == said(stale) == ([NOTHING], [])
    (_, older, _), _ = said(stale, item("", is_page=True))
    assert older == OLDER


def test_backward_stands_beside_the_forward() -> None:
    (_, words), (rows,) = said(item(), item("backward, beside libraries"))
    assert rows[0] == ["beside", "forward: ratio", "slower at", "backward: ratio", "slower at"]
    assert all(row[1:3] == row[3:] for row in rows[1:])
    assert words.endswith(BACKWARD)


def test_further_works_have_a_row_each() -> None:
    """Beside the closest rival each, on the same GPU; what is of older code is left out."""
    works = [
        item(f"{kind}, beside libraries") for kind in ("forward", "in place", "packed, forward", "packed, backward")
    ]
    left_out = item("old", is_fresh=False), item("elsewhere", environment=H100)
    _, (_, rows) = said(*works, item("float32, forward", dtype="float32"), *left_out)
    ratio = "Liger 1.10 (1.00 to 1.20); slower at 0 of 2; equal at 1 of 2"
    assert rows == [
        ["beside the closest", "forward", "backward"],
        ["in place", ratio, UNMEASURED],
        ["packed", ratio, ratio],
        ["float32", ratio, UNMEASURED],
    ]


def test_many_sizes_have_a_tenth() -> None:
    """Also beside each library alone, where a library has no figure at some."""
    sizes = [float(size) for size in range(1, 21)]
    series = {"Triton": sizes, "PyTorch": [10.0] * 20, "Liger": [1.0, *[None] * 19], "Roof": [20.0] * 20}
    many = item("drawn, forward", table=Table("results", "size", "GB/s", sizes, series, {}, {}, {}, {}))
    _, (rows,) = said(many)
    ratios = {name: ratio for name, ratio, *_ in rows}
    assert ratios["PyTorch"] == "1.05 (0.10 to 2.00; 10th percentile 0.30)"
    assert [*distribution([item(), item(is_fresh=False)])] == [], "none has many sizes"
    about, shown = distribution([many, item(), item("old", is_fresh=False)])
    assert about.astext().startswith("On Test H200, ")
    assert [[cell.astext() for cell in row.findall(nodes.entry)] for row in shown.findall(nodes.row)] == [
        ["beside", "PyTorch", "Liger"],
        ["drawn, forward, 20 shapes", "0.10, 0.30, 1.05", UNMEASURED],
    ]


def test_draws_are_one_work() -> None:
    for work in ("op, drawn 0, nt", "op, drawn 1, tn", "op, drawn"):
        assert pooled(work) == "op, drawn"
        assert pooled(f"{work}, backward") == "op, drawn, backward"
    assert pooled("op, causal, drawn 2, forward") == "op, causal, drawn, forward"
    assert pooled("op, forward") == "op, forward"


def test_headline_is_the_op_itself_on_the_device_of_its_page() -> None:
    page = item("", is_page=True)
    works = [
        item(kind, environment=device) for kind in ("fp16", "forward", "backward, packed") for device in (H100, H200)
    ]
    backward = item("backward")
    found = headline([page, *works, item("backward", environment=H100), backward, item("forward", is_fresh=False)])
    assert [(one.kind, one.environment.name) for one in found] == [("forward", "Test H200"), ("backward", "Test H200")]
    older = item(is_fresh=False)
    assert headline([page, older]) == headline([page, older], or_older=True) == [page]
    assert headline([older]) == []
    assert headline([older], or_older=True) == [older]
    assert [one.kind for one in headline([item("loss"), item("float32, loss"), item("loss and gradients")])] == [
        "loss",
        "loss and gradients",
    ]
