"""Agreement of all ranks at the start of a run: memory of a rank, profile, checkpoint."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from headrace.comm.collectives import agree, gather_bytes, gather_floats
from headrace.comm.mesh import Groups
from headrace.costs.saving import save_whole, sealed, unsealed
from headrace.errors import CheckpointError, CostError, DamagedCheckpoint, HeadraceError, SpecError
from headrace.native.machine import available_bytes
from headrace.spec.cluster import Cluster
from headrace.spec.profile import Profile

__all__ = ["agreed_cluster", "agreed_profile", "newest_whole", "read_profile"]

_USED_FRACTION = 0.8
"""The fraction of the free memory that a rank uses by default."""

Found = TypeVar("Found")


def agreed_cluster(groups: Groups, device: str, memory_bytes: int | None) -> Cluster:
    """The ranks of a run and the memory that each may use. Collective.

    Args:
        groups: The groups of this rank.
        device: Where its model lives, as torch names it.
        memory_bytes: What a rank may use; where it is None, 80 % of what is free, which on a CPU
            the ranks of one machine share.

    Returns:
        The cluster, the same on all ranks: the least memory that any of them has.
    """
    host = platform.node().encode()
    ranks_here = gather_bytes(host, groups.world).count(host)  # ranks on this machine
    free = available_bytes(device)
    own_part = free / ranks_here if device == "cpu" else free
    limit = int(_USED_FRACTION * own_part) if memory_bytes is None else memory_bytes
    agreed = min(int(row[0]) for row in gather_floats([float(limit)], groups.world))
    kind = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    return Cluster(devices=groups.ranks, memory_bytes=agreed, device=kind)


def agreed_profile(
    path: Path,
    fingerprint: str,
    measure: Callable[[], Profile],
    groups: Groups,
    tell: Callable[[str], object],
    *,
    fresh: bool = False,
) -> tuple[Profile, bool]:
    """The profile kept in a file, or a new one, which is kept there. Collective.

    Args:
        path: The file.
        fingerprint: Everything that changes what is measured.
        measure: Measures a profile; collective.
        groups: The groups of this rank.
        tell: Called with a line for people.
        fresh: Whether to measure where a profile is kept, too.

    Returns:
        The profile, the same on all ranks, and whether it was measured now. Where any rank has
        none, all measure.
    """
    kept = None if fresh else read_profile(path, fingerprint, tell)
    kept_flags = gather_floats([float(kept is not None)], groups.world)
    all_have = all(flags[0] for flags in kept_flags)
    profile = kept if all_have and kept is not None else measure()
    agree("profile", json.dumps(profile.to_json()), groups.world)
    if not all_have and groups.rank == 0:
        try:
            save_whole(path, sealed(profile.to_json()), "profile")
        except CostError as error:
            tell(f"costs are not kept for other runs ({error})")
    return profile, not all_have


def newest_whole(
    found: Sequence[Path],
    load: Callable[[Path], Found],
    groups: Groups,
    tell: Callable[[str], object],
    *,
    hint: str = "",
) -> tuple[Path, Found] | None:
    """Load the newest checkpoint that is whole on all ranks. Collective.

    Args:
        found: Checkpoints, the newest first.
        load: Loads one; raises DamagedCheckpoint, or what malformed JSON raises, for one that is
            not whole.
        groups: The groups of this rank.
        tell: Called with a line for people, for each that is damaged and passed over.
        hint: What helps where all are damaged.

    Returns:
        The checkpoint and what was loaded; None where there is none yet.

    Raises:
        CheckpointError: Where all are damaged; what ``load`` raises of another kind.
    """
    agree("checkpoints to resume from", str(list(map(str, found))), groups.world)
    wrong = ""  # the error of the newest checkpoint
    for path in found:
        loaded, own_error = _try_load(path, load)
        errors = [error.decode() for error in gather_bytes(own_error.encode(), groups.world)]
        if loaded is not None and not any(errors):
            return path, loaded
        first_error = next((error for error in errors if error), own_error)
        wrong = wrong or first_error
        further = ": going on from the one before" if path != found[-1] else ""
        tell(f"{path} is damaged ({first_error}){further}")
    if wrong:
        raise CheckpointError(
            f"checkpoints in {found[0].parent}",
            got=wrong,
            wanted="one that is whole",
            hint=hint or None,
        )
    return None


def _try_load(path: Path, load: Callable[[Path], Found]) -> tuple[Found | None, str]:
    """Load a checkpoint on this rank; returns (what was loaded, "") or, where it is damaged, (None,
    the error as text), so that ranks can tell each other before any of them raises."""
    try:
        return load(path), ""
    except DamagedCheckpoint as error:
        return None, str(HeadraceError(error.what, got=error.got, wanted=error.wanted))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        return None, f"{path}: {type(error).__name__} {error}"


def read_profile(path: Path, fingerprint: str, tell: Callable[[str], object]) -> Profile | None:
    """The profile in a file, None where there is none, or one of another ``fingerprint``. A file
    that cannot be read is reported by ``tell`` and counts as none."""
    try:
        profile = Profile.from_json(unsealed(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, SpecError) as error:
        tell(f"profile {path} is not readable and is measured again ({error})")
        return None
    return profile if profile.fingerprint == fingerprint else None
