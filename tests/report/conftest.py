"""One run and its page, written once for all tests that only read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from report.fake_run import fake_run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps on 4 ranks."""
    return fake_run(tmp_path_factory.mktemp("run") / "demo")


@pytest.fixture(scope="session")
def page(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its page, with pictures."""
    pytest.importorskip("altair")
    from headrace.report import write_report

    return write_report(folder, tmp_path_factory.mktemp("page") / "report.html")
