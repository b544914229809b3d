"""Batches that are given: a step, or a forward alone, of samples that come when they are asked for.

    run = headrace.attach(model, optimizer, longest="8Ki", batch_tokens="64Ki")
    for micro in run.step(samples):         # planned now, and run by the engine of every loop
        micro.backward(loss(model(**micro.inputs), micro))
    values = run.map(samples, fn)           # forwards only
    run.backward(samples, fn, gradients)    # a step with the gradients of these values

All ranks give the same samples, or each gives its own (:mod:`headrace.engine.own_samples`). Before
anything is planned they tell each other what they ask for and what samples they gave, so that a
rank that asks for something else, gives other samples, cannot read its own or left a step half way
is named on all of them, with nothing trained.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate
from typing import Any

import torch

from headrace.adopt.samples import packed
from headrace.adopt.spread_model import Item, SampleReader, SpreadModel
from headrace.adopt.token_model import TokenModel
from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.comm.ranks import is_broken_connection
from headrace.engine.own_samples import OwnSamples, field_types
from headrace.engine.sample_order import LoopBatch, fingerprint_of
from headrace.engine.step_engine import RunningStep
from headrace.errors import DataError, HeadraceError, PlanMismatch, SpecError
from headrace.spec.lengths import Lengths
from headrace.units import parse_count

__all__ = ["GivenOrder", "given_order", "meet_to", "require_fitting", "unfinished"]

_MADE = 64
"""Tokens of an example that is made up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Given:
    """Samples that are given, by this rank or by all together.

    Attributes:
        items: The samples, where they are here.
        units: Which samples are planned as one.
        counts: Tokens of each sample.
        beside: What goes with each sample, where anything does.
    """

    items: list[Item] = field(default_factory=list, repr=False)
    units: list[tuple[int, ...]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    beside: Sequence[Item] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of what is planned as one."""
        return [sum(self.counts[i] for i in unit) for unit in self.units]

    @property
    def shown(self) -> str:
        """What it is, for people."""
        return f"{len(self.counts)} samples of {sum(self.counts):,} tokens: {self.counts[:8]}"

    def beside_of(self, sample: int) -> Item:
        """What goes with a sample."""
        return self.beside[sample] if self.beside else {}

    def fingerprint(self) -> str:
        """A hash of all values."""
        text = f"{fingerprint_of(self.items)} {self.units} {fingerprint_of(self.beside)}"
        return sha256(text.encode()).hexdigest()

    def told(self, own: bool) -> dict[str, Any]:
        """What other ranks must know of it, where each rank has its own."""
        if not own:
            return {}
        fields = field_types(self.items[0]) if self.items else None
        return {"counts": self.counts, "units": self.units, "fields": fields}


@dataclass(slots=True, kw_only=True, eq=False)
class GivenOrder:
    """Samples in the order in which a loop gives them: a
    :class:`~headrace.engine.sample_order.SampleOrder` that has no next batch of its own.

    Attributes:
        reader: Reads samples.
        example: A sample to look at and to measure the model with.
        longest: Tokens of the longest sample that may come.
        total: Tokens of a batch, more or less.
        own: Whether each rank gives its own samples.
    """

    reader: SampleReader
    example: Item = field(repr=False)
    longest: int
    total: int
    own: bool = False

    @property
    def epoch(self) -> int:
        """0, as nobody counts passes over the data."""
        return 0

    @property
    def fingerprint(self) -> str:
        """A text of the longest sample and the example."""
        return f"{self.longest} {self.total} {fingerprint_of([self.example])}"

    def next_batch(self) -> LoopBatch:
        """Raises SpecError: batches are given."""
        raise SpecError(
            "loop over a run without a data set",
            got="for step in run",
            wanted="for micro in run.step(samples)",
        )

    def coming(self, epochs: int | None) -> Iterator[Lengths] | None:
        """None: batches come when they come."""
        return None

    def first(self) -> Item:
        """The example, as no sample has come yet."""
        return self.example

    def facts(self) -> dict[str, Any]:
        """What is known of the samples to come, for reports."""
        return {"name": "given batches", "context": self.longest}

    def state(self) -> dict[str, Any]:
        """That samples are given, as JSON: where a loop stands in its data is its own business."""
        return {"given": True}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. Raises DataError for that of a data set."""
        if "given" not in state:
            raise DataError("state of the data", got=dict(state), wanted="that of given batches")

    def close(self) -> None:
        """Do nothing: samples are given."""

    def batch(
        self,
        asks: str,
        samples: Iterable[Any],
        groups: Groups,
        *,
        together: Iterable[Sequence[int]] = (),
        beside: Callable[[Sequence[int]], Sequence[Item]] | None = None,
        open_step: Exception | None = None,
        learned: bool = True,
    ) -> LoopBatch:
        """The batch of some samples, which all ranks give alike, or each its own. Collective.

        Args:
            asks: What this rank asks for, with the number of the step.
            samples: Items as those of a data set.
            groups: The groups of this rank.
            together: The numbers of samples that stay in one micro-batch, of each group.
            beside: Makes what goes with each sample, by the tokens of the samples.
            open_step: What is wrong with the step before, if anything is.
            learned: Whether a token must have a label.

        Returns:
            The batch.

        Raises:
            DataError: On every rank for what cannot be read on any, and for samples longer than the
                longest.
            PlanMismatch: On every rank where one gives other samples.
            HeadraceError: On every rank where one left a step half way, or has ended.
        """
        mine, failure = _Given(), open_step
        if failure is None:
            try:
                mine = self._given(samples, together, beside)
            except Exception as error:  # told to all ranks, which would wait for this one
                failure = error
        same = "" if self.own else mine.fingerprint()
        said = meet_to(
            asks, groups, shown=mine.shown, same=same, failure=failure, told=mine.told(self.own)
        )
        whole = _whole(said) if self.own else mine
        apart = all(len(unit) == 1 for unit in whole.units)
        joined = mine.items if apart else _joined(mine.items, mine.units)
        own = self._travelling(mine, whole, joined, said, groups) if self.own else None
        return LoopBatch(
            lengths=Lengths.of(whole.lengths),
            epoch=0,
            read=joined.__getitem__ if own is None else own.read,
            state_after=self.state(),
            together=None if apart else whole.units,
            counts=whole.counts,
            learned=learned,
            like=(lambda: joined[0]) if own is None else own.like,
            beside=mine.beside_of if own is None else _beside(own, whole.units),
            starts=None if own is None else _starts(said, "counts"),
            bring=(lambda plan: None) if own is None else own.bring,
        )

    def lengths(
        self,
        asks: str,
        samples: Iterable[Any],
        groups: Groups,
        *,
        together: Iterable[Sequence[int]] = (),
    ) -> Lengths:
        """The lengths that :meth:`batch` plans by, of samples that come later. Collective; raises
        as it does."""
        mine, failure = _Given(), None
        try:
            mine = self._given(samples, together, None)
        except Exception as error:  # told to all ranks, which would wait for this one
            failure = error
        same = "" if self.own else str(mine.lengths)
        said = meet_to(
            asks, groups, shown=mine.shown, same=same, failure=failure, told=mine.told(self.own)
        )
        return Lengths.of((_whole(said) if self.own else mine).lengths)

    def _given(
        self,
        samples: Iterable[Any],
        together: Iterable[Sequence[int]],
        beside: Callable[[Sequence[int]], Sequence[Item]] | None,
    ) -> _Given:
        """What this rank gives, looked at."""
        items = self._read(samples)
        counts = [self.reader.length(item) for item in items]
        units = _units(together, len(items))
        found = _Given(
            items=items,
            units=units,
            counts=counts,
            beside=[] if beside is None else beside(counts),
        )
        self._require_short(found.lengths, units)
        if any(len(unit) > 1 for unit in units):
            _require_joinable(items)
        return found

    def _travelling(
        self,
        mine: _Given,
        whole: _Given,
        joined: Sequence[Item],
        said: Sequence[Mapping[str, Any]],
        groups: Groups,
    ) -> OwnSamples:
        """The samples that ranks have each for itself, as they are planned."""
        starts = _starts(said, "units")
        return OwnSamples(
            given={
                starts[groups.rank] + at: [item, *map(mine.beside_of, unit)]
                for at, (item, unit) in enumerate(zip(joined, mine.units, strict=True))
            },
            starts=starts,
            lengths=whole.lengths,
            groups=groups,
        )

    def _read(self, samples: Iterable[Any]) -> list[Item]:
        """Samples as the reader makes them of what a loop gave: tensors by name."""
        if isinstance(samples, (dict, torch.Tensor, str)):
            raise DataError(
                "samples",
                got=type(samples).__name__,
                wanted="a list of single samples",
                hint="a batch [b, S] with padding is a list of its rows: give one dict for each",
            )
        self.reader.forget_fields()
        items = [self.reader.read(item, f"sample {at}") for at, item in enumerate(samples)]
        if self.own:  # those of other ranks come by way of the host
            return [{name: value.cpu() for name, value in item.items()} for item in items]
        if not items:
            raise DataError("samples", got="none", wanted="at least one")
        return items

    def _require_short(self, counts: Sequence[int], units: Sequence[tuple[int, ...]]) -> None:
        """Raise DataError for what is longer than plans are made for."""
        for count, unit in zip(counts, units, strict=True):
            if count > self.longest:
                single = len(unit) == 1
                raise DataError(
                    f"sample {unit[0]}" if single else f"samples {list(unit)}, kept together",
                    got=f"{count:,} tokens",
                    wanted=f"at most {self.longest:,}, the longest that the run was made for",
                    hint="give hr.attach a larger longest=, or "
                    + ("shorten the sample" if single else "keep fewer samples together"),
                )


def given_order(
    model: SpreadModel,
    longest: int | str | None,
    budget: int | None,
    example: Any,
    *,
    own: bool = False,
) -> GivenOrder:
    """Samples that are given for each step, at most as long as the longest; by each rank its
    ``own`` where that is so. Raises SpecError where nobody said how long that is."""
    if longest is None:
        raise SpecError(
            "attach without a data set",
            got="no longest=",
            wanted="the tokens of the longest sample that will be given",
            hint='as hr.attach(model, optimizer, longest="8Ki")',
        )
    most = parse_count(longest) if isinstance(longest, str) else int(longest)
    return GivenOrder(
        reader=model,
        example=_example_for(model, example, most),
        longest=most,
        total=budget or most,
        own=own,
    )


def require_fitting(dataset: Any, given: Mapping[str, Any], drawn: Mapping[str, Any]) -> None:
    """Raise SpecError for options of given batches beside a data set, and the other way around."""
    wrong = [name for name, value in given.items() if value is not None]
    if dataset is not None and wrong:
        hint = "longest=" if wrong[0] == "longest" else None
        raise SpecError(
            f"hr.attach({wrong[0]}=...)",
            got="a data set too",
            wanted="one of them",
            hint=f"of a stream: samples=hr.SampleOptions({hint}...)" if hint else None,
        )
    wrong = [name for name, value in drawn.items() if value]
    if dataset is None and wrong:
        raise SpecError(
            f"hr.attach({wrong[0]}=...)",
            got="no data set",
            wanted="one, or a run whose steps are given: run.step(samples)",
        )


def unfinished(step: RunningStep[Any, Any] | None) -> HeadraceError | None:
    """What is wrong with a step after which the loop asks for another one."""
    if step is None or step.stage in ("done", "failed"):
        return None
    got = {
        "planned": "no loop over it",
        "at work": "a call within the loop over it",
        "left": "a loop that left it half way",
    }
    return HeadraceError(
        f"step {step.number}",
        got=got[step.stage],
        wanted="a loop over all its micro-batches: for micro in run.step(samples)",
        hint="nothing of it was trained: give its samples again, or go on without them",
    )


def meet_to(
    asks: str,
    groups: Groups,
    *,
    shown: str = "",
    same: str = "",
    failure: Exception | None = None,
    told: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Meet all ranks before what this one ``asks`` for. Collective.

    Args:
        asks: What comes next on this rank.
        groups: The groups of this rank.
        shown: What it gives, for people.
        same: What must be equal on all ranks.
        failure: What this rank cannot do.
        told: What all ranks are to know, as JSON.

    Returns:
        What each rank told.

    Raises:
        HeadraceError: On every rank where one has a failure, which it raises itself, or has ended.
        PlanMismatch: On every rank where one asks for something else, or with something else.
    """
    wrong = None if failure is None else f"{type(failure).__name__}: {failure}"
    mine = {"asks": asks, "shown": shown, "same": same, "failure": wrong, "told": told or {}}
    try:
        said = gather_bytes(json.dumps(mine).encode(), groups.world)
    except Exception as error:
        if not is_broken_connection(error):
            raise
        raise HeadraceError(
            asks,
            got="a rank that has ended, or waits elsewhere",
            wanted="all ranks",
            hint="every rank takes the same steps",
        ) from error
    if failure is not None:
        raise failure
    ranks = [_told(text) for text in said]
    for rank, text in enumerate(ranks):
        if text is None:
            raise PlanMismatch(
                f"{asks} on rank {groups.rank}",
                got=f"rank {rank} within a step",
                wanted=f"{asks} on every rank",
                hint="no rank may leave a step before all its micro-batches are done",
            )
    found = [text for text in ranks if text is not None]
    for rank, text in enumerate(found):
        if text["failure"] is not None:
            raise HeadraceError(f"{text['asks']} on rank {rank}", got=text["failure"])
    for rank, text in enumerate(found):
        for key, hint in (
            ("asks", "every rank takes the same steps, as many and in the same order"),
            ("same", "every rank gives the same samples in the same order"),
        ):
            if text[key] != found[0][key]:
                view = (text["asks"], text["shown"]) if key == "same" else (text["asks"],)
                first = (found[0]["asks"], found[0]["shown"]) if key == "same" else (found[0][key],)
                raise PlanMismatch(
                    f"what rank {rank} asks for",
                    got=" of ".join(view) + (", of other values" if view == first else ""),
                    wanted=f"{' of '.join(first)}, as rank 0",
                    hint=hint,
                )
    return [text["told"] for text in found]


def _told(text: bytes) -> dict[str, Any] | None:
    """What a rank said in :func:`meet_to`; None where it is elsewhere."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "asks" in found else None


def _units(together: Iterable[Sequence[int]], samples: int) -> list[tuple[int, ...]]:
    """Which samples are planned as one, by the first of each. Raises DataError for numbers that
    are of no sample, or given twice."""
    groups = [tuple(int(i) for i in group) for group in together]
    grouped = [i for group in groups for i in group]
    times = Counter(grouped)
    wrong = [i for i in grouped if not 0 <= i < samples or times[i] > 1]
    if wrong or not all(groups):
        raise DataError(
            "together=",
            got=f"sample {wrong[0]}" if wrong else "an empty group",
            wanted=f"numbers of 0 to {samples - 1}, each once",
        )
    alone = [(i,) for i in sorted(set(range(samples)) - set(grouped))]
    return sorted([*groups, *alone])


def _require_joinable(items: Sequence[Item]) -> None:
    """Raise DataError for samples that are no rows of tokens."""
    if "labels" not in items[0] or items[0]["labels"].dim() != 1:
        raise DataError("together=", got="a model of several axes", wanted="a model of tokens")


def _joined(items: Sequence[Item], units: Sequence[tuple[int, ...]]) -> list[Item]:
    """The samples of each unit as one, in which each is a document of its own."""
    rows = (packed([items[i] for i in unit]) for unit in units)
    return [{name: value[0] for name, value in row.items()} for row in rows]


def _starts(said: Sequence[Mapping[str, Any]], what: str) -> list[int]:
    """The number of the first of what each rank gave, then of all."""
    return [0, *accumulate(len(told[what]) for told in said)]


def _whole(said: Sequence[Mapping[str, Any]]) -> _Given:
    """What all ranks gave together, those of rank 0 first. Raises DataError where none gave any,
    and where ranks have other fields."""
    first: tuple[int, Any] | None = None
    for rank, told in enumerate(said):
        fields = told["fields"]
        if fields is not None and first is None:
            first = rank, fields
        if fields is not None and first is not None and fields != first[1]:
            raise DataError(
                f"fields of the samples of rank {rank}",
                got=_fields_text(fields),
                wanted=f"{_fields_text(first[1])}, as of rank {first[0]}",
                hint="all samples of a batch have the same columns of the same types",
            )
    if first is None:
        raise DataError("samples", got="none on any rank", wanted="at least one")
    starts = _starts(said, "counts")
    return _Given(
        units=[
            tuple(start + i for i in unit)
            for start, told in zip(starts, said, strict=False)
            for unit in told["units"]
        ],
        counts=[count for told in said for count in told["counts"]],
    )


def _fields_text(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {dtype}" for name, dtype in fields.items())


def _beside(own: OwnSamples, units: Sequence[tuple[int, ...]]) -> Callable[[int], Item]:
    """What goes with each sample, where it is here."""
    places = {sample: (at, n) for at, unit in enumerate(units) for n, sample in enumerate(unit)}

    def found(sample: int) -> Item:
        at, n = places[sample]
        return own.beside(at)[n]

    return found


def _example_for(model: SpreadModel, example: Any, longest: int) -> Item:
    """A sample to look at before any is given: the user's own, or one of random tokens where the
    model shows how many there are. Raises SpecError where it does not."""
    if example is not None:
        return model.read(example, "example")
    find = getattr(model.inner, "get_input_embeddings", None)
    table = find() if callable(find) else None
    if not isinstance(model, TokenModel) or not isinstance(table, torch.nn.Embedding):
        raise SpecError(
            "attach without a data set",
            got=f"no example for {type(model.inner).__name__}",
            wanted="a sample as those to come",
            hint="give hr.attach example=sample: it is looked at, and not trained",
        )
    draw = torch.Generator().manual_seed(0)
    count = max(1, min(_MADE, longest))
    ids = torch.randint(0, table.num_embeddings, (count,), generator=draw)
    return model.read({model.tokens: ids, "labels": ids}, "example")
