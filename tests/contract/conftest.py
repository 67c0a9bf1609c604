"""The contract: what every op promises, stated once and asked of each."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from case import Case
from selection import select


@pytest.fixture(scope="session")
def load_op(load_op: Callable[..., ModuleType]) -> Callable[[Case], ModuleType]:
    """Return a function that imports a case's op; cases with the same settings, one after another, share it."""
    return lambda case: load_op(f"{case.recipe}.py", purpose=(case.prepare, dict(case.settings)))


@pytest.fixture
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether a case is tested thoroughly, with all that it lists."""
    config = request.config
    return select(config.getoption("--thorough"), config.getoption("--recipe")).is_thorough(request.node)


@pytest.fixture(scope="session", autouse=True)
def interpreted(quick_interpreter: None) -> None:
    """Have the interpreter run the kernels, unless there is a GPU."""


@pytest.fixture
def no_compile_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch.compile compile: its caches tell ops apart by their kernels, and not by a launcher's settings."""
    monkeypatch.setattr(torch.compiler.config, "force_disable_caches", True)
