"""A profile: what was measured of one model on one set of devices, before any fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from headrace.errors import SpecError
from headrace.spec.architecture import stored_shape
from headrace.spec.cluster import Cluster
from headrace.spec.layer_plan import BRANCHES, Branch
from headrace.spec.model_shape import ModelShape
from headrace.spec.plan import TokenOrder, Working, stored_working

__all__ = [
    "ENDS",
    "PROFILE_FORMAT",
    "NotFitting",
    "Profile",
    "ProfilePoint",
    "stored_working_bytes",
]

ENDS = "ends"
"""The option name of embedding, last norm, head and loss together."""

PROFILE_FORMAT = 5

_READABLE = (3, 4, PROFILE_FORMAT)
"""Profiles of format 3 have the whole architecture in the place of its shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """One measurement of one layer, one branch of it or the ends on groups of ``p`` ranks over
    one pack.

    ``option`` is a layer option's text, a branch's (``attention:METHOD[+LEVEL]``,
    ``feed_forward:METHOD[+LEVEL]``, where ``full`` is no level of a branch) or ``ends``;
    ``lengths`` the documents of the pack; ``order`` how its tokens lay on the ranks; seconds are
    the slowest rank's. ``kept_bytes`` is what one rank keeps for the backward,
    ``transient_bytes`` what it needs in passing on top; None where only time was measured.
    ``fetched`` is the share of the weights' rows that a rank fetches where they are held sharded:
    all of what it lacks, or nothing where a method works with the shards as they lie.
    """

    p: int
    option: str
    lengths: tuple[int, ...]
    forward_s: float
    backward_s: float
    kept_bytes: int | None = None
    transient_bytes: int | None = None
    order: TokenOrder = "natural"
    fetched: float = 1.0

    def __post_init__(self) -> None:
        """Raise SpecError for an unknown token order and for a fetched share outside 0 to 1."""
        if self.order not in get_args(TokenOrder):
            raise SpecError(
                "token order of a point",
                got=repr(self.order),
                wanted=" or ".join(get_args(TokenOrder)),
            )
        if not 0 <= self.fetched <= 1:
            raise SpecError("fetched share of a point", got=self.fetched, wanted="0 to 1")

    @property
    def branch(self) -> tuple[Branch, str] | None:
        """(branch, ``METHOD[+LEVEL]``) of a measured branch, None for whole layers and ends.
        Raises SpecError for an option of another branch."""
        name, colon, rest = self.option.partition(":")
        if not colon:
            return None
        for branch in BRANCHES:
            if name == branch:
                return branch, rest
        raise SpecError("option of a point", got=self.option, wanted=" or ".join(BRANCHES))


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFitting:
    """A pack of ``tokens`` for which two layers of an option, or the ends, on groups of ``p``
    ranks need more memory than a rank has; longer ones were not tried."""

    p: int
    option: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All measurements of one model on one set of devices.

    ``fingerprint`` names everything that changes what would be measured. ``exchange_s`` are the
    seconds of a step's pull, push and update, by these words. ``gather_s[p]`` is what weights held
    sharded add to one layer's (forward, backward). ``state_bytes`` is a rank's storage;
    ``working_bytes`` what working weights and their gradients add, by group size and by how weights
    are held. ``element_bytes`` are those of one element of the activations. ``feed_forwards`` names
    for every method without a feed-forward of its own the method whose it uses, so that equal ones
    are measured once.
    ``links[p]`` is (seconds to start, bytes per second that leave a rank) of collectives in groups
    of p. ``not_fitting`` are the packs at which memory ran out. ``sharded_share`` is the share of
    pull and push that moves where one group of all devices shards weights. ``measured_in_s`` are
    the seconds that measuring took.
    """

    fingerprint: str
    shape: ModelShape
    cluster: Cluster
    points: tuple[ProfilePoint, ...]
    exchange_s: Mapping[str, float]
    state_bytes: int
    working_bytes: Mapping[int, Mapping[Working, int]]
    gather_s: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    element_bytes: int = 4
    feed_forwards: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    not_fitting: tuple[NotFitting, ...] = ()
    sharded_share: float = 1.0
    measured_in_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "format": PROFILE_FORMAT,
            "fingerprint": self.fingerprint,
            "shape": self.shape.to_json(),
            "cluster": self.cluster.to_json(),
            "points": [asdict(point) for point in self.points],
            "exchange_s": dict(self.exchange_s),
            "state_bytes": self.state_bytes,
            "working_bytes": {str(p): dict(held) for p, held in self.working_bytes.items()},
            "gather_s": {str(p): list(pair) for p, pair in self.gather_s.items()},
            "element_bytes": self.element_bytes,
            "feed_forwards": dict(self.feed_forwards),
            "links": {str(p): list(pair) for p, pair in self.links.items()},
            "not_fitting": [asdict(pack) for pack in self.not_fitting],
            "sharded_share": self.sharded_share,
            "measured_in_s": self.measured_in_s,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Profile:
        """The inverse of :meth:`to_json`. Raises SpecError when it is malformed."""
        try:
            if value["format"] not in _READABLE:
                raise SpecError("format of a profile", got=value["format"], wanted=PROFILE_FORMAT)
            return cls(
                fingerprint=value["fingerprint"],
                shape=stored_shape(value),
                cluster=Cluster.from_json(value["cluster"]),
                points=tuple(_point(point) for point in value["points"]),
                exchange_s=dict(value["exchange_s"]),
                state_bytes=value["state_bytes"],
                working_bytes=stored_working_bytes(value),
                gather_s={int(p): (f, b) for p, (f, b) in value["gather_s"].items()},
                element_bytes=value["element_bytes"],
                feed_forwards=dict(value["feed_forwards"]),
                links={int(p): (s, b) for p, (s, b) in value["links"].items()},
                not_fitting=tuple(NotFitting(**pack) for pack in value["not_fitting"]),
                # Before format 5 all plans were said to move all weights.
                sharded_share=value["sharded_share"] if value["format"] > 4 else 1.0,
                measured_in_s=value["measured_in_s"],
            )
        except (KeyError, TypeError, ValueError, AttributeError, SpecError) as error:
            raise SpecError("profile", got=f"{type(error).__name__}: {error}", hint="profile again")


def stored_working_bytes(value: Mapping[str, Any]) -> dict[int, dict[Working, int]]:
    """The ``working_bytes`` of a JSON object by group size, then by how weights are held
    (``replicated`` or ``sharded``). JSON keys are texts, and older files have other words."""
    return {
        int(p): {stored_working(word): size for word, size in held.items()}
        for p, held in value["working_bytes"].items()
    }


def _point(value: Mapping[str, Any]) -> ProfilePoint:
    """The point that a JSON object describes, in which the lengths are a list."""
    fields: dict[str, Any] = {**value, "lengths": tuple(value["lengths"])}
    return ProfilePoint(**fields)
