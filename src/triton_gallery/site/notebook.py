"""Adds to the notebooks, which sphinx-gallery writes without outputs, the outputs that the recipe's page shows."""

import inspect
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from triton_gallery.recipe.needs import packages
from triton_gallery.recipe.outputs import Frame, Output
from triton_gallery.records.files import replace
from triton_gallery.records.output_diff import STALE, Shown, pictures, ran_here, recorded_on, side_by_side
from triton_gallery.site.chart import png
from triton_gallery.site.page_context import RecipePage, pages, recipe_page, site_address
from triton_gallery.site.render import benchmark, clocks

OURS = "install"  # the tag of cells that the page has not


def install_missing(*packages: str) -> None:
    """Install what is not here. Where all is, nothing happens."""
    import subprocess
    import sys
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec
    from shutil import which

    from packaging.requirements import Requirement

    missing = []
    for package in map(Requirement, packages):
        try:
            if package.specifier.contains(version(package.name), prereleases=True):
                continue
        except PackageNotFoundError:
            pass
        missing.append(str(package))
    if not missing:
        return
    if find_spec("pip"):
        install = [sys.executable, "-m", "pip", "install"]
    elif uv := which("uv"):  # an environment of uv has no pip
        install = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise ModuleNotFoundError(f"here is neither pip nor uv: install {', '.join(missing)}")
    subprocess.run([*install, "--quiet", *missing], check=True)


def run_on_all_gpus(name: str, script: str, least: int) -> None:
    """Write the script of these cells to a file, and run it in a process on each GPU, if here are enough."""
    import subprocess
    import sys
    from pathlib import Path

    import torch

    gpus = torch.cuda.device_count()
    if gpus < least:
        print(f"this needs {least} GPUs, here are {gpus}: the cells below run in one process")
        return
    Path(name).write_text(script)
    ranks = f"--nproc-per-node={1 << min(gpus, 8).bit_length() - 1}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    print(ended.stdout)
    if ended.returncode:
        raise RuntimeError(ended.stderr)


def fill(app: Sphinx, _: nodes.document) -> None:
    """When a page is read, write its outputs into the notebook; if that changes it, write the zip again too."""
    page = recipe_page(app.env, app.env.docname)
    if page is None or page.run is None or page.run.failure is not None:
        return
    path = pages(app.env).notebook(page.recipe)
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    notebook["cells"] = [cell for cell in notebook["cells"] if OURS not in cell["metadata"].get("tags", [])]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    figures = pages(app.env).figures(page.recipe)
    outputs = side_by_side(page.run, page.record, page.has_fresh_record, figures)
    for cell, shown in zip(code, outputs, strict=False):
        cell["outputs"] = list(_outputs(page, shown, figures))
    first = notebook["cells"].index(code[0]) if code else 0
    notebook["cells"][first:first] = _added_cells(app, page)
    filled = json.dumps(notebook, indent=1)
    if filled != text:  # a newer file would have every other site of this checkout read the page again
        replace(path, filled.encode())


def _added_cells(app: Sphinx, page: RecipePage) -> Iterator[dict[str, Any]]:
    """Yield the cells that only the notebook has.

    A link to the page, if its address is known, the installation, and what runs a script for several GPUs on them.
    """
    tags: dict[str, Any] = {"metadata": {"tags": [OURS]}}
    if address := site_address(app.env):
        yield {"cell_type": "markdown", **tags, "source": f"From the [Triton Gallery]({address}{page.name}.html)."}
    needs = packages(page.recipe.path, page.recipe.text)
    call = f"install_missing{tuple(needs)!r}".replace("'", '"')
    source = f"{inspect.getsource(install_missing)}\n\n{call}"
    yield {"cell_type": "code", **tags, "execution_count": None, "outputs": [], "source": source}
    if (least := page.declared.of_op.gpus) > 1:
        lines = "\n".join(f"    {line!r}" for line in page.recipe.text.splitlines(keepends=True))
        call = f"run_on_all_gpus({page.recipe.path.name!r}, SCRIPT, {least})"
        source = f"{inspect.getsource(run_on_all_gpus)}\n\nSCRIPT = (\n{lines}\n)\n{call}"
        hidden = {"metadata": tags["metadata"] | {"jupyter": {"source_hidden": True}}}
        yield {"cell_type": "code", **hidden, "execution_count": None, "outputs": [], "source": source}


def _outputs(page: RecipePage, shown: Shown, figures: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    """Yield the output of a cell on this machine and what a record has beyond it, labelled as on the page."""
    if page.run and shown.differ:
        yield _text(f"{ran_here(page.run)}:")
    yield from _of_output(shown.here, figures)
    if page.record and shown.there:
        yield _text(f"{recorded_on(page.record)}{'' if page.record.is_fresh(page.recipe) else STALE}:")
        yield from _of_output(shown.there, pictures(page.record, shown.there))


def _of_output(output: Output, figures: Mapping[str, bytes]) -> Iterator[dict[str, Any]]:
    """Yield an output in the format of notebooks, in the same order as on the page."""
    for table in output.tables:
        yield _picture(png(table))
        yield _table(benchmark(table))
        yield from map(_text, clocks(table))
    for name in output.figures:
        yield _picture(figures[name])
    if output.text:
        yield _text(output.text)
    if output.frame:
        yield _table(output.frame)


def _text(printed: str) -> dict[str, Any]:
    return {"output_type": "stream", "name": "stdout", "text": f"{printed}\n"}


def _picture(content: bytes) -> dict[str, Any]:
    return _display({"image/png": b64encode(content).decode()})


def _table(frame: Frame) -> dict[str, Any]:
    """Return a table as HTML and, for programs that do not show that, as text."""
    lines = [frame.columns, *frame.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    plain = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    rows = "".join(_row("td", row) for row in frame.rows)
    markup = f"<table><thead>{_row('th', frame.columns)}</thead><tbody>{rows}</tbody></table>"
    return _display({"text/html": markup, "text/plain": "\n".join(plain)})


def _row(kind: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(text)}</{kind}>' for text in texts)}</tr>"


def _display(data: dict[str, str]) -> dict[str, Any]:
    return {"output_type": "display_data", "metadata": {}, "data": data}
