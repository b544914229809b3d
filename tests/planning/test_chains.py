"""When pipelines end that share ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import CostModel, ExchangeCost
from headrace.errors import InfeasiblePlan
from headrace.planning import Known, Nested, Problem, SideBySide
from headrace.planning.batch import Chains, PriceTable, SortedBatch
from headrace.planning.explain import require_fit
from headrace.planning.generators import Draft
from headrace.planning.schedule import Assignment
from headrace.spec import Lengths
from planning.tables import bound_s
from planning.worlds import batches, worlds


def drafts(costs: CostModel, lengths: Lengths) -> list[Draft]:
    """Drafts of groups with whole weights, where these hold the batch."""
    problem, batch = Problem(costs=costs), SortedBatch.of(lengths)
    try:
        require_fit(problem, batch.tokens[0], batch.order[0])
    except InfeasiblePlan:
        return []
    schemes = problem.pricing.groups("replicated")
    if not any(scheme.most_tokens >= batch.tokens[0] for scheme in schemes):
        return []
    moved = costs.exchange_s
    table = PriceTable(
        batch,
        schemes,
        problem.devices,
        exchange=ExchangeCost(pull_s=moved.pull_s + 1e-3, push_s=moved.push_s + 1e-3),
    )
    low_s = bound_s(table)
    known = Known(problem=problem, bound_s=low_s, best_s=4 * low_s, packed_s=4 * low_s)
    return [*SideBySide().drafts(table, known), *Nested().drafts(table, known)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 9), count=st.integers(0, 12))
def test_pipelines_end_as_their_ranks_do(seed: int, ranks: int, count: int) -> None:
    """Catches a pipeline that does not wait for all that had its ranks, and gradients that count
    although other work hides them."""
    rng = np.random.default_rng(seed)
    groups = [
        tuple(rng.choice(ranks, int(rng.integers(1, ranks + 1)), replace=False).tolist())
        for _ in range(count)
    ]
    times = [(own[0], own[1], own[2]) for own in rng.random((count, 3)).tolist()]
    free, sent = [0.0] * ranks, [0.0] * ranks
    for own, (there_s, seconds, behind_s) in zip(groups, times, strict=True):
        end_s = max(there_s, *(free[rank] for rank in own)) + seconds
        for rank in own:
            free[rank], sent[rank] = end_s, end_s + behind_s
    chains = Chains(groups)
    found = chains.sent_s(times)
    assert max(found.values(), default=0.0) == max(sent)
    assert all(sent[rank] == found[g] for rank, g in chains.last_of.items())


@settings(max_examples=40, deadline=None)
@given(costs=worlds(), lengths=batches(most=12))
def test_a_draft_is_late_where_its_schedule_is(costs: CostModel, lengths: Lengths) -> None:
    """Catches a draft that is dropped although, packed to the end, it is quick enough."""
    for draft in drafts(costs, lengths):
        made = Assignment.of(draft.table, draft.groups, draft.source)
        assert draft.is_late(made.expected_s)
        assert not draft.is_late(made.expected_s * (1 + 1e-9))
