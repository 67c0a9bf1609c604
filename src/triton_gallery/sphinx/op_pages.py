"""The page of each op: how to take it, what it promises, how fast it is, what it compiles to, and its source.

The pages are written into `docs/ops` when a build begins. What they show comes from the op's module and from records.
"""

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import quote

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from triton_gallery.recipes.contents import sections
from triton_gallery.recipes.declaration import declaration
from triton_gallery.recipes.inline import OPS
from triton_gallery.recipes.op import op_of
from triton_gallery.records.summary import summaries
from triton_gallery.sphinx import glance, lookup, peer_table, row_table, take, targets, version_table, wheel
from triton_gallery.sphinx.fold import fold
from triton_gallery.sphinx.lookup import RecipePage
from triton_gallery.sphinx.show import first_cells, grid, op_link, page_link, titled

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

PACKAGES = ("torch", "transformers", "liger_kernel", "flash_attn", "vllm", "fla")  # in the order of the table
REPLACES = Path(__file__).with_name("replaces.toml")
STATE = "op"  # the key in a page's metadata for what it shows
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
ABOUT = (
    "Each op is one module of the package ``triton_gallery_ops``, and needs ``torch`` and ``triton`` alone. Install "
    "the package, or take one file. An op's page has its signature, its figures beside other libraries at the shapes "
    "of models, what its kernels compile to for other GPUs, and its source."
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
    """Return the functions that others call: the one that has the op's name first, backwards last."""
    found = [part for part in parts_of(source) if part.is_public and part.node]

    def rank(part: Part) -> tuple[bool, bool]:
        assert part.node
        return part.node.name.rstrip("_") != op, part.node.name.endswith("_backward")

    return sorted(found, key=rank)


def prose(text: str) -> list[nodes.Node]:
    """Return a docstring as paragraphs: plain text but for ``code`` and addresses, whatever formulas it has."""
    shown: list[nodes.Node] = []
    for block in filter(None, re.split(r"\n\s*\n", text)):
        paragraph = nodes.paragraph()
        for part in re.split(r"(``.+?``|https?://\S+[\w/])", " ".join(block.split())):
            if part.startswith("``"):
                paragraph += nodes.literal("", part.strip("`"))
            elif part.startswith("http"):
                paragraph += nodes.reference("", part, refuri=part)
            else:
                paragraph += nodes.Text(part)
        shown.append(paragraph)
    return shown


class OpDirective(SphinxDirective):
    """`op`: all that the page of an op has below its title."""

    required_arguments = 1
    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        name = self.arguments[0]
        recipe_name = lookup.ops(self.env)[name]
        page = lookup.recipe_page(self.env, recipe_name)
        assert page
        file = lookup.op_file(self.env, name)
        self.env.note_dependency(str(file))
        self.env.metadata[self.env.docname][STATE] = _state(self.env, page)
        source = file.read_text(encoding="utf-8")
        about = inspect.cleandoc(ast.get_docstring(ast.parse(source)) or "").partition("\n")[2].strip()
        said = f"{first_line(self.env, name)}: install it or take one file; its signature, figures and source."
        return [
            nodes.meta("", name="description", content=said),
            *prose(about),
            self._glance(page),
            *self._contract(name, source),
            *self._beside(page),
            *filter(None, [targets.section(self.env, page.recipe, of_op=True)]),
            self._where(page),
            *self._source(source),
            self._lessons(name),
        ]

    def _glance(self, page: RecipePage) -> nodes.Node:
        """Return the box: chart and ratios, then how to get the op."""
        op = op_of(page.recipe)
        assert op
        items = list(summaries(page.records[:1], lookup.peers(self.env), page.recipe))
        get = nodes.literal_block(text := wheel.command(self.env), text, language="console")
        files = nodes.paragraph(classes=["recipe-downloads"])
        files += take.buttons(self.env, page, up="../")
        box = nodes.container("", nodes.rubric("", "At a glance"), classes=["glance"])
        box += [*glance.measured(page, items, named=True), *glance.said(page)]
        box += [*targets.strip(self.env, page.recipe), get, files]
        return box

    def _contract(self, name: str, source: str) -> list[nodes.Node]:
        """Return the section with the signature of each public function, and what is said of it."""
        section = titled("Use it")
        for part in public(name, source):
            assert part.node
            inner = titled(part.node.name)
            text = f"from {OPS}.{name} import {part.node.name}\n\n{part.signature}"
            inner += nodes.literal_block(text, text, language="python")
            inner += prose(ast.get_docstring(part.node) or "")
            section += inner
        return [section]

    def _beside(self, page: RecipePage) -> list[nodes.Node]:
        """Return the section with the rows beside other libraries, which are folded: the box has what they come to."""
        section = peer_table.section(self.env, page.recipe)
        if section is None:
            return []
        fold(section, 2, len(section), "Every shape, and each library's rate")  # below its title and what it is about
        return [section]

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
        said = nodes.paragraph("", f"Needs {' and '.join(needs)}. {where} ")
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
        return [section]

    def _lessons(self, name: str) -> nodes.Node:
        """Return the section with the lessons that have the op, and where to report a mistake."""
        section = titled("Read more")
        lessons = nodes.bullet_list()
        for page in lookup.lessons(self.env, name):
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
        ops = lookup.ops(self.env)
        found = titled("What you call today")
        for package in PACKAGES:
            called: dict[str, list[tuple[str, str]]] = {}
            for op, (names, note) in replaces().items():
                for name in names if op in ops else ():
                    if name.partition(".")[0] == package:
                        called.setdefault(name, []).append((op, note))
            table = grid([f"in {package}", "op"], [["", ""] for _ in called], "called")
            for row, (name, taken) in zip(_body(table), sorted(called.items()), strict=True):
                first, second = row.findall(nodes.paragraph)
                first += nodes.literal("", name if package == "torch" else ".".join(name.split(".")[-2:]))
                for op, note in taken:
                    second += [op_link(op), nodes.Text(f": {note}"), nodes.raw("", "<br>", format="html")]
            if called:
                found += table
        listed = titled("All ops")
        gallery = Path(self.env.app.confdir, "gallery")
        for section in sections(gallery):
            here = [op for op, page in ops.items() if page.split("/")[-2] == section]
            if here:
                rows = grid(["op", "what it computes"], [["", first_line(self.env, op)] for op in here])
                for place, op in zip(first_cells(rows), here, strict=True):
                    place += op_link(op)
                listed += [nodes.rubric("", section.replace("_", " ").capitalize()), rows]
        return [found, listed]


@cache
def replaces() -> dict[str, tuple[list[str], str]]:
    """Return for each op the names of what it may be taken for, and in what it differs."""
    entries = tomllib.loads(REPLACES.read_text(encoding="utf-8"))
    return {op: (entry["names"], entry["note"]) for op, entry in entries.items()}


def first_line(env: "BuildEnvironment", op: str) -> str:
    """Return the line that an op's module begins with, without its full stop."""
    source = lookup.op_file(env, op).read_text(encoding="utf-8")
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
    rows = row_table.of(page.recipe, lookup.peers(env)), row_table.of(page.recipe, lookup.versions(env))
    shown = [row_table.state(found, [page.recipe]) for found in rows]
    record = page.record
    shown.append(f"{record.path} {record.path.stat().st_mtime_ns} {record.is_fresh(page.recipe)}" if record else "")
    return " ".join([*shown, targets.state(env, page.recipe)])


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the pages that show something else than they would now."""
    old = []
    for op, recipe in lookup.ops(env).items():
        page = lookup.recipe_page(env, recipe)
        known = env.metadata[f"ops/{op}"].get(STATE)
        if page and known is not None and known != _state(env, page):
            old.append(f"ops/{op}")
    return old


def _write(app: "Sphinx") -> None:
    """Write the files of the pages; what they show is put in when they are read."""
    folder, ops = Path(app.srcdir, "ops"), lookup.ops(app.env)
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
