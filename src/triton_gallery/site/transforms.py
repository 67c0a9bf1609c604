"""What is changed on pages when they are read, and in which order. One transform makes all changes."""

import re
from html import escape

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

from triton_gallery.recipe.cells import cells, is_footer
from triton_gallery.recipe.op import SUFFIX
from triton_gallery.site import (
    cell_code,
    formulas,
    index_cards,
    library_table,
    meta_description,
    other_gpus,
    page_context,
    recorded_outputs,
    step_through,
    summary_box,
    version_table,
)
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import folded, paragraph


def remove_downloads(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Remove sphinx-gallery's links to downloads at the end of a page whose box has them."""
    if page.run is not None:
        for footer in [node for node in document.findall(nodes.container) if is_footer(node)]:
            footer.parent.remove(footer)


def fold_answers(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Fold what follows the title "Answers", so that a reader can try first."""
    for section in list(document.findall(nodes.section)):
        if section[0].astext() == "Answers":
            end = next((index for index, node in enumerate(section) if is_footer(node)), len(section))
            section[1:end] = folded("Show the answers", section[1:end], "stays")


def fold_cells(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Fold imports, an op that has a page, and what only measures; what these put out stays in sight, above the fold.

    Guards that only the script needs are left out.
    """
    op, found = page_context.op_of_page(env, page.recipe), cells(document)
    measures = [False, *cell_code.measuring(cell.code.astext() for cell in found[1:])]
    titles = cell_code.measurements([cell.code.parent[0].astext() for cell in found], measures)
    for number, cell in enumerate(found):
        section, code = cell.code.parent, cell.code.astext()
        shown, gpu_only = cell_code.without_guards(code)
        imports = cell_code.leading_imports(code)
        _show_code(cell.code, shown)
        block: list[nodes.Node] = [cell.code]
        if number == 0:
            helpers = any(
                helper in code for helper in ("def gpu_time(", "def statements(", "class Traffic(", "def outcomes(")
            )
            block = folded("Imports, device and measurement helpers" if helpers else "Imports and device", block)
        elif ops := [name.lower() for name in re.findall(rf"(?m)^(\w+){SUFFIX} = ", code)]:
            title = "The op" if op in ops else f"The ops {', '.join(ops)}"
            block = folded(f"{title}: {len(code.splitlines())} lines of code", block)
        elif measures[number]:
            section.remove(cell.code)
            section.insert(section.index([cell.start, *cell.outputs][-1]) + 1, cell.code)
            block = folded(f"How this was measured: {escape(next(titles))}", block)
        elif imports:
            lines, head = shown.splitlines(), cell.code.deepcopy()
            _show_code(head, "\n".join(lines[:imports]))
            _show_code(cell.code, "\n".join(lines[imports:]).strip("\n"))
            block = [*folded("Imports", [head]), *(block if len(lines) > imports else [])]
        if gpu_only and not measures[number]:
            block.insert(0, paragraph("GPU only", classes=["gpu-only"]))
        index = section.index(cell.code)
        section[index : index + 1] = block


def move_first(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Move the section that the recipe declares to be shown first before the other sections."""
    title = page.declared.of_op.shown_first
    sections = [section for section in document.findall(nodes.section) if title and section[0].astext() == title]
    for section in sections:
        parent = section.parent
        parent.remove(section)
        parent.insert(parent.first_child_matching_class(nodes.section) or 0, section)


def _show_code(block: nodes.literal_block, code: str) -> None:
    """Replace the text of a block of code."""
    block.rawsource = code
    block.children = [nodes.Text(code)]
    block.setup_child(block.children[0])


# Called one after the other with the environment, the document and what is known of the recipe.
ON_RECIPE_PAGES = (
    summary_box.add_box,  # first: it takes the links of the downloads as sphinx-gallery wrote them
    recorded_outputs.show_outputs,
    fold_answers,
    # Each of these sections is put last.
    library_table.add_to_recipe,
    other_gpus.add_to_recipe,
    version_table.add_to_recipe,  # a sentence at the end of the section of `library_table`, if that is there
    fold_cells,  # late: the others find the cells and what these put out side by side
    step_through.add_figures,  # after that: a figure is no output of a cell
    remove_downloads,  # late: others find the end of a page by them
    move_first,  # last: others take cells and outputs in the order of the script
)


class PageTransform(SphinxTransform):
    """Changes the pages: before Sphinx collects images and downloads, and before it sets quotation marks."""

    default_priority = 600

    def apply(self, **kwargs: object) -> None:
        """Change the page."""
        page = page_context.recipe_page(self.env, self.env.docname)
        formulas.convert(self.document)  # first: the others take its text
        meta_description.describe(self.env, self.document, page)  # from what the author wrote, before anything is added
        index_cards.add_cards(self.env, self.document)
        if page:
            for change in ON_RECIPE_PAGES:
                change(self.env, self.document, page)
