"""A headless Chromium that opens a page from a file, and notes what goes wrong and what it asks the network for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class Visit:
    """An open page.

    Attributes:
        page: Playwright's page.
        errors: What the console and the page complained of.
        requests: Addresses asked for, the page itself left out.
    """

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return self.page.evaluate(script)

    def timeline(self) -> dict[str, float]:
        """Return what the timeline shows: from, to, inView, merged, all, drawn."""
        self.page.wait_for_timeout(120)  # two frames: it draws on the next one
        shown = json.loads(self.evaluate("JSON.stringify(document.getElementById('timeline').dataset)"))
        return {name: float(value) for name, value in shown.items()}

    def draw_all(self) -> None:
        """Go through the page, so that every figure is drawn."""
        for y in range(0, int(self.evaluate("document.documentElement.scrollHeight")), 400):
            self.evaluate(f"window.scrollTo(0, {y})")
            self.page.wait_for_timeout(60)
        self.page.wait_for_function(
            "[...document.querySelectorAll('.figure')].every(e => e.querySelector('svg'))"
        )
        self.evaluate("window.scrollTo(0, 0)")


def find_browser() -> str | None:
    """Return the path of a Chromium, None where there is none."""
    asked = os.environ.get("BROWSER_PATH")
    return asked or next((path for name in _NAMES if (path := shutil.which(name))), None)


@contextmanager
def browsing() -> Iterator[Callable[..., Visit]]:
    """Yield a function that opens a page; skips the test where there is no browser."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright (in the extra dev)")
    path = find_browser()
    if path is None:
        pytest.skip("needs Chromium (apt-get install chromium-headless-shell)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])

        def visit(path: Path, width: int = 1280, height: int = 900, **context: Any) -> Visit:
            page = browser.new_context(viewport={"width": width, "height": height}, **context).new_page()
            seen = Visit(page)
            page.on("console", lambda message: _note(seen, message))
            page.on("pageerror", lambda error: seen.errors.append(str(error)))
            page.on("request", lambda request: _note_request(seen, request.url, path))
            page.on("dialog", lambda dialog: seen.errors.append(f"dialog: {dialog.message}"))
            page.goto(path.as_uri(), wait_until="load")
            return seen

        yield visit
        browser.close()


def _note(seen: Visit, message: Any) -> None:
    if message.type in ("error", "warning"):
        seen.errors.append(message.text)


def _note_request(seen: Visit, url: str, path: Path) -> None:
    if url != path.as_uri() and not url.startswith("data:"):
        seen.requests.append(url)
