"""What a micro-batch costs one stage of a pipeline, by parallel scheme (Hydraulis, appendix C).

    t = sum_i (a l_i^2 + b l_i) + c

for sequences of l_i tokens packed into one micro-batch, forward and backward. A pipeline of P
stages that works on micro-batches j takes sum_j t_j + (P - 1) max_j t_j.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.costs.saving import load_costs
from headrace.errors import CostError, HeadraceError
from headrace.spec.strategy import Scheme

__all__ = ["PipelineCosts", "SchemeCost"]

KIND = "pipelines"
# Tables of tokens that fit are made in steps of this many.
_TOKEN_STEP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeCost:
    """Seconds and room of one scheme.

    Attributes:
        scheme: The degrees of its pipelines.
        a_s: Seconds per squared token of a sequence on one stage, forward and backward.
        b_s: Seconds per token.
        c_s: Seconds per micro-batch.
        max_length: Tokens that a micro-batch may hold, by the devices of the cluster: the more
            devices share the optimizer's state, the more. Nothing fits where it is zero or
            negative.
        util_length: Tokens from which on a micro-batch keeps its devices busy.
        name: How its file writes the scheme, such as ``tp1-pp4``.
    """

    scheme: Scheme
    a_s: float
    b_s: float
    c_s: float
    max_length: Mapping[int, int]
    util_length: int = 1
    name: str = ""

    def __post_init__(self) -> None:
        """Name the costs by their scheme where they have no name; raises CostError for numbers out
        of range."""
        if not self.name:
            object.__setattr__(self, "name", str(self.scheme))
        for name in ("a_s", "b_s", "c_s"):
            value = getattr(self, name)
            real = isinstance(value, int | float) and not isinstance(value, bool)
            if not real or not math.isfinite(value) or value < 0:
                raise CostError(f"{name} of {self.name}", got=repr(value), wanted="a number >= 0")
        if self.a_s == 0 and self.b_s == 0:
            raise CostError(f"costs of {self.name}", got="a_s = b_s = 0", wanted="one above 0")
        if not self.max_length:
            raise CostError(f"max_length of {self.name}", got="none", wanted="tokens by devices")
        for devices, tokens in self.max_length.items():
            if isinstance(tokens, bool) or not isinstance(tokens, int) or devices < 1:
                what = f"max_length of {self.name} at {devices} devices"
                raise CostError(what, got=repr(tokens), wanted="an int, at one device or more")
        util = self.util_length
        if isinstance(util, bool) or not isinstance(util, int) or util < 0:
            raise CostError(f"util_length of {self.name}", got=repr(util), wanted="an int >= 0")

    def spread(self, degree: int, more: float) -> SchemeCost:
        """The costs of the scheme with ``degree`` times its context-parallel ranks, by the rules of
        :meth:`PipelineCosts.with_context`; ``more`` is the fraction of a token's seconds that
        communication adds."""
        scheme = replace(self.scheme, context=degree * self.scheme.context)
        return SchemeCost(
            scheme=scheme,
            a_s=self.a_s / degree,
            c_s=self.c_s,
            b_s=self.b_s * (1 + more * (degree - 1) / degree) / degree,
            max_length={devices: degree * room for devices, room in self.max_length.items()},
            util_length=degree * self.util_length,
        )

    def sequence_s(self, tokens: int) -> float:
        """Seconds that a sequence of ``tokens`` tokens adds to its micro-batch on each stage."""
        return (self.a_s * tokens + self.b_s) * tokens

    def micro_batch_s(self, tokens: Sequence[int]) -> float:
        """Seconds of a micro-batch on one stage, forward and backward, given the tokens of each of
        its sequences."""
        return sum(map(self.sequence_s, tokens)) + self.c_s

    def most_tokens(self, devices: int) -> int | None:
        """Tokens of a micro-batch in a cluster of ``devices``; None below the smallest listed.

        What a device holds besides activations is A + B / N, with A of the scheme and B the state
        that all N devices share. So between two listed clusters the room is linear in 1 / N; it
        is rounded down as the listed ones are. Above the largest, the largest's is taken: there is
        room for at least that much. Below the smallest nothing is promised.
        """
        if devices in self.max_length:
            return self.max_length[devices]
        known = sorted(self.max_length)
        if devices < known[0]:
            return None
        if devices > known[-1]:
            return self.max_length[known[-1]]
        low, high = next(pair for pair in pairwise(known) if pair[0] < devices < pair[1])
        # How far 1 / devices is on the way from 1 / low to 1 / high.
        share = (1 / low - 1 / devices) / (1 / low - 1 / high)
        room = self.max_length[low] + share * (self.max_length[high] - self.max_length[low])
        return math.floor(room / _TOKEN_STEP) * _TOKEN_STEP

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        scheme = self.scheme
        return {
            "scheme": self.name,
            "tensor": scheme.tensor,
            "context": scheme.context,
            "pipeline": scheme.pipeline,
            "devices": scheme.devices,
            "a_s": self.a_s,
            "b_s": self.b_s,
            "c_s": self.c_s,
            "max_length": {str(devices): tokens for devices, tokens in self.max_length.items()},
            "util_length": self.util_length,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SchemeCost:
        """The inverse of :meth:`to_json`. Raises CostError when a degree contradicts the name."""
        scheme = Scheme.parse(value["scheme"])
        for name in ("tensor", "context", "pipeline", "devices"):
            if value.get(name, getattr(scheme, name)) != getattr(scheme, name):
                raise CostError(
                    f"{name} of {value['scheme']}", got=value[name], wanted=getattr(scheme, name)
                )
        return cls(
            scheme=scheme,
            a_s=value["a_s"],
            b_s=value["b_s"],
            c_s=value["c_s"],
            max_length={int(n): tokens for n, tokens in value["max_length"].items()},
            util_length=value.get("util_length", 1),
            name=value["scheme"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """Costs of every scheme that a pipeline may have.

    A file may list schemes with context parallelism, or have them derived from those that it lists
    by ``"context": {"degrees": [2, 4], "more": 0.05}`` (:meth:`with_context`); measured ones win.

    Attributes:
        schemes: The costs of each scheme; a scheme may have several entries that trade seconds for
            room, each with a name of its own, where a file has one.
        facts: Where the costs come from, in words that are carried along.
    """

    schemes: tuple[SchemeCost, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise CostError for no scheme, and for two entries of one name."""
        if not self.schemes:
            raise CostError("schemes of the costs", got="none", wanted="at least one")
        _once([cost.name for cost in self.schemes])

    @property
    def known_devices(self) -> tuple[int, ...]:
        """Sizes of clusters that some scheme lists, smallest first."""
        return tuple(sorted({n for cost in self.schemes for n in cost.max_length}))

    def with_context(self, degrees: Sequence[int], more: float) -> PipelineCosts:
        """The costs with more schemes: each scheme without context parallelism is added with each
        of ``degrees``, unless it is listed already.

        Each of d ranks has 1 / d of a sequence's attention and of its tokens, so d times the tokens
        fit into a micro-batch and keep the devices busy. A token costs the fraction
        ``more (d - 1) / d`` more, as a ring sends (d - 1) / d of keys and values; seconds per
        micro-batch are the same. Raises CostError for degrees below 2 and for a negative ``more``.
        """
        if not degrees:
            raise CostError("context degrees", got="none", wanted="at least one")
        for degree in degrees:
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 2:
                raise CostError("context degree", got=repr(degree), wanted="an int of at least 2")
        real = isinstance(more, int | float) and not isinstance(more, bool)
        if not real or not math.isfinite(more) or more < 0:
            raise CostError("more of context", got=repr(more), wanted="a number >= 0")
        known = {cost.scheme for cost in self.schemes}
        derived = [
            made
            for cost in self.schemes
            if cost.scheme.context == 1
            for degree in dict.fromkeys(degrees)
            if (made := cost.spread(degree, more)).scheme not in known
        ]
        facts = {**self.facts, "derived": {"degrees": list(degrees), "more": more}}
        return PipelineCosts(schemes=(*self.schemes, *derived), facts=facts)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {"kind": KIND, **self.facts, "schemes": [cost.to_json() for cost in self.schemes]}

    @classmethod
    def from_json(cls, value: Any) -> PipelineCosts:
        """The inverse of :meth:`to_json`. Raises CostError that names the entry at fault."""
        kind = value.get("kind") if isinstance(value, Mapping) else type(value).__name__
        if kind != KIND:
            raise CostError("kind of the costs", got=repr(kind), wanted=repr(KIND))
        entries = value.get("schemes")
        if not isinstance(entries, list):
            raise CostError("schemes of the costs", got=type(entries).__name__, wanted="a list")
        schemes = list[SchemeCost]()
        for number, entry in enumerate(entries):
            what = f"scheme {number} of the costs"
            if not isinstance(entry, Mapping):
                raise CostError(what, got=type(entry).__name__, wanted="an object")
            try:
                schemes.append(SchemeCost.from_json(entry))
            except KeyError as error:
                raise CostError(what, got=f"no {error}", wanted="scheme, a_s, b_s, c_s, max_length")
            except CostError as error:
                raise CostError(f"{what}: {error}")
            except (HeadraceError, TypeError, ValueError, AttributeError) as error:
                raise CostError(what, got=f"{error}", wanted="its JSON form")
        _once([str(cost.scheme) for cost in schemes])
        no_facts = "kind", "schemes", "context"  # every other entry is a remark, and kept
        facts = {name: fact for name, fact in value.items() if name not in no_facts}
        return _with_context_parallel(
            cls(schemes=tuple(schemes), facts=facts), value.get("context")
        )

    @classmethod
    def load(cls, path: str | Path) -> PipelineCosts:
        """Read a file. Raises CostError as :meth:`from_json`, or when it cannot be read."""
        return load_costs(path, cls.from_json)


def _with_context_parallel(costs: PipelineCosts, context: Any) -> PipelineCosts:
    """The costs with the context-parallel schemes that their file derives: ``context`` is its entry
    ``{"degrees": [...], "more": ...}``, or None without one. Raises CostError when malformed."""
    if context is None:
        return costs
    if (
        not isinstance(context, Mapping)
        or not isinstance(context.get("degrees"), list)
        or ("more" not in context)
    ):
        raise CostError(
            "context of the costs", got=repr(context), wanted='{"degrees": [...], "more": ...}'
        )
    return costs.with_context(context["degrees"], context["more"])


def _once(names: Sequence[str]) -> None:
    """Raise CostError for a name that is in ``names`` twice."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise CostError(f"costs of {twice}", got="two entries", wanted="one")
