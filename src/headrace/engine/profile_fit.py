"""The costs of a profile that all ranks have, fitted as a configuration says."""

from __future__ import annotations

import json
from collections.abc import Callable

from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.config.planner_config import PlannerConfig
from headrace.costs import CostModel
from headrace.costs.sources.measured import costs_from_profile
from headrace.spec.profile import Profile

__all__ = ["fitted_costs", "require_fit"]


def require_fit(options: PlannerConfig) -> None:
    """Raise MissingExtra, before anything is measured, where costs cannot be fitted here as the
    configuration says."""
    if options.costs == "hybrid":
        from headrace.costs.paradyse import need_scikit_learn

        need_scikit_learn()


def fitted_costs(
    profile: Profile,
    options: PlannerConfig,
    groups: Groups,
    *,
    longest: int,
    say: Callable[[str], object],
) -> CostModel:
    """Fit the costs that ``planner.costs`` asks for: quadratics fitted to what was measured, or to
    ParaDySe's hybrid (forests and polynomials) of it, up to sequences of ``longest`` tokens. The
    first rank describes a hybrid by ``say``. Collective.

    All ranks fit, so that what cannot be fitted is refused on all. For a hybrid all then take the
    first one's numbers, as random forests made on other processors differ in their last digits.
    Raises CostError for too few measurements.
    """
    if options.costs == "quadratic":
        return costs_from_profile(profile)
    from headrace.costs.paradyse.hybrid_costs import costs_of_hybrid

    found = costs_of_hybrid(profile, longest)
    if groups.rank == 0:
        say(f"hybrid costs: {found}")
    payload = json.dumps(found.costs.to_json()).encode()
    return CostModel.from_json(json.loads(gather_bytes(payload, groups.world)[0]))
