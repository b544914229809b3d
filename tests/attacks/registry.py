"""All attacks."""

from __future__ import annotations

from attacks.attack import Attack
from attacks.caches import CACHES
from attacks.checkpoints import CHECKPOINTS
from attacks.methods import METHODS
from attacks.programs import PROGRAMS
from attacks.steps import STEPS

__all__ = ["ATTACKS"]

ATTACKS: tuple[Attack, ...] = (STEPS, METHODS, PROGRAMS, CHECKPOINTS, CACHES)
