"""The recipe on a page, its runs and records, and what else pages need to know of the project."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from sphinx.environment import BuildEnvironment

from triton_gallery.figures.ratios import Summary, summaries
from triton_gallery.libraries import library_rows, model_rows
from triton_gallery.libraries.library_rows import LibraryRow
from triton_gallery.libraries.model_rows import ModelRow
from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.declaration import Declaration, declaration
from triton_gallery.recipe.inline import OPS, ops_in
from triton_gallery.recipe.op import op_of
from triton_gallery.recipe.tables import Table
from triton_gallery.records.page_cache import Pages, Run
from triton_gallery.records.record_store import Record, Records
from triton_gallery.versions import rates
from triton_gallery.versions.rates import VersionRow

MAIN = "results"  # the table of the op itself


@dataclass(frozen=True)
class RecipePage:
    """A recipe's page: the run that made it, and the recipe's records, the best first."""

    name: str
    recipe: Recipe
    run: Run | None
    records: list[Record]

    @property
    def record(self) -> Record | None:
        """The record that the page shows where this machine gave no output."""
        return self.records[0] if self.records else None

    @property
    def has_fresh_record(self) -> bool:
        """Whether that record is of the present code."""
        return self.record is not None and self.record.is_fresh(self.recipe)

    @property
    def table(self) -> Table | None:
        """The benchmark of the recipe's op itself, as recorded, or else as it ran here."""
        source = self.record or self.run
        tables = [table for output in source.outputs for table in output.tables] if source else []
        return next((table for table in tables if table.name == MAIN), tables[-1] if tables else None)

    @property
    def dtype(self) -> str:
        """The dtype of the recipe's benchmarks: the first that is named above their code; empty if none is."""
        on_gpu = (cell for cell in self.recipe.text.split("\n# %%\n") if 'DEVICE.type == "cuda"' in cell)
        cells = (cell for cell in on_gpu if re.search(rf"\b{MAIN}(_\w+)? = ", cell))
        prose = " ".join(line for cell in cells for line in cell.splitlines() if line.startswith("# "))
        named = re.search(r"\bb?float(16|32|64)\b", prose)
        return named[0] if named else ""

    @property
    def declared(self) -> Declaration:
        """What the recipe declares in its script metadata."""
        return declaration(self.recipe.path, self.recipe.text)


def recipes(env: BuildEnvironment) -> dict[str, Recipe]:
    """Return the recipes by the names of their pages."""
    conf = env.config.sphinx_gallery_conf
    gallery = Path(env.srcdir, conf["examples_dirs"]).resolve()
    return {page_name(env, recipe.key): recipe for recipe in load(gallery)}


def page_name(env: BuildEnvironment, key: str) -> str:
    """Return the name of the page of a recipe, `section/name`."""
    return f"{env.config.sphinx_gallery_conf['gallery_dirs']}/{key}"


def recipe_page(env: BuildEnvironment, name: str) -> RecipePage | None:
    """Return the recipe's page of this name; None if it is not the page of a recipe."""
    recipe = recipes(env).get(name)
    return RecipePage(name, recipe, pages(env).run(recipe.key), records(env).of(recipe)) if recipe else None


def recipe_pages(env: BuildEnvironment) -> list[RecipePage]:
    """Return the pages of all recipes."""
    return [page for name in recipes(env) if (page := recipe_page(env, name))]


def ops(env: BuildEnvironment) -> dict[str, str]:
    """Return the ops that have a module, in the recipes' order, each with the name of its lesson's page."""
    return {op: page for page, recipe in recipes(env).items() if (op := op_of_page(env, recipe))}


def op_of_page(env: BuildEnvironment, recipe: Recipe) -> str | None:
    """Return the op of a recipe, if it has a page of its own."""
    op = op_of(recipe)
    return op.name if op and op_file(env, op.name).is_file() else None


def op_file(env: BuildEnvironment, name: str) -> Path:
    """Return the file of an op."""
    return Path(env.app.confdir, "src", OPS, f"{name}.py")


def op_title(env: BuildEnvironment, name: str) -> str:
    """Return the first line of an op's docstring, without its full stop."""
    source = op_file(env, name).read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or name).partition("\n")[0].rstrip(".")


def lessons(env: BuildEnvironment, op: str) -> list[str]:
    """Return the names of the pages that import an op."""
    gallery = Path(env.app.confdir, "gallery")
    texts = {page: (gallery / f"{recipe.key}.py").read_text(encoding="utf-8") for page, recipe in recipes(env).items()}
    return [page for page, text in texts.items() if op in ops_in(text)]


def line(recipe: Recipe) -> str:
    """Return the description that a recipe declares."""
    return declaration(recipe.path, recipe.text).of_op.line


def pages(env: BuildEnvironment) -> Pages:
    """Return the folder of generated pages."""
    return Pages(Path(env.srcdir, env.config.sphinx_gallery_conf["gallery_dirs"]))


def records(env: BuildEnvironment) -> Records:
    """Return the folder of records."""
    return Records(Path(env.srcdir, "_records"))


def record_shown(env: BuildEnvironment, name: str) -> str:
    """Identify the records that a recipe's page shows, and how; for `freshness.depends_on`."""
    page = recipe_page(env, name)
    if page is None:
        return ""
    recipe, records = page.recipe, page.records
    return " ".join(f"{record.path} {record.path.stat().st_mtime_ns} {record.is_fresh(recipe)}" for record in records)


def beside_libraries(env: BuildEnvironment) -> list[LibraryRow]:
    """Return our ops' figures beside other libraries', by device and in the order of the recipes."""
    order = [recipe.key for recipe in recipes(env).values()]
    rows = library_rows.load_all(records(env).folder)
    return sorted(rows, key=lambda row: (row.environment.name, order.index(row.recipe) if row.recipe in order else -1))


def versions(env: BuildEnvironment) -> list[VersionRow]:
    """Return our ops' figures under several versions of Triton."""
    return rates.load_all(records(env).folder)


def models(env: BuildEnvironment) -> list[ModelRow]:
    """Return the figures of models of the transformers library, by device."""
    return model_rows.load_all(records(env).folder)


def benchmarks(env: BuildEnvironment, page: RecipePage) -> list[Summary]:
    """Return what was measured of a recipe: for its page on one device, beside other libraries on all."""
    return list(summaries(page.records[:1], beside_libraries(env), page.recipe))


def site_address(env: BuildEnvironment) -> str:
    """Return the address of the site, with a slash at its end; empty if it is not known."""
    address: str = env.config.html_baseurl
    return f"{address.rstrip('/')}/" if address else ""


def repository_address(env: BuildEnvironment) -> str:
    """Return the address of the project's repository, without a slash at its end; empty if it is not known."""
    address: str = env.config.gallery_repository
    return address.rstrip("/")
