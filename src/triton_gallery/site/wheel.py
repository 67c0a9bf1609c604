"""Serves the package of ops: a wheel among the site's files, and the command that installs it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes

from triton_gallery.recipe.inline import OPS

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment
    from sphinx.util.typing import ExtensionMetadata

FOLDER = "ops"  # of the site
BUILD = "import sys; from flit_core.buildapi import build_wheel; build_wheel(sys.argv[1])"


def setup(app: "Sphinx") -> "ExtensionMetadata":
    """Have the wheel built when the site is."""
    app.connect("build-finished", _build)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def command(env: "BuildEnvironment") -> list[nodes.Node]:
    """Return what installs the package: from the site, if it knows its address, else from a checkout."""
    root, site = Path(env.app.confdir), env.config.html_baseurl.rstrip("/")
    if site and _has_package(root):
        return [_block(f"{site}/{FOLDER}/{name(root)}")]
    where, repository = nodes.paragraph("", "In a checkout"), env.config.gallery_repository.rstrip("/")
    if repository:
        where += [nodes.Text(" of "), nodes.reference("", repository.partition("//")[2], refuri=repository)]
    where += nodes.Text(":")
    return [where, _block(".")]


def name(root: Path) -> str:
    """Return the file name of the wheel."""
    text = (root / "src" / OPS / "__init__.py").read_text(encoding="utf-8")
    version = next(line.split('"')[1] for line in text.splitlines() if line.startswith("__version__"))
    return f"{OPS}-{version}-py3-none-any.whl"


def _block(what: str) -> nodes.literal_block:
    return nodes.literal_block(text := f"$ pip install {what}", text, language="console")


def _has_package(root: Path) -> bool:
    return (root / "src" / OPS / "__init__.py").is_file()


def _build(app: "Sphinx", exception: Exception | None) -> None:
    root = Path(app.confdir)
    if exception or app.builder.format != "html" or not _has_package(root):
        return
    folder = Path(app.outdir, FOLDER)
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    same = {**os.environ, "SOURCE_DATE_EPOCH": "1767225600"}  # the same file of the same sources
    subprocess.run([sys.executable, "-c", BUILD, str(folder.resolve())], cwd=root, env=same, check=True)
