"""What stands around each page: how to report a mistake, and the versions of the site."""

from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from project import ROOT

from triton_gallery.site import page_frame
from triton_gallery.site.page_context import site_address


def app(tmp_path: Path, **settings: str) -> SimpleNamespace:
    """Return what stands for Sphinx."""
    config = SimpleNamespace(**{"html_baseurl": "", "gallery_repository": "", **settings})
    builder = SimpleNamespace(get_target_uri=lambda page: f"{page}.html")
    return SimpleNamespace(env=SimpleNamespace(config=config), config=config, builder=builder, outdir=tmp_path)


def test_new_issue_has_the_title_and_the_address(tmp_path: Path) -> None:
    known = app(tmp_path, gallery_repository="https://github.com/someone/gallery/")
    context = {"title": "Writing <code>x</code> &amp; y", "pageurl": "https://example.org/guide/x.html"}
    page_frame.add_to_context(known, "guide/x", "page.html", context, None)
    address = urlsplit(context["report_address"])
    assert address.path == "/someone/gallery/issues/new"
    assert parse_qs(address.query) == {
        "title": ["Writing x & y: "],
        "body": ["On https://example.org/guide/x.html:\n\n"],
    }
    without = {"title": "X", "pageurl": None}
    page_frame.add_to_context(known, "guide/x", "page.html", without, None)
    assert "guide/x.html" in parse_qs(urlsplit(without["report_address"]).query)["body"][0]


def test_without_an_address_nothing_is_added(tmp_path: Path) -> None:
    context = {"title": "X"}
    page_frame.add_to_context(app(tmp_path), "x", "page.html", context, None)
    page_frame.write(app(tmp_path))
    assert context == {"title": "X"}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["https://example.org/gallery/", "https://example.org"])
def test_site_that_knows_its_address_lists_no_versions_yet(tmp_path: Path, address: str) -> None:
    known, context = app(tmp_path, html_baseurl=address), {"title": "X"}
    page_frame.add_to_context(known, "x", "page.html", context, None)
    page_frame.write(known)
    assert site_address(known.env).endswith(context["site_root"])
    assert context["site_root"].endswith("/")
    assert (tmp_path / page_frame.VERSIONS).read_text() == "globalThis.siteVersions = [];\n"
    template = (ROOT / "docs" / "_templates" / "page.html").read_text()
    assert f'src="{{{{ site_root }}}}{page_frame.VERSIONS}"' in template
