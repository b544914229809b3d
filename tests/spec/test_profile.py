"""Profiles: their JSON form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.costs.saving import unsealed
from headrace.errors import SpecError
from headrace.spec import Architecture, Cluster
from headrace.spec.profile import ENDS, PROFILE_FORMAT, Profile, ProfilePoint

seconds = st.floats(0, 10)
count = st.one_of(st.none(), st.integers(0, 2**40))
points = st.builds(
    ProfilePoint,
    p=st.integers(1, 4),
    option=st.sampled_from(["local", "ulysses_z+full", "attention:metp+attention", ENDS]),
    lengths=st.lists(st.integers(1, 9999), min_size=1, max_size=5).map(tuple),
    forward_s=seconds,
    backward_s=seconds,
    kept_bytes=count,
    transient_bytes=count,
    order=st.sampled_from(["natural", "zigzag"]),
    fetched=st.sampled_from([0.0, 0.5, 1.0]),
)
sizes = st.integers(1, 9)
profiles = st.builds(
    Profile,
    fingerprint=st.text(),
    shape=st.just(Architecture.preset("llama-tiny").shape),
    cluster=st.just(Cluster(devices=2, memory_bytes=10**9)),
    points=st.lists(points, max_size=6).map(tuple),
    exchange_s=st.fixed_dictionaries({"pull_s": seconds, "push_s": seconds, "update_s": seconds}),
    state_bytes=st.integers(0, 2**40),
    working_bytes=st.dictionaries(
        sizes, st.fixed_dictionaries({"replicated": sizes, "sharded": sizes}), max_size=3
    ),
    gather_s=st.dictionaries(sizes, st.tuples(seconds, seconds), max_size=3),
    element_bytes=st.sampled_from([2, 4, 8]),
    feed_forwards=st.sampled_from([{}, {"megatron_cz": "ulysses_z"}]),
    measured_in_s=seconds,
)


def _json() -> dict[str, Any]:
    point = ProfilePoint(p=1, option=ENDS, lengths=(64,), forward_s=0.1, backward_s=0.2)
    return Profile(
        fingerprint="a=1",
        shape=Architecture.preset("llama-tiny").shape,
        cluster=Cluster(devices=1, memory_bytes=10**9),
        points=(point,),
        exchange_s={"pull_s": 0.0},
        state_bytes=1,
        working_bytes={1: {"replicated": 2, "sharded": 1}},
        gather_s={1: (0.0, 0.0)},
    ).to_json()


def test_branches_are_told_from_layers() -> None:
    """Catches a branch that is taken for a layer of its own, and a branch that nobody has."""

    def branch(option: str) -> tuple[str, str] | None:
        return ProfilePoint(p=1, option=option, lengths=(1,), forward_s=0, backward_s=0).branch

    assert branch("attention:metp") == ("attention", "metp")
    assert branch("feed_forward:metp+attention") == ("feed_forward", "metp+attention")
    assert branch("metp+attention") is None
    assert branch(ENDS) is None
    with pytest.raises(SpecError, match="got head:metp, wanted attention or feed_forward"):
        branch("head:metp")


@given(profiles)
def test_json_reads_back(profile: Profile) -> None:
    """Catches group sizes that stay texts, and lengths or pairs that stay lists."""
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


def test_a_profile_of_old_says_what_replicated_weights_take() -> None:
    """Catches a cached profile that is measured again for the word of before."""
    text = (Path(__file__).parents[1] / "golden" / "weights-whole" / "profile.json").read_text()
    assert Profile.from_json(unsealed(text)) == Profile.from_json(_json())


def test_profiles_of_format_3_are_read() -> None:
    """Catches a profile measured when its model was still its architecture that is lost."""
    value = _json() | {"format": 3}
    del value["shape"]
    value["architecture"] = Architecture.preset("llama-tiny").to_json()
    assert Profile.from_json(value) == Profile.from_json(_json())


@pytest.mark.parametrize("older", [3, 4])
def test_a_profile_without_the_share_that_moves_is_read(older: int) -> None:
    """Catches profiles of last month that have to be measured again for one number."""
    value = _json() | {"format": older}
    del value["sharded_share"]
    assert Profile.from_json(value).sharded_share == 1.0


def test_another_format_is_refused() -> None:
    """Catches numbers of an older meaning that are taken as they are."""
    with pytest.raises(SpecError, match=f"format of a profile: got 0, wanted {PROFILE_FORMAT}"):
        Profile.from_json(_json() | {"format": 0})


@pytest.mark.parametrize("key", _json())
def test_a_missing_key_is_named(key: str) -> None:
    """Catches a KeyError from the depths where half a file was written."""
    value = _json()
    del value[key]
    with pytest.raises(SpecError, match=f"{key}.*; profile again"):
        Profile.from_json(value)


JUNK: list[dict[str, Any]] = [
    {"points": 3},
    {"points": [3]},
    {"points": [{"p": 1}]},
    {"points": [{"lengths": 3}]},
    {"points": [{**_json()["points"][0], "colour": "red"}]},
    {"points": [{**_json()["points"][0], "order": "zig"}]},
    {"points": [{**_json()["points"][0], "fetched": 2.0}]},
    {"feed_forwards": 3},
    {"shape": None},
    {"shape": {"layers": 1}},
    {"cluster": {"colour": "red"}},
    {"exchange_s": 3},
    {"working_bytes": []},
    {"working_bytes": {"one": {}}},
    {"gather_s": {"1": [0.0]}},
    {"gather_s": {"1": None}},
]


@pytest.mark.parametrize("changes", JUNK, ids=str)
def test_junk_is_refused(changes: dict[str, Any]) -> None:
    """Catches a traceback where a cached file was damaged."""
    with pytest.raises(SpecError, match="profile again"):
        Profile.from_json(_json() | changes)


@pytest.mark.parametrize("value", [[], "profile", None, 3], ids=str)
def test_what_is_no_object_is_refused(value: Any) -> None:
    """Catches a file that is JSON, but of something else."""
    with pytest.raises(SpecError):
        Profile.from_json(value)
