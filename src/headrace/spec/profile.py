"""A profile: what was measured of one model on one set of devices, before any fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.errors import SpecError
from headrace.spec.architecture import Architecture
from headrace.spec.cluster import Cluster
from headrace.spec.plan import Working

__all__ = ["ENDS", "PROFILE_FORMAT", "Profile", "ProfilePoint"]

ENDS = "ends"
"""The option name of embedding, last norm, head and loss together."""

PROFILE_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """One measurement of one layer (or the ends) on groups of ``p`` ranks over one pack.

    ``option`` is a layer option's text or ``ends``; ``lengths`` the documents of the pack;
    seconds are the slowest rank's. ``kept_bytes`` is what one rank keeps for the backward,
    ``transient_bytes`` what it needs in passing on top; None where only time was measured.
    """

    p: int
    option: str
    lengths: tuple[int, ...]
    forward_s: float
    backward_s: float
    kept_bytes: int | None = None
    transient_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements of one model on one set of devices.

    ``fingerprint`` names everything that changes what would be measured. ``exchange_s`` are the
    step's constants: pull, push, update. ``gather_s[p]`` is what weights held sharded add to one
    layer's (forward, backward). ``state_bytes`` is a rank's storage; ``working_bytes`` what
    working weights and their gradients add, by group size and kind.
    """

    fingerprint: str
    architecture: Architecture
    cluster: Cluster
    points: tuple[ProfilePoint, ...]
    exchange_s: Mapping[str, float]
    state_bytes: int
    working_bytes: Mapping[int, Mapping[Working, int]]
    gather_s: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    measured_in_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "format": PROFILE_FORMAT,
            "fingerprint": self.fingerprint,
            "architecture": self.architecture.to_json(),
            "cluster": self.cluster.to_json(),
            "points": [asdict(point) for point in self.points],
            "exchange_s": dict(self.exchange_s),
            "state_bytes": self.state_bytes,
            "working_bytes": {str(p): dict(held) for p, held in self.working_bytes.items()},
            "gather_s": {str(p): list(pair) for p, pair in self.gather_s.items()},
            "measured_in_s": self.measured_in_s,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Profile:
        """The inverse of :meth:`to_json`. Raises SpecError when it is malformed."""
        try:
            if value["format"] != PROFILE_FORMAT:
                raise SpecError("format of a profile", got=value["format"], wanted=PROFILE_FORMAT)
            return cls(
                fingerprint=value["fingerprint"],
                architecture=Architecture.from_json(value["architecture"]),
                cluster=Cluster.from_json(value["cluster"]),
                points=tuple(_point(point) for point in value["points"]),
                exchange_s=dict(value["exchange_s"]),
                state_bytes=value["state_bytes"],
                working_bytes={int(p): dict(held) for p, held in value["working_bytes"].items()},
                gather_s={int(p): (f, b) for p, (f, b) in value["gather_s"].items()},
                measured_in_s=value["measured_in_s"],
            )
        except (KeyError, TypeError, ValueError, AttributeError, SpecError) as error:
            raise SpecError("profile", got=f"{type(error).__name__}: {error}", hint="profile again")


def _point(value: Mapping[str, Any]) -> ProfilePoint:
    fields: dict[str, Any] = {**value, "lengths": tuple(value["lengths"])}
    return ProfilePoint(**fields)
