"""Models of tokens in a loop: samples are packed in rows, attention meets other ranks' tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from headrace.adopt.labels import predicted
from headrace.adopt.placement import Exchange, LocalBatch, group_parts
from headrace.adopt.token_probe import logits_of, loss_of
from headrace.adopt.tokens import Adopted
from headrace.comm.mesh import Groups
from headrace.engine.sample_order import TokenReader, packed
from headrace.engine.spread_model import Item, Levels, LoopPart, Pack
from headrace.ops.loss import IGNORED
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder

__all__ = ["TokenModel"]

_EXCHANGES = ("ulysses", "ring")


class TokenModel:
    """An adopted model. Labels are moved to the places that predict them when a sample is read."""

    def __init__(
        self, adopted: Adopted, *, label_name: str, exchange: Exchange | None = None
    ) -> None:
        self.adopted = adopted
        self.exchanges: tuple[str, ...] = (exchange,) if exchange else _EXCHANGES
        self._reader = TokenReader(
            tokens=adopted.tokens, kind=adopted.labels, label_name=label_name
        )
        adopted.labels = "same"  # they are moved when a sample is read
        self.read, self.length = self._reader.read, self._reader.length
        self._label_name, self._first = label_name, 0

    @property
    def inner(self) -> torch.nn.Module:
        """The user's own module."""
        return self.adopted.inner

    @property
    def whole(self) -> bool:
        """Where it is compiled: its layers alone are not what runs."""
        return self.adopted.door == "graph"

    def begin(self, sample: Item, device: str) -> Callable[[], None]:
        """Probe it, and install what makes it work on parts."""
        row = {name: value.to(device) for name, value in packed([sample]).items()}
        self.adopted.probe(row)
        self._first = self.adopted.first_place({})
        return self.adopted.install()

    def packs(self, samples: Sequence[Item]) -> list[Pack]:
        """All in one row."""
        row = packed(samples)
        row["position_ids"] = row["position_ids"] + self._first
        labels = row["labels"]
        return [Pack(values=row, tokens=labels.shape[1], targets=int((labels != IGNORED).sum()))]

    def made(self, sample: Item, lengths: Sequence[int], ranks: int, *, document: int) -> Pack:
        """Its tokens again and again."""
        parts = [min(document, n - start) for n in lengths for start in range(0, n, document)]
        row = packed([{k: _repeated(v, n) for k, v in sample.items()} for n in parts])
        tokens = sum(lengths)
        return Pack(values=row, tokens=tokens, targets=tokens)

    def ranks_for(self, pack: Pack, ranks: Members) -> Members:
        """As many as it has tokens."""
        return ranks[: pack.tokens]

    def groups_of(self, ranks: Members) -> list[Members]:
        """All ranks, and the blocks of meshes."""
        return group_parts(ranks)

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make groups."""
        self.adopted.prepare(groups)

    def place(
        self,
        pack: Pack,
        ranks: Members,
        *,
        targets: int,
        exchange: str | None,
        groups: Groups | None = None,
    ) -> LoopPart:
        """This rank's tokens."""
        shard = self.adopted.place(
            pack.values,
            ranks,
            targets=targets,
            exchange=cast("Exchange | None", exchange),
            groups=groups,
        )
        return self._part(shard)

    def take(self, part: LoopPart) -> None:
        """Work on a part."""
        self.adopted.take(part.shard)

    def number(self, outputs: Any) -> torch.Tensor:
        """Its loss, or the sizes of its logits."""
        loss = loss_of(outputs)
        return logits_of(outputs).float().logsumexp(-1).sum() if loss is None else loss

    def order(self, exchange: str) -> TokenOrder:
        """Balanced where ranks do not have all tokens of a head."""
        return "natural" if exchange == _EXCHANGES[0] else "zigzag"

    def levels(self, layers: Sequence[torch.nn.Module]) -> Levels | None:
        """Those of blocks that can be told apart."""
        levels = self.adopted.levels(layers)
        if levels is None:
            return None
        return Levels(choose=levels.choose, known=("attention", "full"))

    def forget(self) -> None:
        """Nothing is learnt from forwards."""

    def shard(self, batch: Any) -> LoopPart:
        """This rank's tokens of a batch as users have them."""
        given, name = dict(batch), self._label_name
        if name in given:
            given[name] = predicted(given[name], self._reader.kind)
        return self._part(self.adopted.shard(given))

    def _part(self, shard: LocalBatch) -> LoopPart:
        return LoopPart(
            inputs=self.adopted.accepted(shard),
            labels=shard.labels,
            group=shard.placement.group,
            targets=shard.targets,
            tokens=shard.placement.width * shard.placement.rows,
            shard=shard,
        )


def _repeated(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` values, begun again where there are not as many."""
    return x.repeat(-(-count // len(x)), *[1] * (x.dim() - 1))[:count]
