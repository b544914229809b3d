"""Shared test set-up: what torch loads late is imported once, before any rank is forked."""

from __future__ import annotations

import signal
from pathlib import Path

import hypothesis
import pytest

from apart import failure_of
from choose_slow import ALWAYS

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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of slow.txt, which CI has no time for (choose_slow.py), as ``slow``."""
    tests = Path(__file__).parent
    listed = set((tests / "slow.txt").read_text(encoding="utf-8").splitlines())
    names = dict[str, pytest.Item]()
    for item in items:
        names[f"{item.path.relative_to(tests).as_posix()}::{item.name}"] = item
    for name in names.keys() & listed:
        names[name].add_marker("slow")
    # Of files that were collected whole: whether what is listed is there.
    whole = {name.partition("::")[0] for name in names}
    if not any("::" in argument for argument in config.args):
        wanted = listed | set(ALWAYS.split("\n")) - {""}
        gone = sorted(name for name in wanted - names.keys() if name.partition("::")[0] in whole)
        if gone:
            raise pytest.UsageError(f"slow.txt or ALWAYS name what is no test: {', '.join(gone)}")


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
