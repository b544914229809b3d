"""Published costs as priced schemes: a frontier of one row each, without layer plans.

A file of pipelines (Hydraulis) lists schemes with their own a, b, c and the tokens that they hold
by the size of the cluster. A file of groups (FlexSP) has one line for all sizes: p ranks take

    T(S, p) = (sum_i (a l_i^2 + b l_i) + kappa_p sum_i l_i) / p + c

and hold p times what one rank does, so cp p is the row (a / p, (b + kappa_p) / p, c).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.costs.group_costs import GroupCosts
from headrace.costs.pipeline_costs import PipelineCosts
from headrace.errors import CostError, InfeasiblePlan
from headrace.planning.priced import Frontier, PricedScheme
from headrace.spec import Scheme
from headrace.units import counted

__all__ = ["priced", "require_held"]


def priced(costs: PipelineCosts | GroupCosts, devices: int) -> tuple[PricedScheme, ...]:
    """The priced schemes of published costs that fit ``devices``. Raises CostError when the costs
    say nothing of so few devices, InfeasiblePlan when no scheme fits them."""
    if isinstance(costs, GroupCosts):
        return _groups(costs, devices)
    return _pipelines(costs, devices)


def _groups(costs: GroupCosts, devices: int) -> tuple[PricedScheme, ...]:
    """Groups of all sizes that fit the devices. Raises InfeasiblePlan when none does."""
    if costs.sizes[0] > devices:
        raise InfeasiblePlan(
            "devices",
            got=devices,
            wanted=f"at least {costs.sizes[0]}, the smallest group with costs",
        )
    return tuple(
        PricedScheme(
            scheme=Scheme(context=p),
            frontier=Frontier.of_rows(
                [(costs.a_s / p, (costs.b_s + kappa) / p, costs.c_s)], costs.cap_tokens * p
            ),
        )
        for p, kappa in costs.kappa_s.items()
        if p <= devices
    )


def _pipelines(costs: PipelineCosts, devices: int) -> tuple[PricedScheme, ...]:
    """Pipelines that fit the devices and hold tokens there. Raises CostError when the costs say
    nothing of so few devices, InfeasiblePlan when no pipeline fits."""
    known = costs.known_devices
    if devices < known[0]:
        raise CostError(
            "devices",
            got=devices,
            wanted=f"at least {known[0]}",
            hint=f"the costs list what fits memory at {', '.join(map(str, known))} devices",
        )
    cap_of = {cost.name: cost.most_tokens(devices) or 0 for cost in costs.schemes}
    schemes = tuple(
        PricedScheme(
            scheme=cost.scheme,
            name=cost.name,
            util=max(1, cost.util_length),
            frontier=Frontier.of_rows([(cost.a_s, cost.b_s, cost.c_s)], cap_of[cost.name]),
        )
        for cost in costs.schemes
        if cap_of[cost.name] > 0 and cost.scheme.devices <= devices
    )
    if not schemes:
        closest = min(costs.schemes, key=lambda c: (cap_of[c.name] <= 0, c.scheme.devices))
        raise InfeasiblePlan(
            "no scheme fits the devices",
            got=devices,
            wanted="a scheme with room for tokens",
            hint=f"{closest.name} takes {closest.scheme.devices} and holds "
            f"{counted(max(0, cap_of[closest.name]), 'token')}",
        )
    return schemes


def require_held(
    costs: PipelineCosts | GroupCosts,
    schemes: Sequence[PricedScheme],
    devices: int,
    longest: int,
    index: int,
) -> None:
    """Raise InfeasiblePlan when the longest sequence of a batch, of ``longest`` tokens and number
    ``index``, fits none of the schemes for so many devices."""
    roomiest = max(schemes, key=lambda scheme: scheme.most_tokens)
    if longest <= roomiest.most_tokens:
        return
    if isinstance(costs, GroupCosts):
        enough_devices = next((p for p in costs.sizes if p * costs.cap_tokens >= longest), None)
        needed_devices = -(-longest // costs.cap_tokens)
        hint = f"{enough_devices} devices would hold it"
        if enough_devices is None:
            hint = f"it takes {needed_devices} devices, and groups of so many have no costs"
        raise InfeasiblePlan(
            f"sequence {index} of {counted(longest, 'token')}",
            wanted=f"at most {counted(roomiest.most_tokens, 'token')} on "
            f"{counted(devices, 'device')} "
            f"({costs.cap_tokens:,} per device)",
            hint=hint,
        )
    raise InfeasiblePlan(
        f"sequence {index} fits no scheme",
        got=counted(longest, "token"),
        wanted=f"at most {roomiest.most_tokens:,}",
        hint=f"{roomiest} on {counted(devices, 'device')} holds the most",
    )
