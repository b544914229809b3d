"""Batches: budgets, epochs, long documents, curricula, and going on where one stopped."""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.data.corpus import StoredCorpus, corpus_of
from headrace.data.sampler import Batch, Sampler, SamplerOptions
from headrace.errors import ConfigError, DataError

LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=40)


def corpus(lengths: list[int]) -> StoredCorpus:
    return corpus_of([[i % 7 for i in range(length)] for length in lengths], vocabulary=7)


@st.composite
def options(draw: st.DrawFn) -> SamplerOptions:
    tokens = draw(st.booleans())
    steps = draw(st.sampled_from([0, 0, 1, 3, 20]))
    return SamplerOptions(
        batch_tokens=draw(st.integers(1, 100)) if tokens else None,
        batch_sequences=None if tokens else draw(st.integers(1, 6)),
        context=draw(st.sampled_from([None, 2, 5, 16])),
        too_long=draw(st.sampled_from(["truncate", "split"])),
        curriculum="short-to-long" if steps else "none",
        curriculum_steps=steps,
        seed=draw(st.integers(0, 2**64 - 1)),
    )


def sampler(lengths: list[int], chosen: SamplerOptions) -> Sampler:
    cap = chosen.context if chosen.context and chosen.too_long == "truncate" else 10**9
    assume(any(min(length, cap) >= 2 for length in lengths))
    return Sampler(corpus(lengths), chosen)


def epoch(of: Sampler, number: int) -> list[Batch]:
    """All batches of one epoch."""
    return list(takewhile(lambda batch: batch.epoch == number, iter(of.next_batch, None)))


@given(LENGTHS, options())
def test_every_sample_once_per_epoch(lengths: list[int], chosen: SamplerOptions) -> None:
    """Catches a sample lost at a batch's or an epoch's border, drawn twice, or cut wrongly."""
    drawn = sampler(lengths, chosen)
    batches = epoch(drawn, 0)
    seen = sorted((s.document, s.start, s.length) for batch in batches for s in batch.samples)
    expected = []
    for document, length in enumerate(lengths):
        most = chosen.context or max(length, 1)
        split = chosen.too_long == "split" and length > most
        starts = range(0, length - 1, most - 1) if split else range(min(length, 1))
        pieces = [(document, start, min(most, length - start)) for start in starts]
        expected += [piece for piece in pieces if piece[2] >= 2]
    assert seen == expected
    assert drawn.samples == len(expected)


@given(LENGTHS, st.integers(2, 20), st.integers(0, 99))
def test_every_token_but_the_first_is_predicted_once(
    lengths: list[int], context: int, seed: int
) -> None:
    """Catches a prediction lost or made twice where a document is split, and a rest of one token,
    which is dropped."""
    assume(max(lengths) > 1)
    chosen = SamplerOptions(batch_sequences=3, context=context, too_long="split", seed=seed)
    predicted = [
        (s.document, token)
        for batch in epoch(Sampler(corpus(lengths), chosen), 0)
        for s in batch.samples
        for token in range(s.start + 1, s.start + s.length)
    ]
    wanted = [(i, token) for i, length in enumerate(lengths) for token in range(1, length)]
    assert sorted(predicted) == wanted


@given(LENGTHS, options())
def test_batches_keep_to_the_budget(lengths: list[int], chosen: SamplerOptions) -> None:
    """Catches a batch over budget, one closed too early, and lengths in another order."""
    batches = epoch(sampler(lengths, chosen), 0)
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        assert batch.lengths.tokens == tuple(sample.length for sample in batch.samples)
        total, count = batch.lengths.total, len(batch.lengths)
        assert count == 1 or total <= (chosen.batch_tokens or total)
        assert count <= (chosen.batch_sequences or count)
        if following is not None and chosen.curriculum == "none":
            after = following.lengths.tokens[0]
            assert chosen.full(sequences=count, tokens=total, following=after)
    assert [batch.step for batch in batches] == list(range(len(batches)))


@given(LENGTHS, options(), st.integers(0, 25), st.integers(0, 3))
@settings(deadline=None)
def test_restored_runs_go_on_alike(
    lengths: list[int], chosen: SamplerOptions, stop: int, ahead: int
) -> None:
    """Catches a state that misses the epoch, its first step or the batch, or moves with peeks."""
    whole = sampler(lengths, chosen)
    expected = [whole.next_batch() for _ in range(stop + 8)]
    first = sampler(lengths, chosen)
    state: dict[str, Any] = first.state()
    for batch in expected[:stop]:
        assert first.peek(ahead) == tuple(expected[batch.step : batch.step + ahead])
        drawn = first.next_batch()
        assert drawn == batch
        state = drawn.state_after
    first.peek(5)
    second = sampler(lengths, chosen)
    second.next_batch()
    second.restore(json.loads(json.dumps(state)))
    assert [second.next_batch() for _ in range(8)] == expected[stop:]


def test_order_is_fixed() -> None:
    """Catches a change of the order between versions, which would break every resumed run."""
    chosen = SamplerOptions(batch_sequences=8, seed=5)
    drawn = Sampler(corpus([2] * 8), chosen)
    assert drawn.next_batch().lengths.ids == (2, 4, 3, 1, 5, 0, 6, 7)
    assert drawn.next_batch().lengths.ids == (7, 4, 5, 1, 6, 0, 2, 3)


def test_order_depends_on_seed_and_epoch() -> None:
    """Catches epochs that repeat each other and a seed that is not used."""
    orders = set()
    for seed in range(3):
        drawn = Sampler(corpus([2] * 30), SamplerOptions(batch_sequences=30, seed=seed))
        orders |= {drawn.next_batch().lengths.ids for _ in range(3)}
    assert len(orders) == 9


def test_sample_ids_are_documents_unless_split() -> None:
    """Catches ids that shift when a short document is dropped."""
    lengths = [1, 9, 0, 4]
    drawn = Sampler(corpus(lengths), SamplerOptions(batch_sequences=4, context=5))
    (batch,) = epoch(drawn, 0)
    assert {s.document for s in batch.samples} == set(batch.lengths.ids) == {1, 3}
    assert drawn.samples == 2
    split = SamplerOptions(batch_sequences=9, context=4, too_long="split")
    (batch,) = epoch(Sampler(corpus(lengths), split), 0)
    pieces = dict(zip(batch.lengths.ids, batch.samples, strict=True))
    assert {i: (s.document, s.start, s.length) for i, s in pieces.items()} == {
        1: (1, 0, 4),
        2: (1, 3, 4),
        3: (1, 6, 3),
        5: (3, 0, 4),
    }


def test_refusing_long_documents() -> None:
    """Catches a refusal that does not say which document, how long, and how many more."""
    chosen = SamplerOptions(batch_sequences=1, context=5, too_long="refuse")
    with pytest.raises(DataError, match=r"document 2 and 1 more .*got 9 tokens.*at most 5"):
        Sampler(corpus([3, 6, 9]), chosen)
    assert Sampler(corpus([3, 5]), chosen).samples == 2


def test_nothing_to_draw() -> None:
    """Catches a sampler that would draw for ever from nothing."""
    with pytest.raises(DataError, match="all shorter"):
        Sampler(corpus([1, 1]), SamplerOptions(batch_sequences=1))


def test_curriculum_goes_from_short_to_long() -> None:
    """Catches a pool that opens at once, one that never opens, and half-empty batches."""
    lengths = list(range(2, 202))
    chosen = SamplerOptions(
        batch_sequences=4, curriculum="short-to-long", curriculum_steps=20, seed=1
    )
    batches = epoch(Sampler(corpus(lengths), chosen), 0)
    for batch in batches[:20]:
        assert len(batch.lengths) == 4
        assert batch.lengths.longest <= lengths[10 * (batch.step + 1) - 1]
    assert len(batches) == 50
    means = [np.mean([b.lengths.total for b in batches[i : i + 10]]) for i in (0, 10, 40)]
    assert means[0] < means[1] < means[2]
    assert max(b.lengths.longest for b in batches[10:20]) > 60


def test_curriculum_over_more_than_an_epoch() -> None:
    """Catches a curriculum that starts again with each epoch, or goes on for ever."""
    lengths = list(range(2, 22))
    chosen = SamplerOptions(batch_sequences=5, curriculum="short-to-long", curriculum_steps=6)
    drawn = Sampler(corpus(lengths), chosen)
    batches = [drawn.next_batch() for _ in range(16)]
    assert [batch.epoch for batch in batches] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert batches[0].lengths.longest == 6
    assert batches[4].lengths.longest <= lengths[16]
    plain = Sampler(corpus(lengths), SamplerOptions(batch_sequences=5))
    assert [b.lengths for b in batches[8:]] == [plain.next_batch().lengths for _ in range(16)][8:]


def test_restore_refuses_what_is_not_its_own() -> None:
    """Catches a run that continues on other data or options, or from a damaged state."""
    chosen = SamplerOptions(batch_tokens=20, seed=3)
    drawn = Sampler(corpus([5] * 9), chosen)
    state = drawn.next_batch().state_after
    with pytest.raises(DataError, match="fingerprint"):
        Sampler(corpus([5] * 8), chosen).restore(state)
    with pytest.raises(DataError, match=r"data\.seed: got 4, wanted 3"):
        Sampler(corpus([5] * 9), SamplerOptions(batch_tokens=20, seed=4)).restore(state)
    before = drawn.state()
    for bad in ({"batch": 99}, {"step": -1}, {"epoch": "0"}, {"batch": 1.0}, {"options": None}):
        with pytest.raises(DataError):
            drawn.restore({**state, **bad})
    with pytest.raises(DataError, match="an entry epoch"):
        drawn.restore({name: value for name, value in state.items() if name != "epoch"})
    assert drawn.state() == before


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"batch_tokens": 4, "batch_sequences": 4},
        {"batch_tokens": 0},
        {"batch_tokens": 4, "context": 1},
        {"batch_tokens": 4, "seed": -1},
        {"batch_tokens": 4, "too_long": "cut"},
        {"batch_tokens": 4, "curriculum": "short-to-long"},
        {"batch_tokens": 4, "curriculum_steps": 4},
    ],
)
def test_bad_options(bad: dict[str, Any]) -> None:
    """Catches options that contradict each other."""
    with pytest.raises(ConfigError):
        SamplerOptions(**bad)
    assert SamplerOptions.from_json(SamplerOptions(batch_tokens=4).to_json()).batch_tokens == 4


def test_documents_that_no_context_holds_are_named_by_their_key() -> None:
    """Catches ``data.context`` refused where ``data.min_tokens`` was set too high."""
    with pytest.raises(
        ConfigError, match=r"data.min_tokens: got 9, wanted at most data.context, 8"
    ):
        SamplerOptions(batch_tokens=40, context=8, min_tokens=9)
