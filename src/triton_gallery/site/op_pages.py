"""The page of each op: how to take it, what it promises, how fast it is, what it compiles to, and its source.

The pages are written into `docs/ops` when a build begins. What they show comes from the op's module and from records.
"""

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from triton_gallery.figures.ratios import headline
from triton_gallery.recipe.inline import OPS
from triton_gallery.recipe.op import op_of
from triton_gallery.records.output_diff import recorded_on
from triton_gallery.records.record_store import Record
from triton_gallery.site import (
    library_table,
    op_files,
    op_grid,
    other_gpus,
    page_context,
    render,
    replaces,
    summary_box,
    verdict,
    version_matrix,
    version_table,
)
from triton_gallery.site.chart import chart
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.panels import Panel, about_table, figure_of
from triton_gallery.site.render import RINGS, folded, html, op_link, page_link, paragraph, prose, table, titled

PACKAGES = ("torch", "transformers", "liger_kernel", "flash_attn", "vllm", "fla")  # in the order of the table
PARTS = ("_forward", "_with_lse", "_with_stats", "_backward")  # end the names of functions that a gradient needs
ROUNDING = "Rounding: "  # begins a paragraph of a docstring
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
COMPILED = "The op is registered with torch.library, and torch.compile takes it without a graph break, as tests show. "
ABOUT = (
    "Each op is one module of the package ``triton_gallery_ops``, and needs ``torch`` and ``triton`` alone. Install "
    "the package, or take one file. An op's page has its signature, its figures beside other libraries at the shapes "
    "of models, what its kernels compile to for other GPUs, and its source. "
    "The first list finds an op by the function that it replaces; `All ops <#all-ops>`__ have their speed on each GPU."
)


@dataclass(frozen=True)
class Part:
    """A part of an op's source: a function, a class, or the statements between two of them.

    Attributes:
        text: the code, with the comments and decorators above it.
        node: the function or class; None for other statements.
    """

    text: str
    node: ast.FunctionDef | ast.ClassDef | None

    @property
    def is_public(self) -> bool:
        """Whether it is a public function, not a kernel."""
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
        """The title of its fold: its name and the first line of its docstring."""
        if self.node is None:
            return "Imports and constants" if "import " in self.text else "Constants, and what is registered"
        kind = "class" if isinstance(self.node, ast.ClassDef) else "def"
        summary = escape((ast.get_docstring(self.node) or "").partition("\n")[0])
        summary = re.sub(r"``(.+?)``", r"<code>\1</code>", summary)
        return f"<code>{kind} {escape(self.node.name)}</code> {summary}".strip()


def parts_of(source: str) -> list[Part]:
    """Return the parts of a module below its docstring, in order."""
    lines, parts = source.splitlines(), list[Part]()
    docstring, *body = ast.parse(source).body
    end = docstring.end_lineno or 0
    between: list[str] = []

    def add(text: list[str], node: ast.FunctionDef | ast.ClassDef | None) -> None:
        if any(text):
            parts.append(Part("\n".join(text).strip("\n"), node))

    for node in body:
        text = lines[end : node.end_lineno]
        end = node.end_lineno or end
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            add(between, None)
            add(text, node)
            between = []
        else:
            between += text
    add(between, None)
    return parts


def public(op: str, source: str) -> list[Part]:
    """Return the public functions: the one with the op's name first, those that a gradient needs last."""

    def rank(part: Part) -> tuple[bool, bool]:
        assert part.node
        return part.node.name.rstrip("_") != op, part.node.name.endswith(PARTS)

    return sorted((part for part in parts_of(source) if part.is_public), key=rank)


class OpDirective(SphinxDirective):
    """`op`: the page of an op below its title."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        name = self.arguments[0]
        lesson = page_context.ops(self.env)[name]
        page = page_context.recipe_page(self.env, lesson)
        assert page
        file = page_context.op_file(self.env, name)
        self.env.note_dependency(str(file))
        self.env.note_dependency(str(replaces.FILE))
        for source_of_figures in (library_table.shown, version_table.shown):
            depends_on(self.env, source_of_figures, page.recipe.key)
        depends_on(self.env, page_context.record_shown, lesson)
        depends_on(self.env, other_gpus.shown, lesson)
        source = file.read_text(encoding="utf-8")
        about = inspect.cleandoc(ast.get_docstring(ast.parse(source)) or "").partition("\n")[2].strip()
        title = page_context.op_title(self.env, name)
        description = f"{title}: install it or take one file; its signature, figures and source."
        sections = [
            *replaces.section(name),
            self._contract(name, source),
            *self._beside(page),
            *filter(None, [other_gpus.section(self.env, page.recipe, of_op=True)]),
            self._where(page),
            _source(source),
            self._lessons(name),
        ]
        for section in sections:
            section["classes"].append("of-op")
        return [
            nodes.meta("", name="description", content=description),
            *prose(about),
            *self._instead(name),
            self._glance(name, page),
            *sections,
        ]

    def _instead(self, name: str) -> list[nodes.Node]:
        """Return a line on the op to take, if this one is there to learn from."""
        other = op_grid.take_instead(self.env).get(name)
        return [paragraph("This op is there to learn from. To take, ", op_link(other), " is faster.")] if other else []

    def _glance(self, name: str, page: RecipePage) -> nodes.Node:
        """Return the box: a summary of the records, a chart, the GPUs that the op fits, then how to get it."""
        items = page_context.benchmarks(self.env, page)
        box = nodes.container("", nodes.rubric("", "At a glance"), classes=["glance", "of-op"])
        box += verdict.table(items)
        box += figure_of([panel for record in page.records for panel in _panels(page, record)])
        if cpu := verdict.cpu(page, items):
            box += paragraph(cpu)
        box += [
            *summary_box.declared(page),
            *other_gpus.strip(self.env, page),
            *version_matrix.strip(self.env, page.name, name),
            *other_gpus.misfits(self.env, page.recipe),
            *op_files.install_command(self.env),
            paragraph(*op_files.buttons(page, up="../"), classes=["recipe-downloads"]),
            self._about_file(name, page),
        ]
        return box

    def _about_file(self, name: str, page: RecipePage) -> nodes.paragraph:
        """Return a line on the file to download: its licence, length, import, and the namespace to change."""
        op = op_of(page.recipe)
        assert op
        first = public(name, page_context.op_file(self.env, name).read_text(encoding="utf-8"))[0]
        assert first.node
        lines = len(op_files.text_of(self.env, op, page).splitlines())
        return paragraph(
            f"The file has the MIT licence and {lines} lines: ",
            nodes.literal("", f"from {name}_op import {first.node.name}"),
            ". For two versions of the op in one process, give one of them another ",
            *(nodes.literal("", space) for space in op.names if space.endswith("_NAMESPACE")),
            ".",
        )

    def _contract(self, name: str, source: str) -> nodes.section:
        """Return the section with the signature and the docstring of each public function.

        The first paragraphs of the first function, and where it rounds, are visible; everything else is folded.
        """
        section = titled("Use it")
        for number, part in enumerate(public(name, source)):
            assert part.node
            imports = render.code(f"from {OPS}.{name} import {part.node.name}\n\n{part.signature}")
            contract = prose(ast.get_docstring(part.node) or "")
            in_sight = [node for place, node in enumerate(contract) if place < 2 or node.astext().startswith(ROUNDING)]
            rest = [node for node in contract if node not in in_sight]
            if rest and not number:
                rest = folded("The rest of the contract", rest)
            in_place = number and part.node.name.endswith("_")  # rope and rope_ would have the same address
            function = titled(part.node.name, imports, *in_sight, *rest, address="in place" if in_place else "")
            section += folded(part.title, [function]) if number else [function]
        return section

    def _beside(self, page: RecipePage) -> list[nodes.section]:
        """Return the section with the workloads that the box leaves out and all rows beside other libraries, folded."""
        rows = library_table.section(self.env, page.recipe)
        items = page_context.benchmarks(self.env, page)
        main = headline(items)
        shown: list[nodes.Node] = []
        if rest := [item for item in items if item not in main]:
            title = "Other dtypes and variants, and the lesson's sizes, beside each library"
            shown += folded(title, [paragraph(RATIOS), summary_box.ratios(rest, named=True)])
        if rows:
            shown += folded("Every shape, and each library's rate", rows[1:])
        return [titled(library_table.TITLE, *shown)] if shown else []

    def _where(self, page: RecipePage) -> nodes.section:
        """Return the section that says where the op runs."""
        declared = page.declared
        if gpu := declared.of_op.gpu:
            where = f"On NVIDIA GPUs of compute capability {gpu.removeprefix('==')} alone."
        else:
            where = (
                "On GPUs that Triton supports. Without one, with torch 2.13 or later, in Triton's interpreter, slowly: "
                "set TRITON_INTERPRET=1 before triton is imported."
            )
        more: list[nodes.Node | str] = []
        if version_table.PAGE in self.env.found_docs:
            more = [page_link(version_table.PAGE), " has what was tried, and the rates on several versions of Triton."]
        text = paragraph(f"Needs {op_files.needs(declared)}. {where} {COMPILED}", *more)
        lost = version_table.sentence(self.env, page.recipe)
        return titled("Where it runs", text, *([lost] if lost else []))

    def _lessons(self, name: str) -> nodes.section:
        """Return the section with the lessons that have the op."""
        links = (paragraph(page_link(page)) for page in page_context.lessons(self.env, name))
        return titled("Read more", render.bullets(links))


def _panels(page: RecipePage, record: Record) -> Iterator[Panel]:
    """Yield the charts of a record, that of the op itself first; their sizes are not those of the table above them."""
    main = page.table.name if page.table else ""
    tables = [table for output in record.outputs for table in output.tables]
    gpu, stale = record.environment.name, render.older(record.is_fresh(page.recipe))
    for benchmark in sorted(tables, key=lambda table: table.name != main):
        kind = f"{benchmark.kind} " if benchmark.kind else ""
        which = f"{kind}in {page.dtype}, at" if page.dtype else f"{kind}at"
        recorded = f". {recorded_on(record)}{stale}."
        caption = paragraph(f"The chart: {which} the sizes of ", page_link(page.name), recorded, classes=["gpu-label"])
        rings = [paragraph(RINGS)] if any(map(any, benchmark.cpu_bound.values())) else []
        yield Panel(about_table(benchmark, gpu), [html(chart(benchmark, f"At a glance, {gpu}: ")), *rings, caption])


class OpsDirective(SphinxDirective):
    """`ops`: the functions that ops replace, then all ops by section."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        ops = page_context.ops(self.env)
        self.env.note_dependency(str(replaces.FILE))
        depends_on(self.env, op_grid.shown)
        today = titled("What you call today", *(node for package in PACKAGES for node in _called_today(package, ops)))
        return [today, titled("All ops", paragraph(op_grid.ABOUT), *op_grid.grid(self.env))]


def _called_today(package: str, ops: Mapping[str, str]) -> list[nodes.Node]:
    """Return a table of the functions of a package that ops replace; nothing if there are none."""
    called: dict[str, list[str | nodes.Node]] = {}
    for op, replaced in replaces.replaces().items():
        for name in replaced.names if op in ops else ():
            if name.partition(".")[0] == package:
                called.setdefault(name, []).extend([op_link(op), f": {replaced.note}", html("<br>")])
    rows: list[list[render.Parts]] = []
    for name, taken in sorted(called.items(), key=lambda item: item[0]):
        short = name if package == "torch" else ".".join(name.split(".")[-2:])
        rows.append([nodes.literal("", short), taken])
    return [table([f"in {package}", "op"], rows, "called")] if rows else []


def _source(source: str) -> nodes.section:
    """Return the section with the source, each function folded."""
    parts = [node for part in parts_of(source) for node in folded(part.title, [render.code(part.text)])]
    return titled("Source", *folded(f"{len(source.splitlines())} lines, function by function", parts))


def _arguments(arguments: ast.arguments) -> list[str]:
    """Return the arguments of a function, each with its type and its default."""
    missing = len(arguments.args) - len(arguments.defaults)
    defaults = [*missing * [None], *arguments.defaults, *arguments.kw_defaults]
    pairs = zip([*arguments.args, *arguments.kwonlyargs], defaults, strict=True)
    texts = [ast.unparse(argument) + (f" = {ast.unparse(default)}" if default else "") for argument, default in pairs]
    if arguments.kwonlyargs:
        texts.insert(len(arguments.args), "*")
    return texts


def write(app: Sphinx) -> None:
    """Write the source files of the pages when a build begins; the directives in them produce the content."""
    folder, ops = Path(app.srcdir, "ops"), page_context.ops(app.env)
    files = {}
    for op in ops:
        title = re.sub(r"([*`|_\\])", r"\\\1", page_context.op_title(app.env, op))
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
