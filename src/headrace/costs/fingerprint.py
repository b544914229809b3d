"""Fingerprints: everything that changes what a profile would measure, as text that can be compared.

Text form: ``key=value`` joined by ``"; "``, keys sorted. Kept readable rather than hashed, so that
a mismatch can be named.
"""

from __future__ import annotations

from headrace.errors import CostError

__all__ = ["HYBRID", "fingerprint_difference", "fingerprint_of", "is_of_hybrid"]

HYBRID = "fit=hybrid"
"""What the fingerprint of costs has besides the profile's, where they were fitted to a hybrid."""


def fingerprint_of(**facts: object) -> str:
    """Write facts as a fingerprint.

    Args:
        facts: What changes measurements, by name.

    Returns:
        ``device=cpu; torch=2.13; ...``, names sorted.

    Raises:
        CostError: When a value contains a semicolon or a line break.
    """
    for key, value in facts.items():
        if ";" in str(value) or "\n" in str(value):
            raise CostError(f"fingerprint, {key}", got=repr(value), wanted="no ';' or line break")
    return "; ".join(f"{key}={facts[key]}" for key in sorted(facts))


def _facts(fingerprint: str) -> dict[str, str]:
    """The facts of a fingerprint, values by key."""
    parts = (part.strip().partition("=") for part in fingerprint.split(";") if part.strip())
    return {key: value for key, _, value in parts}


def fingerprint_difference(stored: str, wanted: str) -> str:
    """Say in what two fingerprints differ.

    Args:
        stored: The fingerprint of what was measured.
        wanted: The fingerprint of this set-up.

    Returns:
        Such as ``torch is 2.12 instead of 2.13``; empty when nothing differs.
    """
    had, wants = _facts(stored), _facts(wanted)
    texts = []
    for key in sorted(had.keys() | wants.keys()):
        if had.get(key) != wants.get(key):
            texts.append(f"{key} is {had.get(key, 'absent')} instead of {wants.get(key, 'absent')}")
    return ", ".join(texts)


def is_of_hybrid(fingerprint: str) -> bool:
    """Whether costs with this fingerprint were fitted to a hybrid (ParaDySe)."""
    return HYBRID in fingerprint.split("; ")
