"""The browser in which tests look at pages."""

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the machine's browser."""
    paths = [path for name in BROWSERS if (path := shutil.which(name))]
    if not paths:
        message = f"no browser on this machine ({', '.join(BROWSERS)}): the site is untested in one"
        if "CI" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=paths[0], args=["--no-sandbox", "--disable-quic"])
        yield browser
        browser.close()
