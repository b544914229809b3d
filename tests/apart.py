"""A test in a process of its own, which has none of the threads that tests before it left.

What such threads hold does not survive a fork: converters of pictures and backward passes hang or
fail in a child of a process that has used them.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

__all__ = ["failure_of"]

_PRELOADED = [
    "apart",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch._export",
    "headrace.engine.attach",
    "headrace.engine.training",
    "transformers.models.llama.modeling_llama",
    "running.engine.loops",
]
"""What most of them import, or torch for them: once."""


def failure_of(path: Path, name: str, given: Mapping[str, Any]) -> str:
    """The traceback of the function ``name`` of a file of tests when called with ``given``, whose
    ``monkeypatch`` is made there; empty when it passes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    here, there = context.Pipe(duplex=False)
    sent = {key: value for key, value in given.items() if key != "monkeypatch"}
    patched = len(sent) < len(given)
    child = context.Process(target=_run, args=(path, name, sent, patched, there))
    child.start()
    there.close()
    try:
        return here.recv()
    except EOFError:
        child.join()
        return f"the test's process ended with exit code {child.exitcode}"
    finally:
        child.join(10)
        child.kill()


def _run(path: Path, name: str, given: dict[str, Any], patched: bool, there: Connection) -> None:
    text = ""
    gc.freeze()
    try:
        function = getattr(_module(path), name)
        if patched:
            given["monkeypatch"] = pytest.MonkeyPatch()
        function(**given)
    except BaseException:
        text = traceback.format_exc()
    there.send(text)
    os._exit(0)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
