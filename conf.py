"""Sphinx's settings of the site; https://www.sphinx-doc.org/en/master/usage/configuration.html explains each."""

import os
import sys
from pathlib import Path
from urllib.parse import urlparse

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "src"))

import triton_gallery  # noqa: E402
from triton_gallery.recipe.contents import sections  # noqa: E402

project = "Triton Gallery"
author = "The Triton Gallery authors"
copyright = "2026, The Triton Gallery authors"
version = release = triton_gallery.__version__

extensions = [
    "triton_gallery.site",
    "myst_parser",
    "notfound.extension",
    "sphinx.ext.githubpages",
    "sphinx_copybutton",
    "sphinxext.opengraph",
]
nitpicky = True
exclude_patterns = ["_records", "_compiled", "_templates", "_versions"]  # data, whatever lies there

# The gallery. triton_gallery executes every recipe, in a process of its own; sphinx-gallery then assembles the pages.
plot_gallery = "False"
recipe_time_limit = 300  # seconds
recipe_memory_limit = 0.8  # of the machine's memory, for all that run at once
sphinx_gallery_conf = {
    "examples_dirs": "../_build/gallery",  # where scripts stand whole, as a build writes them from gallery/
    "gallery_dirs": "recipes",
    "filename_pattern": r"\.py$",
    "subsection_order": [f"../_build/gallery/{section}" for section in sections(ROOT / "gallery")],
    "within_subsection_order": "triton_gallery.recipe.contents.RecipeOrder",
    "image_scrapers": ("triton_gallery.execute.scraper.scrape", "matplotlib"),
    "download_all_examples": False,
    "min_reported_time": float("inf"),  # the strip under the title says it, and what it means
    "remove_config_comments": True,
    "show_signature": False,
    "write_computation_times": False,
}

# Look
html_theme = "furo"
templates_path = [str(ROOT / "docs" / "_templates")]
html_title = "Triton Gallery"
html_static_path = [str(ROOT / "docs" / "_static")]
html_css_files = ["gallery.css", "chart.css", "op_grid.css", "step_through.css", "drawings.css"]
html_favicon = str(ROOT / "docs" / "_static" / "favicon.svg")
html_copy_source = False
html_use_index = False  # the search finds names
html_show_sphinx = False
html_logo = str(ROOT / "docs" / "_static" / "favicon.svg")
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1f6685",
        "color-brand-content": "#1f6685",
        "gallery-accent": "#b8560f",
        "chart-ours-1": "#c2570c",
        "chart-ours-2": "#e58f4b",
        "chart-ours-3": "#8a3c05",
        "chart-ours-4": "#b98a5e",
        "chart-other-1": "#1f6685",
        "chart-other-2": "#3f8f4f",
        "chart-other-3": "#7a5aa6",
        "chart-other-4": "#8f6f10",
        "chart-other-5": "#666666",
        "step-ink": "#000",
        "step-now": "55%",
        "step-load": "#2f7fb5",
        "step-store": "#c2620f",
        "step-outside": "#c62838",
        "step-hatch": "#8a8f98",
        "step-0": "#2f7fb5",
        "step-1": "#c2620f",
        "step-2": "#3d8b4a",
        "step-3": "#8d5bb5",
        "step-4": "#b0902a",
        "step-5": "#bb4a6d",
        "step-6": "#2b8f8f",
        "step-7": "#7a6a58",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cc0de",
        "color-brand-content": "#7cc0de",
        "gallery-accent": "#f2a365",
        "chart-ours-1": "#f2a365",
        "chart-ours-2": "#cf7f42",
        "chart-ours-3": "#f7cba6",
        "chart-ours-4": "#a9764b",
        "chart-other-1": "#7cc0de",
        "chart-other-2": "#82cb90",
        "chart-other-3": "#b9a0e0",
        "chart-other-4": "#d9c061",
        "chart-other-5": "#a5a5a5",
        "step-ink": "#fff",
        "step-now": "45%",
        "step-load": "#5db1e4",
        "step-store": "#f0974a",
        "step-outside": "#ff7a86",
        "step-hatch": "#8b93a0",
        "step-0": "#5db1e4",
        "step-1": "#f0974a",
        "step-2": "#6cc07c",
        "step-3": "#bd90e6",
        "step-4": "#dcc05a",
        "step-5": "#ee86a6",
        "step-6": "#5ccaca",
        "step-7": "#b9a58e",
    },
    "top_of_page_buttons": [],
}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div:not(.sphx-glr-script-out) > div.highlight:not(.source) > pre"

# Where the site is served: SITE_URL=https://user.github.io/triton-gallery/. Pages use relative links; only the page for
# missing addresses, link previews and the sitemap need it.
html_baseurl = os.environ.get("SITE_URL", "")
ogp_site_url = html_baseurl
ogp_social_cards = {"enable": False}
notfound_template = "404.html"
notfound_urls_prefix = urlparse(html_baseurl).path or "/"

# The project's repository: SITE_REPOSITORY=https://github.com/user/triton-gallery has each recipe's page lead to its
# source; SITE_NOTEBOOKS, the name of a branch there that has the notebooks, to Colab.
gallery_repository = os.environ.get("SITE_REPOSITORY", "")
gallery_notebooks = os.environ.get("SITE_NOTEBOOKS", "")

# Text
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache", "sphinx_gallery.space_in_filename"]  # the second: of the checkout's folder
