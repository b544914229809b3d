"""Devices, links and nodes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec.hardware import DEVICES, LINKS, USUAL, Hardware, Link
from headrace.units import GIB

devices = st.sampled_from(sorted(DEVICES))
links = st.lists(st.sampled_from(sorted(LINKS)), max_size=2)


@given(devices, links)
def test_text_reads_back(device: str, given_links: list[str]) -> None:
    """Catches a default that ``str`` leaves out, and links in the wrong order."""
    hardware = Hardware.parse("+".join([device, *given_links]))
    assert Hardware.parse(str(hardware)) == hardware
    assert hardware.device is DEVICES[device]
    found = [hardware.inside.name, hardware.across.name]
    assert found == [*given_links, *USUAL[device].links[len(given_links) :]]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("h100", "h100+nvlink4+infiniband-ndr"),
        ("A100-80G + PCIe4", "a100-80g+pcie4+infiniband-hdr"),
        ("h100+nvlink4+ethernet-100g", "h100+nvlink4+ethernet-100g"),
    ],
)
def test_what_people_type(text: str, read: str) -> None:
    """Catches capitals and blanks that are refused, and other defaults than documented."""
    assert str(Hardware.parse(text)) == read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10", r"device of the hardware: got 'h10'; which one: h100, h100-96g-500w\?"),
        ("a100", r"got 'a100'; which one: a100-80g, a100-40g\?"),
        ("mi205", r"did you mean 'mi250'\?"),
        ("gaudi", r"got 'gaudi'; known are a100-80g, "),
        ("", r"got ''; known are a100-80g, "),
        ("h100+infiniband", r"link of the hardware: got .* infiniband-hdr, infiniband-ndr\?"),
        ("h100+nvlnik4", r"did you mean 'nvlink4'\?"),
        ("h100+", r"link of the hardware: got ''"),
        ("h100+nvlink4+pcie4+pcie5", r"wanted DEVICE\[\+INSIDE\]\[\+ACROSS\]"),
    ],
)
def test_unknown_names_say_which_there_are(text: str, message: str) -> None:
    """Catches a KeyError, and a100 taken for a slip of h100."""
    with pytest.raises(SpecError, match=message):
        Hardware.parse(text)


def test_groups_of_one_node_talk_inside_it() -> None:
    """Catches nodes that are counted from the group's first rank, and a group of neighbours on
    two nodes that is taken for one of one."""
    hardware = Hardware.parse("h100")
    assert hardware.link([3]) is hardware.inside
    assert hardware.link(range(8, 16)) is hardware.inside
    assert hardware.link([7, 8]) is hardware.across
    assert hardware.link([0, 15]) is hardware.across
    assert replace(hardware, devices_per_node=16).link([0, 15]) is hardware.inside


def test_a_message_waits_and_then_flows() -> None:
    """Catches a latency paid once for many messages, or peaks where fractions are attained."""
    link = replace(LINKS["pcie4"], bytes_per_s=1e9, latency_s=1e-3, attained=0.5)
    assert link.seconds(1e6) == pytest.approx(1e-3 + 2e-3)
    assert link.seconds(1e6, messages=3) == pytest.approx(3e-3 + 2e-3)
    assert link.seconds(0.0, messages=0) == 0


def test_presets_are_filed_under_their_names_and_say_where_from() -> None:
    """Catches a preset that is copied and not renamed, and a number without a source."""
    for presets in (DEVICES, LINKS):
        for name, preset in presets.items():
            assert preset.name == name
            assert len(preset.source) > 20
    assert set(USUAL) == set(DEVICES)
    assert all(set(usual.links) <= set(LINKS) for usual in USUAL.values())


def test_presets_keep_the_order_of_their_data_sheets() -> None:
    """Catches a slip of a power of ten, and bits taken for bytes or both directions for one."""
    a100, h100, h200 = (DEVICES[name] for name in ("a100-80g", "h100", "h200"))
    assert h100.peak("bfloat16") == pytest.approx(3.17 * a100.peak("bfloat16"), rel=0.01)
    assert h200.flops_per_s == h100.flops_per_s
    assert a100.memory_bytes_per_s < h100.memory_bytes_per_s < h200.memory_bytes_per_s
    assert 78 * GIB < h100.memory_bytes < 80 * 10**9 * 1.1 < h200.memory_bytes
    assert DEVICES["a800"].peak("bfloat16") == a100.peak("bfloat16")
    speeds = {name: link.bytes_per_s for name, link in LINKS.items()}
    assert speeds["nvlink3"] / speeds["nvlink-a800"] == 1.5
    assert speeds["nvlink4"] / speeds["nvlink3"] == 1.5
    assert speeds["infiniband-ndr"] == 4 * speeds["ethernet-100g"] == 400e9 / 8
    assert all(1 <= link.latency_s * 1e6 <= 200 for link in LINKS.values())


def test_a_dtype_without_units_is_one_message() -> None:
    """Catches a KeyError for float16 on the CPU preset."""
    with pytest.raises(SpecError, match="FLOPs of cpu: got 'float16'; known are bfloat16"):
        DEVICES["cpu"].peak("float16")


@pytest.mark.parametrize(
    "change",
    [
        {"flops_per_s": {}},
        {"flops_per_s": {"float32": 0.0}},
        {"memory_bytes": 0},
        {"memory_bytes_per_s": float("nan")},
        {"launch_s": -1.0},
        {"attained_matmul": 0.0},
        {"attained_attention": 70.0},
        {"attained_memory": float("nan")},
    ],
)
def test_devices_are_checked(change: dict) -> None:
    """Catches divisions by zero later, and percent taken for fractions."""
    with pytest.raises(SpecError, match="of cpu"):
        replace(DEVICES["cpu"], **change)


@pytest.mark.parametrize("change", [{"bytes_per_s": 0.0}, {"latency_s": -1.0}, {"attained": 1.1}])
def test_links_are_checked(change: dict) -> None:
    """Catches a link that takes no time, or is better than its peak."""
    with pytest.raises(SpecError, match="pcie4"):
        replace(LINKS["pcie4"], **change)
    with pytest.raises(SpecError, match="devices of a node: got 0"):
        replace(Hardware.parse("cpu"), devices_per_node=0)


def test_what_all_get_crosses_once_a_node() -> None:
    """Catches bytes that cross once a device, that move inside for nothing, and a node too many."""
    inside, across = (
        Link(name=name, bytes_per_s=speed, latency_s=0.0, attained=1.0, source="made up")
        for name, speed in (("in", 8.0), ("out", 1.0))
    )
    hardware = replace(Hardware.parse("h100"), inside=inside, across=across, devices_per_node=4)
    assert hardware.gather_s(1, 16.0) == 0.0
    assert hardware.gather_s(4, 16.0) == 4 * 3 / 8
    assert hardware.gather_s(16, 16.0) == 3 / 1 + 12 / 8
    assert hardware.gather_s(5, 10.0) == 2 * 4 / 1  # one device alone, which receives all across
    assert hardware.gather_s(6, 12.0) == 2 * 2 / 1 + 2 * 3 / 8  # two, half of it each
