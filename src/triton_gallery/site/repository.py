"""Links from a recipe's page into the project's repository, where the site knows it."""

from html import escape
from typing import TYPE_CHECKING

from docutils import nodes

from triton_gallery.recipe.contents import Recipe

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.config import Config
    from sphinx.util.typing import ExtensionMetadata

GITHUB = "https://github.com/"
COLAB = "https://colab.research.google.com/github/"


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Add the settings."""
    app.add_config_value("gallery_repository", "", "env", str)  # its address
    app.add_config_value("gallery_notebooks", "", "env", str)  # the branch with the notebooks, if it has one
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def links(config: "Config", recipe: Recipe) -> list[nodes.Node]:
    """Return the links of a recipe: to its source, and to its notebook in Colab, which opens those on GitHub."""
    repository, branch = config.gallery_repository.rstrip("/"), config.gallery_notebooks
    found = {}
    if repository:
        found["Source"] = f"{repository}/blob/HEAD/gallery/{recipe.key}.py"
    if repository.startswith(GITHUB) and branch:
        found["Open in Colab"] = (
            f"{COLAB}{repository.removeprefix(GITHUB)}/blob/{branch}/docs/recipes/{recipe.key}.ipynb"
        )
    shown = (f'<a class="elsewhere" href="{escape(address)}">{name}</a> ' for name, address in found.items())
    return [nodes.raw("", "".join(shown), format="html")] if found else []
