"""The box below a recipe's introduction: how its op performs, how to get it, and the neighbouring recipes."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape

from docutils import nodes
from sphinx import addnodes
from sphinx.environment import BuildEnvironment

from triton_gallery.figures.ratios import Summary
from triton_gallery.recipe.cells import cells
from triton_gallery.recipe.contents import Recipe
from triton_gallery.site import library_table, op_files, other_gpus, page_context, provenance, verdict, version_matrix
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import folded, html, older, op_link, page_link, paragraph, table, where
from triton_gallery.site.sphinx_internals import DOWNLOAD_NOTE

GITHUB = "https://github.com/"
COLAB = "https://colab.research.google.com/github/"


def add_box(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Insert the box before the first cell of a recipe's page, if a run made it."""
    if page.run is None:
        return
    env.note_dependency(str(page_context.pages(env).run_file(page.recipe.key)))
    for note in list(document.findall(nodes.note)):
        if DOWNLOAD_NOTE in note["classes"]:
            note.parent.remove(note)
    op = page_context.op_of_page(env, page.recipe)
    strip = nodes.container("", *provenance.lines(page, page.run), classes=["recipe-strip"])
    box = nodes.container("", classes=["glance"])
    box += [
        *(_of_lesson(env, page, op) if op else []),
        *folded(
            "Where it runs, and what was measured where",
            [
                *([] if op else _measured(env, page)),
                *declared(page),
                *other_gpus.strip(env, page, f"../../ops/{op}.html" if op else ""),
                *version_matrix.strip(env, page.name),
                strip,
            ],
            "stays",
        ),
        _downloads(env, page, document),
        _neighbours(env, page),
    ]
    for cell in cells(document)[:1]:
        cell.start.parent.insert(cell.start.parent.index(cell.start), [*provenance.failure(page.run), box])


def _measured(env: BuildEnvironment, page: RecipePage) -> Iterator[nodes.Node]:
    """Yield a table of its ratios to the best other, and the CPU time of a call."""
    items, record = page_context.benchmarks(env, page), page.record
    if record is None or page.table is None or not items:
        return
    yield ratios([item for item in items if item.environment.name == record.environment.name])
    if cpu := verdict.cpu(page, items):
        yield paragraph(cpu)


def _of_lesson(env: BuildEnvironment, page: RecipePage, op: str) -> Iterator[nodes.Node]:
    """Yield a link to the page of an op, then its ratios over many shapes.

    Old addresses of sections that moved there lead to the link.
    """
    moved = [nodes.make_id(library_table.TITLE)]
    moved += [] if other_gpus.section(env, page.recipe, of_op=False) else [nodes.make_id(other_gpus.TITLE)]
    has = ", has its signature, its figures beside other libraries, what it compiles to, and its source."
    yield paragraph("The page of the op, ", op_link(op), has, ids=moved, classes=["op-page"])
    yield from verdict.distribution(page_context.benchmarks(env, page))


def ratios(items: Sequence[Summary], named: bool = False) -> nodes.Node:
    """Return the table of the benchmarks' ratios, without columns that are empty.

    On the page of an op, each library is named, and each row says of which sizes it is, and on which GPU.
    """
    others = [*dict.fromkeys(name for item in items for name in item.table.others)] if named else []
    against = [f"speed / {name}" for name in others] or ["speed / best other"]
    device = "" if named else f"on {items[0].environment.name}, "
    columns = [f"{device}median of the sizes", *against, "speed / roof"]
    rows = [[_name(item, items, named), *_ratios(item, others)] for item in items]
    kept = [place for place in range(len(columns)) if place == 0 or any(row[place] for row in rows)]
    return table([columns[place] for place in kept], [[row[place] for place in kept] for row in rows], "ratios")


def _name(item: Summary, items: Sequence[Summary], named: bool) -> str:
    """Return the name of a benchmark; one without a name is the forward's if there is one of a backward."""
    unnamed = "forward" if any("backward" in other.kind for other in items) else "this page"
    kind = item.kind or unnamed
    if named:
        sizes = "the lesson's sizes" if item.is_page else "shapes of models"
        kind = f"{verdict.label(item)}, {sizes}, {item.environment.name}"
    return f"{kind}{older(item.is_fresh)}"


def _ratios(item: Summary, others: Sequence[str]) -> Iterator[str]:
    """Yield the ratios to these libraries, or to the best of all, and to the roof."""
    of_others: list[Callable[[int], float | None]] = [partial(item.table.over, name) for name in others]
    for ratio in (*(of_others or [item.table.ratio]), item.table.of_roof):
        over = item.over(ratio)
        yield f"{over.median:.2f}; worst {over.worst:.2f} at {where(item, over.at)}" if over else ""


def declared(page: RecipePage) -> Iterator[nodes.paragraph]:
    """Yield a line with what the recipe declares of its op; tests check that."""
    of_op = page.declared.of_op
    if of_op.dtypes:
        backward = "with a backward" if of_op.backward else "forward alone"
        same = "deterministic" if of_op.deterministic else "not deterministic"
        yield paragraph(f"Takes {', '.join(of_op.dtypes)} · {backward} · {same}")


def _downloads(env: BuildEnvironment, page: RecipePage, document: nodes.document) -> nodes.paragraph:
    """Return the buttons: the op, the files to download, and links into the repository."""
    buttons = paragraph(*op_files.buttons(page), classes=["recipe-downloads"])
    for link in list(document.findall(addnodes.download_reference)):
        file = link["reftarget"].rpartition("/")[2]
        if file.endswith((".py", ".ipynb")):
            buttons += [addnodes.download_reference("", "", nodes.Text(file), **link.attributes), nodes.Text(" ")]
    for path in page.recipe.companions:
        target = f"/{os.path.relpath(path, env.srcdir)}"
        buttons += [addnodes.download_reference("", "", nodes.Text(path.name), reftarget=target), nodes.Text(" ")]
    links = _repository_links(env, page.recipe).items()
    markup = "".join(f'<a class="elsewhere" href="{escape(address)}">{name}</a> ' for name, address in links)
    buttons += [html(markup)] if markup else []
    return buttons


def _repository_links(env: BuildEnvironment, recipe: Recipe) -> dict[str, str]:
    """Return the addresses of a recipe's source and of its notebook in Colab, if the repository is known."""
    repository, branch = page_context.repository_address(env), env.config.gallery_notebooks
    links = {}
    if repository:
        links["Source"] = f"{repository}/blob/HEAD/gallery/{recipe.key}.py"
    if repository.startswith(GITHUB) and branch:  # Colab opens notebooks that are on GitHub
        project = repository.removeprefix(GITHUB)
        links["Open in Colab"] = f"{COLAB}{project}/blob/{branch}/docs/recipes/{recipe.key}.ipynb"
    return links


def _neighbours(env: BuildEnvironment, page: RecipePage) -> nodes.paragraph:
    """Return links to the recipes before and after this one, as the contents have them."""
    order = list(page_context.recipes(env))
    place = order.index(page.name)
    links = paragraph(classes=["recipe-path"])
    for word, neighbours in (("Previous: ", order[:place][-1:]), ("Next: ", order[place + 1 :][:1])):
        links += [nodes.inline("", word, page_link(name)) for name in neighbours]
    return links
