"""Makes Sphinx read a page again when the records that it shows have changed but its own file has not.

While a page is read it notes which function returns what it shows, and a digest of that. The next build asks the
function again.
"""

import hashlib
from collections.abc import Callable
from functools import cache

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

KEY = "shown"  # in a page's metadata


def depends_on(env: BuildEnvironment, shown: Callable[..., object], *arguments: str) -> None:
    """Note that the page being read shows what a function returns for the environment and these arguments.

    The function is asked again in a later process: it has to be one of a module, and the `repr` of what it returns has
    to say everything.
    """
    noted = env.metadata[env.docname].setdefault(KEY, {})
    noted[shown, arguments] = _digest(shown(env, *arguments))


def outdated(app: Sphinx, env: BuildEnvironment, *_: set[str]) -> list[str]:
    """Return the pages whose content would be different now."""

    @cache
    def digest(shown: Callable[..., object], arguments: tuple[str, ...]) -> str:
        return _digest(shown(env, *arguments))

    return [
        page
        for page in env.metadata.keys() & env.found_docs
        if any(digest(*source) != before for source, before in env.metadata[page].get(KEY, {}).items())
    ]


def _digest(shown: object) -> str:
    return hashlib.sha256(repr(shown).encode()).hexdigest()
