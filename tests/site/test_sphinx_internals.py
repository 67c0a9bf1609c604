"""What `site/sphinx_internals.py` knows of other packages was read in the versions that are installed."""

import base64
import hashlib
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import furo
import pytest
import sphinx_copybutton
from project import ROOT
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES, String, Text
from sphinx.builders.html._assets import _CascadingStyleSheet, _JavaScript

from triton_gallery.site.sphinx_internals import (
    READ_IN,
    STRING,
    STYLES,
    THEME_SCRIPT,
    UNCOLOURED,
    choose_files,
    lighten_code,
)


@pytest.mark.parametrize("package", READ_IN)
def test_internals_were_read_in_the_installed_version(package: str) -> None:
    assert version(package) == READ_IN[package], (
        f"{package} {version(package)} is installed: read what sphinx_internals.py has of it in that version, "
        f"mend it if need be, and note the version in READ_IN"
    )


def test_hash_is_that_of_the_script_of_the_theme() -> None:
    template = Path(furo.__file__).parent / "theme" / "furo" / "base.html"
    (script,) = re.findall("(?s)<script>(.*?)</script>", template.read_text())
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() == THEME_SCRIPT


@pytest.mark.parametrize("setting", ["pygments_style", "pygments_dark_style"])
def test_code_looks_the_same_with_fewer_elements(setting: str) -> None:
    name = re.search(rf'{setting} = "(.+)"', (ROOT / "conf.py").read_text())
    assert name
    style = get_style_by_name(name[1])
    for token, short in STANDARD_TYPES.items():
        element = f'<span class="{short}">x</span>'
        if UNCOLOURED.fullmatch(element):
            assert style.style_for_token(token) == style.style_for_token(Text)
        if STRING.match(element):
            assert style.style_for_token(token) == style.style_for_token(String)


def test_elements_around_code_are_joined() -> None:
    names = '<span class="n">x</span><span class="o">.</span><span class="n">T</span>'
    context = {"body": names + ' <span class="sa">f</span><span class="s2">a</span><span class="si">{</span>'}
    lighten_code(None, "", "", context, None)  # type: ignore[arg-type]
    assert context["body"] == 'x.T <span class="s">fa{</span>'


def test_page_has_one_style_file_and_deferred_scripts(tmp_path: Path) -> None:
    (tmp_path / "_static").mkdir()
    for name, text in (("theme.css", "a {}\n/*# sourceMappingURL=theme.css.map*/"), ("ours.css", "b {}")):
        (tmp_path / "_static" / name).write_text(text)
    names = ("doctools.js", "furo.js", "filter.js", "gpu_choice.js", "copybutton.js")
    context = {
        "body": '<div class="filters"><div data-kind="gpu">',
        "script_files": [_JavaScript(f"_static/{name}", priority=200) for name in names],
        "css_files": [
            _CascadingStyleSheet("_static/ours.css", priority=800),
            _CascadingStyleSheet("_static/sg_gallery.css"),
            _CascadingStyleSheet("_static/theme.css", priority=200),
        ],
    }
    choose_files(SimpleNamespace(outdir=tmp_path), "", "", context, None)  # type: ignore[arg-type]
    scripts = {Path(file.filename).name: file.attributes for file in context["script_files"]}
    assert scripts == {name: {"defer": "defer"} for name in ("furo.js", "filter.js", "gpu_choice.js")}
    assert [file.filename for file in context["css_files"]] == [STYLES]
    assert (tmp_path / STYLES).read_text().split() == ["a", "{}", "b", "{}"]


def test_nothing_calls_the_script_of_sphinx_that_is_left_out() -> None:
    """It defines `Documentation`, `_ready` and `_`."""
    copy_button = Path(sphinx_copybutton.__file__).parent / "_static" / "copybutton.js_t"
    theme = Path(furo.__file__).parent / "theme" / "furo" / "static" / "scripts" / "furo.js"
    for script in (copy_button, theme, *(ROOT / "docs" / "_static").glob("*.js")):
        assert not re.search(r"\bDocumentation\.|\b_ready\(|(?<![\w.$])_\(", script.read_text()), script
