"""The drawings of the page `docs/gpu.md`: numbers have sources, drawings have the numbers, and layouts are Triton's."""

import re
from importlib.metadata import version
from itertools import chain
from typing import Any
from xml.etree import ElementTree

import pytest

from triton_gallery.site import drawings
from triton_gallery.site.drawings import BANKS, LANES, THREAD, TILE, figures, holders, read

pytestmark = pytest.mark.usefixtures("quick_interpreter")  # some import Triton
LAYOUTS = read("layouts.toml")
BASES = ("reg_bases", "lane_bases", "warp_bases", "offset_bases")
each_layout = pytest.mark.parametrize("name", LAYOUTS)
tells_shared_layouts = pytest.mark.skipif(
    tuple(map(int, version("triton").split(".")[:2])) < (3, 7), reason="this Triton ends the process"
)


def texts(svg: str) -> list[str]:
    """Return the texts in a drawing."""
    return ["".join(element.itertext()) for element in ElementTree.fromstring(svg).iter("text")]


class Builder:
    """What Triton asks of layouts."""

    def __init__(self) -> None:
        """Make a context, which has to live as long as the builder."""
        from triton._C.libtriton import gluon_ir, ir

        self.context = ir.context()
        ir.load_dialects(self.context)
        self.builder = gluon_ir.GluonOpBuilder(self.context)

    def bases(self, layout: Any, rows: int = TILE) -> Any:
        """Return the linear layout of a tile."""
        return self.builder.to_linear_layout(layout._to_ir(self.builder), [rows, TILE])


@pytest.fixture
def builder() -> Builder:
    """Return a builder of layouts."""
    return Builder()


def made(name: str) -> Any:
    """Return a layout of Gluon as the page makes it."""
    from triton.experimental.gluon import language as gl

    return eval(LAYOUTS[name]["made_by"], {"gl": gl})


def test_every_number_has_a_source() -> None:
    sources = read("gpu_picture.toml")["sources"]
    for name, figure in figures().items():
        assert len(figure.numbers) == len(figure.sources) > 0, name
        assert {*figure.sources} <= sources.keys(), name
    assert {key for figure in figures().values() for key in figure.sources} == sources.keys()
    assert all(source["url"].startswith("https://") and source["title"] for source in sources.values())


def test_drawing_has_every_number_of_the_table_and_no_other() -> None:
    shown = texts(drawings.gpu_picture())
    for name, figure in figures().items():
        text = figure.range if figure.unit == "cycles" else figure.text
        assert any(re.search(rf"(?<![\d.]){re.escape(text)}(?![\d.])", line) for line in shown), name
    numbers = {f"{number:g}" for figure in figures().values() for number in figure.numbers}
    words = " ".join(shown).replace("L1", "").replace("L2", "").replace("HBM3", "").replace("of 4 bytes", "")
    assert {*re.findall(r"[\d.]*\d", words)} == numbers


def test_bars_are_as_long_as_latencies() -> None:
    paths = re.findall(r'<path class="bar(| light)" d="M[\d.]+ \d+h([\d.]+)', drawings.gpu_picture())
    latencies = [figure.numbers for figure in figures().values() if figure.unit == "cycles"]
    steps = chain.from_iterable((min(numbers), max(numbers) - min(numbers)) for numbers in latencies)
    longest = max(map(max, latencies))
    for (_, length), cycles in zip(paths, steps, strict=True):
        assert float(length) == pytest.approx(drawings.BAR_WIDTH * cycles / longest, abs=0.1)


def test_program_is_drawn_as_its_layout() -> None:
    """The marked values are those of the thread that the drawing names."""
    (picture,) = drawings.program()
    words = " ".join(texts(picture.astext()))
    assert "of 64 threads in 2 warps" in words
    assert f"4 values of thread {THREAD}" in words
    (x, y, width, height) = map(
        int, re.findall(r'one filled" x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)', picture.astext())[0]
    )
    row, column = (y - 204) // 6, (x - 132) // 6
    assert holders(LAYOUTS["blocked"])[row][column : column + width // 6] == [THREAD] * 4
    assert (width, height) == (24, 6)


@pytest.mark.parametrize("name", ["blocked", "mma", pytest.param("shared", marks=tells_shared_layouts)])
def test_layout_is_as_triton_computes_it(name: str, builder: Builder) -> None:
    layout = builder.bases(made(name))
    assert {kind: getattr(layout, kind) for kind in BASES if hasattr(layout, kind)} == {
        kind: LAYOUTS[name][kind] for kind in BASES if kind in LAYOUTS[name]
    }
    assert not layout.block_bases


@tells_shared_layouts
@pytest.mark.parametrize("name", ["blocked", "mma"])
def test_threads_are_as_triton_prints_them(name: str) -> None:
    printed = re.findall(r"T(\d+):", made(name).format_tensor_view([TILE, TILE]))
    assert [*map(int, printed)] == [*chain.from_iterable(holders(LAYOUTS[name]))]


@tells_shared_layouts
def test_banks_are_as_triton_prints_them() -> None:
    """It prints for each element the row and the column of its place in memory, or the other way round."""
    lines = re.findall(r"Offset: (\d+) -> \( ?(\d+), ?(\d+)\)", made("shared").format_hardware_view([TILE, TILE]))
    assert len(lines) == TILE * TILE
    banks = holders(LAYOUTS["shared"])
    assert all(banks[int(row)][int(column)] == int(offset) % BANKS for offset, row, column in lines)


@tells_shared_layouts
@pytest.mark.parametrize(("max_phase", "banks"), [(8, TILE), (1, 2)])
def test_column_has_sixteen_banks_and_two_without_the_swizzle(builder: Builder, max_phase: int, banks: int) -> None:
    from triton.experimental.gluon import language as gl

    layout = gl.SwizzledSharedLayout(vec=1, per_phase=2, max_phase=max_phase, order=[1, 0])
    rows = holders({"offset_bases": builder.bases(layout).offset_bases})
    assert all(len({row[column] for row in rows}) == banks for column in range(TILE))


def test_warpgroup_holds_sixteen_rows_a_warp_in_the_same_order(builder: Builder) -> None:
    from triton.experimental.gluon import language as gl

    hopper = builder.bases(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]), rows=4 * TILE)
    assert hopper.lane_bases == LAYOUTS["mma"]["lane_bases"]
    assert hopper.warp_bases == [[TILE, 0], [2 * TILE, 0]]


@each_layout
def test_layout_is_drawn_whole(name: str) -> None:
    """A number stands in each cell, and in the marked cells that of the thread, or all of column 0."""
    picture = drawings.layout_picture(name, LAYOUTS[name])
    root = ElementTree.fromstring(picture)
    (numbers,) = [group for group in root.iter("g") if group.get("class") == "numbers"]
    assert [int(text.text or "") for text in numbers] == [*chain.from_iterable(holders(LAYOUTS[name]))]
    (marked,) = [path for path in root.iter("path") if path.get("class") == "one filled"]
    assert (marked.get("d") or "").count("M") == (TILE if name == "shared" else 4)
    warps = {thread // LANES for row in holders(LAYOUTS[name]) for thread in row}
    assert len(warps) == (1 if name == "shared" else 2)


def test_layouts_have_a_button_each() -> None:
    markup = "".join(node.astext() for node in drawings.layouts())
    buttons = re.findall(r'<button type="button" aria-pressed="(\w+)">(\w+)</button>', markup)
    assert buttons == [("true", "blocked"), ("false", "MMA"), ("false", "shared")]
    assert markup.count('data-layout="') == len(LAYOUTS)
