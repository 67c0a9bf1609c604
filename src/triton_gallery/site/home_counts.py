"""The counts at the foot of the home page, the days of the records, and the package's first call."""

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective

from triton_gallery.compiled.gpus import GPUS
from triton_gallery.recipe.op import op_of
from triton_gallery.records.record_store import Record
from triton_gallery.site import op_files, other_gpus, page_context
from triton_gallery.site.freshness import depends_on
from triton_gallery.site.render import bullets, paragraph


class CountsDirective(SphinxDirective):
    """`counts`: of recipes, ops, kernels and records."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        depends_on(self.env, counts)
        return [bullets(map(paragraph, counts(self.env)), "counts")]


class InstallDirective(SphinxDirective):
    """`install`: the command that installs the package of ops."""

    def run(self) -> list[nodes.Node]:
        """Return the nodes."""
        return op_files.install_command(self.env)


def counts(env: BuildEnvironment) -> list[str]:
    """Return the counts, in words; for `freshness.depends_on` too."""
    recipes = list(page_context.recipes(env).values())
    ops = [recipe for recipe in recipes if op_of(recipe)]
    kernels = [kernel for recipe in recipes if (kept := other_gpus.kept(env, recipe)) for kernel in kept.kernels]
    lines = [f"{len(recipes)} recipes, {len(ops)} ops to take"]
    if kernels:
        lines.append(f"{len(kernels)} kernels, compiled for {len(GPUS)} kinds of GPU")
    of_device: dict[str, list[Record]] = {}
    for recipe in recipes:
        for record in page_context.records(env).of(recipe):
            of_device.setdefault(record.environment.name, []).append(record)
    for device, records in of_device.items():
        first, last = min(record.date for record in records)[:10], max(record.date for record in records)[:10]
        when = first if first == last else f"{first} to {last}"
        lines.append(f"{len(records)} recipe{'s' * (len(records) > 1)} run on {device}, {when}")
    return lines
