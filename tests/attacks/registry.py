"""All attacks."""

from __future__ import annotations

from attacks.attack import Attack
from attacks.caches import CACHES
from attacks.checkpoints import CHECKPOINTS
from attacks.configurations import CONFIGURATIONS
from attacks.data import DATA
from attacks.doors import AXES, CALLS, LOOPS
from attacks.kills import KILLS
from attacks.methods import METHODS
from attacks.planner import PLANNER
from attacks.programs import PROGRAMS
from attacks.steps import STEPS

__all__ = ["ATTACKS"]

ATTACKS: tuple[Attack, ...] = (
    STEPS,
    KILLS,
    METHODS,
    PROGRAMS,
    PLANNER,
    CHECKPOINTS,
    CACHES,
    DATA,
    CONFIGURATIONS,
    CALLS,
    LOOPS,
    AXES,
)
