"""One scheme for all pipelines, the one that is best over all batches.

static         sequences dispatched by cost
max-length     sequences are packed to the longest's length as they come, and the packs dealt
               out evenly (Megatron-LM)
token-balance  tokens balanced by Karmarkar and Karp's differencing
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from headrace.errors import InfeasiblePlan
from headrace.planners.groups import is_groups
from headrace.planners.launched import fitting
from headrace.planners.megatron import as_they_come
from headrace.planners.token_balance import by_tokens
from headrace.planning.batch import PriceTable
from headrace.planning.schedule import Assignment, placed
from headrace.planning.static import static_schedule

__all__ = [
    "BatchPlanner",
    "best_scheme",
    "by_length",
    "max_length",
    "roomiest_first",
    "static",
    "token_balance",
]

BatchPlanner = Callable[[int, PriceTable], Assignment]
"""Plans a batch, given its number and its table."""

Make = Callable[[PriceTable, int], Assignment | None]
"""Plans a batch on one scheme, given its table and the scheme; None where that does not hold it."""


def static(tables: Sequence[PriceTable]) -> BatchPlanner:
    """Plans all batches on one scheme, with sequences dispatched by cost, longest first. Of groups
    it is the smallest size that holds the longest sequence of all batches, else the scheme that is
    best over all batches."""
    if is_groups(tables[0]):
        holding = [fitting(table) for table in tables]
        k = max((k for k in holding if k is not None), default=None)
        if k is not None and None not in holding:
            return _always_on(k, static_schedule)
    return _always_on(_best(tables, static_schedule), static_schedule)


def max_length(tables: Sequence[PriceTable]) -> BatchPlanner:
    """Plans all batches on the best scheme, with packs as long as the longest sequence of all
    batches dealt out evenly."""
    longest = max(table.tokens[0] for table in tables)
    make = partial(by_length, context=longest)
    return _always_on(_best(tables, make), make)


def token_balance(tables: Sequence[PriceTable]) -> BatchPlanner:
    """Plans all batches on the best scheme, with about the same tokens for every pipeline."""
    return _always_on(_best(tables, by_tokens), by_tokens)


def by_length(table: PriceTable, k: int, context: int) -> Assignment | None:
    """The schedule of packs of up to ``context`` tokens, dealt out in turn to pipelines of scheme
    k; None where the scheme does not hold so many tokens."""
    if context > table.schemes[k].most_tokens:
        return None
    packs, count = as_they_come(table, table.tokens, context), table.devices // table.width[k]
    pipelines = placed(table, [(k, []) for _ in range(count)])  # empty ones, for their ranks
    bins = [(k, ranks, packs[number::count]) for number, (_, ranks, _) in enumerate(pipelines)]
    return Assignment.of_bins(table, bins, "max-length")


def roomiest_first(table: PriceTable) -> list[int]:
    """The schemes that the devices have room for, those that hold the longest sequences first."""
    keys = [
        (-scheme.most_tokens, scheme.devices, scheme.depth, str(scheme)) for scheme in table.schemes
    ]
    fitting = (k for k, width in enumerate(table.width) if width <= table.devices)
    return sorted(fitting, key=keys.__getitem__)


def best_scheme(tables: Sequence[PriceTable], make: Make) -> tuple[float, int | None]:
    """(seconds over all batches, scheme) of the scheme on which ``make`` takes the least seconds;
    (infinity, None) where no scheme holds all batches."""
    best_s, best = inf, None
    for k in roomiest_first(tables[0]):
        total_s = 0.0
        for table in tables:
            schedule = make(table, k)
            total_s += inf if schedule is None else schedule.seconds
            if total_s >= best_s:
                break
        if total_s < best_s:
            best_s, best = total_s, k
    return best_s, best


def _best(tables: Sequence[PriceTable], make: Make) -> int:
    """The scheme on which ``make`` takes the least seconds over all batches. Raises InfeasiblePlan
    where none holds all of them."""
    _, best = best_scheme(tables, make)
    if best is None:
        raise InfeasiblePlan("no homogeneous strategy holds every iteration")
    return best


def _always_on(k: int, make: Make) -> BatchPlanner:
    """A planner that calls ``make`` with scheme k, which holds all batches, for every batch."""

    def planned(_: int, table: PriceTable) -> Assignment:
        """The schedule of one batch on scheme k."""
        schedule = make(table, k)
        assert schedule is not None, "it held every batch"
        return schedule

    return planned
