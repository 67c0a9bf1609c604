"""Makes Triton's interpreter quick: `triton.language` patched for a launch at once, and dtypes that are looked up.

Triton looks for what it has to patch at each launch and, within, at each call of a function, which takes longer than
the small kernels of most tests and pages. What it patches for such a call stays patched, and the compiler then chokes
on it.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class Patch:
    """Takes the place of Triton's function that patches, and keeps what that did at the first launch."""

    def __init__(self, patch_lang: Callable[..., Any]) -> None:
        """Take Triton's function."""
        self._patch_lang = patch_lang
        self._changes: list[tuple[object, str, object, object]] = []
        self._patched = False

    def __call__(self, function: Callable[..., object]) -> "Patch":
        """Patch the language, but for a call within a launch."""
        if not self._patched:
            self._patched = True
            if not self._changes:
                scope = self._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
                self._changes = [(place, name, before, vars(place)[name]) for place, name, before in scope._changes]
            for place, name, _, after in self._changes:
                setattr(place, name, after)
        return self

    def restore(self) -> None:
        """Give the language back as it was; Triton asks for that after a launch."""
        for place, name, before, _ in reversed(self._changes):
            if before is interpreter._MISSING:
                delattr(place, name)
            else:
                setattr(place, name, before)
        self._patched = False


def quicken(replace: Callable[[object, str, object], object] = setattr) -> None:
    """Have the interpreter do the same in less time, in this process; `replace` is another function than setattr.

    The names are private to Triton, 3.6 to 3.9: where a later one has others, the interpreter stays as it is.
    """
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype", "_MISSING")):
        return
    known = functools.cache(interpreter._get_np_dtype)  # which makes a table of all dtypes at each call

    def np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        scalar = dtype.scalar
        return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else known(scalar)

    replace(interpreter, "_patch_lang", Patch(interpreter._patch_lang))
    replace(interpreter, "_get_np_dtype", np_dtype)
