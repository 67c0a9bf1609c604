"""Notes what is compiled for the launches of a recipe, in the process that executes it.

They are noted when Triton is about to compile, and never after: what is timed stays as it is.
"""

import json
import math
from pathlib import Path
from typing import Any

from triton_gallery.execute import triton_patches
from triton_gallery.recipe.launches import ALIGNED, DTYPE, FLOAT, FUNCTION, LAYOUT, TUPLE, Launch, typical

OPTIONS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}  # and what they are where none is given


class Watch:
    """The launches of kernels that a folder's scripts define."""

    def __init__(self, folder: Path) -> None:
        """Watch from now on."""
        self._folder = f"{folder}/"
        self._seen: list[tuple[Launch, Any, Any]] = []  # each with the autotuner and the config that it tries, if any
        self._trial: tuple[Any, Any] = (None, None)
        triton_patches.on_trial(self._note_trial)
        triton_patches.on_compile(self._note_launch)

    @property
    def launches(self) -> list[Launch]:
        """The typical launch of each kernel; of what was tuned, only as it was found to be best."""
        return typical(
            [
                launch
                for launch, tuner, config in self._seen
                if tuner is None or any(config is best for best in tuner.cache.values())
            ]
        )

    def _note_trial(self, tuner: Any, config: Any) -> None:
        self._trial = tuner, config

    def _note_launch(self, kernel: Any, signature: Any, constants: Any, options: Any, attributes: Any) -> None:
        if kernel.fn.__code__.co_filename.startswith(self._folder):
            types = {name: _listed(kind) for name, kind in signature.items()}
            plain = [[list(place), _plain(value)] for place, value in constants.items()]
            aligned = [list(place) for place, known in attributes.items() if [ALIGNED, 16] in known]
            given: dict[str, Any] = {name: getattr(options, name, usual) for name, usual in OPTIONS.items()}
            changed = {name: value for name, value in given.items() if value != OPTIONS[name]}
            self._seen.append((Launch(kernel.fn.__name__, types, plain, aligned, changed), *self._trial))


def _plain(value: Any) -> Any:
    """Return a constant as JSON can have it."""
    if hasattr(value, "value") and type(value).__name__ == "constexpr":
        value = value.value
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return json.loads(json.dumps(value))  # of its plain type
    if isinstance(value, tuple):
        return {TUPLE: [_plain(item) for item in value]}
    if type(value).__name__ == "dtype":
        return {DTYPE: str(value)}
    if type(value).__name__.endswith("Layout"):
        return {LAYOUT: repr(value)}
    return {FUNCTION: getattr(getattr(value, "fn", value), "__name__", repr(value))}


def _listed(kind: Any) -> Any:
    return [_listed(item) for item in kind] if isinstance(kind, tuple) else kind
