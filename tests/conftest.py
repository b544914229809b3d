"""Shared test set-up: what torch loads late is imported once, before any rank is forked."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection

import hypothesis
import pytest

# Deadlines would fail tests on a busy machine.
hypothesis.settings.register_profile("headrace", deadline=None)
hypothesis.settings.load_profile("headrace")

try:
    import torch
except ModuleNotFoundError:  # the planning side is tested without torch too
    collect_ignore_glob = ["running/*", "attacks/*"]
else:
    import torch._dynamo
    import torch.distributed.tensor

    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files instead of comparing"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests that are marked ``apart`` run in a forked child."""
    if pyfuncitem.get_closest_marker("apart") is None:
        return None
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_apart, args=(pyfuncitem, there))
    child.start()
    there.close()
    try:
        failure = here.recv()
    except EOFError:
        failure = f"the test's process ended with exit code {child.join() or child.exitcode}"
    child.join()
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def _apart(item: pytest.Function, there: Connection) -> None:
    names = item._fixtureinfo.argnames
    try:
        item.obj(**{name: item.funcargs[name] for name in names})
        there.send("")
    except BaseException:
        there.send(traceback.format_exc())
    os._exit(0)
