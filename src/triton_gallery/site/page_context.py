"""What is known of the recipe on a page."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from triton_gallery.libraries import peer_rows as peer_records
from triton_gallery.libraries.peer_rows import PeerRow
from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.inline import OPS, ops_in
from triton_gallery.recipe.op import op_of
from triton_gallery.recipe.tables import Table
from triton_gallery.records.page_cache import Pages, Run
from triton_gallery.records.record_store import Record, Records
from triton_gallery.versions import rates as version_records
from triton_gallery.versions.rates import VersionRow

if TYPE_CHECKING:
    from sphinx.environment import BuildEnvironment


MAIN = "results"  # the table of the op itself


@dataclass(frozen=True)
class RecipePage:
    """A recipe, the run that made its page, and its records, the best first."""

    recipe: Recipe
    run: Run | None
    records: list[Record]

    @property
    def record(self) -> Record | None:
        """The record that the page shows where this machine gave no output."""
        return self.records[0] if self.records else None

    @property
    def table(self) -> Table | None:
        """The benchmark of the recipe's op itself, as recorded, or else as it ran here."""
        made = self.record or self.run
        tables = [table for output in made.outputs for table in output.tables] if made else []
        return next((table for table in tables if table.name == MAIN), tables[-1] if tables else None)


def recipes(env: "BuildEnvironment") -> dict[str, Recipe]:
    """Return the recipes by the names of their pages."""
    conf = env.config.sphinx_gallery_conf
    gallery = Path(env.srcdir, conf["examples_dirs"]).resolve()
    return {f"{conf['gallery_dirs']}/{recipe.key}": recipe for recipe in load(gallery)}


def ops(env: "BuildEnvironment") -> dict[str, str]:
    """Return the ops that have a module, in the recipes' order, and of each the name of the page that ends in it."""
    found = {op.name: page for page, recipe in recipes(env).items() if (op := op_of(recipe))}
    return {name: page for name, page in found.items() if op_file(env, name).is_file()}


def op_of_page(env: "BuildEnvironment", recipe: Recipe) -> str | None:
    """Return the op of a recipe, if it has a page of its own."""
    op = op_of(recipe)
    return op.name if op and op_file(env, op.name).is_file() else None


def op_file(env: "BuildEnvironment", name: str) -> Path:
    """Return the file of an op."""
    return Path(env.app.confdir, "src", OPS, f"{name}.py")


def lessons(env: "BuildEnvironment", op: str) -> list[str]:
    """Return the names of the pages that import an op."""
    gallery = Path(env.app.confdir, "gallery")
    texts = {page: (gallery / f"{recipe.key}.py").read_text(encoding="utf-8") for page, recipe in recipes(env).items()}
    return [page for page, text in texts.items() if op in ops_in(text)]


def line(recipe: Recipe) -> str:
    """Return what a recipe says of itself in one line."""
    return declaration(recipe.path, recipe.text).of_op.line


def pages(env: "BuildEnvironment") -> Pages:
    """Return the folder of generated pages."""
    return Pages(Path(env.srcdir, env.config.sphinx_gallery_conf["gallery_dirs"]))


def records(env: "BuildEnvironment") -> Records:
    """Return the folder of records."""
    return Records(Path(env.srcdir, "_records"))


def peers(env: "BuildEnvironment") -> list[PeerRow]:
    """Return our ops' figures beside other libraries', by device and in the order of the recipes."""
    order = [recipe.key for recipe in recipes(env).values()]
    rows = peer_records.load_all(records(env).folder)
    return sorted(rows, key=lambda row: (row.environment.name, order.index(row.recipe) if row.recipe in order else -1))


def versions(env: "BuildEnvironment") -> list[VersionRow]:
    """Return our ops' figures under several versions of Triton."""
    return version_records.load_all(records(env).folder)


def recipe_page(env: "BuildEnvironment", page: str) -> RecipePage | None:
    """Return what is known of the recipe on a page; None if the page is another."""
    recipe = recipes(env).get(page)
    if recipe is None:
        return None
    return RecipePage(recipe, pages(env).run(recipe.key), records(env).of(recipe))
