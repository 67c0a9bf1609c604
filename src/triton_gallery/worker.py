"""The child process that executes one recipe through sphinx-gallery.

`python -m triton_gallery.worker SANDBOX CONFDIR EXECUTE` expects one recipe under `SANDBOX/gallery` and leaves its
page's files under `SANDBOX/site/recipes`; where EXECUTE is `False`, without executing it. It says in
`SANDBOX/result.json` how it went: what the cells put out when every cell ran, else what happened and the traceback. No
such file: the process did not live to write it.

The pipe in `ALIVE` ends when the build ends, however it ends; then this process kills its group.
"""

import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from triton_gallery.outputs import read

ALIVE = "TRITON_GALLERY_ALIVE"
FILE_LIMIT = 2**30
OUTPUT_LIMIT = 1_000_000  # bytes of text on a page


def main(sandbox: Path, confdir: Path, execute: str) -> None:
    """Execute the one recipe in the sandbox unless `execute` is "False", writing its page beside it."""
    threading.Thread(target=_die_with_the_build, args=(int(os.environ.pop(ALIVE)),), daemon=True).start()
    faulthandler.enable(all_threads=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # out of memory shall cost this recipe, not the build
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    result: dict[str, Any]
    try:
        result = _make_page(sandbox, confdir, execute)
    except BaseException as error:  # sphinx-gallery lets SystemExit and KeyboardInterrupt through
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(sandbox))
        ]
        trace = traceback.format_list(frames) + traceback.format_exception_only(error)
        what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {trace[-1].strip()}"
        result = {"failure": what, "detail": "".join(trace)}
    (sandbox / "result.json").write_text(json.dumps(result), encoding="utf-8")


def _make_page(sandbox: Path, confdir: Path, execute: str) -> dict[str, Any]:
    site = sandbox / "site"
    site.mkdir()
    (recipe,) = (sandbox / "gallery").glob("*/*.py")
    page = f"recipes/{recipe.parent.name}/{recipe.stem}"
    app = Sphinx(
        site,
        confdir,
        sandbox / "out",
        sandbox / "doctrees",
        "dummy",
        confoverrides={
            "extensions": ["sphinx_gallery.gen_gallery"],
            "root_doc": page,
            "plot_gallery": execute,
            "sphinx_gallery_conf.examples_dirs": str(sandbox / "gallery"),
            "sphinx_gallery_conf.subsection_order": None,
            "sphinx_gallery_conf.within_subsection_order": "FileNameSortKey",
        },
        status=None,
        warning=None,
    )
    outcome = app.config.sphinx_gallery_conf
    if outcome["failing_examples"]:
        (trace,) = outcome["failing_examples"].values()
        # after the header and the indented stack: an exception's message may go on for many lines
        message = next(line for line in trace.splitlines()[1:] if not line.startswith(" "))
        return {"failure": f"raised {message}", "detail": trace}
    if execute == "True" and len(outcome["passing_examples"]) != 1:
        raise RuntimeError("sphinx-gallery did not execute the recipe")
    if (site / f"{page}.rst").stat().st_size > OUTPUT_LIMIT:
        return {"outputs": []}  # the build will refuse it
    app.build()
    return {"outputs": [asdict(output) for output in read(app.env.get_doctree(page))]}


def _die_with_the_build(pipe: int) -> None:
    os.read(pipe, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
