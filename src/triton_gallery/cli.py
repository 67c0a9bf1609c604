"""The command line: `python -m triton_gallery COMMAND`, run in the folder that holds `conf.py`."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from sphinx.cmd.build import main as sphinx_build

from triton_gallery.pages import Pages
from triton_gallery.recipes import load

TRACEBACK_LINES = 6


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m triton_gallery", description=__doc__)
    commands = parser.add_subparsers(required=True)
    html_parser = commands.add_parser("html", help="execute what changed and build the site")
    html_parser.add_argument("--out", type=Path, default=Path("_build/html"), help="where to (default: %(default)s)")
    html_parser.set_defaults(command=html)
    options = parser.parse_args(arguments)
    return int(options.command(options))


def html(options: argparse.Namespace) -> int:
    """Build the site; end with a table of the recipes that failed and with what to open."""
    console = Console(highlight=False)
    try:
        recipes = load(Path("gallery"))
    except ValueError as error:
        console.print(Text(f"The gallery is not in order:\n{error}"), style="red")
        return 2
    index = options.out / "index.html"
    index.unlink(missing_ok=True)
    status = sphinx_build(["-c", ".", "-W", "--keep-going", "-n", "-q", "docs", str(options.out)])
    pages = Pages(Path("docs/recipes"))
    failed = [(recipe, run) for recipe in recipes if (run := pages.run(recipe.key)) and run.failure is not None]
    if failed:
        table = Table("recipe", "what happened", "last lines", title="Recipes that failed", show_lines=True)
        for recipe, run in failed:
            lines = run.detail.strip().splitlines()[-TRACEBACK_LINES:]
            table.add_row(Text(recipe.key), Text(run.failure or ""), Text("\n".join(lines)))
        console.print(table)
    if index.exists():
        console.print(f"Open {index}")
    return status or bool(failed)
