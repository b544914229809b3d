"""Clusters."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import Cluster
from headrace.units import GIB

clusters = st.builds(
    Cluster, devices=st.integers(1, 4096), memory_bytes=st.integers(1, 2**50), device=st.text()
)


@given(clusters)
def test_json_reads_back(cluster: Cluster) -> None:
    """Catches a field that JSON does not carry."""
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_it_prints_its_size() -> None:
    """Catches memory printed in bytes."""
    cluster = Cluster(devices=4, memory_bytes=80 * GIB, device="H100")
    assert str(cluster) == "4 x H100 with 80 GiB"


@pytest.mark.parametrize("devices", [0, -1])
def test_there_are_devices(devices: int) -> None:
    """Catches a plan for nobody."""
    with pytest.raises(SpecError, match=f"devices of a cluster: got {devices}, wanted a whole"):
        Cluster(devices=devices, memory_bytes=1)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 8.5, True, "8", 10**30, 1e308])
def test_numbers_are_whole_and_bounded(number: float) -> None:
    """Catches comparisons that do not hold for NaN, and so refuse nothing, and clusters of which
    nobody would live to see a plan."""
    shown = re.escape(repr(number))
    with pytest.raises(SpecError, match=f"devices of a cluster: got {shown}"):
        Cluster(devices=number, memory_bytes=1)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=f"memory of a device: got {shown}"):
        Cluster(devices=1, memory_bytes=number)  # type: ignore[arg-type]


def test_devices_have_memory() -> None:
    """Catches a limit of zero, under which every plan would be infeasible."""
    with pytest.raises(SpecError, match="memory of a device: got 0, wanted a whole"):
        Cluster(devices=1, memory_bytes=0)
