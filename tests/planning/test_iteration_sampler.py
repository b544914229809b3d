"""Iterations that choose their own samples as the batches of a run: order, states, refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace as hr
from headrace.data.sampler import Sampler, SamplerOptions, cut
from headrace.engine.iteration_sampler import IterationSampler
from headrace.errors import DataError, InfeasiblePlan
from headrace.spec.draw_options import DrawOptions

CONTEXT = 1500
DRAWS = DrawOptions(bucket_ratio=2.0, seed=4)
STEPS = 9


@dataclass(frozen=True)
class Documents:
    """A corpus of documents of these lengths."""

    lengths: NDArray[np.int64]
    name: str = "documents"

    @property
    def fingerprint(self) -> str:
        """A text that is equal for equal lengths."""
        return str(hash(self.lengths.tobytes()))


def documents(seed: int = 0) -> Documents:
    """A corpus of which some documents are longer than the context, and some of one token."""
    rng = np.random.default_rng(seed)
    return Documents(rng.lognormal(5.0, 1.5, size=700).clip(1, 4000).astype(np.int64))


def problem(ranks: int = 4, memory_bytes: int = 200_000_000, margin: float = 0.1) -> hr.Problem:
    """Ranks that hold some thousand tokens of a small model."""
    model = hr.Architecture.preset("llama-tiny")
    costs = hr.costs.roofline(model, "h100", devices=ranks, memory_bytes=memory_bytes)
    return hr.Problem(costs=costs.replace(memory_margin=margin))


def sampler(options: DrawOptions = DRAWS, corpus: Documents | None = None) -> IterationSampler:
    """A sampler that is not priced yet."""
    chosen: Any = {"context": CONTEXT, "too_long": "split", "min_tokens": 2}
    return IterationSampler(corpus or documents(), options, **chosen)


def priced(for_: hr.Problem | None = None) -> IterationSampler:
    made = sampler()
    made.price(for_ or problem())
    return made


def ids_of(made: IterationSampler, steps: int) -> list[tuple[int, ...]]:
    return [made.next_batch().lengths.ids for _ in range(steps)]


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_sample_comes_once_an_epoch(ranks: int) -> None:
    """Catches samples that are lost or doubled where an epoch ends, pieces of long documents that
    are read from elsewhere, short ones that are not left out, and steps that are counted anew."""
    made, corpus = priced(problem(ranks)), documents()
    pieces = cut(corpus.lengths, context=CONTEXT, too_long="split")
    wanted = np.flatnonzero(pieces.lengths >= 2).tolist()
    assert len(wanted) != len(corpus.lengths)
    step = 0
    orders = list[list[int]]()
    for epoch in range(2):
        seen = list[int]()
        while made.state()["epoch"] == epoch:
            batch = made.next_batch()
            assert (batch.step, batch.epoch) == (step, epoch)
            step += 1
            seen += batch.lengths.ids
            for one, number, tokens in zip(
                batch.samples, batch.lengths.ids, batch.lengths.tokens, strict=True
            ):
                assert one.document == pieces.documents[number]
                assert one.start == pieces.starts[number]
                assert one.length == tokens == pieces.lengths[number]
        assert sorted(seen) == wanted
        orders.append(seen)
    assert orders[0] != orders[1]
    assert made.state()["step"] == step > 4


def test_a_state_goes_on_whatever_memory_there_is_by_then() -> None:
    """Catches a resumed run that draws other iterations than one without a break: from another
    position, with another seed, or for the memory and the margin that it finds."""
    whole = ids_of(priced(), STEPS)
    assert ids_of(priced(problem(memory_bytes=150_000_000)), STEPS) != whole
    made = priced()
    states = [through_json(made.state())]
    for _ in range(STEPS - 1):
        states.append(through_json(made.next_batch().state_after))
    for at, state in enumerate(states):
        for now in (problem(), problem(memory_bytes=150_000_000), problem(margin=0.5)):
            again = sampler()
            again.restore(state)
            again.price(now)
            assert ids_of(again, STEPS - at) == whole[at:]
    late = priced(problem(margin=0.5))
    late.restore(states[3])  # priced before
    assert ids_of(late, STEPS - 3) == whole[3:]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_other_ranks_go_on_with_what_is_left(ranks: int) -> None:
    """Catches a position that counts for one number of ranks only."""
    made = priced()
    before = ids_of(made, 3)
    again = sampler()
    again.restore(through_json(made.state()))
    again.price(problem(ranks))
    assert again.state()["drawn_for"]["ranks"] == ranks
    rest = takewhile(lambda batch: batch.epoch == 0, iter(again.next_batch, None))
    seen = [number for ids in before for number in ids]
    seen += [number for batch in rest for number in batch.lengths.ids]
    assert sorted(seen) == sorted(
        number
        for batch in takewhile(lambda batch: batch.epoch == 0, iter(priced().next_batch, None))
        for number in batch.lengths.ids
    )


def test_what_is_looked_at_is_not_taken() -> None:
    """Catches plans made ahead that move the batches they are made of."""
    made = priced()
    ahead = made.copy()
    assert [batch.lengths.ids for batch in made.peek(3)] == ids_of(ahead, 3)
    assert made.per_batch == len(made.peek()[0].samples)
    assert made.state() == priced().state()
    assert ids_of(made, 5)[3:] == ids_of(ahead, 2)


def test_a_planner_of_one_size_has_its_groups_filled() -> None:
    """Catches iterations that are filled with groups which no plan of the run has."""
    static = problem().replace(planner="static", static_size=2)
    assert "groups of 2 ranks" in str(priced(static))
    assert "groups of 1 rank," in str(priced())


def test_a_sample_that_fits_nowhere_is_told_before_the_first_step() -> None:
    """Catches a run that ends hours later, when its longest sample comes."""
    with pytest.raises(InfeasiblePlan, match="the longest sample of 1,500 tokens"):
        sampler().price(problem(memory_bytes=8_000_000))


def test_states_of_other_runs_are_refused() -> None:
    """Catches positions in buckets that mean other samples, and a state that is changed by one that
    it refuses."""
    made = priced()
    made.next_batch()
    state = through_json(made.state())
    others = {
        "fingerprint": sampler(corpus=documents(1)),
        r"data\.seed: got 5, wanted 4": sampler(replace(DRAWS, seed=5)),
        r"data\.iterations: got .*1\.5": sampler(replace(DRAWS, bucket_ratio=1.5)),
    }
    for text, other in others.items():
        with pytest.raises(DataError, match=text):
            other.restore(state)
    given = Sampler(documents(), SamplerOptions(batch_tokens=4000, context=CONTEXT))
    with pytest.raises(DataError, match=r"data\.\w+: got 4000, wanted None as when"):
        given.restore(state)
    with pytest.raises(DataError, match=r"data\.iterations: got .*, wanted None as when"):
        made.restore(given.state())
    sizes = len(state["taken"])
    for bad in (
        {"taken": None},
        {"taken": state["taken"][1:]},
        {"taken": [1.0] * sizes},
        {"taken": [-1, *state["taken"][1:]]},
        {"taken": [10**6] * sizes},
        {"drawn_for": {"ranks": 2}},
        {"drawn_for": "4 ranks"},
        {"first_step": 1},
        {"batch": "0"},
    ):
        with pytest.raises(DataError):
            made.restore(state | bad)
    assert made.state() == state
