"""Lines on what executed a recipe and when, and a box on what went wrong if it failed."""

from collections.abc import Iterator, Mapping

from docutils import nodes

from triton_gallery.recipe.device import Environment
from triton_gallery.records.page_cache import Run
from triton_gallery.records.record_store import Record
from triton_gallery.site.links import TERM
from triton_gallery.site.page_context import RecipePage
from triton_gallery.site.render import code, paragraph


def lines(page: RecipePage, run: Run) -> list[nodes.paragraph]:
    """Return the lines about the run that made a page, and about the record that it shows."""
    environment = run.environment
    record = _record(page, run)
    if run.missing:
        shown = [_line("Not executed where this page was built, which lacks ", ", ".join(run.missing), [])]
    else:
        facts = [*_software(environment, run.packages), run.date[:10]]
        if not environment.is_gpu:
            facts[-1] += "; no kernel is timed here"
        shown = [_line("Executed by ", environment.name, facts)]
    if record and (run.missing or not environment.is_gpu):
        facts = [*_software(record.environment, record.packages), record.date[:10]]
        shown.append(_line("GPU outputs recorded on ", record.environment.name, facts))
        if not record.is_fresh(page.recipe):
            shown[-1] += [nodes.Text(" · of "), nodes.inline("", "older code", classes=[TERM])]
    if record:
        shown[-1] += _sanitized(page, record)
    return shown


def failure(run: Run) -> list[nodes.Node]:
    """Return a box that says what went wrong; nothing if nothing did."""
    if run.failure is None:
        return []
    box = nodes.danger("", paragraph("This recipe failed when this page was built: ", nodes.literal("", run.failure)))
    if run.detail:
        box += code(run.detail, "none")
    return [box]


def _line(what: str, device: str, facts: list[str]) -> nodes.paragraph:
    return paragraph(what, nodes.strong("", device), "".join(f" · {fact}" for fact in facts))


def _software(environment: Environment, packages: Mapping[str, str]) -> list[str]:
    driver = [f"driver {environment.driver}"] if environment.driver else []
    links = [f"connected by {environment.links}"] if environment.links else []
    more = [f"{name} {version}" for name, version in packages.items()]
    return [*links, *driver, f"torch {environment.torch}", f"triton {environment.triton}", *more]


def _record(page: RecipePage, run: Run) -> Record | None:
    """Return the record that the lines are about: that of the GPU that executed the page, or the one shown on it."""
    if run.environment.is_gpu and not run.missing:
        return next((record for record in page.records if record.environment.name == run.environment.name), None)
    return page.record


def _sanitized(page: RecipePage, record: Record) -> Iterator[nodes.Node]:
    """Yield the sanitizers that found nothing in the recipe's present code, each linked to the glossary."""
    tools = record.sanitized if record.is_fresh(page.recipe) else []
    for before, tool in zip([" · ", *[", "] * len(tools)], tools, strict=False):
        yield nodes.Text(before)
        yield nodes.inline("", tool, classes=[TERM])
    if tools:
        yield nodes.Text(" clean")
