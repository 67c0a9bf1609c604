"""Which recipes exist, and in what order.

The order stands in `gallery/contents.toml`: each section's name, and the names of its recipes.
"""

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from triton_gallery.recipe.inline import OPS, inlined, sources

CONTENTS = "contents.toml"
HEADER = "GALLERY_HEADER.rst"


@dataclass(frozen=True)
class Recipe:
    """One script of the gallery."""

    section: str
    name: str
    path: Path

    @property
    def key(self) -> str:
        """`section/name`, as targets and messages give it."""
        return f"{self.section}/{self.name}"

    @property
    def text(self) -> str:
        """The whole script, as readers take it: with the text of what it imports of this project."""
        return inlined(self.path.read_text(encoding="utf-8"), self.ops)

    @property
    def sources(self) -> list[Path]:
        """The files of this project whose text is in the whole script, besides the script's own."""
        return sources(self.path.read_text(encoding="utf-8"), self.ops)

    @property
    def ops(self) -> Path:
        """The folder of the project's ops."""
        return self.path.parents[2] / "src" / OPS

    @property
    def companions(self) -> list[Path]:
        """The files beside the script that carry its name; it finds them in the folder where it is executed."""
        return sorted(path for path in self.path.parent.glob(f"{self.name}.*") if path != self.path)


def load(gallery: Path) -> list[Recipe]:
    """Return the recipes of a gallery folder in their order.

    Raises:
        ValueError: if the contents and the files disagree, or a name cannot be imported, or stands twice; the message
            lists every fault.
    """
    contents = _contents(gallery)
    listed = [
        Recipe(section, name, gallery / section / f"{name}.py") for section, names in contents.items() for name in names
    ]
    faults = []
    for recipe in listed:
        if not recipe.path.is_file():
            faults.append(f"{CONTENTS} lists {recipe.key}, but {recipe.path} does not exist")
        elif fault := _fault(recipe):
            faults.append(f"{recipe.path}: {fault}")
        if not recipe.name.isidentifier():
            faults.append(f"{recipe.key} cannot be imported under its name")
        if sum(other.name == recipe.name for other in listed) > 1:
            faults.append(f"{recipe.key} shares its name with another recipe")
    for path in sorted(gallery.glob("*/*.py")):
        if path not in {recipe.path for recipe in listed}:
            faults.append(f"{path} is not listed in {CONTENTS}")
    for section in contents:
        if not (gallery / section / HEADER).is_file():
            faults.append(f"section {section} has no {HEADER}")
    if faults:
        raise ValueError("\n".join(faults))
    return listed


def _fault(recipe: Recipe) -> str | None:
    """Return why a recipe's script cannot stand alone; None if it can."""
    try:
        _ = recipe.text
    except ValueError as error:
        return str(error)
    return None


def lay_out(gallery: Path, to: Path) -> None:
    """Have in a folder what a gallery has, with whole scripts, as readers take them, and nothing else.

    Raises:
        ValueError: as `load`.
    """
    recipes = load(gallery)
    copied = [gallery / CONTENTS, *gallery.glob(f"**/{HEADER}"), *(path for it in recipes for path in it.companions)]
    files = {to / path.relative_to(gallery): path.read_bytes() for path in copied}
    files |= {to / f"{recipe.key}.py": recipe.text.encode() for recipe in recipes}
    for path in to.glob("*/*"):
        if path.is_dir():  # what Python compiled, where somebody ran a script there
            shutil.rmtree(path)
        elif path not in files:
            path.unlink()
    for path, content in files.items():
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def sections(gallery: Path) -> list[str]:
    """Return the names of a gallery's sections in their order; ValueError if the contents cannot be read."""
    return list(_contents(gallery))


def _contents(gallery: Path) -> dict[str, list[str]]:
    path = gallery / CONTENTS
    try:
        contents = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for section, names in contents.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path}: section {section} is not a list of recipe names")
    return contents


class RecipeOrder:
    """Sort key of sphinx-gallery for the recipes of a section (`within_subsection_order`)."""

    def __init__(self, folder: str) -> None:
        """Take the section's folder, as sphinx-gallery gives it."""
        self.path = Path(folder)

    def __call__(self, file_name: str) -> int:
        """Return the place of a recipe's file in its section."""
        return _contents(self.path.parent)[self.path.name].index(Path(file_name).stem)
