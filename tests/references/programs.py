"""The paper's integer programs, solved by HiGHS: references for instances small enough.

Packing (Hydraulis, equation 1), for one pipeline and V micro-batches:

    Data        T_i seconds and l_i tokens of sequence i, room M, constant c, P stages.
    Variables   o_ij in {0, 1}: i is in micro-batch j; z, the longest micro-batch.
    Constraint  sum_j o_ij = 1;  sum_i o_ij l_i <= M;  sum_i o_ij T_i <= z.
    Objective   minimise z.

With V given, sum_j t_j + (P - 1) max_j t_j = sum_i T_i + c V + (P - 1) (z + c), so the same
program serves our objective; V is enumerated. Schemes have one row each.

Dispatch (equation 3), for one strategy:

    Variables   m_iq in {0, 1}: i is on pipeline q; V_q whole, its micro-batches; y_q, its longest
                sequence's seconds; z, the step.
    Constraint  sum_q m_iq = 1 over the pipelines that hold i;  m_iq T_iq <= y_q;
                sum_i m_iq l_i <= V_q M_q;  sum_i m_iq T_iq + c V_q + (P_q - 1) (y_q + c u_q) <= z
                with u_q = 1 where anything is there.
    Objective   minimise z.

Its left side is no more than what any packing takes, so a proven optimum is a bound of the
strategy's plans; with one stage everywhere and packings into V_q that exist, it is their optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy

from headrace.planning.batch import PriceTable
from headrace.planning.side_by_side import Counts

__all__ = ["Answer", "dispatch_program", "packing_program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``members`` (None: nothing was found in time) take ``seconds``, of which ``bound_s`` is
    proved to be the least possible."""

    members: list[list[int]] | None
    seconds: float
    bound_s: float


def packing_program(
    table: PriceTable, k: int, members: Sequence[int], *, limit_s: float = 5.0
) -> Answer:
    """The best micro-batches of one pipeline, with ``limit_s`` seconds for each V."""
    seconds, c, bubbles = table.seconds(k), table.c[k], table.depth[k] - 1
    held = sum(table.tokens[i] for i in members)
    least = -(-held // table.cap[k])
    most = min(len(members), max(least, held // table.util[k]))
    work = sum(seconds[i] for i in members)
    best = Answer(members=None, seconds=float("inf"), bound_s=float("inf"))
    for v in range(least, len(members) + 1):
        if v > most and best.members is not None:
            break
        fixed_s = work + c * v + bubbles * c
        floor_s = fixed_s + bubbles * max(seconds[members[0]], work / v)
        if floor_s >= best.seconds:
            best = Answer(
                members=best.members, seconds=best.seconds, bound_s=min(best.bound_s, floor_s)
            )
            continue
        bins, longest_s, proved_s = _even(table, k, members, v, limit_s)
        bound_s = min(best.bound_s, fixed_s + bubbles * proved_s)
        found_s = fixed_s + bubbles * longest_s
        if bins is not None and found_s < best.seconds:
            best = Answer(members=bins, seconds=found_s, bound_s=bound_s)
        else:
            best = Answer(members=best.members, seconds=best.seconds, bound_s=bound_s)
    return best


def _even(
    table: PriceTable, k: int, members: Sequence[int], v: int, limit_s: float
) -> tuple[list[list[int]] | None, float, float]:
    """``v`` micro-batches, the longest's seconds and what is proved of them."""
    seconds, cap = table.seconds(k), table.cap[k]
    model = _model(limit_s)
    inside = [[model.addBinary() for _ in range(v)] for _ in members]
    longest = model.addVariable()
    for row in inside:
        model.addConstr(model.qsum(row) == 1)
    for j in range(v):
        model.addConstr(
            model.qsum(row[j] * table.tokens[i] for row, i in zip(inside, members, strict=True))
            <= cap
        )
        model.addConstr(
            model.qsum(row[j] * seconds[i] for row, i in zip(inside, members, strict=True))
            <= longest
        )
    # Micro-batches are alike: the first sequence is in the first of them.
    model.addConstr(inside[0][0] == 1)
    model.minimize(longest)
    chosen = _whole(model, inside)
    proved = _proved(model)
    if chosen is None:
        return None, float("inf"), proved
    bins = [[i for i, j in zip(members, chosen, strict=True) if j == at] for at in range(v)]
    held = [sum(table.tokens[i] for i in own) for own in bins]
    if max(held) > cap:
        return None, float("inf"), proved
    bins = [own for own in bins if own]
    return bins, max(sum(seconds[i] for i in own) for own in bins), proved


def dispatch_program(table: PriceTable, counts: Counts, *, limit_s: float = 30.0) -> Answer:
    """The best dispatch of one strategy that holds the batch; ``seconds`` is its objective."""
    kinds = [k for k, n in enumerate(counts) for _ in range(n)]
    everyone = range(len(table.tokens))
    model = _model(limit_s)
    given = [
        [model.addBinary() if table.tokens[i] <= table.cap[k] else None for k in kinds]
        for i in everyone
    ]
    step = model.addVariable()
    for row in given:
        model.addConstr(model.qsum(x for x in row if x is not None) == 1)
    for q, k in enumerate(kinds):
        seconds, c, bubbles = table.seconds(k), table.c[k], table.depth[k] - 1
        own = [(i, x) for i, row in enumerate(given) if (x := row[q]) is not None]
        if not own:
            continue
        count, longest, used = model.addIntegral(), model.addVariable(), model.addBinary()
        for i, x in own:
            model.addConstr(x <= used)
            if bubbles:
                model.addConstr(x * seconds[i] <= longest)
        model.addConstr(model.qsum(x * table.tokens[i] for i, x in own) <= count * table.cap[k])
        work = model.qsum(x * seconds[i] for i, x in own)
        model.addConstr(work + (count * c + used * (bubbles * c)) + longest * bubbles <= step)
    model.minimize(step)
    chosen = _whole(model, given)
    if chosen is None:
        return Answer(members=None, seconds=float("inf"), bound_s=_proved(model))
    members = [[i for i, at in enumerate(chosen) if at == q] for q in range(len(kinds))]
    return Answer(members=members, seconds=model.getObjectiveValue(), bound_s=_proved(model))


def _model(limit_s: float) -> highspy.Highs:
    model = highspy.Highs()
    model.silent()
    model.setOptionValue("time_limit", limit_s)
    model.setOptionValue("threads", 1)
    return model


def _whole(
    model: highspy.Highs, rows: Sequence[Sequence[highspy.highs.highs_var | None]]
) -> list[int] | None:
    """Which one of each row is chosen; None unless the solution says exactly one, as a solver
    stopped by its time limit may not."""
    if model.getInfo().primal_solution_status != 2:
        return None
    values = [[0.0 if x is None else model.val(x) for x in row] for row in rows]
    chosen = [max(range(len(row)), key=row.__getitem__) for row in values]
    whole = all(
        abs(sum(row) - 1) < 1e-6 and row[at] > 0.99 for row, at in zip(values, chosen, strict=True)
    )
    return chosen if whole else None


def _proved(model: highspy.Highs) -> float:
    return max(0.0, float(model.getInfo().mip_dual_bound))
