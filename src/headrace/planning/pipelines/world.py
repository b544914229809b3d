"""The schemes that a cluster can run, and what each may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

from headrace.costs.pipeline_costs import PipelineCosts, SchemeCost
from headrace.errors import CostError, InfeasiblePlan, SpecError

__all__ = ["Counts", "Pipe", "World"]

Counts = tuple[int, ...]
"""A strategy: how many pipelines of each of a world's pipes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """A pipeline of one scheme in this cluster: ``cap`` tokens at most in a micro-batch, which
    takes ``sum(a l^2 + b l) + c`` seconds on each of ``stages`` stages."""

    name: str
    devices: int
    stages: int
    a: float
    b: float
    c: float
    cap: int
    util: int

    def sequence_s(self, tokens: int) -> float:
        """Seconds that a sequence adds to its micro-batch."""
        return (self.a * tokens + self.b) * tokens

    def alone_s(self, tokens: int) -> float:
        """Seconds of a pipeline that has only this sequence."""
        return self.stages * (self.sequence_s(tokens) + self.c)

    def count(self, work_s: float, tokens: float, longest_s: float) -> int:
        """How many micro-batches to expect for sequences of ``work_s`` seconds together, the
        longest of them ``longest_s``.

        One stage: the fewest that hold the tokens. More: with V alike micro-batches a pipeline
        takes work + c V + (P - 1) max(longest, work / V), least at V = sqrt(work (P - 1) / c), or
        where the longest sequence fills a micro-batch alone. No more than keep the devices busy,
        by ``util`` tokens each.
        """
        least = max(1, ceil(tokens / self.cap))
        if self.stages == 1 or work_s <= 0:
            return least
        even = work_s / longest_s if longest_s > 0 else 1.0
        if self.c > 0:
            even = min(even, sqrt(work_s * (self.stages - 1) / self.c))
        most = max(least, int(tokens // self.util))
        floor = max(least, int(even))
        if floor >= most:
            return most
        bubbles = self.stages - 1
        low = self.c * floor + bubbles * max(longest_s, work_s / floor)
        high = self.c * (floor + 1) + bubbles * max(longest_s, work_s / (floor + 1))
        return floor if low <= high else floor + 1

    def load_s(self, work_s: float, tokens: float, longest_s: float) -> float:
        """Seconds to expect of a pipeline, its micro-batches as even as can be: what they take
        never less unless more of them are made than can be needed."""
        if work_s <= 0:
            return 0.0
        if self.stages == 1:
            return work_s + self.c * max(1, -(-tokens // self.cap))
        v = self.count(work_s, tokens, longest_s)
        return work_s + self.c * v + (self.stages - 1) * (max(longest_s, work_s / v) + self.c)

    def usable_s(self, limit_s: float, longest_s: float, least: int = 1) -> float:
        """Seconds of work that end within ``limit_s`` in ``least`` micro-batches or more.

        With V micro-batches, work + c V + (P - 1) (max(longest, work / V) + c) <= limit. More of
        them help until the longest sequence fills one, or their constants cost more than the
        bubbles.
        """
        if self.stages == 1:
            return limit_s - self.c * least
        bubbles = self.stages - 1
        rest_s = limit_s - bubbles * self.c
        if rest_s <= 0:
            return 0.0
        count = (rest_s - bubbles * longest_s) / (longest_s + self.c)
        if self.c > 0:
            count = min(count, sqrt(limit_s * bubbles / self.c) - bubbles)
        v = max(least, int(count + 0.5), 1)
        by_count = (rest_s - self.c * v) * v / (v + bubbles)
        return min(by_count, rest_s - self.c * v - bubbles * longest_s)

    def run_s(
        self, sums: Sequence[float], begin: int, end: int, before: float, tokens: int,
        longest_s: float,
    ) -> float:  # fmt: skip
        """:meth:`load_s` of a run of sequences, longest first, with the sums of their seconds
        before each; ``before + sums[end]`` are all seconds of work, ``longest_s`` the longest's.

        Sequences are whole: of the m V + 1 longest some micro-batch has m + 1, together no less
        than the m + 1 shortest of them.
        """
        work_s, n, bubbles = before + sums[end], end - begin, self.stages - 1
        middle = self.count(work_s, tokens, longest_s)
        least, best = max(1, -(-tokens // self.cap)), inf
        most = max(least, min(middle + 2, n, tokens // self.util))
        for v in range(max(least, min(middle - 2, most)), most + 1):
            level_s, several = max(longest_s, work_s / v), (n - 1) // v
            if several:
                last = begin + several * v + 1
                level_s = max(level_s, sums[last] - sums[last - several - 1],
                              sums[begin + v + 1] - sums[begin + v - 1])  # fmt: skip
            best = min(best, work_s + self.c * v + bubbles * (level_s + self.c))
        return best

    def pipeline_s(self, micro_batches: Sequence[float]) -> float:
        """Seconds of a pipeline whose micro-batches take these on each stage."""
        if not micro_batches:
            return 0.0
        return sum(micro_batches) + (self.stages - 1) * max(micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A cluster of ``devices`` and the pipes that fit it, the roomiest first. ``parameters`` are
    the model's, as far as the costs tell."""

    devices: int
    pipes: tuple[Pipe, ...]
    parameters: int | None = None

    @classmethod
    def of(cls, costs: PipelineCosts, devices: int) -> World:
        """Raises SpecError for fewer than one device, CostError when the costs say nothing of so
        few devices, InfeasiblePlan when no scheme fits them."""
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise SpecError("devices", got=repr(devices), wanted="an int >= 1")
        known = costs.known_devices
        if devices < known[0]:
            listed = ", ".join(map(str, known))
            raise CostError(
                "devices", got=devices, wanted=f"at least {known[0]}",
                hint=f"the costs list what fits memory at {listed} devices",
            )  # fmt: skip
        pipes = [_pipe(cost, devices) for cost in costs.schemes]
        fitting = [pipe for pipe in pipes if pipe.cap > 0 and pipe.devices <= devices]
        if not fitting:
            least = min(pipes, key=lambda pipe: (pipe.cap <= 0, pipe.devices))
            holds = f"{least.name} takes {least.devices} and holds {max(0, least.cap)} tokens"
            raise InfeasiblePlan(
                "no scheme fits the devices", got=devices, wanted="a scheme with room for tokens",
                hint=holds,
            )  # fmt: skip
        fitting.sort(key=lambda pipe: (-pipe.cap, pipe.devices, pipe.stages, pipe.name))
        return cls(devices=devices, pipes=tuple(fitting), parameters=_parameters(costs))

    def require(self, lengths: Sequence[int], iteration: int) -> None:
        """Raise SpecError for an empty batch or a length that is none, InfeasiblePlan for a
        sequence that no scheme holds."""
        where = f"iteration {iteration}"
        if not lengths:
            raise SpecError(f"lengths of {where}", got="none", wanted="at least one sequence")
        for i, tokens in enumerate(lengths):
            if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
                raise SpecError(f"length {i} of {where}", got=repr(tokens), wanted="an int >= 1")
        longest = max(lengths)
        widest = self.pipes[0]
        if longest > widest.cap:
            raise InfeasiblePlan(
                f"sequence {lengths.index(longest)} of {where} fits no scheme",
                got=f"{longest:,} tokens", wanted=f"at most {widest.cap:,}",
                hint=f"{widest.name} on {self.devices} devices holds the most",
            )  # fmt: skip

    def used(self, counts: Counts) -> int:
        """Devices of a strategy."""
        return sum(n * pipe.devices for n, pipe in zip(counts, self.pipes, strict=True))

    def text(self, counts: Counts) -> str:
        """``1*tp16 + 6*tp8``."""
        terms = [
            (-pipe.devices, f"{n}*{pipe.name}")
            for n, pipe in zip(counts, self.pipes, strict=True)
            if n
        ]
        return " + ".join(term for _, term in sorted(terms, key=lambda term: term[0]))

    def homogeneous(self) -> list[Counts]:
        """As many pipelines of one scheme as there is room for, of every scheme."""
        return [
            tuple(self.devices // pipe.devices if j == k else 0 for j in range(len(self.pipes)))
            for k, pipe in enumerate(self.pipes)
        ]


def _parameters(costs: PipelineCosts) -> int | None:
    """12 h^2 a layer, if the costs say how many layers of what width."""
    facts = costs.facts.get("architecture")
    if not isinstance(facts, Mapping):
        return None
    layers, hidden = facts.get("layers"), facts.get("hidden")
    if isinstance(layers, int) and isinstance(hidden, int):
        return 12 * layers * hidden**2
    return None


def _pipe(cost: SchemeCost, devices: int) -> Pipe:
    return Pipe(
        name=cost.name, devices=cost.scheme.devices, stages=cost.scheme.pipeline,
        a=cost.a_s, b=cost.b_s, c=cost.c_s,
        cap=cost.most_tokens(devices) or 0, util=max(1, cost.util_length),
    )  # fmt: skip
