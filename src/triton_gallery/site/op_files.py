"""The ops to download: each as a file of its own, all of them in one zip, and the package as a wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from statistics import median

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

from triton_gallery.figures.ratios import Summary, summaries
from triton_gallery.recipe.declaration import Declaration
from triton_gallery.recipe.inline import OPS
from triton_gallery.recipe.op import Op, op_of
from triton_gallery.site import deferred, page_context
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import code, figure, html, older, paragraph, size

FOLDER = "ops"  # of the site
LICENCE = """\
SPDX-FileCopyrightText: 2026 The Triton Gallery authors
SPDX-License-Identifier: MIT
Take it, change it, ship it; keep these lines."""
BUILD = "import sys; from flit_core.buildapi import build_wheel; build_wheel(sys.argv[1])"


def buttons(page: RecipePage, up: str = "../../") -> list[nodes.Node]:
    """Return the buttons that download the op of a recipe or copy it to the clipboard; none if it has no op.

    `up` leads from the page to the top of the site.
    """
    op = op_of(page.recipe)
    if op is None:
        return []
    file = f"{up}{FOLDER}/{_file_name(op.name)}"
    take = f'<a class="take" href="{file}" download>Take the op: {_file_name(op.name)}</a>'
    script = file.removesuffix(".py") + ".js"
    copy = f'<button class="take" type="button" data-from="{script}">Copy the op</button>'
    return [html(f"{take} {copy} ")]


def text_of(env: BuildEnvironment, op: Op, page: RecipePage) -> str:
    """Return the file of an op: comments with its origin, licence and speed, then its code."""
    facts = [
        f"{op.title}: an op of the Triton Gallery, {page_context.site_address(env)}{FOLDER}/{op.name}.html",
        "",
        *LICENCE.splitlines(),
        "",
    ]
    spaces = [name for name in op.names if name.endswith("_NAMESPACE")]
    facts += [f"Needs {needs(page.declared)}. {name} is yours to set, to a Python identifier." for name in spaces]
    facts += [] if page.declared.gpus else ["Without a GPU, set TRITON_INTERPRET=1 before triton is imported."]
    for item in summaries(page.records[:1], [], page.recipe):
        facts += ["", *_measured(item)]
    head = "\n".join(f"# {fact}".rstrip() for fact in facts)
    return f"{head}\n\n{op.code}"


def needs(declared: Declaration) -> str:
    """Return the versions of torch and Triton that an op needs."""
    return " and ".join(str(package) for package in declared.packages if package.name in {"torch", "triton"})


def _file_name(op: str) -> str:
    return f"{op}_op.py"


def _measured(item: Summary) -> list[str]:
    """Return a benchmark as a table in plain text."""
    device, table = item.environment, item.table
    what = f"{item.kind}, {table.unit}" if item.kind else table.unit
    software = f"torch {device.torch}, triton {device.triton}"
    head = f"{device.name}, {software}, {item.date[:10]}{older(item.is_fresh)}: {what}"
    rows = [[size(x), *(figure(values[place]) for values in table.series.values())] for place, x in enumerate(table.xs)]
    rows.insert(0, [table.x, *table.series])
    if table.cpu:
        cpu = [[time for time in table.cpu.get(name, []) if time is not None] for name in table.series]
        rows.append(["CPU us", *(figure(median(times)) if times else "" for times in cpu)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [head, *("  ".join(map(str.rjust, row, widths)) for row in rows)]


def install_command(env: BuildEnvironment) -> list[nodes.Node]:
    """Return the command that installs the package: from the site if its address is known, else from a checkout."""
    root, site = Path(env.app.confdir), page_context.site_address(env)
    if site and _has_package(root):
        return [code(f"$ pip install {site}{FOLDER}/{wheel_name(root)}", "console")]
    repository = page_context.repository_address(env)
    link = nodes.reference("", repository.partition("//")[2], refuri=repository)
    checkout = paragraph("In a checkout of ", link, ":") if repository else paragraph("In a checkout:")
    return [checkout, code("$ pip install .", "console")]


def wheel_name(root: Path) -> str:
    """Return the file name of the wheel."""
    text = (root / "src" / OPS / "__init__.py").read_text(encoding="utf-8")
    version = next(line.split('"')[1] for line in text.splitlines() if line.startswith("__version__"))
    return f"{OPS}-{version}-py3-none-any.whl"


def _has_package(root: Path) -> bool:
    return (root / "src" / OPS / "__init__.py").is_file()


def write(app: Sphinx) -> None:
    """Write a file for each op, the zip, and the wheel."""
    root, folder = Path(app.confdir), Path(app.outdir, FOLDER)
    pages = page_context.recipe_pages(app.env)
    files = {_file_name(op.name): text_of(app.env, op, page) for page in pages if (op := op_of(page.recipe))}
    folder.mkdir(exist_ok=True)
    for pattern in ("*_op.py", "*_op.js", "*.whl"):
        for old in folder.glob(pattern):
            old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).with_suffix(".js").write_text(deferred.script(text), encoding="ascii")
    with zipfile.ZipFile(folder / f"{OPS}.zip", "w") as archive:
        licence = (root / "LICENSE").read_text(encoding="utf-8")
        for name, text in {"LICENSE": licence, "__init__.py": "", **files}.items():
            archive.writestr(zipfile.ZipInfo(f"{OPS}/{name}"), text)  # without a date: the same each time
    if _has_package(root):
        same = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600"}  # the same file of the same sources
        subprocess.run([sys.executable, "-c", BUILD, str(folder.resolve())], cwd=root, env=same, check=True)
