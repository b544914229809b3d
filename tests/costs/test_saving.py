"""Costs kept between runs: as they were written, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import Config
from headrace.costs import synthetic_costs
from headrace.costs.saving import save_whole, sealed, unsealed
from headrace.engine.agreement import read_profile
from headrace.engine.cost_cache import newest_costs, profile_path, remember_costs
from headrace.engine.setup import architecture_of
from profiles import made_up

VALUE = {"format": 1, "points": [{"forward_s": 0.25, "p": 2}, 1e-9], "name": "Mühle", "none": None}


def test_what_is_sealed_reads_back() -> None:
    """Would catch a checksum of a text that json writes in another way."""
    assert unsealed(sealed(VALUE)) == VALUE
    assert json.loads(sealed(VALUE))["points"] == VALUE["points"], "readable without the seal"


@given(st.integers(0, len(sealed(VALUE)) - 2), st.characters(max_codepoint=126))
def test_any_other_character_is_found(at: int, character: str) -> None:
    """Would catch a part of the file that the checksum leaves out, the seal's own name too."""
    text = sealed(VALUE)
    changed = text[:at] + character + text[at + 1 :]
    try:
        found = unsealed(changed)
    except ValueError:
        return
    assert found == VALUE, "another number, and nobody noticed"


@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"crc32": 1}', "[" * 5000, '{"a": NaN}'])
def test_what_was_never_sealed_is_refused(text: str) -> None:
    """Would catch a file of something else that counts as checked."""
    with pytest.raises(ValueError):  # noqa: PT011 (whatever its text)
        unsealed(text)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "a.toml"
    path.write_text('[data]\npaths = ["."]\nbatch_tokens = 9\n[model]\npreset = "llama-tiny"\n')
    return Config.load(path, f"data.cache={tmp_path / 'cache'}", "devices.memory=1GiB")


def flip(folder: Path, old: str, new: str) -> None:
    (file,) = folder.rglob("*.json")
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_remembered_costs_with_a_flipped_digit_count_as_none(config: Config) -> None:
    """Would catch plans by costs that the disk made up."""
    architecture = architecture_of(config)
    costs = synthetic_costs(2, architecture.layers).replace(shape=architecture.shape)
    remember_costs(config, costs)
    assert newest_costs(config, architecture, 2) is not None
    flip(config.data.cache_folder, '"state_bytes": ', '"state_bytes": 1')
    assert newest_costs(config, architecture, 2) is None


def test_a_profile_with_a_flipped_digit_is_measured_again(config: Config) -> None:
    """Would catch the same of a profile; and damage that nobody is told of."""
    profile, told = made_up(), list[object]()
    path = profile_path(config, profile.fingerprint)
    save_whole(path, sealed(profile.to_json()), "profile")
    assert read_profile(path, profile.fingerprint, told.append) == profile
    flip(config.data.cache_folder, '"pull_s": 0.1', '"pull_s": 0.3')
    assert read_profile(path, profile.fingerprint, told.append) is None
    assert "measured again (its checksum differs)" in str(told)
