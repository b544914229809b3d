"""Tables of groups, which planners of others read that know nothing of stages or tensor blocks."""

from __future__ import annotations

from headrace.planning.batch import PriceTable
from headrace.planning.priced import PricedScheme

__all__ = ["groups_only", "is_groups"]


def is_groups(table: PriceTable) -> bool:
    """Whether all schemes of a table are plain groups: one stage and no tensor blocks."""
    return all(scheme.depth == 1 and scheme.scheme.tensor == 1 for scheme in table.schemes)


def groups_only(table: PriceTable) -> PriceTable:
    """The table with schemes of one stage only, for each number of devices the one that holds the
    most tokens; the same table where all are plain groups."""
    if is_groups(table):
        return table
    roomiest: dict[int, PricedScheme] = {}
    for scheme in table.schemes:
        best = roomiest.get(scheme.devices)
        if scheme.depth == 1 and (best is None or best.most_tokens < scheme.most_tokens):
            roomiest[scheme.devices] = scheme
    return PriceTable.like(table, list(roomiest.values()))
