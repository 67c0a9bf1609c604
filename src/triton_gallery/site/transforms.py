"""What is changed on pages when they are read, and in which order. One transform makes all changes."""

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

from triton_gallery.recipe.cells import cells, is_footer
from triton_gallery.recipe.op import SUFFIX
from triton_gallery.site import (
    formulas,
    index_cards,
    library_table,
    meta_description,
    other_gpus,
    page_context,
    recorded_outputs,
    summary_box,
    version_table,
)
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import folded


def fold_answers(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Fold what follows the title "Answers", so that a reader can try first."""
    for section in list(document.findall(nodes.section)):
        if section[0].astext() == "Answers":
            end = next((index for index, node in enumerate(section) if is_footer(node)), len(section))
            section[1:end] = folded("Show the answers", section[1:end], "stays")


def fold_cells(env: BuildEnvironment, document: nodes.document, page: RecipePage) -> None:
    """Fold a recipe's first cell, and an op that has a page; what they put out stays in sight."""
    op = page_context.op_of_page(env, page.recipe)
    for number, cell in enumerate(cells(document)):
        section, code = cell.code.parent, cell.code.astext()
        if number == 0:
            measures = any(helper in code for helper in ("def gpu_time(", "def statements(", "class Traffic("))
            summary = "Imports, the device, and what measures" if measures else "Imports and the device"
        elif op and f"\n{op.upper()}{SUFFIX} = " in f"\n{code}":
            summary = f"The op: {len(code.splitlines())} lines of code"
        else:
            continue
        index = section.index(cell.code)
        section[index : index + 1] = folded(summary, [cell.code])


# Called one after the other with the environment, the document and what is known of the recipe.
ON_RECIPE_PAGES = (
    summary_box.add_box,  # first: it takes the links of the downloads as sphinx-gallery wrote them
    recorded_outputs.show_outputs,
    fold_answers,
    # Each of these sections is put last, but before "Go further".
    library_table.add_to_recipe,
    other_gpus.add_to_recipe,
    version_table.add_to_recipe,  # a sentence at the end of the section of `library_table`, if that is there
    fold_cells,  # last: the others find the cells and what these put out side by side
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
