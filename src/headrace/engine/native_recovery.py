"""Going on when a device runs out of memory in the middle of a step.

Nothing is written before the update, so a step that failed before it can be taken again: all ranks
leave what they wait in, meet anew, agree on who ran out, and get a thriftier plan of the same
batch. Randomness is keyed by sample and step, so the loss is the one it would have been.
"""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass, field

from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.comm.rerendezvous import Rerendezvous
from headrace.comm.waiting import freed
from headrace.errors import HeadraceError
from headrace.native.executor import Executor
from headrace.native.machine import give_back_memory, is_out_of_memory
from headrace.spec.step import Exhausted

__all__ = ["Recovery"]


@dataclass(slots=True, kw_only=True)
class Recovery:
    """One rank's part in going on."""

    rerendezvous: Rerendezvous
    groups: Groups
    _mine: str | None = field(default=None, init=False)

    def possible(self, error: Exception, executor: Executor) -> bool:
        """Whether the step that ended with ``error`` can be taken again: some rank ran out of
        memory, and nothing was written. Tells the others when it was this one; not while groups
        are made, from which others cannot be freed. Once some rank asks to meet anew, any error of
        another may be what aborted transfers left: it may have read a size from there."""
        self._mine = None
        if executor.written:
            return False
        if is_out_of_memory(error) and not freed():
            if executor.prepared:
                self._mine = executor.action
                self.rerendezvous.ask()
            return executor.prepared
        return self.rerendezvous.asked()

    def meet(self, executor: Executor) -> Exhausted:
        """Meet the other ranks anew, after :meth:`possible`. No exception of the failed step may be
        alive: its frames hold what the step held. Collective. Raises HeadraceError when it was
        nobody's memory."""

        def let_go() -> None:
            executor.storage.forget_layouts()
            gc.collect()  # a transfer in a cycle would still wait in the old world
            give_back_memory(self.groups.device)

        self.rerendezvous.meet_anew(self.groups, let_go)
        said = gather_bytes(json.dumps(self._mine).encode(), self.groups.world)
        told = [json.loads(text) for text in said]
        found = Exhausted(actions=tuple((r, text) for r, text in enumerate(told) if text))
        if not found.actions:
            raise HeadraceError("step", got="a broken connection", wanted="ranks that all answer")
        return found
