"""Begins a recipe: its script, op and test, made of the templates beside this file, and its place in the contents.

What is made is runnable and right, of a tiny op that its author replaces.
"""

import keyword
import re
import tomllib
from pathlib import Path

from triton_gallery.recipe.contents import CONTENTS, load, sections
from triton_gallery.recipe.inline import OPS

TEMPLATES = Path(__file__).parent / "template"


def create(root: Path, key: str) -> list[Path]:
    """Write a recipe `section/name`, the last of its section; return the files that were written or changed.

    Raises:
        ValueError: if it cannot be; then nothing was written.
    """
    section, _, name = key.partition("/")
    gallery = root / "gallery"
    recipes = load(gallery)
    if section not in sections(gallery):
        raise ValueError(f"there is no section {section!r}: {', '.join(sections(gallery))}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is no name for a recipe: letters, digits and underscores, as Python imports it")
    if name in {recipe.name for recipe in recipes}:
        raise ValueError(f"there is a recipe called {name} already")
    files = {
        gallery / section / f"{name}.py": "recipe.txt",
        root / "src" / OPS / f"{name}.py": "op.txt",
        root / "tests" / "ops" / f"test_{name}.py": "test.txt",
    }
    for path in files:
        if path.exists():
            raise ValueError(f"{path} is there already")
    title = name.replace("_", " ").capitalize()
    words = {
        "@KEY@": key,
        "@NAME@": name,
        "@CONSTANT@": name.upper(),
        "@TITLE@": title,
        "@LINE@": "=" * len(title),
    }
    contents = _listed((gallery / CONTENTS).read_text(encoding="utf-8"), section, name)
    for path, template in files.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub("|".join(words), lambda match: words[match[0]], text), encoding="utf-8")
    (gallery / CONTENTS).write_text(contents, encoding="utf-8")
    return [*files, gallery / CONTENTS]


def _listed(contents: str, section: str, name: str) -> str:
    """Return the contents with a name at the end of a section; ValueError if they are laid out in another way."""
    listed = re.sub(
        rf"(?m)^({re.escape(section)} *= *\[[^\]]*?),?\s*\]",
        lambda match: f'{match[1]}{"" if match[1].endswith("[") else ","}\n  "{name}",\n]',
        contents,
    )
    wanted = tomllib.loads(contents)
    wanted[section].append(name)
    try:
        right = tomllib.loads(listed) == wanted
    except tomllib.TOMLDecodeError:
        right = False
    if not right:
        raise ValueError(f"{CONTENTS} is laid out in another way: list {name} there by hand")
    return listed
