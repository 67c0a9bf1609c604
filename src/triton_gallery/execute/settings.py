"""What `conf.py` says of executing recipes."""

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What `conf.py` says of executing recipes.

    Attributes:
        time_limit: seconds that a recipe may take.
        memory_limit: how much of the machine's memory recipes may use, 1 being all of it.
        gallery: the settings of sphinx-gallery.
    """

    time_limit: float
    memory_limit: float
    gallery: dict[str, Any]


def read(confdir: Path) -> Settings:
    """Return the settings; ValueError if a limit is none."""
    values = runpy.run_path(str(confdir / "conf.py"))
    time, memory = values.get("recipe_time_limit", 300), values.get("recipe_memory_limit", 0.8)
    if not (isinstance(time, int | float) and time > 0):
        raise ValueError(f"recipe_time_limit is {time!r}; it takes a positive number of seconds")
    if not (isinstance(memory, int | float) and 0 < memory <= 1):
        raise ValueError(f"recipe_memory_limit is {memory!r}; it takes a share of the machine's memory, such as 0.8")
    return Settings(time, memory, values.get("sphinx_gallery_conf", {}))
