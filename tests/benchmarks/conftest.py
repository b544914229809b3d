"""The benchmarks' modules are imported by name (``pythonpath``); all of them need torch."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]
