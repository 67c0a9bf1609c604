"""The process of one recipe: sphinx-gallery executes its script there and lays out its page.

It finds the recipe in the folder `gallery` of its work folder, and leaves the page's files in `site/recipes`. It writes
into `result.json` how it went: what the cells put out when every cell ran, else what happened and the traceback. If
there is no such file, the process did not live to write it.

A recipe for several GPUs has a process for each, its ranks. The first is this one; the others run the script alone, and
the first of them to fail writes `failed.json`.
"""

import faulthandler
import json
import multiprocessing
import os
import resource
import runpy
import sys
import tempfile
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec

from triton_gallery.execute.scraper import outputs_of

FILE_LIMIT = 2**30
RESULT, FAILED = "result.json", "failed.json"
OUTPUT_LIMIT = 1_000_000  # bytes of text on a page


@dataclass(frozen=True)
class Order:
    """What the process is to do.

    Attributes:
        work: its work folder.
        gallery: the settings of sphinx-gallery.
        execute: whether to execute the recipe, or to lay out its page alone.
        variables: its environment variables.
        uses_triton: whether the recipe imports it, so that its launches are noted.
        interpreted: whether Triton's interpreter executes here.
        warm_up: whether it runs to fill the compilers' caches, and nothing that it measures is kept.
        laid_out: if the recipe ran before, what each code cell put out then, as sphinx-gallery laid it out.
        ranks: how many processes run it together.
    """

    work: Path
    gallery: dict[str, Any]
    execute: bool
    variables: dict[str, str]
    uses_triton: bool = False
    interpreted: bool = False
    warm_up: bool = False
    laid_out: list[str] | None = None
    ranks: int = 1


def of_rank(rank: int) -> dict[str, str]:
    """Return the environment variables of one rank alone, as `torchrun` sets them."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def main(order: Order, rank: int = 0) -> None:
    """Execute the one recipe in the work folder; the first of its ranks writes its page beside it."""
    _start_anew(order.variables | (of_rank(rank) if order.ranks > 1 else {}))
    if order.warm_up:
        _let_others_have_the_gpu()
    faulthandler.enable(all_threads=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # out of memory shall cost this recipe, not the build
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if rank:
        _be_rank(order, rank)
        return
    result: dict[str, Any]
    try:
        result = _make_page(order)
    except BaseException as error:  # sphinx-gallery lets SystemExit and KeyboardInterrupt through
        result = _failure(order, error)
    partial = order.work / f"{RESULT}.partial"
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(order.work / RESULT)


def passed(work: Path) -> bool:
    """Return whether the first rank wrote that every cell ran."""
    result = work / RESULT
    return result.exists() and "failure" not in json.loads(result.read_bytes())


def _failure(order: Order, error: BaseException) -> dict[str, Any]:
    """Return what an error came to, and its traceback within the recipe."""
    within = str(order.work)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(within)]
    trace = traceback.format_list(frames) + traceback.format_exception_only(error)
    failure = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {trace[-1].strip()}"
    return {"failure": failure, "detail": "".join(trace)}


def _be_rank(order: Order, rank: int) -> None:
    """Run the script as one of the other ranks; what it prints is kept for when it fails."""
    log = os.open(order.work / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    (script,) = (order.work / "gallery").glob("*/*.py")
    os.chdir(script.parent)
    sys.argv = [str(script)]
    try:
        _load_triton(order)
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:
        traceback.print_exc()
        failure = _failure(order, error)
        with suppress(FileExistsError), open(order.work / FAILED, "x", encoding="utf-8") as file:
            json.dump(failure | {"failure": f"rank {rank} {failure['failure']}"}, file)
        os._exit(1)  # at once: the others wait for it


def _load_triton(order: Order) -> None:
    """Import Triton where the recipe does and the fork server has not, and have its interpreter be quick."""
    if not order.uses_triton:
        return
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if order.interpreted else {}):
        import triton  # noqa: F401

    if order.interpreted:
        from triton_gallery.execute.triton_patches import quicken

        quicken()


def _start_anew(variables: dict[str, str]) -> None:
    """Let nothing remain of the process that this one was forked from but what it imported."""
    import numpy

    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None
    multiprocessing.set_start_method(None, force=True)  # else a recipe's own processes came of the fork server
    numpy.random.seed()
    # They say where PyTorch lies on this machine, and nothing of the recipe.
    warnings.filterwarnings("ignore", module=r"torch\.")


def _let_others_have_the_gpu() -> None:
    """Have the GPU never sleep, as it does before a timed call: others use it meanwhile."""
    import torch

    torch.cuda._sleep = lambda cycles: None


def _error(trace: str) -> str:
    """Return the line of a traceback that names the error: after the header and the indented stack.

    Its message may go on for many lines. If it is what another process printed, that one's traceback tells more.
    """
    lines = trace.splitlines()
    last = max(n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call last)"))
    return next((line for line in lines[last + 1 :] if not line.startswith(" ")), lines[-1].strip())


def _make_page(order: Order) -> dict[str, Any]:
    from sphinx_gallery.gen_gallery import fill_gallery_conf_defaults
    from sphinx_gallery.gen_rst import generate_file_rst

    (script,) = (order.work / "gallery").glob("*/*.py")
    site = order.work / "site"
    page = site / "recipes" / script.parent.name
    (page / "images" / "thumb").mkdir(parents=True, exist_ok=True)
    laid_out = _watch_layout(order.laid_out)
    _load_triton(order)
    watch = None
    if order.uses_triton:
        from triton_gallery.execute.launch_trace import Watch

        watch = Watch(script.parent)
    config = SimpleNamespace(sphinx_gallery_conf=order.gallery, html_static_path=[], templates_path=[])
    fill_gallery_conf_defaults(None, config)
    settings = {
        **config.sphinx_gallery_conf,
        "src_dir": str(site),
        "plot_gallery": order.execute,
        "abort_on_example_error": False,
    }
    *_, outcome = generate_file_rst(script.name, page, script.parent, settings)
    if trace := outcome.get("formatted_exception"):
        return {"failure": f"raised {_error(trace)}", "detail": trace}
    if order.execute and not outcome.get("passing"):
        raise RuntimeError("sphinx-gallery did not execute the recipe")
    if (page / script.name).with_suffix(".rst").stat().st_size > OUTPUT_LIMIT:
        return {"outputs": []}  # the build will refuse it
    outputs = msgspec.to_builtins(outputs_of(script, laid_out))
    launches = msgspec.to_builtins(watch.launches) if watch else []
    return {"outputs": outputs, "launches": launches, "laid_out": laid_out}


def _watch_layout(before: list[str] | None) -> list[str]:
    """Return a list to which sphinx-gallery's layout of each code cell's output is added, or have it use these."""
    from sphinx_gallery import gen_rst

    execute, laid_out = gen_rst.execute_code_block, []
    replayed = iter(before or [])

    def execute_code_block(compiler: Any, block: Any, *given: Any) -> str:
        text: str = execute(compiler, block, *given)
        if block.type == "code":
            text = text if before is None else next(replayed, "")
            laid_out.append(text)
        return text

    gen_rst.execute_code_block = execute_code_block
    return laid_out
