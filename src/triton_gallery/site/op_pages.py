"""The page of each op: how to take it, what it promises, how fast it is, what it compiles to, and its source.

The pages are written into `docs/ops` when a build begins. What they show comes from the op's module and from records.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.figures.ratios import Summary, headline, summaries
from triton_gallery.recipe.contents import sections
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.inline import OPS
from triton_gallery.recipe.op import op_of
from triton_gallery.site import (
    op_files,
    other_gpus,
    page_context,
    peer_table,
    replaces,
    row_table,
    summary_box,
    verdict,
    version_matrix,
    version_table,
    wheel,
)
from triton_gallery.site.collapsible import fold
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import first_cells, grid, op_link, page_link, prose, titled

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

PACKAGES = ("torch", "transformers", "liger_kernel", "flash_attn", "vllm", "fla")  # in the order of the table
PARTS = ("_forward", "_with_lse", "_with_stats", "_backward")  # end the names of functions that a gradient needs
ROUNDING = "Rounding: "  # begins a paragraph of a docstring
STATE = "op"  # the key in a page's metadata for what it shows
COLUMNS = ["op", "forward", "backward", "measured on", "dtype"]  # of the index
INDEX = """\
:orphan:

Ops
===

{about}

.. ops::

.. toctree::
   :hidden:

{pages}
"""
RATIOS = (
    "Above 1 the op is faster. The roof is what the hardware itself does with as many bytes or operations, measured in "
    "the same run. A kernel that writes less than a copy may pass it."
)
NO_BACKWARD = "none"
SPEED = (
    "Forward and backward: the op's speed over a library's, the median over the shapes; above 1 the op is faster. The "
    "library is the fastest of those measured beside the op: the one with the lowest of these medians. "
    f"The word {NO_BACKWARD} means that the op has no backward, and {verdict.UNMEASURED} that it was not measured. An "
    "op's page has every library, and the range."
)
COMPILED = "The op is registered with torch.library, and torch.compile takes it without a graph break, as tests show. "
ABOUT = (
    "Each op is one module of the package ``triton_gallery_ops``, and needs ``torch`` and ``triton`` alone. Install "
    "the package, or take one file. An op's page has its signature, its figures beside other libraries at the shapes "
    "of models, what its kernels compile to for other GPUs, and its source. "
    "The first list finds an op by the function that it replaces; `All ops <#all-ops>`__ have their speed."
)


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Have the pages written, add their directives, and make them follow what they show."""
    app.add_directive("op", OpDirective)
    app.add_directive("ops", OpsDirective)
    app.connect("builder-inited", _write)
    app.connect("env-get-outdated", _outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


@dataclass(frozen=True)
class Part:
    """A part of an op's source: a function or a class, or what stands between two of them.

    Attributes:
        text: the code, with the comments and decorators above it.
        node: the function or class; None for what stands between.
    """

    text: str
    node: ast.FunctionDef | ast.ClassDef | None

    @property
    def is_public(self) -> bool:
        """Whether it is a function that others call."""
        node = self.node
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            return False
        return not any(ast.unparse(by).partition("(")[0].endswith("jit") for by in node.decorator_list)

    @property
    def signature(self) -> str:
        """The name and the arguments of a function, on one line if it is short."""
        assert isinstance(self.node, ast.FunctionDef)
        returns = f" -> {ast.unparse(self.node.returns)}" if self.node.returns else ""
        line = f"{self.node.name}({ast.unparse(self.node.args)}){returns}"
        if len(line) <= 100:
            return line
        inner = _arguments(self.node.args)
        return "\n".join([f"{self.node.name}(", *(f"    {argument}," for argument in inner), f"){returns}"])

    @property
    def title(self) -> str:
        """What stands on its fold: its name and the first line that is said of it."""
        if self.node is None:
            return "Imports and constants" if "import " in self.text else "Constants, and what is registered"
        kind = "class" if isinstance(self.node, ast.ClassDef) else "def"
        said = (ast.get_docstring(self.node) or "").partition("\n")[0]
        said = re.sub(r"``(.+?)``", r"<code>\1</code>", escape(said))
        return f"<code>{kind} {escape(self.node.name)}</code> {said}".strip()


def parts_of(source: str) -> list[Part]:
    """Return the parts of a module below its docstring, in order."""
    lines, parts = source.splitlines(), list[Part]()
    body = ast.parse(source).body[1:]
    end = ast.parse(source).body[0].end_lineno or 0
    between: list[str] = []
    for node in body:
        text = lines[end : node.end_lineno]
        end = node.end_lineno or end
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            between += text
            continue
        if any(between):
            parts.append(Part("\n".join(between).strip("\n"), None))
        between = []
        parts.append(Part("\n".join(text).strip("\n"), node))
    if any(between):
        parts.append(Part("\n".join(between).strip("\n"), None))
    return parts


def public(op: str, source: str) -> list[Part]:
    """Return the functions that others call: the one that has the op's name first, what its gradient needs last."""
    found = [part for part in parts_of(source) if part.is_public and part.node]

    def rank(part: Part) -> tuple[bool, bool]:
        assert part.node
        return part.node.name.rstrip("_") != op, part.node.name.endswith(PARTS)

    return sorted(found, key=rank)


class OpDirective(SphinxDirective):
    """`op`: all that the page of an op has below its title."""

    required_arguments = 1
    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        name = self.arguments[0]
        recipe_name = page_context.ops(self.env)[name]
        page = page_context.recipe_page(self.env, recipe_name)
        assert page
        file = page_context.op_file(self.env, name)
        self.env.note_dependency(str(file))
        self.env.note_dependency(str(replaces.FILE))
        self.env.metadata[self.env.docname][STATE] = _state(self.env, page)
        source = file.read_text(encoding="utf-8")
        about = inspect.cleandoc(ast.get_docstring(ast.parse(source)) or "").partition("\n")[2].strip()
        said = f"{first_line(self.env, name)}: install it or take one file; its signature, figures and source."
        shown = [
            nodes.meta("", name="description", content=said),
            *prose(about),
            self._glance(page),
            *replaces.section(name),
            *self._contract(name, source),
            *self._beside(page),
            *filter(None, [other_gpus.section(self.env, page.recipe, of_op=True)]),
            self._where(page),
            *self._source(source),
            self._lessons(name),
        ]
        for section in (node for node in shown if isinstance(node, nodes.section)):
            section["classes"].append("of-op")
        return shown

    def _glance(self, page: RecipePage) -> nodes.Node:
        """Return the box: what the records come to, a chart, where the op fits, then how to get it."""
        items = _items(self.env, page)
        files = nodes.paragraph(classes=["recipe-downloads"])
        files += op_files.buttons(self.env, page, up="../")
        box = nodes.container("", nodes.rubric("", "At a glance"), classes=["glance", "of-op"])
        box += verdict.table(items)
        if chart := [*summary_box.chart(page)]:
            box += [*chart, self._caption(page)]
        if cpu := verdict.cpu(page, items):
            box += nodes.paragraph("", cpu)
        box += [*summary_box.said(page), *other_gpus.strip(self.env, page.recipe)]
        box += version_matrix.marks(self.env, page.recipe, self.arguments[0])
        box += [*other_gpus.misfits(self.env, page.recipe), *wheel.command(self.env), files, self._taken(page)]
        return box

    def _caption(self, page: RecipePage) -> nodes.paragraph:
        """Say of what the chart is: its sizes are not those of the table above it."""
        record = page.record
        assert record is not None
        assert page.table is not None
        older = "" if record.is_fresh(page.recipe) else ", of older code"
        kind = f"{page.table.kind} " if page.table.kind else ""
        where = f"{record.environment.name}, {record.date[:10]}{older}"
        said = f"The chart: {kind}at the lesson's sizes, recorded on {where}. "
        shown = nodes.paragraph("", said, page_link(page_context.ops(self.env)[self.arguments[0]]))
        shown += nodes.Text(" says in which dtype.")
        return shown

    def _taken(self, page: RecipePage) -> nodes.paragraph:
        """Say of the file to take its licence, its length, how it is imported, and what tells two versions apart."""
        name, op = self.arguments[0], op_of(page.recipe)
        assert op
        first = public(name, page_context.op_file(self.env, name).read_text(encoding="utf-8"))[0]
        assert first.node
        lines = len(op_files.text_of(self.env, op, page).splitlines())
        said = nodes.paragraph("", f"The file has the MIT licence and {lines} lines: ")
        said += nodes.literal("", f"from {name}_op import {first.node.name}")
        said += nodes.Text(". For two versions of the op in one process, give one of them another ")
        said += [nodes.literal("", space) for space in op.names if space.endswith("_NAMESPACE")]
        said += nodes.Text(".")
        return said

    def _contract(self, name: str, source: str) -> list[nodes.Node]:
        """Return the section with the signature of each public function, and what is said of it.

        Of the first, what it takes and where it rounds is in sight; the rest is folded, and so are the other functions.
        """
        section = titled("Use it")
        for number, part in enumerate(public(name, source)):
            assert part.node
            inner = titled(part.node.name)
            text = f"from {OPS}.{name} import {part.node.name}\n\n{part.signature}"
            inner += nodes.literal_block(text, text, language="python")
            said = prose(ast.get_docstring(part.node) or "")
            seen = [place for place, node in enumerate(said) if place < 2 or node.astext().startswith(ROUNDING)]
            more = [node for place, node in enumerate(said) if place not in seen]
            inner += [*(said[place] for place in seen), *more]
            start = len(section)
            section += inner
            if number:
                fold(section, start, start + 1, part.title)
            elif more:
                fold(inner, len(inner) - len(more), len(inner), "The rest of the contract")
        return [section]

    def _beside(self, page: RecipePage) -> list[nodes.Node]:
        """Return the section with the works that the box leaves out, then all rows beside other libraries, folded."""
        section = peer_table.section(self.env, page.recipe) or titled(peer_table.TITLE)
        if len(section) > 1:
            fold(section, 1, len(section), "Every shape, and each library's rate")
        items = _items(self.env, page)
        told = headline(items)
        if rest := [item for item in items if item not in told]:
            shown = [nodes.paragraph("", RATIOS), summary_box.ratios(rest, named=True)]
            section.insert(1, shown)
            fold(section, 1, 1 + len(shown), "Other dtypes and variants, and the lesson's sizes, beside each library")
        return [section] if len(section) > 1 else []

    def _where(self, page: RecipePage) -> nodes.Node:
        """Return the section that says where the op runs."""
        declared = declaration(page.recipe.path, page.recipe.text)
        needs = [str(package) for package in declared.packages if package.name in {"torch", "triton"}]
        section = titled("Where it runs")
        gpu = declared.of_op.gpu
        where = (
            f"On NVIDIA GPUs of compute capability {gpu.removeprefix('==')} alone."
            if gpu
            else "On GPUs that Triton "
            "supports. Without one, with torch 2.13 or later, in Triton's interpreter, slowly: set TRITON_INTERPRET=1 "
            "before triton is imported."
        )
        said = nodes.paragraph("", f"Needs {' and '.join(needs)}. {where} {COMPILED}")
        if version_table.PAGE in self.env.found_docs:
            said += page_link(version_table.PAGE)
            said += nodes.Text(" has what was tried, and the rates on several versions of Triton.")
        section += said
        if lost := version_table.sentence(self.env, page.recipe):
            section += lost
        return section

    def _source(self, source: str) -> list[nodes.Node]:
        """Return the source as an outline: each function is a fold."""
        section = titled("Source")
        for part in parts_of(source):
            block = nodes.literal_block(part.text, part.text, language="python")
            start = len(section)
            section += block
            fold(section, start, start + 1, part.title)
        fold(section, 1, len(section), f"{len(source.splitlines())} lines, function by function")
        return [section]

    def _lessons(self, name: str) -> nodes.Node:
        """Return the section with the lessons that have the op, and where to report a mistake."""
        section = titled("Read more")
        lessons = nodes.bullet_list()
        for page in page_context.lessons(self.env, name):
            lessons += nodes.list_item("", nodes.paragraph("", "", page_link(page)))
        section += lessons
        repository = self.env.config.gallery_repository.rstrip("/")
        if repository:
            address = f"{repository}/issues/new?title={quote(f'{OPS}.{name}: ')}"
            section += nodes.paragraph("", "", nodes.reference("", "Report a mistake", refuri=address))
        return section


class OpsDirective(SphinxDirective):
    """`ops`: what people call today and the op that computes the same, then all ops by section."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        ops = page_context.ops(self.env)
        self.env.note_dependency(str(replaces.FILE))
        self.env.metadata[self.env.docname][STATE] = _state_of_index(self.env)
        found = titled("What you call today")
        for package in PACKAGES:
            called: dict[str, list[tuple[str, str]]] = {}
            for op, taken_for in replaces.replaces().items():
                for name in taken_for.names if op in ops else ():
                    if name.partition(".")[0] == package:
                        called.setdefault(name, []).append((op, taken_for.note))
            table = grid([f"in {package}", "op"], [["", ""] for _ in called], "called")
            for row, (name, taken) in zip(_body(table), sorted(called.items()), strict=True):
                first, second = row.findall(nodes.paragraph)
                first += nodes.literal("", name if package == "torch" else ".".join(name.split(".")[-2:]))
                for op, note in taken:
                    second += [op_link(op), nodes.Text(f": {note}"), nodes.raw("", "<br>", format="html")]
            if called:
                found += table
        listed = titled("All ops")
        listed += nodes.paragraph("", SPEED)
        gallery = Path(self.env.app.confdir, "gallery")
        for section in sections(gallery):
            here = [op for op, page in ops.items() if page.split("/")[-2] == section]
            if here:
                rows = grid(COLUMNS, [["", *_speeds(self.env, ops[op])] for op in here], "ops")
                for place, op in zip(first_cells(rows), here, strict=True):
                    place += [op_link(op), nodes.Text(f": {first_line(self.env, op)}")]
                listed += [nodes.rubric("", section.replace("_", " ").capitalize()), rows]
        return [found, listed]


def _items(env: "BuildEnvironment", page: RecipePage) -> list[Summary]:
    """Return what was measured of an op: for its page on one device, beside other libraries on all."""
    return list(summaries(page.records[:1], page_context.peers(env), page.recipe))


def _speeds(env: "BuildEnvironment", recipe_page: str) -> list[str]:
    """Return what the index says of an op's speed: forward, backward, on which GPU and in which types."""
    page = page_context.recipe_page(env, recipe_page)
    assert page
    found = headline(_items(env, page))
    by_way = {item.is_backward: verdict.short(item) for item in reversed(found)}
    backward = declaration(page.recipe.path, page.recipe.text).of_op.backward
    ways = [by_way.get(False, ""), by_way.get(True, "")]
    if not backward:  # such an op may compute gradients in its forward
        ways = ["".join(ways), NO_BACKWARD]
    dtypes = ", ".join(dict.fromkeys(item.dtype for item in found if item.dtype))
    return [text or verdict.UNMEASURED for text in (*ways, found[0].environment.name if found else "", dtypes)]


def first_line(env: "BuildEnvironment", op: str) -> str:
    """Return the line that an op's module begins with, without its full stop."""
    source = page_context.op_file(env, op).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or op).partition("\n")[0].rstrip(".")


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Yield the arguments of a function, each with its type and its default."""
    missing = len(arguments.args) - len(arguments.defaults)
    by_place = zip(arguments.args, [*missing * [None], *arguments.defaults], strict=True)
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    yield from (_argument(*item) for item in by_place)
    yield from ["*"] if arguments.kwonlyargs else []
    yield from (_argument(*item) for item in by_name)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "")


def _body(table: nodes.Node) -> Iterator[nodes.row]:
    for body in table.findall(nodes.tbody):
        yield from body.findall(nodes.row)


def _state(env: "BuildEnvironment", page: RecipePage) -> str:
    """Identify what a page shows of records."""
    rows = row_table.of(page.recipe, page_context.peers(env)), row_table.of(page.recipe, page_context.versions(env))
    shown = [row_table.state(found, [page.recipe]) for found in rows]
    record = page.record
    shown.append(f"{record.path} {record.path.stat().st_mtime_ns} {record.is_fresh(page.recipe)}" if record else "")
    return " ".join([*shown, other_gpus.state(env, page.recipe)])


def _state_of_index(env: "BuildEnvironment") -> str:
    """Identify what the index shows of records."""
    return " ".join(text for recipe in page_context.ops(env).values() for text in _speeds(env, recipe))


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the pages that show something else than they would now."""
    old = []
    for op, recipe in page_context.ops(env).items():
        page = page_context.recipe_page(env, recipe)
        known = env.metadata[f"ops/{op}"].get(STATE)
        if page and known is not None and known != _state(env, page):
            old.append(f"ops/{op}")
    known = env.metadata["ops/index"].get(STATE)
    return [*old, "ops/index"] if known is not None and known != _state_of_index(env) else old


def _write(app: "Sphinx") -> None:
    """Write the files of the pages; what they show is put in when they are read."""
    folder, ops = Path(app.srcdir, "ops"), page_context.ops(app.env)
    files = {}
    for op in ops:
        title = re.sub(r"([*`|_\\])", r"\\\1", first_line(app.env, op))
        files[f"{op}.rst"] = f"{title}\n{'=' * len(title)}\n\n.. op:: {op}\n"
    if ops:
        pages = "\n".join(f"   {op} <{op}>" for op in ops)
        guide = " :doc:`/guide/take` says more." if Path(app.srcdir, "guide", "take.md").is_file() else ""
        files["index.rst"] = INDEX.format(about=ABOUT + guide, pages=pages)
    for path in folder.glob("*.rst"):
        if path.name not in files:
            path.unlink()
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text:
            (folder / name).write_text(text, encoding="utf-8")
