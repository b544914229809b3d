"""Going on when a rank runs out of memory in the middle of a step of a loop.

The ranks of its group wait for it in a collective; others do not know. It asks for a meeting in the
store, leaves its groups, whose connections break, and comes to the meeting that ends every attempt
at a step, in the world that the user made, where nothing is broken. Those who wait see the broken
connection, or look into the store between two slices of waiting, and come too. Then all leave their
groups, get a thriftier plan of the same batch, and take it: nothing was written before. On gloo,
with replicated weights: nobody watches here who would abort what waits in NCCL, and a gather of
FSDP2 cannot be left.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from headrace.comm import waiting
from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.comm.ranks import is_broken_connection
from headrace.errors import HeadraceError
from headrace.native.machine import is_out_of_memory
from headrace.spec.step import Exhausted

__all__ = ["LoopRecovery"]


@dataclass(slots=True, kw_only=True)
class LoopRecovery:
    """One rank's part in it. ``possible``: whether groups can be left at all."""

    groups: Groups
    possible: bool
    _attempt: int = 0
    _mine: str | None = field(default=None)
    _broken: bool = False

    def begin(self) -> None:
        """An attempt at a step begins."""
        self._attempt += 1
        self._mine, self._broken = None, False
        if self.possible:
            waiting.begin()
            waiting.heed(self._asked)

    def survives(self, error: BaseException, action: str) -> bool:
        """Whether the step can be taken again after an error in ``action``: this rank ran out of
        memory, which the others are told, or another did."""
        if not self.possible:
            return False
        if is_out_of_memory(error):
            self._mine = action
            _store().set(self._key, action)
        elif not (is_broken_connection(error) and self._asked()):
            return False
        self._broken = True
        return True

    def meet(self, loss: float) -> tuple[float, Exhausted | None]:
        """The end of an attempt: the sum of all ranks' losses, and who ran out of memory, if anyone
        did. Collective."""
        if self._broken:
            self.groups.leave()
        waiting.heed(lambda: False)
        mine = json.dumps([loss, self._mine]).encode()
        said = [json.loads(one) for one in gather_bytes(mine, self.groups.world)]
        found = Exhausted(actions=tuple((r, text) for r, (_, text) in enumerate(said) if text))
        if found.actions and not self._broken:
            self.groups.leave()
        if self._broken and not found.actions:
            raise HeadraceError("step", got="a broken connection", wanted="ranks that all answer")
        return sum(part for part, _ in said), found if found.actions else None

    @property
    def _key(self) -> str:
        return f"headrace/loop/out of memory/{self._attempt}"

    def _asked(self) -> bool:
        return bool(_store().check([self._key]))


def _store() -> dist.Store:
    """Where the ranks of the user's world met."""
    found: Callable[[], dist.Store] = dist.distributed_c10d._get_default_store  # noqa: SLF001
    return found()
