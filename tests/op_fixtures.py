"""Fixtures for the tests of ops: how an op and its recipe are imported, and what they are run with."""

import functools
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import memory
import pytest
import torch
from compiled import Ask, h100
from hypothesis import Phase, settings
from selection import KEYS

from triton_gallery.recipe.contents import Recipe
from triton_gallery.recipe.op import op_of
from triton_gallery.records.page_cache import Run

settings.register_profile("default", max_examples=25, deadline=None)
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True)
# For recipes that are broken on purpose: the first failure is enough.
settings.register_profile(
    "mutants", max_examples=25, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("ci" if os.environ.get("CI") else "default")


# JAX gives memory back, as PyTorch does when asked: the next large test may need it.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")


def recipe_in(script: Path) -> Recipe:
    """Return the recipe of a script."""
    return Recipe(script.parent.name, script.stem, script)


def import_code(code: str, file: Path) -> ModuleType:
    """Write code to a file and import it."""
    file.write_text(code)
    return import_file(file)


def import_file(file: Path) -> ModuleType:
    """Import a file, as `import <stem>` would: torch.compile looks functions' modules up by name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def end_ops(module: ModuleType | None) -> None:
    """End what a module registered by itself: PyTorch 2.11 refuses a second function for one device of one op."""

    def ended(*_: object, **__: object) -> None:
        raise RuntimeError("this op has ended: it was imported once more, for another test")

    for name, value in list(vars(module).items()) if module else []:
        if isinstance(value, torch.library.Library):
            value._destroy()
        elif isinstance(value, torch.library.CustomOpDef):  # a call of it could end the process
            setattr(module, name, ended)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Limit a test to this process's part of the GPU's memory, or give it what it needs."""
    with memory.limit(large=item.get_closest_marker("needs_gpu_memory") is not None):
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before the fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more memory than it can have, or a page that was executed without a GPU."""
    if "printed" in getattr(item, "fixturenames", ()) and torch.cuda.is_available():
        pytest.skip("the recorded run shows it")
    for mark in item.iter_markers("needs_gpu_memory"):
        memory.require(*mark.args)


TAKEN: dict[str, tuple[ModuleType, object]] = {}  # the op of each recipe that was imported last, and what for
LOADED: dict[str, ModuleType] = {}  # each recipe that was imported last


def end_ops_in(code: str, modules: dict[str, ModuleType]) -> list[str]:
    """End the ops of modules that code registers again, and name these. An op that is made of others has them, too."""
    ended = []
    for path, module in modules.items():
        libraries = (name for name, value in vars(module).items() if isinstance(value, torch.library.Library))
        if any(f"{name} = Library(" in code for name in libraries):
            end_ops(module)
            ended.append(path)
    return ended


@pytest.fixture(scope="session")
def load_recipe(gallery: Path) -> Callable[[str], ModuleType]:
    """Return a function that imports a recipe of the gallery under test, as `import <stem>` would for a reader."""

    def load(path: str) -> ModuleType:
        file = gallery / path
        end_ops(sys.modules.get(file.stem))
        end_ops_in(file.read_text(), LOADED)
        for taken, (module, _) in TAKEN.items():
            TAKEN[taken] = module, None  # the recipe may register the same ops
        before = sys.dont_write_bytecode
        sys.dont_write_bytecode = True  # no __pycache__ among the recipes
        try:
            LOADED[path] = import_file(file)
        finally:
            sys.dont_write_bytecode = before
        return LOADED[path]

    return load


@pytest.fixture(scope="module")
def recipe_at(load_recipe: Callable[[str], ModuleType]) -> Callable[[str], ModuleType]:
    """Return a function that imports each recipe once: a second one would tune again, and end the first one's ops."""
    return functools.cache(load_recipe)


@pytest.fixture(scope="session")
def load_op(gallery: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModuleType]:
    """Return a function that imports the op of a recipe as whoever takes it does: its imports and its cell alone.

    It imports it again, unless it is asked for the same purpose as the last time.
    """

    def load(path: str, purpose: object = None) -> ModuleType:
        module, last = TAKEN.get(path, (None, None))
        if module and last is not None and last == purpose:
            return module
        op = op_of(recipe_in(gallery / path))
        assert op is not None, f"{path} hands over no op"
        end_ops(module)
        code = op.of("taken").code
        for other in end_ops_in(code, {other: with_ops for other, (with_ops, _) in TAKEN.items()}):
            TAKEN[other] = TAKEN[other][0], None
        folder = tmp_path_factory.mktemp("taken")  # torch.compile remembers modules by their names: none has it twice
        module = import_code(code, folder / f"{op.name}_{folder.name}_op.py")
        TAKEN[path] = module, purpose
        return module

    return load


@pytest.fixture(scope="module")
def taken(request: pytest.FixtureRequest, load_op: Callable[[str], ModuleType]) -> ModuleType:
    """Return the op of the recipe that the test's file is named after, as whoever takes it imports it."""
    return load_op(_own(request))


@pytest.fixture(scope="module")
def recipe(request: pytest.FixtureRequest, load_recipe: Callable[[str], ModuleType]) -> ModuleType:
    """Return the recipe that the test's file is named after, as a module."""
    return load_recipe(_own(request))


def _own(request: pytest.FixtureRequest) -> str:
    return f"{KEYS[request.path.stem.removeprefix('test_')]}.py"


@pytest.fixture
def printed(site: Path, run_of_page: Callable[[str], Run | None]) -> Callable[[str], str]:
    """Return a function for what a recipe's page printed when it was executed here, `section/name`, without a GPU."""
    assert site  # built, so all pages were executed

    def read(key: str) -> str:
        run = run_of_page(key)
        assert run, "no run of the present code passed here"
        return "".join(f"{output.text}\n" for output in run.outputs if output.text)

    return read


@pytest.fixture
def poison() -> Iterator[None]:
    """Have PyTorch fill all memory that an op allocates with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def on_h100() -> Iterator[Ask]:
    """Return a function that asks the one process that compiles for an H100."""
    with h100() as ask:
        yield ask


@pytest.fixture(scope="session")
def quick_interpreter() -> Iterator[None]:
    """Have the interpreter run the kernels quickly, unless there is a GPU."""
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from triton_gallery.execute.triton_patches import quicken  # now that the choice of the interpreter is made

    with pytest.MonkeyPatch.context() as patch:
        quicken(patch.setattr)
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many autotune configs were run, each by itself."""
    passed = terminalreporter.stats.get("passed", [])
    configs = {value for report in passed for name, value in report.user_properties if name == "config"}
    counts = Counter(config.partition(" ")[0] for config in configs)
    for kernel, count in sorted(counts.items()):
        terminalreporter.write_line(f"autotune: {count} configs of {kernel} run, each by itself")
