"""Runs a script whose trainer shards weights, on CPUs: python sharded_on_cpus.py SCRIPT ...

Accelerate shards on GPUs only. What it does there works on CPUs too, once it takes their ranks for
those of GPUs.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments

own = TrainingArguments.__post_init__


def sharded(self: Any) -> None:
    own(self)
    assert self.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


TrainingArguments.__post_init__ = sharded
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
