"""Shared test set-up: what torch loads late is imported once, before any rank is forked."""

from __future__ import annotations

import signal

import hypothesis
import pytest

from apart import failure_of

# A shell may have them ignored (nohup, &); what tests of signals send must arrive.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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
    """Tests that are marked ``apart`` run in a process of their own."""
    if pyfuncitem.get_closest_marker("apart") is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    given = {name: pyfuncitem.funcargs[name] for name in names}
    failure = failure_of(pyfuncitem.path, pyfuncitem.originalname, given)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True
