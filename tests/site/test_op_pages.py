"""The pages of ops: what each shows, what a lesson that moved something there still has, and which addresses go on."""

import ast
import importlib
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from bs4 import BeautifulSoup
from project import OPS, ROOT, SOURCES, Project, deferred, whole_page

from triton_gallery.libraries.library_rows import LibraryRow, merge
from triton_gallery.recipe.contents import load
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.measured import op_hash
from triton_gallery.recipe.new import create
from triton_gallery.recipe.op import op_of
from triton_gallery.site.op_files import install_command, wheel_name
from triton_gallery.site.op_pages import parts_of, public
from triton_gallery.site.render import prose
from triton_gallery.site.replaces import replaces

ADDRESSES = (ROOT / "tests" / "site" / "addresses.txt").read_text().split()
SECTIONS = ["Use it", "Where it runs", "Source", "Read more"]


def test_every_op_is_of_one_lesson() -> None:
    lessons = [op.name for recipe in load(ROOT / "gallery") if (op := op_of(recipe))]
    assert sorted(lessons) == OPS


@pytest.mark.parametrize("op", OPS)
def test_page_has_all_of_the_op(site: Path, parsed: Callable[[str], BeautifulSoup], op: str) -> None:
    source = (SOURCES / f"{op}.py").read_text()
    page = parsed(f"ops/{op}.html")
    title = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0].rstrip(".")
    assert page.select_one("h1").text.rstrip("#¶") == title.replace("``", "")
    sections = [heading.text.rstrip("#¶") for heading in page.select("h2")]
    assert [section for section in sections if section in SECTIONS] == SECTIONS
    names = [part.node.name for part in public(op, source)]
    assert names[0].startswith(op), "the op itself comes first"
    assert [heading.text.rstrip("#¶") for heading in page.select("#use-it h3")] == names
    assert f"import {names[0]}" in page.select_one("#use-it .highlight").text
    assert page.select_one(".glance a.take")["href"].endswith(f"ops/{op}_op.py")
    taken = deferred(site / "ops" / page.select_one(".glance button.take")["data-from"])
    about = page.select_one(".glance").text
    assert f"{len(taken.splitlines())} lines: from {op}_op import {names[0]}. " in about
    assert f"{op.upper()}_NAMESPACE" in about
    shown = [block.text.strip("\n") for block in page.select("#source details .highlight")]
    assert "\n".join(shown).split() == source[source.index('"""\n', 3) + 4 :].split()
    assert page.select("#source details summary code")
    assert page.select("#read-more a[href*='recipes/']")


def test_rows_beside_libraries_are_folded(parsed: Callable[[str], BeautifulSoup]) -> None:
    section = parsed("ops/softmax.html").select_one("#beside-other-libraries")
    assert section.select("details.fold table.libraries")
    assert not [table for table in section.select("table.libraries") if not table.find_parent("details")]


def test_verdict_names_each_library(parsed: Callable[[str], BeautifulSoup]) -> None:
    """And not the best of those that happen to have been measured; what it does not have is folded."""
    page = parsed("ops/softmax.html")
    table = page.select_one(".glance table.ratios")
    assert {row.select_one("td").text for row in table.select("tbody tr")} == {
        "PyTorch",
        "torch.compile",
        "Liger",
        "Roof",
    }
    assert table.select("tbody tr")[-1].select_one("td").text == "Roof"
    assert [cell.text for cell in table.select("th")][1::2] == ["forward: ratio", "backward: ratio"]
    heads = [cell.text for cell in page.select("#beside-other-libraries details.fold table.ratios th")]
    assert heads[1:] == ["speed / PyTorch", "speed / torch.compile", "speed / Liger", "speed / roof"]
    in_place = parsed("ops/rope.html").select(".glance table.ratios")[1]
    assert "in place" in [row.select_one("td").text for row in in_place.select("tbody tr")]


@pytest.mark.parametrize("op", OPS)
def test_page_has_what_is_called_today(parsed: Callable[[str], BeautifulSoup], op: str) -> None:
    section = parsed(f"ops/{op}.html").select_one("#instead-of-what-you-call-today")
    blocks = [block.text.strip().splitlines()[0] for block in section.select(".highlight")]
    assert blocks == ["# Today", "# With this op"] * len(replaces()[op].swaps)
    assert len(section.select("details.fold")) == len(replaces()[op].swaps) - 1


@pytest.mark.parametrize("op", OPS)
def test_rounding_is_in_sight(parsed: Callable[[str], BeautifulSoup], op: str) -> None:
    said = [text for text in parsed(f"ops/{op}.html").select("#use-it p") if text.text.startswith("Rounding: ")]
    assert said
    assert not said[0].find_parent("details")


def test_what_does_not_fit_is_explained(parsed: Callable[[str], BeautifulSoup]) -> None:
    """Whoever adds an op to those whose launcher chooses less has read its launcher: it was read of these."""
    chooses = set()
    for op in OPS:
        box = parsed(f"ops/{op}.html").select_one(".glance")
        explained = [text.parent.text for text in box.select("p > em")]
        smaller = [text for text in explained if "the op chooses a smaller launch" in text]
        partly = [text for text in explained if "that was not compiled" in text]
        assert bool(box.select(".target.smaller")) == bool(smaller)
        assert bool(box.select(".target.partly")) == bool(partly)
        assert bool(box.select(".target.too-large")) == (len(smaller) + len(partly) < len(explained))
        if smaller:
            chooses.add(op)
    assert chooses == {"linear_gelu", "rms_norm", "skinny_matmul"}


@pytest.mark.parametrize("op", OPS)
def test_lesson_leads_to_the_op(parsed: Callable[[str], BeautifulSoup], op: str) -> None:
    (recipe,) = (recipe for recipe in load(ROOT / "gallery") if (found := op_of(recipe)) and found.name == op)
    page = parsed(f"recipes/{recipe.key}.html")
    assert page.select_one(f".glance .op-page a[href='../../ops/{op}.html']")
    assert not page.select(".glance table.ratios:not(.distribution)"), "it is on the op's page"
    assert not page.select("section#beside-other-libraries"), "it is on the op's page"
    kernels = {block.text.partition("(")[0] for block in page.select("#on-other-gpus details > p > code")}
    assert "_NAMESPACE" in page.select_one("#the-op details.fold .highlight").text
    found = op_of(recipe)
    assert not kernels & {*found.names}, "they are on the op's page"


def test_index_has_every_op_and_what_it_is_taken_for(parsed: Callable[[str], BeautifulSoup]) -> None:
    page = parsed("ops/index.html")
    listed = [link["href"].removesuffix(".html") for link in page.select("#all-ops .op-grid > li > p:first-child a")]
    assert sorted(listed) == OPS
    assert [heading.text.rstrip("#¶") for heading in page.select("h2")] == ["What you call today", "All ops"]
    rows = {row.select_one("code").text: row.text for row in page.select("table.called tbody tr")}
    assert "rms_norm_residual" in rows["modeling_llama.LlamaRMSNorm"]
    assert [link.text for link in page.select("table.called a") if "softmax" in link.text]


@pytest.mark.usefixtures("quick_interpreter")  # it imports Triton
def test_what_ops_are_taken_for_exists() -> None:
    """Of torch, which is here; names of other libraries were read in their sources."""
    assert replaces().keys() <= {*OPS}
    for taken_for in replaces().values():
        assert taken_for.note
        for called in (called for called in taken_for.names if called.startswith("torch.")):
            found = importlib.import_module("torch")
            for name in called.split(".")[1:]:
                if not hasattr(found, name):
                    importlib.import_module(f"{found.__name__}.{name}")
                found = getattr(found, name)


def test_wheel_and_files_are_served(site: Path) -> None:
    assert {path.stem.removesuffix("_op") for path in (site / "ops").glob("*_op.py")} == {*OPS}
    with zipfile.ZipFile(site / "ops" / wheel_name(ROOT)) as archive:
        assert f"triton_gallery_ops/{OPS[0]}.py" in archive.namelist()


def test_checkout_is_named() -> None:
    """Where the site does not know its own address."""
    config = SimpleNamespace(html_baseurl="", gallery_repository="https://example.org/code/")
    where, block = install_command(SimpleNamespace(app=SimpleNamespace(confdir=ROOT), config=config))
    assert where.astext() == "In a checkout of example.org/code:"
    assert block.astext() == "$ pip install ."


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_go_on_working(site: Path, parsed: Callable[[str], BeautifulSoup], address: str) -> None:
    file, _, anchor = unquote(address).partition("#")
    assert (site / file).is_file()
    if anchor:
        assert parsed(file).find(id=anchor), f"{file} has no #{anchor}"


@pytest.fixture(scope="module")
def project(make_project: Callable[..., Project]) -> Project:
    """Return a project with one recipe and its op, built where the site's address is known."""
    project = make_project()
    project.write(before='print("before")')
    create(project.root, "things/square")
    (project.root / "docs" / "performance.md").write_text("# Performance\n\n```{performance}\n```\n")
    index = project.root / "docs" / "index.md"
    index.write_text(index.read_text().replace("recipes/index", "recipes/index\nperformance"))
    status, output = project.run("html", SITE_URL="https://example.org/x/", SITE_REPOSITORY="https://example.org/code")
    assert status == 0, output
    return project


def test_new_op_has_a_page(project: Project) -> None:
    page = BeautifulSoup(whole_page(project.root / "_build" / "html" / "ops" / "square.html"), "html.parser")
    assert "x: torch.Tensor" in page.select_one("#use-it").text
    assert page.find("a", string="Report a mistake")["href"].startswith("https://example.org/code/issues/new?title=")


def test_lesson_and_op_show_how_ratios_lie(project: Project) -> None:
    """Of many sizes, also if they are of several draws: the worst, the tenth and the median."""
    (square,) = (recipe for recipe in load(project.root / "gallery") if recipe.name == "square")
    gpu = Environment("Test GPU", "9.0", 1, None, None, "2.11", "3.6", "3.12")
    measured = "things/square", "GB/s", op_hash(square), gpu, "2026-01-02T03:04:05+00:00", None, {}
    rows = []
    for seed, dtype in enumerate(("bfloat16", "float16")):
        for size in range(10 * seed + 1, 10 * seed + 11):
            rates = {"Triton": [float(size)] * 3, "PyTorch": [10.0] * 3, "Roof": [20.0] * 3}
            recipe, unit, *others = measured
            rows.append(LibraryRow(recipe, f"square, drawn {seed}, forward", [size], unit, *others, rates, dtype))
    merge(project.root / "docs" / "_records", rows, [row.key for row in rows])
    status, output = project.run("html")
    assert status == 0, output

    def tables(page: str) -> list[list[list[str]]]:
        parsed = BeautifulSoup(whole_page(project.root / "_build" / "html" / page), "html.parser")
        found = parsed.select(".glance table.ratios")
        return [[[cell.text for cell in row.select("th, td")] for row in table.select("tr")] for table in found]

    assert tables("recipes/things/square.html") == [
        [["beside", "PyTorch"], ["drawn, forward, 20 shapes", "0.10, 0.30, 1.05"]]
    ]
    (verdict,) = tables("ops/square.html")
    assert verdict[1][:2] == ["PyTorch", "1.05 (0.10 to 2.00; 10th percentile 0.30)"]
    assert verdict[2][:2] == ["Roof", "0.53 (0.05 to 1.00; 10th percentile 0.15)"]


def test_page_follows_its_module(project: Project) -> None:
    file = project.root / "src" / "triton_gallery_ops" / "square.py"
    file.write_text(file.read_text().replace("TODO: when it is fast", "Fast at |any| *size"))
    status, output = project.run("html")
    assert status == 0, output
    page = whole_page(project.root / "_build" / "html" / "ops" / "square.html")
    assert "Fast at |any| *size" in page


def test_removed_op_leaves_nothing(project: Project) -> None:
    site = project.root / "_build" / "html"
    names = [f"square{suffix}" for suffix in (".html", ".folded.html", ".folded.js", ".md", ".js", "_op.py")]
    assert {path.name for path in site.rglob("square*")} >= {*names}
    project.remove("square")
    (project.root / "src" / "triton_gallery_ops" / "square.py").unlink()
    status, output = project.run("html")
    assert status == 0, output
    assert not (project.root / "docs" / "ops" / "square.rst").exists()
    assert not [path for path in site.rglob("square*") if path.name in names]


def test_docstrings_are_shown_as_they_are() -> None:
    first, second = prose("Return |x|_2 * ``y``\nof x, see https://arxiv.org/abs/1.\n\nRaises **no** error.")
    assert [child.astext() for child in first] == [
        "Return |x|_2 * ",
        "y",
        " of x, see ",
        "https://arxiv.org/abs/1",
        ".",
    ]
    assert second.astext() == "Raises **no** error."


def test_long_signature_has_types_and_defaults() -> None:
    inner = ", ".join(f"number_{n}: torch.Tensor" for n in range(4))
    arguments = f"{inner}, causal: bool = False, *, eps: float | None = None"
    (part,) = parts_of(f'"""Doc."""\n\n\ndef long({arguments}) -> int:\n    """Say."""\n')
    first, *lines, last = part.signature.splitlines()
    assert (first, last) == ("long(", ") -> int")
    assert lines[3:] == [
        "    number_3: torch.Tensor,",
        "    causal: bool = False,",
        "    *,",
        "    eps: float | None = None,",
    ]


def test_parts_lose_nothing() -> None:
    source = '"""Doc."""\n\nimport os\n\nA = 1\n\n\n# said\n@cache\ndef f(x):\n    """Say."""\n\n\nf.y = 1\n'
    parts = parts_of(source)
    assert [part.title for part in parts] == [
        "Imports and constants",
        "<code>def f</code> Say.",
        "Constants, and what is registered",
    ]
    assert re.sub(r"\n+", "\n", "\n".join(part.text for part in parts)) in re.sub(r"\n+", "\n", source)
