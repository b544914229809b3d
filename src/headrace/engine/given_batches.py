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

_EXAMPLE_TOKENS = 64
"""Tokens of an example of random tokens, where the user gave none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Given:
    """Samples that are given, by this rank or by all together.

    A *unit* is what the planner sees as one sequence: a sample, or several that stay together.

    Attributes:
        items: The samples; empty for those of all ranks, which are not all here.
        units: The numbers of the samples of each unit.
        counts: Tokens of each sample.
        beside: Tensors that go with each sample, such as its gradient; empty where there are none.
    """

    items: list[Item] = field(default_factory=list, repr=False)
    units: list[tuple[int, ...]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    beside: Sequence[Item] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each unit, all of its samples together."""
        return [sum(self.counts[i] for i in unit) for unit in self.units]

    @property
    def shown(self) -> str:
        """The samples in words, for errors: how many, and their tokens."""
        return f"{len(self.counts)} samples of {sum(self.counts):,} tokens: {self.counts[:8]}"

    def beside_of(self, sample: int) -> Item:
        """The tensors that go with a sample, by name."""
        return self.beside[sample] if self.beside else {}

    def fingerprint(self) -> str:
        """A hash of all values of the samples, which ranks compare."""
        text = f"{fingerprint_of(self.items)} {self.units} {fingerprint_of(self.beside)}"
        return sha256(text.encode()).hexdigest()

    def told(self, own: bool) -> dict[str, Any]:
        """What this rank tells the others about its samples, as JSON: tokens, units and types of
        fields where each rank gives its ``own`` samples; nothing where all give the same."""
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
        """A text of the longest length, the tokens of a batch and the example, which must be the
        same on all ranks."""
        return f"{self.longest} {self.total} {fingerprint_of([self.example])}"

    def next_batch(self) -> LoopBatch:
        """Raises SpecError: batches are given."""
        raise SpecError(
            "loop over a run without a data set",
            got="for step in run",
            wanted="for micro in run.step(samples)",
        )

    def coming(self, epochs: int | None) -> Iterator[Lengths] | None:
        """None: the lengths of batches are not known before they are given."""
        return None

    def first(self) -> Item:
        """The example, as no sample has come yet."""
        return self.example

    def facts(self) -> dict[str, Any]:
        """What is known of the samples to come, for reports."""
        return {"name": "given batches", "context": self.longest}

    def state(self) -> dict[str, Any]:
        """A mark that samples are given, as JSON; the loop itself has to save its place in the
        data."""
        return {"given": True}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Check that a saved state is of given batches; there is no position to restore. Raises
        DataError for the state of a run with a data set."""
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
        beside: Callable[[Sequence[Item], Sequence[int]], Sequence[Item]] | None = None,
        open_step: Exception | None = None,
        learned: bool = True,
    ) -> LoopBatch:
        """Read samples, which all ranks give alike or each its own, and make the batch of a step.
        Collective.

        Args:
            asks: What this rank asks for, with the number of the step, as errors name it.
            samples: Items as those of a data set.
            groups: The groups of this rank.
            together: Groups of samples that stay in one micro-batch, by their numbers.
            beside: Given the samples and the tokens of each, makes the tensors that go with each.
            open_step: What is wrong with the step before, if anything is.
            learned: Whether samples must have labels, and one of their tokens a loss.

        Returns:
            The batch.

        Raises:
            DataError: On every rank for what cannot be read on any, and for samples longer than the
                longest.
            PlanMismatch: On every rank where one gives other samples.
            HeadraceError: On every rank where one left a step half way, or has ended.
        """
        here, failure = _Given(), open_step
        if failure is None:
            try:
                here = self._read_given(samples, together, beside, labelled=learned)
            except Exception as error:  # told to all ranks, which would wait for this one
                failure = error
        same = "" if self.own else here.fingerprint()  # own samples differ between ranks
        told_by_rank = meet_to(
            asks, groups, shown=here.shown, same=same, failure=failure, told=here.told(self.own)
        )
        whole = _given_by_all(told_by_rank) if self.own else here
        single = all(len(unit) == 1 for unit in whole.units)  # no samples stay together
        sequences = here.items if single else _join_units(here.items, here.units)
        # Own samples are read on other ranks than gave them: they travel once the plan is known.
        own = self._own_samples(here, whole, sequences, told_by_rank, groups) if self.own else None
        return LoopBatch(
            lengths=Lengths.of(whole.lengths),
            epoch=0,
            read=sequences.__getitem__ if own is None else own.read,
            state_after=self.state(),
            together=None if single else whole.units,
            counts=whole.counts,
            learned=learned,
            like=(lambda: sequences[0]) if own is None else own.like,
            beside=here.beside_of if own is None else _beside_own(own, whole.units),
            starts=None if own is None else _first_numbers(told_by_rank, "counts"),
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
        """The lengths by which a :meth:`batch` of these samples is planned, for a plan that is made
        ahead. Collective; arguments and errors are those of :meth:`batch`."""
        here, failure = _Given(), None
        try:
            here = self._read_given(samples, together, None, labelled=True)
        except Exception as error:  # told to all ranks, which would wait for this one
            failure = error
        same = "" if self.own else str(here.lengths)
        told_by_rank = meet_to(
            asks, groups, shown=here.shown, same=same, failure=failure, told=here.told(self.own)
        )
        return Lengths.of((_given_by_all(told_by_rank) if self.own else here).lengths)

    def _read_given(
        self,
        samples: Iterable[Any],
        together: Iterable[Sequence[int]],
        beside: Callable[[Sequence[Item], Sequence[int]], Sequence[Item]] | None,
        *,
        labelled: bool,
    ) -> _Given:
        """Read what this rank gives; samples that are not ``labelled`` need no labels. Raises
        DataError for what cannot be read, is longer than the longest, or cannot be kept together.
        """
        items = self._read(samples, labelled=labelled)
        counts = [self.reader.length(item) for item in items]
        units = _units(together, len(items))
        given = _Given(
            items=items,
            units=units,
            counts=counts,
            beside=[] if beside is None else beside(items, counts),
        )
        self._require_short(given.lengths, units)
        if any(len(unit) > 1 for unit in units):
            _require_joinable(items)
        return given

    def _own_samples(
        self,
        here: _Given,
        whole: _Given,
        sequences: Sequence[Item],
        told_by_rank: Sequence[Mapping[str, Any]],
        groups: Groups,
    ) -> OwnSamples:
        """The batch's units where each rank gave some of them, with the tensors that go with their
        samples, ready to be sent to the ranks that a plan has work on them.

        ``here`` are the samples of this rank, ``whole`` those of all; ``sequences`` are this rank's
        units as one item each.
        """
        first_units = _first_numbers(told_by_rank, "units")
        return OwnSamples(
            given={
                first_units[groups.rank] + at: [item, *map(here.beside_of, unit)]
                for at, (item, unit) in enumerate(zip(sequences, here.units, strict=True))
            },
            starts=first_units,
            lengths=whole.lengths,
            groups=groups,
        )

    def _read(self, samples: Iterable[Any], *, labelled: bool) -> list[Item]:
        """The tensors by name that the reader makes of each item of ``samples``. Raises DataError
        for what is no list of samples, and for an empty one unless each rank gives its own."""
        if isinstance(samples, (dict, torch.Tensor, str)):
            raise DataError(
                "samples",
                got=type(samples).__name__,
                wanted="a list of single samples",
                hint="a batch [b, S] with padding is a list of its rows: give one dict for each",
            )
        self.reader.forget_fields()
        items = [
            self.reader.read(item, f"sample {at}", labelled=labelled)
            for at, item in enumerate(samples)
        ]
        if self.own:  # those of other ranks come by way of the host
            return [{name: value.cpu() for name, value in item.items()} for item in items]
        if not items:
            raise DataError("samples", got="none", wanted="at least one")
        return items

    def _require_short(self, lengths: Sequence[int], units: Sequence[tuple[int, ...]]) -> None:
        """Raise DataError for a unit of more tokens than ``longest``, for which plans are made."""
        for length, unit in zip(lengths, units, strict=True):
            if length > self.longest:
                single = len(unit) == 1
                raise DataError(
                    f"sample {unit[0]}" if single else f"samples {list(unit)}, kept together",
                    got=f"{length:,} tokens",
                    wanted=f"at most {self.longest:,}, the longest that the run was made for",
                    hint="give hr.attach, or hr.trainer, a larger longest=, or "
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
    """The order of a run whose samples are given for each step.

    ``longest`` is the tokens of the longest sample, ``budget`` those of a step where they are
    known, ``example`` a sample as those to come, ``own`` whether each rank gives its own samples.
    Raises SpecError where ``longest`` is None, or no example can be made.
    """
    if longest is None:
        raise SpecError(
            "attach without a data set",
            got="no longest=",
            wanted="the tokens of the longest sample that will be given",
            hint='as hr.attach(model, optimizer, longest="8Ki")',
        )
    longest_tokens = parse_count(longest) if isinstance(longest, str) else int(longest)
    return GivenOrder(
        reader=model,
        example=_example_for(model, example, longest_tokens),
        longest=longest_tokens,
        total=budget or longest_tokens,
        own=own,
    )


def require_fitting(dataset: Any, given: Mapping[str, Any], drawn: Mapping[str, Any]) -> None:
    """Raise SpecError for options that do not fit the data set, or its absence (None). ``given``
    are options by name for runs without one, None where not set; ``drawn`` those for runs with one,
    false where not set."""
    misplaced = [name for name, value in given.items() if value is not None]
    if dataset is not None and misplaced:
        hint = "longest=" if misplaced[0] == "longest" else None
        raise SpecError(
            f"hr.attach({misplaced[0]}=...)",
            got="a data set too",
            wanted="one of them",
            hint=f"of a stream: samples=hr.SampleOptions({hint}...)" if hint else None,
        )
    misplaced = [name for name, value in drawn.items() if value]
    if dataset is None and misplaced:
        raise SpecError(
            f"hr.attach({misplaced[0]}=...)",
            got="no data set",
            wanted="one, or a run whose steps are given: run.step(samples)",
        )


def unfinished(step: RunningStep[Any, Any] | None) -> HeadraceError | None:
    """The error for a loop that asks for another step while ``step`` is not done; None where it is
    done, has failed, or there is none."""
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
    """Have all ranks compare what they are about to do, before they do it. Collective.

    Args:
        asks: What this rank is about to do, in words; the same on all ranks.
        groups: The groups of this rank.
        shown: The samples that this rank gives, in words, for errors.
        same: A text that must be equal on all ranks.
        failure: The error of this rank, where it cannot do it.
        told: What all ranks are to know of this one, as JSON.

    Returns:
        ``told`` of each rank, by rank.

    Raises:
        HeadraceError: On every rank where one has a failure, which it raises itself, or has ended.
        PlanMismatch: On every rank where one asks for something else, or with something else.
    """
    failure_text = None if failure is None else f"{type(failure).__name__}: {failure}"
    own = {"asks": asks, "shown": shown, "same": same, "failure": failure_text, "told": told or {}}
    try:
        messages = gather_bytes(json.dumps(own).encode(), groups.world)
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
    parsed = [_parse_message(message) for message in messages]
    for rank, call in enumerate(parsed):
        if call is None:
            raise PlanMismatch(
                f"{asks} on rank {groups.rank}",
                got=f"rank {rank} within a step",
                wanted=f"{asks} on every rank",
                hint="no rank may leave a step before all its micro-batches are done",
            )
    calls = [call for call in parsed if call is not None]  # by rank: none is left out
    for rank, call in enumerate(calls):
        if call["failure"] is not None:
            raise HeadraceError(f"{call['asks']} on rank {rank}", got=call["failure"])
    for rank, call in enumerate(calls):
        _require_same_call(rank, call, calls[0])
    return [call["told"] for call in calls]


def _require_same_call(rank: int, call: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raise PlanMismatch where ``call``, the message of a rank in :func:`meet_to`, asks for
    something else than ``first``, that of rank 0, or for the same with other samples."""
    if call["asks"] != first["asks"]:
        raise PlanMismatch(
            f"what rank {rank} asks for",
            got=call["asks"],
            wanted=f"{first['asks']}, as rank 0",
            hint="every rank takes the same steps, as many and in the same order",
        )
    if call["same"] != first["same"]:
        got, wanted = (f"{of_rank['asks']} of {of_rank['shown']}" for of_rank in (call, first))
        # Samples may be as many and as long, and still have other values.
        raise PlanMismatch(
            f"what rank {rank} asks for",
            got=got + (", of other values" if got == wanted else ""),
            wanted=f"{wanted}, as rank 0",
            hint="every rank gives the same samples in the same order",
        )


def _parse_message(message: bytes) -> dict[str, Any] | None:
    """Parse the message that a rank sent from :func:`meet_to`; returns None for any other message,
    which came from a rank that is in another collective."""
    try:
        content = json.loads(message)
    except ValueError:
        return None
    return content if isinstance(content, dict) and "asks" in content else None


def _units(together: Iterable[Sequence[int]], samples: int) -> list[tuple[int, ...]]:
    """The units of ``samples`` samples, each the numbers of its samples, sorted by the first of
    each: the groups in ``together``, and every other sample alone. Raises DataError for numbers
    that are of no sample or given twice, and for an empty group."""
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
    """Raise DataError for samples of a model of several axes, whose labels are no row [n]: only
    rows of tokens can be put one behind the other."""
    if "labels" not in items[0] or items[0]["labels"].dim() != 1:
        raise DataError("together=", got="a model of several axes", wanted="a model of tokens")


def _join_units(items: Sequence[Item], units: Sequence[tuple[int, ...]]) -> list[Item]:
    """One item for each unit: its samples one behind the other, each a document of its own."""
    rows = (packed([items[i] for i in unit]) for unit in units)
    return [{name: value[0] for name, value in row.items()} for row in rows]


def _first_numbers(told_by_rank: Sequence[Mapping[str, Any]], key: str) -> list[int]:
    """The number of the first sample (``key`` "counts") or unit ("units") of each rank in the batch
    of all, then the number of all."""
    return [0, *accumulate(len(told[key]) for told in told_by_rank)]


def _given_by_all(told_by_rank: Sequence[Mapping[str, Any]]) -> _Given:
    """The units and token counts of the samples of all ranks, those of rank 0 first, without the
    samples themselves. Raises DataError where no rank gave any, and where the types of their fields
    differ."""
    first: tuple[int, Any] | None = None  # the first rank that gave samples, and their fields
    for rank, told in enumerate(told_by_rank):
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
    first_samples = _first_numbers(told_by_rank, "counts")  # and the number of all, not used
    return _Given(
        units=[
            tuple(first_sample + i for i in unit)
            for first_sample, told in zip(first_samples, told_by_rank, strict=False)
            for unit in told["units"]
        ],
        counts=[count for told in told_by_rank for count in told["counts"]],
    )


def _fields_text(fields: Mapping[str, str]) -> str:
    """The fields of a sample, types by name, in words for errors."""
    return ", ".join(f"{name} {dtype}" for name, dtype in fields.items())


def _beside_own(own: OwnSamples, units: Sequence[tuple[int, ...]]) -> Callable[[int], Item]:
    """Make a function from the number of a sample to the tensors that go with it, for the samples
    that this rank works on: ``own`` has these tensors by unit. ``units`` are the numbers of the
    samples of each unit of the batch."""
    # By sample: the number of its unit, and its position in that.
    places = {
        sample: (unit_number, position)
        for unit_number, unit in enumerate(units)
        for position, sample in enumerate(unit)
    }

    def beside_sample(sample: int) -> Item:
        """The tensors that go with a sample, by name."""
        unit_number, position = places[sample]
        return own.beside(unit_number)[position]

    return beside_sample


def _example_for(model: SpreadModel, example: Any, longest: int) -> Item:
    """A sample to measure the model with before any is given: the user's ``example``, or at most
    ``longest`` random tokens where an embedding shows the size of the vocabulary. Raises SpecError
    where there is neither."""
    if example is not None:
        return model.read(example, "example")
    get_embeddings = getattr(model.inner, "get_input_embeddings", None)  # of transformers
    embedding = get_embeddings() if callable(get_embeddings) else None
    if not isinstance(model, TokenModel) or not isinstance(embedding, torch.nn.Embedding):
        raise SpecError(
            "attach without a data set",
            got=f"no example for {type(model.inner).__name__}",
            wanted="a sample as those to come",
            hint="give hr.attach example=sample: it is looked at, and not trained",
        )
    draw = torch.Generator().manual_seed(0)
    count = max(1, min(_EXAMPLE_TOKENS, longest))
    ids = torch.randint(0, embedding.num_embeddings, (count,), generator=draw)
    return model.read((ids, ids), "example")
