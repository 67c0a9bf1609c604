"""Pages are read again when the records that they show have changed."""

import pickle
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from triton_gallery.site.freshness import depends_on, outdated


def facts(env: Any, name: str = "") -> object:
    return env.facts[name] if name else env.facts


def environment() -> Any:
    """Return what stands in for Sphinx's environment, after pages of one fact and of all have been read."""
    known = {"one": 1, "two": 2}
    env = SimpleNamespace(
        facts=known, metadata=defaultdict(dict), found_docs={"one", "two", "all", "other"}, docname=""
    )
    for env.docname, arguments in {"one": ["one"], "two": ["two"], "all": []}.items():
        depends_on(env, facts, *arguments)
    env.metadata = pickle.loads(pickle.dumps(env.metadata))  # as between two builds
    return env


def test_pages_of_what_changed_are_read_again() -> None:
    env = environment()
    assert outdated(None, env) == []
    env.facts["one"] = 3
    assert sorted(outdated(None, env)) == ["all", "one"]


def test_pages_that_are_gone_are_not_asked() -> None:
    env = environment()
    del env.facts["one"]
    env.found_docs.remove("one")
    assert outdated(None, env) == ["all"]
