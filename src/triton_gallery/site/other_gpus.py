"""What kernels compile to for GPUs that this machine need not have: on each recipe's page its own, on one page all.

The texts that compilers wrote are files of their own, loaded when a reader opens one. They are scripts, because a page
that was opened from a disk may load nothing else. Where `make listings` did not make them, pages go without.
"""

import base64
import gzip
import json
import shutil
from collections import defaultdict
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.compiled.gpus import GPUS, KIB, Gpu
from triton_gallery.compiled.store import FAILED, FITS, TOO_LARGE, UNMEANT, Kernel, Targets, listing, load, load_texts
from triton_gallery.compiled.table import COLUMNS, cells
from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.device import Environment
from triton_gallery.recipe.op import Op, op_of
from triton_gallery.site import deferred, page_context
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import Parts, add_section, folded, html, marks, older, paragraph, table, titled

FOLDER = "listings"  # of the site
TITLE = "On other GPUs"
SHARED = "shared_memory_per_block_optin"  # an op that has it in its text launches what fits, as a test holds
STAGES = {False: ("ttgir", "ptx", "sass"), True: ("ttgir", "amdgcn")}
SMALLER = "smaller launch"
RAN, COMPILED, NOT_SUPPORTED = "Run on", "Compiled, not run:", "Not supported:"
CLASSES = {FITS: "fits", TOO_LARGE: "too-large", FAILED: "fails", UNMEANT: "unmeant", SMALLER: "smaller"}


def kept(env: BuildEnvironment, recipe: Recipe) -> Targets | None:
    """Return what was compiled for a recipe; None if nothing was."""
    return load(Path(env.srcdir, "_compiled"), recipe)


def strip(env: BuildEnvironment, page: RecipePage, address: str = "") -> list[nodes.Node]:
    """Return a line with a mark for each GPU, those that the recipe ran on first; nothing if nothing was compiled.

    It has a link to the tables of the page at an address.
    """
    targets, op = kept(env, page.recipe), op_of(page.recipe)
    if targets is None or not targets.kernels:
        return []
    groups, ran_on = defaultdict[str, list[tuple[str, str, str]]](list), _ran_on(env, page)
    for gpu in GPUS:
        cards, names = gpu.name.split(", "), [one.name for one in ran_on if one.capability == gpu.capability]
        ran = [card for card in cards if any(card in name for name in names)]
        rest = [card for card in cards if card not in ran]
        is_compiled = targets.verdict(gpu, op)[0] != UNMEANT
        for title, which in ((RAN, ran), (COMPILED if is_compiled else NOT_SUPPORTED, rest)):
            if which:
                groups[title].append(_mark(targets, gpu, op, ", ".join(which)))
    link = f'<a href="{address}#{nodes.make_id(TITLE)}">{{}}</a>'
    titles = [title for title in (RAN, COMPILED, NOT_SUPPORTED) if title in groups]
    return [marks(*((link.format(title), groups[title]) for title in titles))]


def _ran_on(env: BuildEnvironment, page: RecipePage) -> list[Environment]:
    """Return what a recipe was recorded on, and its op was measured on beside other libraries."""
    rows = page_context.beside_libraries(env)
    of_op = [row.environment for row in rows if row.recipe == page.recipe.key]
    return [*(record.environment for record in page.records), *of_op]


def _mark(targets: Targets, gpu: Gpu, op: Op | None, label: str) -> tuple[str, str, str]:
    """Return the mark of a kind of GPU, given its label: its class, its tooltip and the label with what to expect."""
    word, names = targets.verdict(gpu, op)
    if op and word == TOO_LARGE:
        verdicts = (kernel.verdict(gpu) for kernel in targets.of(op))
        word = SMALLER if all(_adapts(op, why) for verdict, why in verdicts if verdict == TOO_LARGE) else word
    if word == UNMEANT:
        return CLASSES[word], word, label
    if word != FITS:
        return CLASSES[word], names, f"{label} {word}"
    kernels = [kernel for kernel in targets.of(op) or targets.kernels if kernel.on]
    if left_out := [kernel.launch.kernel for kernel in kernels if gpu.key not in kernel.on]:
        count = f"{len(kernels) - len(left_out)} of {len(kernels)} kernels"
        return "partly", f"not {', '.join(left_out)}", f"{label}: {count}"
    return CLASSES[FITS], FITS, label


def misfits(env: BuildEnvironment, recipe: Recipe) -> list[nodes.Node]:
    """Return a line for each reason why a kernel of the op does not fit some GPUs, and what follows from it."""
    targets, op = kept(env, recipe), op_of(recipe)
    if targets is None or op is None:
        return []
    gpus = defaultdict[tuple[str, str], list[str]](list)
    left_out = defaultdict[tuple[str, ...], list[str]](list)
    kernels = [kernel for kernel in targets.of(op) if kernel.on]
    for gpu in GPUS:
        for kernel in kernels:
            word, why = kernel.verdict(gpu)
            if word == TOO_LARGE:
                gpus[kernel.launch.kernel, why].append(gpu.name)
        names = tuple(kernel.launch.kernel for kernel in kernels if gpu.key not in kernel.on)
        if len(names) < len(kernels) and names:
            left_out[names].append(gpu.name)
    launch = f"the launch recorded on {targets.launched_by}"
    lines: list[nodes.Node] = []
    for (name, why), on in gpus.items():
        kernel_name = nodes.literal("", name)
        parts: list[nodes.Node | str] = [kernel_name, f" does not run there at {launch}: {why}."]
        if _adapts(op, why):
            parts = [f"with {launch}, ", kernel_name, f" does not fit: {why}. "]
            parts.append("There the op chooses a smaller launch, which was not tried.")
        lines.append(paragraph(nodes.emphasis("", f"{'; '.join(on)}: "), *parts))
    for names, on in left_out.items():
        listed = [part for name in names for part in (", ", nodes.literal("", name))][1:]
        verb = "is" if len(names) == 1 else "are"
        these = "this GPU" if len(on) == 1 else "these GPUs"
        parts = [f"with {launch}, {len(names)} of {len(kernels)} kernels {verb} not meant for {these}: ", *listed]
        parts += [". There the op launches it smaller or uses another kernel; that was not compiled. "]
        parts += [nodes.reference("", "All kernels", refuri=f"#{nodes.make_id(TITLE)}", internal=True), "."]
        lines.append(paragraph(nodes.emphasis("", f"{'; '.join(on)}: "), *parts))
    return lines


def _adapts(op: Op, why: str) -> bool:
    """Whether an op chooses a smaller launch when a kernel does not fit for this reason."""
    return "shared memory" in why and SHARED in op.cell


def add_to_recipe(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Add a section with a table for each kernel of a recipe, except those that are on the op's page."""
    depends_on(env, shown, page.name)
    if tables := section(env, page.recipe, False if page_context.op_of_page(env, page.recipe) else None):
        add_section(document, tables)


def section(env: BuildEnvironment, recipe: Recipe, of_op: bool | None = None) -> nodes.section | None:
    """Return the section with a recipe's kernels: all, those of its op, or the others; None if there are none."""
    targets, op = kept(env, recipe), op_of(recipe)
    kernels = targets.kernels if targets else []
    if of_op is not None:
        kernels = [kernel for kernel in kernels if of_op == bool(op and kernel.launch.kernel in op.names)]
    if targets is None or not kernels:
        return None
    has_code = listing(_listings(env), targets).is_file()
    title = f"Registers, memory and instructions of each kernel{', and its code' if has_code else ''}"
    about = _about(targets, recipe, "../" if of_op else "../../")
    tables = [node for kernel in kernels for node in _tables(kernel, recipe, has_code)]
    return titled(TITLE, *folded(title, [about, *tables]))


def shown(env: BuildEnvironment, page: str = "") -> list[tuple[str, Targets, bool, bool]]:
    """Return what pages show of one recipe, by the name of its page, or of all; for `freshness.depends_on`."""
    recipes = page_context.recipes(env)
    return [
        (recipe.key, targets, targets.is_fresh(recipe), listing(_listings(env), targets).is_file())
        for name, recipe in recipes.items()
        if name == (page or name) and (targets := kept(env, recipe))
    ]


class TargetsDirective(SphinxDirective):
    """`targets`: all kernels against all GPUs."""

    def run(self) -> list[nodes.Node]:
        """Return the table, and one of the limits of each GPU."""
        depends_on(self.env, shown)
        recipes = page_context.recipes(self.env).items()
        rows = [
            self._row(page, recipe, kernel, targets.launched_by)
            for page, recipe in recipes
            if (targets := kept(self.env, recipe))
            for kernel in targets.kernels
        ]
        if not rows:
            return [paragraph("Nothing has been compiled yet.")]
        columns = ["recipe", "kernel", *(gpu.name for gpu in GPUS), "launched with", "launched by"]
        return [table(columns, rows, "targets", "sortable", "filterable"), _limits()]

    def _row(self, page: str, recipe: Recipe, kernel: Kernel, launched_by: str) -> list[Parts]:
        """Return the row of a kernel, with a link to the page that has its table."""
        op, launch = op_of(recipe), kernel.launch
        if op and launch.kernel in op.names and page_context.op_of_page(self.env, recipe):
            page = f"ops/{op.name}"
        address = f"{page}.html#{nodes.make_id(TITLE)}"
        link = nodes.reference("", recipe.name, refuri=address, internal=True)
        return [link, launch.kernel, *(_short(kernel, gpu) for gpu in GPUS), launch.arguments, launched_by]


def _limits() -> nodes.Node:
    """Return a table of the limits of each GPU."""
    rows = [
        {
            "GPU": gpu.name,
            "also": gpu.cards,
            "compiled for": gpu.key,
            "shared memory of a program": f"{gpu.shared // KIB} KiB",
            "registers of a multiprocessor": str(gpu.registers),
            "its warps": f"{gpu.warps} of {gpu.warp} threads",
        }
        for gpu in GPUS
    ]
    return table([*rows[0]], [[*row.values()] for row in rows], "targets")


def _about(targets: Targets, recipe: Recipe, up: str) -> nodes.paragraph:
    """Return the paragraph that explains the tables."""
    return paragraph(
        f"Triton {targets.triton} compiled this page's kernels{older(targets.is_fresh(recipe))} for GPUs that are not "
        "in this machine. "
        "Nothing was run or timed there. "
        f"The tables show one launch of each kernel, of those that {targets.launched_by} made when it ran this page: "
        "16-bit types if there were any, then the most arguments that 16 divides, then the largest tile. "
        "Other types and sizes may compile differently, and a launcher may choose otherwise on another GPU. ",
        nodes.reference("", "How to read them", refuri=f"{up}guide/read.html#on-other-gpus", internal=True),
        ".",
    )


def _tables(kernel: Kernel, recipe: Recipe, has_code: bool) -> list[nodes.Node]:
    """Return the title of a kernel, its table with buttons that open listings, and the element that shows these."""
    title = paragraph(nodes.literal("", kernel.launch.described))
    rows: list[list[Parts]] = [
        [gpu.name, *([_buttons(kernel, recipe, gpu)] if has_code else []), *cells(kernel, gpu)] for gpu in GPUS
    ]
    kernel_table = table(["GPU", *(["code"] if has_code else []), *COLUMNS], rows, "targets")
    return [title, kernel_table, *([html('<div class="listing" hidden></div>')] if has_code else [])]


def _buttons(kernel: Kernel, recipe: Recipe, gpu: Gpu) -> Parts:
    """Return the buttons that open the listings of a kernel for a GPU; none if it does not compile."""
    if gpu.key not in kernel.on or kernel.on[gpu.key].failure is not None:
        return ""
    file = f"{recipe.key}/{kernel.launch.kernel}"
    buttons = (
        f'<button class="listing" type="button" data-file="{file}" data-text="{gpu.key}.{stage}">{stage}</button>'
        for stage in STAGES[gpu.is_amd]
    )
    return html(" ".join(buttons))


def _short(kernel: Kernel, gpu: Gpu) -> str:
    """Return a short verdict on a kernel on a GPU: its registers and memory, or why it does not run."""
    word, _ = kernel.verdict(gpu)
    if word != FITS:
        return word
    compiled = kernel.on[gpu.key]
    shared = f", {compiled.shared // KIB} KiB" if compiled.shared >= KIB else ""
    spilled = f", {compiled.spilled} B spilled" if compiled.spilled else ""
    return f"{compiled.registers}{shared}{spilled}"


def _listings(env: BuildEnvironment) -> Path:
    return Path(env.srcdir).parent / "_build" / "listings"


def write(app: Sphinx) -> None:
    """Write a file for each kernel with its listings for all GPUs, for recipes whose listings changed."""
    for recipe in page_context.recipes(app.env).values():
        folder, targets = Path(app.outdir, FOLDER, recipe.key), kept(app.env, recipe)
        file = targets and listing(_listings(app.env), targets)
        mark = folder / "source"
        if not (file and file.is_file()):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        if mark.is_file() and mark.read_text(encoding="ascii") == file.name:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        files: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for name, text in load_texts(file).items():
            kernel, _, stage = name.partition("/")
            files[kernel][stage] = text
        folder.mkdir(parents=True)
        for kernel, texts in files.items():
            packed = base64.b64encode(gzip.compress(json.dumps(texts).encode(), 9, mtime=0)).decode()
            (folder / f"{kernel}.js").write_text(deferred.script(packed), encoding="ascii")
        mark.write_text(file.name, encoding="ascii")
