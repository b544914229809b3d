"""Objectives: which tokens a model reads and which it must say, whatever the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.mesh import Groups
from headrace.errors import DataError
from headrace.models.objective import Masked, NextToken, objective_of
from headrace.native.executor import Executor
from headrace.native.storage import Storage
from headrace.ops.loss import IGNORED
from headrace.spec import Architecture, Lengths
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.strategy import Scheme
from oracles import reference_example
from ranks import run_ranks

BERT = Architecture(
    layers=2,
    hidden=16,
    heads=2,
    kv_heads=2,
    ffn=32,
    vocabulary=97,
    kind="bert",
    causal=False,
    positions=64,
    mask_id=96,
)
GPT = Architecture.preset("gpt-tiny")
BIG = 2**63 - 1


def _masked(seed: int = 3, step: int = 5, vocabulary: int = 1000) -> Masked:
    return Masked(seed=seed, step=step, share=0.15, mask_id=999, vocabulary=vocabulary)


def _document(length: int, vocabulary: int = 900) -> np.ndarray:
    return np.random.default_rng(length).integers(vocabulary, size=length).astype(np.int32)


def test_a_model_has_its_objective() -> None:
    """Would catch a BERT that predicts the next token, and masks of another seed or step."""
    assert objective_of(GPT, seed=1, step=2) == NextToken()
    wanted = Masked(seed=1, step=2, share=0.15, mask_id=96, vocabulary=97)
    assert objective_of(BERT, seed=1, step=2) == wanted


def test_next_tokens() -> None:
    """Would catch a last token that is asked for the first of its neighbour."""
    ids, labels = NextToken().example(np.array([5, 6, 7], np.int32), 0)
    assert (ids.tolist(), labels.tolist()) == ([5, 6, 7], [6, 7, IGNORED])
    ids, labels = NextToken().example(np.array([5], np.int32), 0)
    assert (ids.tolist(), labels.tolist()) == ([5], [IGNORED])
    assert NextToken().count(Lengths(tokens=(3, 1, 5))) == 6


def test_masked_next_tokens() -> None:
    """Would catch a mask at the place that predicts, and first tokens that are counted."""
    mask = np.array([True, False, True])
    ids, labels = NextToken().example(np.array([5, 6, 7], np.int32), 0, mask)
    assert (ids.tolist(), labels.tolist()) == ([5, 6, 7], [IGNORED, 7, IGNORED])
    assert NextToken().count(Lengths(tokens=(3, 4)), [mask, None]) == 4
    with pytest.raises(DataError, match="hides its tokens itself"):
        _masked().example(np.array([5, 6, 7], np.int32), 0, mask)
    assert NextToken().count(Lengths(tokens=(1, 1))) == 1


@given(
    seed=st.integers(0, BIG),
    step=st.integers(0, 10**7),
    sample=st.integers(0, BIG),
    length=st.integers(1, 60),
)
@settings(max_examples=60, deadline=None)
def test_masks_are_those_of_the_formula(seed: int, step: int, sample: int, length: int) -> None:
    """Would catch wrapping that differs from arithmetic modulo 2^64, in any of the four inputs."""
    document = _document(length, BERT.vocabulary)
    ids, labels = objective_of(BERT, seed=seed, step=step).example(document, sample)
    wanted, asked = reference_example(document, BERT, sample, seed, step)
    assert ids.tolist() == wanted
    assert {i: int(label) for i, label in enumerate(labels) if label != IGNORED} == asked
    assert ids.dtype == labels.dtype == np.int32


def test_shares() -> None:
    """Would catch 15 % of the hidden in place of the picked, or 10 % of the rest."""
    document = _document(400_000)
    ids, labels = _masked().example(document, 7)
    picked = labels != IGNORED
    assert np.array_equal(labels[picked], document[picked])
    assert np.array_equal(ids[~picked], document[~picked]), "what is not picked is read as it is"
    hidden, same = ids[picked] == 999, ids[picked] == document[picked]
    random = ids[picked][~hidden & ~same]
    # Four deviations of a binomial; one in a thousand random ids is the token itself or the mask.
    assert picked.mean() == pytest.approx(0.15, abs=0.0023)
    assert hidden.mean() == pytest.approx(0.8, abs=0.0067)
    assert same.mean() == pytest.approx(0.1, abs=0.005)
    assert len(random) / picked.sum() == pytest.approx(0.1, abs=0.005)
    counts = np.bincount(random, minlength=1000)[:999]
    assert len(counts) == 999
    assert ((counts - counts.mean()) ** 2).sum() / counts.mean() < 999 + 4 * np.sqrt(2 * 999)


def test_masks_change_with_everything_but_the_company() -> None:
    """Would catch a mask that is keyed by rank, pack or order, or the same in every epoch."""
    document = _document(4000)
    ids, labels = _masked().example(document, 7)
    part = _masked().example(document[:1500], 7)
    assert np.array_equal(part[0], ids[:1500])
    assert np.array_equal(part[1], labels[:1500])
    others = [
        _masked(seed=4).example(document, 7),
        _masked(step=6).example(document, 7),
        _masked().example(document, 8),
        _masked(seed=5, step=3).example(document, 7),
    ]
    for _, other in others:
        both = ((labels != IGNORED) & (other != IGNORED)).mean()
        assert both == pytest.approx(0.15**2, abs=0.01), "picks are independent"
    assert np.array_equal(document, _document(4000)), "the corpus is not written"


@given(
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    first=st.integers(0, 10**6),
    step=st.integers(0, 99),
)
def test_every_rank_counts_the_whole_batch(tokens: list[int], first: int, step: int) -> None:
    """Would catch a count over other samples or positions than those that are picked."""
    lengths = Lengths.of(tokens, range(first, first + 3 * len(tokens), 3))
    objective = _masked(step=step)
    documents = zip(lengths.tokens, lengths.ids, strict=True)
    labels = [objective.example(_document(n), sample)[1] for n, sample in documents]
    picked = sum(int((part != IGNORED).sum()) for part in labels)
    assert objective.count(lengths) == max(1, picked)


def test_a_batch_of_which_nothing_is_picked() -> None:
    """Would catch a division by zero, and a gradient where there is no loss."""
    loss, norm, touched = run_ranks(1, _nothing_picked)[0]
    assert (loss, norm, touched) == (0.0, 0.0, False)


def _nothing_picked() -> tuple[float, float, bool]:
    groups = Groups()
    storage = Storage(BERT, groups, seed=1, dtype=torch.float64)
    executor = Executor(storage, groups, seed=1)
    lengths = Lengths(tokens=(1,))
    step = next(
        s
        for s in range(99)
        if objective_of(BERT, seed=1, step=s).example(np.zeros(1, np.int32), 0)[1][0] == IGNORED
    )
    plan = Plan(
        lengths=lengths,
        devices=1,
        pipelines=(Pipeline(scheme=Scheme(), ranks=(0,)),),
        micro_batches=(
            MicroBatch(
                pipeline=0, sequences=(0,), layers=LayerPlan.uniform(LayerOption.of("local"), 2)
            ),
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
    )
    result = executor.run(plan, (np.zeros(1, np.int32),), step=step, lr=0.0)
    touched = any(bool(total.any()) for total in storage.sums.values())
    return result.loss, result.gradient_norm, touched
