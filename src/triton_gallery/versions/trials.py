"""Tries the gallery with a Triton that lies over the pinned packages.

`try_pair` installs it into a folder of its own and starts `python -m triton_gallery.versions.trials` with that
folder before all others. That process runs each lesson without a GPU, compiles the kernels for an H100, has the ops'
contract asked for a few examples, and makes the probes.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import msgspec
from packaging.specifiers import SpecifierSet

from triton_gallery.compiled import store
from triton_gallery.compiled.compile import Compiler, meant
from triton_gallery.compiled.compiler_process import HOPPER
from triton_gallery.compiled.gpus import GPUS
from triton_gallery.recipe.contents import Recipe, load
from triton_gallery.recipe.declaration import declaration
from triton_gallery.recipe.hashes import cell_hash
from triton_gallery.recipe.needs import missing
from triton_gallery.recipe.op import op_of
from triton_gallery.versions.matrix import FEATURE, KERNELS, LESSON, OP, Outcome, Pair, Tried, hashes

GALLERY, COMPILED = Path("gallery"), Path("docs/_compiled")
CACHE, OVERLAYS = Path("_build/compiled"), Path("_build/triton")
EXAMPLES = (  # of tests of ops
    "tests/contract/test_results.py::test_sizes",
    "tests/contract/test_gradients.py::test_autograd",
)
CORES = len(os.sched_getaffinity(0))
LIMIT, LIMIT_OF_TESTS = 600, 1800  # seconds for one lesson, and for the examples of all ops
REASON = 200  # characters at the most
ON_A_GPU, INTERPRETED = "on a GPU", "interpreted"  # end the names of probes
PROBES = Path(__file__).with_name("probes.py")
WITHOUT_A_GPU = {"CUDA_VISIBLE_DEVICES": ""}
UNASKED = "no example was asked of it"


class TrialError(Exception):
    """A Triton could not be tried to the end.

    Attributes:
        tried: what came of it until then, if anything did.
    """

    def __init__(self, message: str, tried: Tried | None = None) -> None:
        """Take why, and what is known nevertheless."""
        super().__init__(message)
        self.tried = tried


def try_pair(pair: Pair, keys: Sequence[str], before: Tried | None, again: bool, seconds: float | None) -> Tried:
    """Try a Triton; return what came of it, and what came of it before where the code is the same.

    Args:
        pair: the Triton, and what it needs besides.
        keys: the recipes to try, `section/name`.
        before: what is known of it.
        again: whether what passed before with the same code is tried, too.
        seconds: start nothing after so many; None for no limit.

    Raises:
        TrialError: if it cannot be installed, or the process that tries it ends before it has.
    """
    folder = _installed(pair)
    with TemporaryDirectory(prefix="triton-gallery-") as name:
        order, result = Path(name, "order.json"), Path(name, "tried.json")
        order.write_bytes(msgspec.json.encode(_Order(keys, before, again, seconds)))
        command = [sys.executable, "-m", "triton_gallery.versions.trials", str(order), str(result)]
        ended = subprocess.run(command, env=_variables(folder), check=False)
        tried = msgspec.json.decode(result.read_bytes(), type=Tried) if result.exists() else None
        if tried and tried.triton != pair.triton:
            raise TrialError(f"in {folder} is no whole Triton {pair.triton}: {tried.triton} was found")
        if tried is None or ended.returncode:
            raise TrialError(f"the process with Triton {pair.triton} ended with status {ended.returncode}", tried)
        return tried


def _installed(pair: Pair) -> Path:
    """Install a Triton and what it needs, unless it is there; return the folder."""
    folder = OVERLAYS / "_".join(pair.requirements)
    if not folder.is_dir():
        OVERLAYS.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=OVERLAYS) as partial:
            if _pip("install", "--quiet", "--no-deps", "--target", partial, *pair.requirements).returncode:
                raise TrialError(f"pip could not install {' '.join(pair.requirements)}")
            shutil.move(partial, folder)
            Path(partial).mkdir()  # as it is removed now
    return folder.absolute()


def newest_release() -> str:
    """Return the newest version of Triton that pip can install here; TrialError if it does not say."""
    output = _pip("index", "versions", "triton", stdout=subprocess.PIPE, text=True).stdout
    if not (match := re.match(r"triton \((\S+)\)", output)):
        raise TrialError("pip does not say which version of Triton is the newest")
    return match[1]


def _pip(*arguments: str | Path, **options: Any) -> "subprocess.CompletedProcess[Any]":
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=False, **options)


def _variables(folder: Path) -> dict[str, str]:
    """Return the environment of a process that finds what is in a folder before all else."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(folder), str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}


class _Order(msgspec.Struct):
    """What the process is to try; see `try_pair`."""

    keys: Sequence[str]
    before: Tried | None
    again: bool
    seconds: float | None


def main(order: Path, result: Path) -> None:
    """Try what one file asks for, and write into another what came of it, kind by kind."""
    asked = msgspec.json.decode(order.read_bytes(), type=_Order)
    recipes = [recipe for recipe in load(GALLERY) if recipe.key in asked.keys]
    for tried in _Trial(recipes, asked.before, asked.again, asked.seconds).made():
        result.write_bytes(msgspec.json.encode(tried))


class _Trial:
    def __init__(self, recipes: Sequence[Recipe], before: Tried | None, again: bool, seconds: float | None) -> None:
        self._recipes = recipes
        self._again = again
        self._seconds = seconds
        self._began = time.monotonic()
        self._hashes = hashes(recipes)
        self._missing = {recipe.key: missing(recipe.path, recipe.text, capability=None) for recipe in recipes}
        versions = version("triton"), version("torch"), version("numpy"), platform.python_version()
        self._tried = Tried.nothing(*versions)
        if before and (before.triton, before.torch, before.numpy, before.python) == versions:  # else tried elsewhere
            self._tried.outcomes |= {kind: dict(outcomes) for kind, outcomes in before.outcomes.items()}

    def made(self) -> Iterator[Tried]:
        """Try all that is due; yield what came of it after each kind."""
        for attempt in (self._features, self._kernels, self._ops, self._lessons):
            attempt()
            yield self._tried

    def _features(self) -> None:
        text = PROBES.read_text(encoding="utf-8")
        # The names are read: with this Triton their module may not be importable.
        names = re.findall(r'(?m)^@probe\("(.+)"\)$', text)
        self._hashes[FEATURE] = dict.fromkeys(names, cell_hash(text))
        known = self._tried.outcomes[FEATURE]
        self._tried.outcomes[FEATURE] = {name: known[name] for name in names if name in known}
        here = [] if _gpu() else ["a GPU"]
        self._each(FEATURE, _probe, {name: here for name in names if name.endswith(ON_A_GPU)})

    def _kernels(self) -> None:
        (hopper,) = (gpu for gpu in GPUS if gpu.key == HOPPER)
        recipes, launches, lacking = {recipe.key: recipe for recipe in self._recipes}, {}, {}
        for key, recipe in recipes.items():
            kept = store.load(COMPILED, recipe)
            only = declaration(recipe.path, recipe.text).of_op.only_with
            meant_launches = [
                kernel.launch
                for kernel in (kept.kernels if kept else [])
                if hopper in meant(recipe, kernel.launch)
                and SpecifierSet(only.get(kernel.launch.kernel, "")).contains(self._tried.triton)
            ]
            if kept and meant_launches:
                launches[key] = meant_launches
                stale = [] if kept.is_fresh(recipe) else ["launches of its present code, which make compile notes"]
                lacking[key] = [*(need for need in self._missing[key] if "NVIDIA GPU" not in need), *stale]
        self._hashes[KERNELS] = {key: self._hashes[KERNELS][key] for key in launches}
        for key in recipes.keys() - launches.keys():  # it had kernels before
            self._tried.outcomes[KERNELS].pop(key, None)

        def compile_all(key: str, compiler: Compiler) -> str | None:
            for launch in launches[key]:
                compiled, _ = compiler.make(recipes[key], launch, hopper)
                if compiled.failure:
                    return f"{launch.kernel}: {compiled.failure}"
            return None

        with Compiler(CACHE) as compiler:
            self._each(KERNELS, partial(compile_all, compiler=compiler), lacking)

    def _ops(self) -> None:
        ops = {op.name: recipe.key for recipe in self._recipes if (op := op_of(recipe))}
        faults: Mapping[str, str | None] = {}
        due = [name for name in ops if self._due(OP, name) and not self._missing[ops[name]]]
        if due and not self._is_late(OP, due):
            faults = _asked([ops[name] for name in due])
        for name, key in ops.items():
            if self._missing[key]:
                self._lacks(OP, name, self._missing[key])
            elif key in faults:
                self._note(OP, name, faults[key])

    def _lessons(self) -> None:
        recipes = {recipe.key: recipe for recipe in self._recipes}
        self._each(LESSON, lambda key: _lesson(recipes[key]), self._missing)

    def _each(self, kind: str, attempt: Callable[[str], str | None], lacking: Mapping[str, list[str]]) -> None:
        """Try all of a kind that is due, as many at a time as there are cores."""
        due = []
        for name in self._hashes[kind]:
            if lacks := lacking.get(name):
                self._lacks(kind, name, lacks)
            elif self._due(kind, name):
                due.append(name)

        def attempt_one(name: str) -> None:
            if self._is_late(kind, [name]):
                return
            try:
                failure = attempt(name)
            except Exception as error:  # a fault of one, or of what tries it, says nothing of the others
                failure = _short(f"{type(error).__name__}: {error}")
            self._note(kind, name, failure)

        with ThreadPoolExecutor(CORES) as pool:
            list(pool.map(attempt_one, due))

    def _due(self, kind: str, name: str) -> bool:
        known = self._tried.outcomes[kind].get(name)
        if self._again or known is None or known.code_hash != self._hashes[kind][name]:
            return True
        return not known.passed and (kind != FEATURE or known.missing != [])  # what a Triton lacks, it lacks

    def _is_late(self, kind: str, names: Sequence[str]) -> bool:
        late = self._seconds is not None and time.monotonic() - self._began > self._seconds
        if late:
            print(f"  NOT TRIED, {self._seconds:.0f} s are over: {kind} {', '.join(names)}", flush=True)
        return late

    def _lacks(self, kind: str, name: str, lacking: list[str]) -> None:
        """Note what is missing here, unless the same code was tried elsewhere, or missed the same before."""
        known = self._tried.outcomes[kind].get(name)
        if known is None or known.code_hash != self._hashes[kind][name] or known.missing not in ([], lacking):
            self._keep(kind, name, missing=lacking)
            print(f"  {kind:<8} {name:<48} not tried, needs {', '.join(lacking)}", flush=True)

    def _note(self, kind: str, name: str, failure: str | None) -> None:
        self._keep(kind, name, failure=failure or "")
        fails = "is not there" if kind == FEATURE else "FAILED"
        print(f"  {kind:<8} {name:<48} {'passed' if failure is None else f'{fails}: {failure}'}", flush=True)

    def _keep(self, kind: str, name: str, **came: Any) -> None:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        self._tried.outcomes[kind][name] = Outcome(self._hashes[kind][name], date, **came)


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _probe(name: str) -> str | None:
    """Make a probe; return why it failed."""
    variables = {"TRITON_INTERPRET": str(int(name.endswith(INTERPRETED)))}
    variables |= {} if name.endswith(ON_A_GPU) else WITHOUT_A_GPU
    return _fault([sys.executable, "-m", "triton_gallery.versions.probes", name], Path.cwd(), variables)


def _lesson(recipe: Recipe) -> str | None:
    """Run a lesson in an empty folder, as one who downloaded it; return why it failed."""
    with TemporaryDirectory(prefix="triton-gallery-") as name:
        folder = Path(name)
        for path in recipe.companions:
            shutil.copy(path, folder)
        script = folder / recipe.path.name
        script.write_text(recipe.text, encoding="utf-8")
        return _fault([sys.executable, "-B", script], folder, WITHOUT_A_GPU)


def _fault(command: Sequence[str | Path], folder: Path, variables: dict[str, str]) -> str | None:
    """Run a command; return the line of what it wrote that says why it failed, or None."""
    try:
        ended = subprocess.run(
            command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it was stopped after {LIMIT} s"
    if ended.returncode == 0:
        return None
    lines = [line for line in ended.stderr.splitlines() if line and not line[0].isspace()]
    return _short(lines[-1] if lines else f"it ended with exit status {ended.returncode}")


def _asked(keys: Sequence[str]) -> dict[str, str | None]:
    """Have the ops of recipes asked the contract for a few examples; return why each failed, if it did."""
    with TemporaryDirectory(prefix="triton-gallery-") as name:
        report = Path(name, "report.xml")
        command = [sys.executable, "-m", "pytest", *EXAMPLES, "-q", f"--examples-of={' '.join(keys)}"]
        command += [f"--numprocesses={CORES}", "--dist=loadgroup", f"--junitxml={report}"]
        try:
            variables = os.environ | WITHOUT_A_GPU
            ended = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=LIMIT_OF_TESTS, check=False
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(keys, f"the examples were stopped after {LIMIT_OF_TESTS} s")
        faults = defaultdict[str, list[str | None]](list)
        for key, fault in _verdicts(report) if report.is_file() else ():
            faults[key].append(fault)
    lines = (ended.stdout.strip() or ended.stderr.strip()).splitlines()
    whole = (
        [] if ended.returncode in {0, 1} else [f"pytest ended with status {ended.returncode}: {''.join(lines[-1:])}"]
    )
    of_all = [*faults.pop("", []), *whole]  # of a process that crashed, or a file that was not imported
    return {
        key: next((fault for fault in [*of_all, *faults[key]] if fault is not None), None if faults[key] else UNASKED)
        for key in keys
    }


def _verdicts(report: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the recipe of each test that ran, or nothing for one, and why it failed, if it did."""
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  pytest wrote it just now
        keys = [entry.get("value") or "" for entry in case.iter("property") if entry.get("name") == "recipe"]
        faults = [*case.iter("failure"), *case.iter("error")]
        if case.find("skipped") is None and (keys or faults):
            yield keys[0] if keys else "", _short(faults[0].get("message") or "") if faults else None


def _short(text: str) -> str:
    return " ".join(text.split())[:REASON] or "failed, and said nothing"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
