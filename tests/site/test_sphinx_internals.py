"""What `site/sphinx_internals.py` knows of other packages was read in the versions that are installed."""

import base64
import hashlib
import re
from importlib.metadata import version
from pathlib import Path

import furo
import pytest
from project import ROOT
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES, String, Text

from triton_gallery.site.sphinx_internals import READ_IN, STRING, THEME_SCRIPT, UNCOLOURED, lighten_code


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
