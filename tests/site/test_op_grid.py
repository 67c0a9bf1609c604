"""What home and the performance page say of an op's records, and the pictures and badges of the recipes' cards."""

import re
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from docutils import nodes
from msgspec import structs
from project import OPS, ROOT
from sphinx.addnodes import pending_xref
from test_verdict import H100, H200, SERIES, TABLE, item

from triton_gallery.figures.ratios import headline
from triton_gallery.recipe.contents import load, sections
from triton_gallery.recipe.op import op_of
from triton_gallery.site import index_cards, op_grid, page_context, performance
from triton_gallery.site.pictures import COLORS, COLUMNS, ROWS, picture, pictures

RECIPES = load(ROOT / "gallery")


def text(markup: nodes.Node) -> str:
    """Return the words of markup."""
    return " ".join(re.sub(r"<[^>]+>", "", markup.astext()).split())


def test_speed_is_the_median_over_the_sizes() -> None:
    forward, backward = item(), item("backward, beside libraries")
    times = "\N{MULTIPLICATION SIGN}"
    assert text(op_grid._line(forward)) == f"forward 2.00 {times} PyTorch, 1.00 {times} best other, 0.50 of the roof"
    assert "--roof: 0.500" in op_grid._line(forward).astext()
    assert text(op_grid._line(backward)).startswith("backward 2.00")
    assert op_grid._conditions([forward, backward]) == "bfloat16, median of 3 sizes"
    assert op_grid._conditions([item(is_page=True, dtype="")]) == "median of 3 sizes of the lesson"
    older = item(is_fresh=False)
    assert op_grid._conditions([older]) == "bfloat16, median of 3 sizes, of older code"
    assert performance._workload(older) == "bfloat16, of older code"
    assert performance._sizes(older)["title"] == performance._sizes(item())["title"] + ", of older code"


def test_one_size_is_named() -> None:
    one = {name: values[:1] for name, values in SERIES.items()}
    table = structs.replace(TABLE, xs=TABLE.xs[:1], series=one, p20={}, p80={})
    assert op_grid._conditions([item(table=table)]) == f"bfloat16, {TABLE.xs[0]}"


def test_what_was_not_measured_is_left_out() -> None:
    """The best other is, where PyTorch is the only one."""
    alone, beside_pytorch = (
        structs.replace(TABLE, series={name: SERIES[name] for name in ("Triton", other)}, p20={}, p80={})
        for other in ("Liger", "PyTorch")
    )
    assert text(op_grid._line(item(table=alone))) == "forward 1.10 \N{MULTIPLICATION SIGN} best other"
    assert text(op_grid._line(item(table=beside_pytorch))) == "forward 2.00 \N{MULTIPLICATION SIGN} PyTorch"


def test_ops_to_learn_from_stand_apart() -> None:
    """Last, each with an op to take instead, which is itself one to take."""
    env = environment()
    instead = op_grid.take_instead(env)
    assert {*instead} == {"tuned_matmul", "flash_attention_forward"}
    assert {*instead.values()} <= {*OPS} - {*instead}
    *_, title, tiles = op_grid.grid(env)
    assert title.astext() == op_grid.TO_LEARN
    names = [[link["reftarget"].rpartition("/")[2] for link in tile.findall(pending_xref)] for tile in tiles]
    assert dict(names) == instead


def test_sizes_have_the_notes_on_their_marks() -> None:
    late = structs.replace(TABLE, cpu={"Triton": [9.0, 80.0, 9.0]}, cpu_bound={"Triton": [False, True, False]})
    assert (
        "CPU time of a call there, in microseconds: Triton 80 at two."
        in performance._sizes(item(table=late))["notes"][0]
    )


def test_gpu_with_most_ops_is_first() -> None:
    by_op = {"a": {H100.name: [item()]}, "b": {H100.name: [item()], H200.name: [item()]}}
    assert op_grid.gpus(by_op) == [H100.name, H200.name]
    assert re.findall("<option>(.+?)</option>", op_grid.choice(op_grid.gpus(by_op)).astext()) == [H100.name, H200.name]


def environment() -> Any:
    """Return what stands in for Sphinx's environment."""
    return SimpleNamespace(
        app=SimpleNamespace(confdir=ROOT),
        srcdir=ROOT / "docs",
        config=SimpleNamespace(sphinx_gallery_conf={"examples_dirs": "../gallery", "gallery_dirs": "recipes"}),
    )


def test_records_show_every_op_somewhere() -> None:
    env = environment()
    by_op = op_grid.speeds(env)
    assert list(by_op) == [op.name for recipe in RECIPES if (op := op_of(recipe))]
    for op, of_gpus in by_op.items():
        assert all(main == headline(main, or_older=True) for main in of_gpus.values()), op
        assert all(len({item.is_fresh for item in main}) == 1 for main in of_gpus.values()), op
    lessons = performance._lessons(env)
    assert lessons
    assert not {page.removeprefix("recipes/") for page in lessons} & {recipe.key for recipe in RECIPES if op_of(recipe)}


def test_row_has_the_best_other_at_each_size() -> None:
    """And not the library that is the best over all."""
    op, dtype, *cells, sizes, date = performance._row(
        "softmax", H200.name, [item(), item("backward, beside libraries")]
    )
    best, worst, roof = cells[:3]
    assert (dtype, date) == ("bfloat16", item().date[:10])
    ratios = [TABLE.ratio(index) or 0 for index in range(3)]
    assert (best, worst) == (f"{sorted(ratios)[1]:.2f}", f"{min(ratios):.2f}")
    assert text(roof[0]) == "0.50"
    assert cells[3:5] == cells[:2]
    assert text(sizes[0]) == "3 sizes"
    assert 'aria-label="3 sizes of softmax"' in sizes[0].astext()
    assert op[0]["reftarget"] == "/ops/softmax"


def test_captions_have_the_dtype() -> None:
    pages = {page.recipe.name: page for page in page_context.recipe_pages(environment())}
    assert pages["softmax"].dtype == pages["layer_norm"].dtype == "bfloat16"
    assert pages["flash_attention"].dtype == "float16"
    assert pages["topk"].dtype == "float32"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.key)
def test_card_has_a_picture_of_its_own(recipe) -> None:
    rows = pictures()[recipe.name].split("/")
    assert len(rows) <= ROWS
    assert all(len(row) <= COLUMNS and set(row) <= {*COLORS, " "} for row in rows)
    assert len(re.findall("<", picture(recipe.name))) <= 2 + len(COLORS)
    assert "var(--" in picture(recipe.name)


def test_pictures_are_told_apart() -> None:
    assert {*pictures()} == {recipe.name for recipe in RECIPES}
    drawn = [picture(recipe.name) for recipe in RECIPES]
    assert len(set(drawn)) == len(drawn)
    assert picture("no_such_recipe") == ""


def test_badges_come_from_what_is_declared() -> None:
    first = sections(ROOT / "gallery")[0]
    badges = {recipe.name: index_cards._badges(recipe, first) for recipe in RECIPES}
    assert badges["vector_add"] == ["beginner", "lesson"]
    assert badges["softmax"] == ["intermediate", "backward", "fp16 bf16 fp32 fp64"]
    assert badges["gluon_matmul"] == ["advanced", "no backward", "fp16 bf16"]


def test_sections_can_be_followed() -> None:
    """First steps, then the sections of ops, then the lessons about tools; XLA is last."""
    of_section = {name: [*recipes] for name, recipes in groupby(RECIPES, key=lambda recipe: recipe.section)}
    have_ops = [any(map(op_of, recipes)) for recipes in of_section.values()]
    assert [has_ops for has_ops, _ in groupby(have_ops)] == [False, True, False]
    assert next(iter(of_section)) == "first_steps"
    assert [*of_section][-1] == "xla"
