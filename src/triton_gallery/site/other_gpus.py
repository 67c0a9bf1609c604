"""What the kernels compile to for GPUs that need not be here: on each recipe's page its own, on one page all of them.

The texts that compilers wrote are files of their own, loaded when a reader opens one. They are scripts, because a page
that was opened from a disk may load nothing else. Where `make listings` did not make them, pages go without.
"""

import base64
import gzip
import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from docutils import nodes
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from triton_gallery.compiled.gpus import GPUS, KIB, Gpu
from triton_gallery.compiled.store import FAILED, FITS, TOO_LARGE, UNMEANT, Kernel, Targets, listing, load, load_texts
from triton_gallery.compiled.table import COLUMNS, cells
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.op import Op, op_of
from triton_gallery.site import page_context
from triton_gallery.site.collapsible import fold
from triton_gallery.site.render import add_section, first_cells, grid, titled

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

STATE = "targets"  # the key in a page's metadata for what it shows
FOLDER = "listings"  # of the site
TITLE = "On other GPUs"
SHARED = "shared_memory_per_block_optin"  # an op that has it in its text launches what fits, as a test holds
STAGES = {False: ("ttgir", "ptx", "sass"), True: ("ttgir", "amdgcn")}
SMALLER = "smaller launch"
CLASSES = {FITS: "fits", TOO_LARGE: "too-large", FAILED: "fails", UNMEANT: "unmeant", SMALLER: "smaller"}


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the directive and the transform, make pages follow what is kept, and have the listings written."""
    app.add_directive("targets", TargetsDirective)
    app.add_transform(TargetsOfRecipe)
    app.add_js_file("listing.js", defer="defer")
    app.connect("env-get-outdated", _outdated)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def kept(env: "BuildEnvironment", recipe: Recipe) -> Targets | None:
    """Return what is kept of a recipe."""
    return load(_folder(env), recipe)


def strip(env: "BuildEnvironment", recipe: Recipe, page: str = "") -> list[nodes.Node]:
    """Return a line with a mark for each GPU, and a link to the tables on a page; nothing where nothing is kept."""
    found = kept(env, recipe)
    if found is None or not found.kernels:
        return []
    marks, op = [], op_of(recipe)
    for gpu in GPUS:
        word, names = found.verdict(gpu, op)
        if op and word == TOO_LARGE and all(_adapts(op, why) for why in _reasons(found.of(op), gpu)):
            word = SMALLER
        said = "" if word == FITS else f" {word}"
        marks.append(f'<span class="target {CLASSES[word]}" title="{escape(names or word)}">{gpu.name}{said}</span>')
    link = f'<a href="{page}#{nodes.make_id(TITLE)}">Compiled for</a>'
    return [nodes.raw("", f'<p class="targets">{link} {" ".join(marks)}</p>', format="html")]


def misfits(env: "BuildEnvironment", recipe: Recipe) -> list[nodes.Node]:
    """Return in a line each what a kernel of the op needs that some GPUs have not, and what that means there."""
    found, op = kept(env, recipe), op_of(recipe)
    if found is None or op is None:
        return []
    gpus = defaultdict[tuple[str, str], list[str]](list)
    for kernel in found.of(op):
        for gpu in GPUS:
            word, why = kernel.verdict(gpu)
            if word == TOO_LARGE:
                gpus[kernel.launch.kernel, why].append(gpu.name)
    lines: list[nodes.Node] = []
    for (name, why), names in gpus.items():
        line = nodes.paragraph("", "", nodes.emphasis("", f"{'; '.join(names)}: "))
        if _adapts(op, why):
            line += [nodes.Text(f"with the launch recorded on {found.launched_by}, "), nodes.literal("", name)]
            line += nodes.Text(f" does not fit: {why}. There the op chooses a smaller launch, which was not tried.")
        else:
            line += [nodes.literal("", name), nodes.Text(" does not run there at the launch recorded on ")]
            line += nodes.Text(f"{found.launched_by}: {why}.")
        lines.append(line)
    return lines


def _reasons(kernels: Sequence[Kernel], gpu: Gpu) -> Iterator[str]:
    """Yield why kernels do not fit a GPU."""
    yield from (why for word, why in (kernel.verdict(gpu) for kernel in kernels) if word == TOO_LARGE)


def _adapts(op: Op, why: str) -> bool:
    """Whether an op launches less where a kernel does not fit, for this reason."""
    return "shared memory" in why and SHARED in op.cell


class TargetsOfRecipe(SphinxTransform):
    """Gives a recipe's page a section with a table for each of its kernels."""

    default_priority = 601  # after the section beside other libraries

    def apply(self, **kwargs: object) -> None:
        """Insert the section, if anything is kept."""
        name = self.env.current_document.docname
        recipe = page_context.recipes(self.env).get(name)
        if recipe is None:
            return
        found = kept(self.env, recipe)
        self.env.metadata[name][STATE] = _state(self.env, [(recipe, found)])
        of_op = False if page_context.op_of_page(self.env, recipe) else None  # those are on the op's page
        if shown := section(self.env, recipe, of_op):
            add_section(self.document, shown)


def section(env: "BuildEnvironment", recipe: Recipe, of_op: bool | None = None) -> nodes.section | None:
    """Return the section with a recipe's kernels: all, those of its op, or the others; None if nothing is kept."""
    found, op = kept(env, recipe), op_of(recipe)
    kernels = found.kernels if found else []
    if of_op is not None:
        kernels = [kernel for kernel in kernels if of_op == bool(op and kernel.launch.kernel in op.names)]
    if found is None or not kernels:
        return None
    shown = titled(TITLE)
    shown += _about(found, recipe, "../" if of_op else "../../")
    start, has_code = 1 if of_op else len(shown), listing(_listings(env), found).is_file()
    for kernel in kernels:
        shown += _tables(kernel, recipe, has_code)
    title = "Registers, memory and instructions of each kernel"
    fold(shown, start, len(shown), f"{title}, and its code" if has_code else title)
    return shown


def state(env: "BuildEnvironment", recipe: Recipe) -> str:
    """Identify what a page shows of a recipe."""
    return _state(env, [(recipe, kept(env, recipe))])


class TargetsDirective(SphinxDirective):
    """`targets`: all kernels against all GPUs."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the table, and one of what a kernel may use of each GPU."""
        found = [(recipe, kept(self.env, recipe)) for recipe in page_context.recipes(self.env).values()]
        self.env.metadata[self.env.docname][STATE] = _state(self.env, found)
        rows = [(recipe, kernel, of.launched_by) for recipe, of in found if of is not None for kernel in of.kernels]
        if not rows:
            return [nodes.paragraph("", "Nothing has been compiled yet.")]
        lines = [
            ["", kernel.launch.kernel, *(_short(kernel, gpu) for gpu in GPUS), kernel.launch.arguments, by]
            for _, kernel, by in rows
        ]
        columns = ["recipe", "kernel", *(gpu.name for gpu in GPUS), "launched with", "launched by"]
        table = grid(columns, lines, "targets", "sortable", "filterable")
        gallery = self.env.config.sphinx_gallery_conf["gallery_dirs"]
        anchor = nodes.make_id(TITLE)
        for place, (recipe, kernel, _) in zip(first_cells(table), rows, strict=True):
            page, op = f"{gallery}/{recipe.key}", op_of(recipe)
            if op and kernel.launch.kernel in op.names and page_context.op_of_page(self.env, recipe):
                page = f"ops/{op.name}"
            place += nodes.reference("", recipe.name, refuri=f"{page}.html#{anchor}", internal=True)
        return [table, _limits()]


def _limits() -> nodes.Node:
    """Return a table of what a kernel may use of each GPU."""
    columns = [
        "GPU",
        "also",
        "compiled for",
        "shared memory of a program",
        "registers of a multiprocessor",
        "its warps",
    ]
    rows = [
        [
            gpu.name,
            gpu.cards,
            gpu.key,
            f"{gpu.shared // KIB} KiB",
            str(gpu.registers),
            f"{gpu.warps} of {gpu.warp} threads",
        ]
        for gpu in GPUS
    ]
    return grid(columns, rows, "targets")


def _about(found: Targets, recipe: Recipe, up: str) -> nodes.paragraph:
    """Say of what the tables are."""
    older = "" if found.is_fresh(recipe) else ", of older code than this page's"
    said = [
        f"What Triton {found.triton} makes of this page's kernels for GPUs that it was not run on{older}.",
        "Nothing was run or timed there.",
        f"Of each kernel one launch is compiled, as {found.launched_by} made it when it ran this page.",
        "Where there were several, it is the one with 16-bit types; of these, with most arguments that 16 divides;",
        "of these, with the largest tile.",
        "The tables do not tell of other types and sizes, nor of what a launcher would choose on another GPU. ",
    ]
    about = nodes.paragraph("", " ".join(said))
    about += nodes.reference("", "How to read them", refuri=f"{up}guide/read.html#on-other-gpus", internal=True)
    about += nodes.Text(".")
    return about


def _tables(kernel: Kernel, recipe: Recipe, has_code: bool) -> list[nodes.Node]:
    """Return the title of a kernel, its table with what opens its listings, and the place where they are shown."""
    title = nodes.paragraph("", "", nodes.literal("", kernel.launch.described))
    head, blank = (["GPU", "code"], [""]) if has_code else (["GPU"], [])
    table = grid([*head, *COLUMNS], [[gpu.name, *blank, *cells(kernel, gpu)] for gpu in GPUS], "targets")
    if not has_code:
        return [title, table]
    rows = [row for body in table.findall(nodes.tbody) for row in body.findall(nodes.row)]
    for gpu, row in zip(GPUS, rows, strict=True):
        if gpu.key in kernel.on and kernel.on[gpu.key].failure is None:
            _, place, *_ = row.findall(nodes.paragraph)
            place += nodes.raw("", " ".join(_button(kernel, recipe, gpu.key, gpu.is_amd)), format="html")
    return [title, table, nodes.raw("", '<div class="listing" hidden></div>', format="html")]


def _button(kernel: Kernel, recipe: Recipe, gpu: str, is_amd: bool) -> list[str]:
    file = f"{recipe.key}/{kernel.launch.kernel}"
    return [
        f'<button class="listing" type="button" data-file="{file}" data-text="{gpu}.{stage}">{stage}</button>'
        for stage in STAGES[is_amd]
    ]


def _short(kernel: Kernel, gpu: Gpu) -> str:
    """Return a kernel on a GPU in a word: its registers, or what keeps it from running."""
    word, _ = kernel.verdict(gpu)
    if word != FITS:
        return word
    compiled = kernel.on[gpu.key]
    shared = f", {compiled.shared // KIB} KiB" if compiled.shared >= KIB else ""
    spilled = f", {compiled.spilled} B spilled" if compiled.spilled else ""
    return f"{compiled.registers}{shared}{spilled}"


def _folder(env: "BuildEnvironment") -> Path:
    return Path(env.srcdir, "_compiled")


def _listings(env: "BuildEnvironment") -> Path:
    return Path(env.srcdir).parent / "_build" / "listings"


def _state(env: "BuildEnvironment", found: Sequence[tuple[Recipe, Targets | None]]) -> str:
    """Identify what a page shows."""
    shown = [
        (recipe.key, targets, targets.is_fresh(recipe), listing(_listings(env), targets).is_file())
        for recipe, targets in found
        if targets is not None
    ]
    return hashlib.sha256(repr(shown).encode()).hexdigest()


def _outdated(app: "Sphinx", env: "BuildEnvironment", *_: set[str]) -> list[str]:
    """Name the pages that show something else than they would now."""
    recipes = page_context.recipes(env)
    found = {name: (recipe, kept(env, recipe)) for name, recipe in recipes.items()}
    shown = {name: data[STATE] for name, data in env.metadata.items() if STATE in data and name in env.all_docs}
    now = dict.fromkeys(shown, _state(env, list(found.values())))
    now |= {name: _state(env, [item]) for name, item in found.items()}
    return [name for name, state in shown.items() if state != now[name]]


def _write(app: "Sphinx", exception: Exception | None) -> None:
    """Write a file for each kernel, with its texts for all GPUs, where those of the recipe changed."""
    if exception or app.builder.format != "html":
        return
    for recipe in page_context.recipes(app.env).values():
        folder, found = Path(app.outdir, FOLDER, recipe.key), kept(app.env, recipe)
        file = found and listing(_listings(app.env), found)
        mark = folder / "of"
        if not (file and file.is_file()):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        if mark.is_file() and mark.read_text(encoding="ascii") == file.name:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        files: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name, text in load_texts(file).items():
            kernel, _, what = name.partition("/")
            files[kernel][what] = text
        folder.mkdir(parents=True)
        for kernel, said in files.items():
            packed = base64.b64encode(gzip.compress(json.dumps(said).encode(), 9, mtime=0)).decode()
            script = f'showListing.loaded("{recipe.key}/{kernel}", "{packed}");\n'
            (folder / f"{kernel}.js").write_text(script, encoding="ascii")
        mark.write_text(file.name, encoding="ascii")
