"""What `site/sphinx_internals.py` knows of other packages was read in the versions that are installed."""

import base64
import hashlib
import re
from importlib.metadata import version
from pathlib import Path

import furo
import pytest

from triton_gallery.site.sphinx_internals import READ_IN, THEME_SCRIPT


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
