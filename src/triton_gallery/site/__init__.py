"""The Sphinx extension that `conf.py` names: one module for each thing that the site shows.

What these modules hook into a build is listed here; what they change on pages, and in which order, in `transforms`.
"""

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

import triton_gallery
from triton_gallery.site import (
    api,
    crawlers,
    deferred,
    drawings,
    execute_hook,
    formulas,
    freshness,
    home_counts,
    links,
    model_tables,
    notebook,
    op_files,
    op_grid,
    op_pages,
    other_gpus,
    page_frame,
    performance,
    search,
    sphinx_internals,
    step_through,
    transforms,
    version_matrix,
    version_table,
)

DIRECTIVES = {
    "counts": home_counts.CountsDirective,
    "drawing": drawings.DrawingDirective,
    "features-by-version": version_matrix.FeaturesDirective,
    "models": model_tables.ModelsDirective,
    "models-line": model_tables.ModelLineDirective,
    "names": api.NamesDirective,
    "op": op_pages.OpDirective,
    "ops": op_pages.OpsDirective,
    "install": home_counts.InstallDirective,
    "op-grid": op_grid.OpGridDirective,
    "performance": performance.PerformanceDirective,
    "recipes-by-version": version_matrix.RecipesDirective,
    "step-through": step_through.StepThroughDirective,
    "targets": other_gpus.TargetsDirective,
    "versions": version_table.VersionsDirective,
}
SCRIPTS = (
    "deferred.js",
    "take.js",
    "filter.js",
    "performance.js",
    "gpu_choice.js",
    "listing.js",
    "chart.js",
    "keyboard.js",
    "step_through.js",
)
WRITERS = (op_files.write, performance.write, other_gpus.write, search.write, crawlers.write, page_frame.write)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Connect the modules to the steps of a build, in the order in which these happen."""
    app.setup_extension("sphinx_gallery.gen_gallery")
    app.add_config_value("gallery_repository", "", "env", str)  # its address
    app.add_config_value("gallery_notebooks", "", "env", str)  # the branch with the notebooks, if it has one
    for name, directive in DIRECTIVES.items():
        app.add_directive(name, directive)
    for file in SCRIPTS:
        app.add_js_file(file, defer="defer")

    # When a build begins
    app.connect("builder-inited", execute_hook.execute, priority=sphinx_internals.BEFORE_SPHINX_GALLERY)
    app.connect("builder-inited", step_through.record, priority=sphinx_internals.BEFORE_SPHINX_GALLERY)
    app.connect("builder-inited", op_pages.write)
    app.connect("builder-inited", sphinx_internals.leave_out_search)

    # Which pages are read again, though their files are the same
    app.connect("env-get-outdated", execute_hook.remove)
    app.connect("env-get-outdated", freshness.outdated)
    app.connect("env-get-outdated", links.follow_each_other)

    # When a page is read
    app.add_transform(transforms.PageTransform)
    app.connect("doctree-read", notebook.fill)
    app.connect("doctree-read", search.note)

    # When a page is written: all have been read
    app.add_html_math_renderer("mathml", (formulas.visit, None), (formulas.visit, None))
    app.connect("doctree-resolved", links.link_prose)
    app.connect("doctree-resolved", search.link_related)
    app.connect("doctree-resolved", links.add_recipes)
    app.connect("html-collect-pages", search.pages)
    app.connect("html-page-context", sphinx_internals.add_to_context)
    app.connect("html-page-context", page_frame.add_to_context)
    app.connect("html-page-context", links.link_code)
    app.connect("html-page-context", sphinx_internals.lighten_code)  # it removes what links are found by
    app.connect("html-page-context", crawlers.announce)
    app.connect("html-page-context", sphinx_internals.choose_files, priority=900)  # after those who add some
    app.connect("html-page-context", deferred.defer, priority=950)  # the files are chosen by all that the page shows

    app.connect("build-finished", _write)
    return {
        "version": triton_gallery.__version__,
        "env_version": 4,  # to be raised when pages have to be read again because of what is noted of them
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }


def _write(app: Sphinx, exception: Exception | None) -> None:
    """Write the files of the site that are not pages, at the end of a build."""
    if not exception and app.builder.format == "html":
        for write in WRITERS:
            write(app)
