"""Pages read by a parser, and drawn by a browser."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Tags(HTMLParser):
    """Collects start tags and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self.inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts.append(data)
        elif self.inside != "style":
            self.text.append(data)


def chromium(page: Path, profile: Path) -> str:
    """The page as a browser has drawn it."""
    assert CHROMIUM is not None
    quiet = ("quic", "gpu", "background-networking", "component-update", "sync")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", "--dump-dom"]
    command += [f"--disable-{name}" for name in quiet]
    command += ["--virtual-time-budget=20000", "--window-size=1280,4000"]
    command += [f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return done.stdout
