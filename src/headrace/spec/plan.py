"""A plan: which devices work on which sequences of one batch, and how."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from math import inf
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from headrace.errors import SpecError
from headrace.notebook import table_html
from headrace.spec.cluster import MOST_DEVICES
from headrace.spec.given import number, of_kind, path_of, read_json, whole
from headrace.spec.layer_plan import LayerPlan
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.strategy import Scheme, Stage, Strategy, share_layers
from headrace.units import percent_text, seconds_text

__all__ = [
    "MicroBatch",
    "NumberReader",
    "Pipeline",
    "Plan",
    "Semantics",
    "TokenOrder",
    "Working",
    "numbers_of",
    "stored_working",
]


@dataclass(slots=True)
class NumberReader:
    """Reads a sequence of ``numbers`` from index ``at`` on. Raises ValueError when there are too
    few."""

    numbers: Sequence[int]
    at: int = 0

    def take(self, count: int) -> Sequence[int]:
        """Take the next ``count`` numbers and move on."""
        self.at += count
        if count < 0 or self.at > len(self.numbers):
            raise ValueError(f"{len(self.numbers)} numbers are too few")
        return self.numbers[self.at - count : self.at]

    def parts(self, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Read one tuple for each of ``sizes``, of that many numbers."""
        bounds = list(accumulate(sizes, initial=0))
        taken = tuple(self.take(bounds[-1]))
        return (taken[start:end] for start, end in pairwise(bounds))


def numbers_of(plan: Plan, orders: Sequence[str]) -> tuple[dict[str, Any], array[int]]:
    """The decisions of ``plan`` in a compact form, which :func:`_decisions` reads: a pair of a JSON
    object of counts and texts, and one flat int64 array of everything else, one field of all
    pipelines or micro-batches after the other. Texts that repeat (schemes, layer plans, token
    ``orders``) stand in the array as indices."""
    schemes, layers = dict[str, int](), _Layers()
    pipelines, micros = plan.pipelines, plan.micro_batches
    numbers = array("q", plan.lengths.tokens)
    numbers.extend(plan.lengths.ids)
    numbers.extend(schemes.setdefault(str(p.scheme), len(schemes)) for p in pipelines)
    numbers.extend(len(p.shares) for p in pipelines)
    for pipeline in pipelines:
        numbers.extend(pipeline.ranks)
    for pipeline in pipelines:
        numbers.extend(pipeline.shares)
    numbers.extend(m.pipeline for m in micros)
    numbers.extend(layers.place(m.layers) for m in micros)
    numbers.extend(orders.index(m.order) for m in micros)
    numbers.extend(len(m.sequences) for m in micros)
    for micro in micros:
        numbers.extend(micro.sequences)
    texts = {
        "sequences": len(plan.lengths),
        "pipelines": len(pipelines),
        "micro_batches": len(micros),
        "schemes": list(schemes),
        "layers": list(layers.texts),
        "devices": plan.devices,
        "working": plan.working,
        "semantics": plan.semantics,
    }
    return texts, numbers


class _Layers:
    """Numbers the distinct layer plans by their text. The number of a plan object that was seen
    before is found by its identity, as making the text for each micro-batch would be slow."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}  # number of each text
        self._known: dict[int, int] = {}  # number of the text of each object, by its id()

    def place(self, layers: LayerPlan) -> int:
        """The index of the text of ``layers`` among ``texts``, to which it is added when new."""
        if id(layers) not in self._known:
            self._known[id(layers)] = self.texts.setdefault(str(layers), len(self.texts))
        return self._known[id(layers)]


Semantics = Literal["free", "lockstep"]
TokenOrder = Literal["natural", "zigzag"]
Working = Literal["replicated", "sharded"]

_ORDERS = get_args(TokenOrder)
_KINDS = ("working", "semantics")
_TOLD = ("predicted_s", "lower_bound_s", "planner", "seed", "why")
"""What is said of a plan besides its decisions."""


def stored_working(word: Any) -> Any:
    """``working`` as a stored file says it; older files say ``whole`` for ``replicated``."""
    return "replicated" if word == "whole" else word


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """One pipeline: its scheme and the ranks that form it.

    Attributes:
        scheme: Its tensor, context and pipeline degrees.
        ranks: Its ranks, stage by stage; within a stage tensor ranks are neighbours.
        shares: Layers of each stage; as even as can be when empty.

    Raises:
        SpecError: For ranks that are not distinct, or not as many as the scheme has.
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise SpecError unless the ranks are distinct and as many as the scheme has, and every
        stage has a layer."""
        if len(self.ranks) != self.scheme.devices:
            raise SpecError(
                f"ranks of a {self.scheme} pipeline",
                got=len(self.ranks),
                wanted=self.scheme.devices,
            )
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise SpecError("ranks of a pipeline", got=self.ranks, wanted="distinct ranks >= 0")
        stages = self.scheme.pipeline
        if self.shares and (len(self.shares) != stages or min(self.shares) < 1):
            raise SpecError(
                f"layers of the stages of a {self.scheme} pipeline",
                got=self.shares,
                wanted=f"{stages} counts >= 1",
            )

    def stages(self, layers: int) -> tuple[Stage, ...]:
        """Its stages over a model of ``layers`` layers. Raises SpecError when the layers of the
        stages are more or fewer in sum."""
        shares = self.shares or share_layers(layers, self.scheme.pipeline)
        if sum(shares) != layers:
            raise SpecError(
                "layers of the stages of a pipeline", got=f"{shares}", wanted=f"{layers} in sum"
            )
        width, start = self.scheme.width, 0
        stages: list[Stage] = []
        for index, share in enumerate(shares):
            ranks = tuple(sorted(self.ranks[index * width : (index + 1) * width]))
            stages.append(
                Stage(index=index, count=len(shares), ranks=ranks, start=start, stop=start + share)
            )
            start += share
        return tuple(stages)

    def stage_of(self, rank: int, layers: int) -> Stage:
        """The stage in which ``rank`` works. Raises SpecError when it is in none."""
        for stage in self.stages(layers):
            if rank in stage.ranks:
                return stage
        raise SpecError(f"rank {rank}", got="outside the pipeline", wanted=f"one of {self.ranks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One packed run through one pipeline.

    Attributes:
        pipeline: The index of its pipeline among those of the plan.
        sequences: Indices into the lengths of the batch, in pack order.
        layers: The option of every layer.
        order: How the tokens of the pack lie on the ranks of a group. In ``natural`` order each
            rank holds one run of the pack; in ``zigzag`` order every long document is cut into
            twice as many pieces as ranks, and rank r holds piece r from the front and piece r from
            the back.

    Raises:
        SpecError: For an order that is not known.
    """

    pipeline: int
    sequences: tuple[int, ...]
    layers: LayerPlan
    order: TokenOrder = "natural"

    def __post_init__(self) -> None:
        if self.order not in _ORDERS:
            raise SpecError(
                "token order of a micro-batch", got=repr(self.order), wanted=" or ".join(_ORDERS)
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that the ranks need to know about one step.

    Attributes:
        lengths: The lengths of the batch.
        devices: Ranks of the job; some may have no work.
        pipelines: The pipelines. A rank may belong to several, one after the other, when none of
            these has stages.
        micro_batches: The micro-batches in one global order. Each rank runs those of its pipelines
            in that order, so that ranks which share several pipelines meet their groups alike.
        predicted_s: Predicted seconds of the whole step.
        lower_bound_s: Seconds that no plan of the step beats, at most ``predicted_s``.
        working: How a pipeline of several ranks holds weights while it propagates: ``replicated``
            (each rank pulls all rows once per step) or ``sharded`` (each pulls its part, and
            methods gather a layer's rows when it runs).
        semantics: When micro-batches start: ``free`` as soon as their ranks are free, ``lockstep``
            in waves, as all ranks meet at every layer.
        planner: The planner that made it, by name.
        seed: The seed of its search.
        why: Reasons for the plan, a sentence each.
        clock: Gives the timeline of the plan, for pictures; None for a plan that was loaded, as it
            is not saved.

    Raises:
        SpecError: When a sequence is missing or doubled, a rank does not exist, the bound is above
            the prediction, or a number is none.
    """

    lengths: Lengths
    devices: int
    pipelines: tuple[Pipeline, ...]
    micro_batches: tuple[MicroBatch, ...]
    predicted_s: float
    lower_bound_s: float
    working: Working = "replicated"
    semantics: Semantics = "free"
    planner: str = "adaptive"
    seed: int = 0
    why: tuple[str, ...] = ()
    clock: Callable[[Plan], Timeline] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Raise SpecError unless each sequence is in one micro-batch, each micro-batch has a
        pipeline, every rank exists, and no rank of a staged pipeline is in another one too."""
        for name, words in (("working", get_args(Working)), ("semantics", get_args(Semantics))):
            if getattr(self, name) not in words:
                raise SpecError(
                    f"{name} of a plan", got=repr(getattr(self, name)), wanted=" or ".join(words)
                )
        _check_bound(self)
        seen = sorted(chain.from_iterable([micro.sequences for micro in self.micro_batches]))
        if seen != list(range(len(self.lengths))):
            missing = sorted(set(range(len(self.lengths))) - set(seen))
            raise SpecError(
                "sequences of a plan",
                got=f"{len(seen)} ({len(missing)} missing)",
                wanted=f"each of {len(self.lengths)} exactly once",
            )
        for pipeline in self.pipelines:
            if max(pipeline.ranks) >= self.devices:
                raise SpecError("rank", got=max(pipeline.ranks), wanted=f"< {self.devices}")
        for micro in self.micro_batches:
            if not 0 <= micro.pipeline < len(self.pipelines):
                raise SpecError(
                    "pipeline of a micro-batch",
                    got=micro.pipeline,
                    wanted=f"0 to {len(self.pipelines) - 1}",
                )
            if not micro.sequences:
                raise SpecError("micro-batch", got="no sequences", wanted="at least one")
        self._check_shared_ranks()

    def _check_shared_ranks(self) -> None:
        """Raise SpecError where a rank of a pipeline with several stages is in another pipeline
        too."""
        if all(pipeline.scheme.pipeline == 1 for pipeline in self.pipelines):
            return
        owners: dict[int, int] = {}
        for index, pipeline in enumerate(self.pipelines):
            for rank in pipeline.ranks:
                other = owners.setdefault(rank, index)
                deep = max(pipeline.scheme.pipeline, self.pipelines[other].scheme.pipeline)
                if other != index and deep > 1:
                    raise SpecError(
                        f"rank {rank}",
                        got=f"in pipelines {other} and {index}",
                        wanted="one pipeline",
                        hint="ranks of a staged pipeline work in it alone",
                    )

    @property
    def layers(self) -> int:
        """The number of layers of the model that the plan is for."""
        return len(self.micro_batches[0].layers.options) if self.micro_batches else 0

    @property
    def strategy(self) -> Strategy:
        """The schemes of the pipelines that have work."""
        used = {micro.pipeline for micro in self.micro_batches}
        return Strategy.of(self.pipelines[i].scheme for i in sorted(used))

    @property
    def gap(self) -> float:
        """How far the prediction is above the lower bound, as a fraction of the bound."""
        return self.predicted_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0

    @property
    def hash(self) -> str:
        """SHA-256 over the decisions, not the predictions. Plans of equal hashes run equally."""
        texts, numbers = numbers_of(self, _ORDERS)
        digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode())
        digest.update(numbers)
        return digest.hexdigest()

    def tokens_of(self, micro: MicroBatch) -> tuple[int, ...]:
        """The lengths of a micro-batch.

        Args:
            micro: One of the plan's micro-batches.

        Returns:
            Tokens of each of its sequences, in pack order.
        """
        return tuple(self.lengths.tokens[i] for i in micro.sequences)

    def replace(self, **changes: Any) -> Plan:
        """Copy the plan with some fields changed.

        Args:
            changes: The new values by the names of fields.

        Returns:
            The copy.

        Raises:
            SpecError: As for a new plan.
        """
        if not changes.keys() <= set(_TOLD):
            return replace(self, **changes)
        # Only what is told besides the decisions changes, and the decisions have been checked:
        # `dataclasses.replace` would check them again, which is slow for large plans.
        made = copy(self)
        for name, value in changes.items():
            object.__setattr__(made, name, value)  # the class is frozen
        _check_bound(made)
        return made

    def explain(self) -> str:
        """Say why the plan is as it is.

        Returns:
            One reason per line; empty for a plan without reasons.
        """
        return "\n".join(self.why)

    def __str__(self) -> str:
        """A few lines for people: strategy, counts, predicted and least seconds, and why the plan
        was taken."""
        rows = [
            ("strategy", str(self.strategy)),
            (
                "sequences",
                f"{len(self.lengths):,}  tokens {self.lengths.total:,}"
                f"  longest {self.lengths.longest:,}",
            ),
            ("micro-batches", f"{len(self.micro_batches)}  weights {self.working}"),
            (
                "predicted",
                f"{seconds_text(self.predicted_s)}  bound "
                f"{seconds_text(self.lower_bound_s)}  gap {percent_text(self.gap)}",
            ),
        ]
        rows += [("why" if i == 0 else "", reason) for i, reason in enumerate(self.why)]
        return "\n".join(f"{name:<14}{text}" for name, text in rows)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON, without its clock.

        Returns:
            An object that :meth:`from_json` reads back.
        """
        return {
            "lengths": self.lengths.to_json(),
            "devices": self.devices,
            "pipelines": [
                {"scheme": str(p.scheme), "ranks": list(p.ranks)}
                | ({"shares": list(p.shares)} if p.shares else {})
                for p in self.pipelines
            ],
            "micro_batches": [
                {
                    "pipeline": m.pipeline,
                    "sequences": list(m.sequences),
                    "layers": str(m.layers),
                    "order": m.order,
                }
                for m in self.micro_batches
            ],
            "predicted_s": self.predicted_s,
            "lower_bound_s": self.lower_bound_s,
            "working": self.working,
            "semantics": self.semantics,
            "planner": self.planner,
            "seed": self.seed,
            "why": list(self.why),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        """Read what :meth:`to_json` gave.

        Args:
            value: The JSON object.

        Returns:
            The plan, without a clock.

        Raises:
            SpecError: When a key is missing or a value malformed.
        """
        try:
            known = {
                text: LayerPlan.parse(text)
                for text in {m["layers"] for m in value["micro_batches"]}
            }
            _require_told(value)
            return cls(
                lengths=Lengths.from_json(value["lengths"]),
                devices=value["devices"],
                pipelines=tuple(
                    Pipeline(
                        scheme=Scheme.parse(p["scheme"]),
                        ranks=_wholes("rank", p["ranks"]),
                        shares=_wholes("layers of a stage", p.get("shares", ())),
                    )
                    for p in value["pipelines"]
                ),
                micro_batches=tuple(
                    MicroBatch(
                        pipeline=whole("pipeline of a micro-batch", m["pipeline"]),
                        sequences=_wholes("sequence", m["sequences"]),
                        layers=known[m["layers"]],
                        order=m.get("order", "natural"),  # plans of old had no other
                    )
                    for m in value["micro_batches"]
                ),
                predicted_s=value["predicted_s"],
                lower_bound_s=value["lower_bound_s"],
                working=stored_working(value["working"]),
                semantics=value["semantics"],
                planner=value["planner"],
                seed=value["seed"],
                why=tuple(value["why"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError("plan", got=f"{type(error).__name__}: {error}", wanted="its JSON form")

    def to_bytes(self) -> bytes:
        """The plan as bytes, for ranks on machines of the same byte order.

        Returns:
            A line of JSON, then the decisions as int64 numbers, as they lie in memory.
        """
        texts, numbers = numbers_of(self, _ORDERS)
        told = {name: getattr(self, name) for name in _TOLD}
        return json.dumps(texts | told).encode() + b"\n" + numbers.tobytes()

    @classmethod
    def from_bytes(cls, value: bytes) -> Plan:
        """Read what :meth:`to_bytes` gave.

        Args:
            value: The bytes.

        Returns:
            The plan, without a clock.

        Raises:
            SpecError: For anything else.
        """
        head, _, tail = value.partition(b"\n")
        try:
            texts: dict[str, Any] = json.loads(head)
            numbers = array("q")
            numbers.frombytes(tail)
            reader = NumberReader(numbers.tolist())
            given: dict[str, Any] = {name: texts[name] for name in ("devices", *_KINDS, *_TOLD)}
            return cls(**_decisions(texts, reader) | given | {"why": tuple(given["why"])})
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise SpecError("plan", got=f"{type(error).__name__}: {error}", wanted="its bytes")

    def save(self, path: str | Path) -> None:
        """Write the plan to a file as JSON.

        Args:
            path: The file.

        Raises:
            SpecError: When it cannot be written.
        """
        place = path_of("file of a plan", path)
        try:
            place.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")
        except OSError as error:
            raise SpecError(f"plan {path}", got=error.strerror, wanted="a writable file")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file of :meth:`save`.

        Args:
            path: The file.

        Returns:
            The plan; to draw it, give ``hr.draw`` a timeline, as its clock is not saved.

        Raises:
            SpecError: When the file cannot be read or is malformed.
        """
        return cls.from_json(read_json(path, f"plan {path}"))

    def draw(self, path: str | Path, timeline: Timeline | None = None) -> NoReturn:
        """Renamed: use ``hr.draw(plan, path)``.

        Args:
            path: As for ``hr.draw``.
            timeline: As for ``hr.draw``.

        Raises:
            SpecError: Always; it names the new way.
        """
        raise SpecError("plan.draw", got="its former name", wanted="hr.draw(plan, path)")

    def _repr_html_(self) -> str:
        """The lines of ``str`` as an HTML table, which notebooks show."""
        return table_html(str(self))


def _check_bound(plan: Plan) -> None:
    """Raise SpecError for seconds that are none, and for a lower bound above the predicted ones,
    beyond rounding."""
    if not 0 <= plan.lower_bound_s <= plan.predicted_s * (1 + 1e-9) < inf:
        raise SpecError(
            "lower bound of a plan",
            got=f"{plan.lower_bound_s} s",
            wanted=f"at most the predicted {plan.predicted_s} s, which end",
        )


def _require_told(value: Mapping[str, Any]) -> None:
    """Raise SpecError for numbers and texts of a plan in JSON that are of another kind."""
    whole("devices of a plan", value["devices"], least=1, most=MOST_DEVICES)
    number("predicted seconds of a plan", value["predicted_s"], least=0)
    number("lower bound of a plan", value["lower_bound_s"], least=0)
    whole("seed of a plan", value["seed"])
    for text in (value["planner"], *of_kind("reasons of a plan", value["why"], list)):
        of_kind("planner or reason of a plan", text, str)


def _wholes(what: str, values: Iterable[object]) -> tuple[int, ...]:
    """The whole numbers of a list in JSON. Raises SpecError, about ``what``, for other values."""
    return tuple(whole(what, value) for value in values)


def _decisions(texts: dict[str, Any], numbers: NumberReader) -> dict[str, Any]:
    """The fields ``lengths``, ``pipelines`` and ``micro_batches`` of the plan that
    :func:`numbers_of` wrote, read in the same order. Micro-batches with equal layer plans share one
    object."""
    count, pipes, micros = (texts[name] for name in ("sequences", "pipelines", "micro_batches"))
    lengths = Lengths(tokens=tuple(numbers.take(count)), ids=tuple(numbers.take(count)))
    schemes = tuple(map(Scheme.parse, texts["schemes"]))
    layer_plans = tuple(map(LayerPlan.parse, texts["layers"]))
    scheme_of_pipes = [schemes[i] for i in numbers.take(pipes)]
    share_counts = numbers.take(pipes)
    ranks_of_pipes = list(numbers.parts([scheme.devices for scheme in scheme_of_pipes]))
    pipelines = tuple(
        Pipeline(scheme=scheme, ranks=ranks, shares=shares)
        for scheme, ranks, shares in zip(
            scheme_of_pipes, ranks_of_pipes, numbers.parts(share_counts), strict=True
        )
    )
    # Columns of the micro-batches: pipeline, layer plan, token order, number of sequences.
    columns = [numbers.take(micros) for _ in range(4)]
    micro_batches = tuple(
        MicroBatch(
            pipeline=pipeline,
            layers=layer_plans[layers],
            order=_ORDERS[order],
            sequences=sequences,
        )
        for pipeline, layers, order, sequences in zip(
            *columns[:3], numbers.parts(columns[3]), strict=True
        )
    )
    return {"lengths": lengths, "pipelines": pipelines, "micro_batches": micro_batches}
