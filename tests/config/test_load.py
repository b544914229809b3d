"""Configurations from files and flags: what is right is read, what is wrong is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace.config import Config, apply_overrides
from headrace.config.clips_config import ClipsConfig
from headrace.config.kinds import read_any
from headrace.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))

GOOD = """
[run]
steps = 7
[data]
paths = ["corpus", "/absolute", "python:stdlib", "package:torch", "~/mine"]
tokenizer = "tokenizer.json"
context = "32Ki"
batch_tokens = 4096
[model]
layers = 2
hidden = 32
heads = 4
"""

WRONG = """
rum = 1
[run]
stepz = 3
name = "a b"
[data]
paths = ["corpus", 3]
batch_tokens = 3
min_tokens = 0
colour = "red"
[model]
layers = 0
hidden = [1]
kind = "bart"
[devices]
device = "tpu"
timeout_s = -1
[planner]
recompute = ["none", "some"]
[optimiser]
lr = 1
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "my.toml"
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> dict[str, str]:
    """The named keys of a refused configuration, each with what is said of it."""
    with pytest.raises(ConfigError) as caught:
        Config.load(path, *overrides)
    text = str(caught.value)
    assert text.startswith(f"config {path}:")
    lines = text.removeprefix(f"config {path}:").strip().splitlines()
    found = [re.fullmatch(r"\s*([A-Za-z_0-9.]+): (.+)", line) for line in lines]
    assert all(found), lines
    return {line[1]: line[2] for line in found if line}


def test_a_file_with_every_kind_of_mistake_names_each(tmp_path: Path) -> None:
    """Catches a reader that stops at the first mistake, or says only that there is one."""
    found = problems(write(tmp_path, WRONG))
    assert found.pop("run.stepz") == "unknown key; did you mean 'steps'?"
    assert found.pop("optimiser") == "unknown key; did you mean 'optimizer'?"
    assert found.pop("rum") == "unknown key; did you mean 'run'?"
    assert found.pop("data.colour") == "unknown key"
    assert "got 'a b'" in found.pop("run.name")
    assert "got 3" in found.pop("data.paths.1")
    assert "got 0" in found.pop("data.min_tokens")
    assert "got 0" in found.pop("model.layers")
    assert "got [1]" in found.pop("model.hidden")
    assert "'llama', 'gpt' or 'bert' (got 'bart')" in found.pop("model.kind")
    assert "got 'tpu'" in found.pop("devices.device")
    assert "got -1" in found.pop("devices.timeout_s")
    assert "got 'some'" in found.pop("planner.recompute.1")
    assert not found


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "data"),
        ("[data]\nbatch_tokens = 3", "data.paths"),
        ("[run]\nsteps = 3", "model"),
        ('data = 3\n[model]\npreset = "gpt2"', "data"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, text: str, key: str) -> None:
    """Catches a default for what has none."""
    assert key in problems(write(tmp_path, text))


def test_whole_weights_are_told_their_new_word(tmp_path: Path) -> None:
    """Catches the word of before taken for another one, or refused without the new one."""
    path = write(tmp_path, GOOD)
    assert "'replicated'" in problems(path, "planner.working=whole")["planner.working"]
    assert Config.load(path, "planner.working=replicated").planner.working == "replicated"


def test_a_wrong_item_is_one_mistake(tmp_path: Path) -> None:
    """Catches a second message, which says that a list of one is empty."""
    path = write(tmp_path, GOOD)
    assert set(problems(path, "data.paths=[3]")) == {"data.paths.0"}


@pytest.mark.parametrize("key", ["data.context", "data.batch_tokens", "profile.longest"])
def test_keys_are_those_of_the_file(tmp_path: Path, key: str) -> None:
    """Catches ``data.context.constrained-int``, which nobody wrote."""
    assert set(problems(write(tmp_path, GOOD), f"{key}=[1]")) == {key}


NUMBERS = {
    "data.context": "many",
    "data.batch_tokens": "4X",
    "devices.memory": "lots",
    "profile.longest": "long",
}


@pytest.mark.parametrize("key", NUMBERS)
def test_texts_that_are_no_numbers_are_named(tmp_path: Path, key: str) -> None:
    """Catches ``devices: size: got 'lots'``, which leaves one to guess the key, and a traceback
    when the run starts and the text is read at last."""
    found = problems(write(tmp_path, GOOD), f"{key}={NUMBERS[key]}")
    assert set(found) == {key}
    assert f"got '{NUMBERS[key]}', wanted a number and one of the units" in found[key]


def test_paths_are_those_of_the_files_folder(tmp_path: Path, monkeypatch) -> None:
    """Catches paths of the folder in which the command happens to run."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    write(tmp_path, GOOD)
    config = Config.load(Path("../my.toml"))
    assert config.data.paths == (
        str(tmp_path / "corpus"),
        "/absolute",
        "python:stdlib",
        "package:torch",
        str(Path("~/mine").expanduser()),
    )
    assert config.data.tokenizer == str(tmp_path / "tokenizer.json")


def test_a_model_s_folder_is_taken_from_the_files_folder(tmp_path: Path) -> None:
    """Catches a folder of where the command runs, and a hint that names a key nobody can write."""
    path = tmp_path / "from.toml"
    path.write_text('data = { paths = ["a"], batch_tokens = 9 }\nmodel = { from = "m" }\n')
    assert Config.load(path).model.from_ == str(tmp_path / "m")
    assert Config.load(path).data.tokenizer == str(tmp_path / "m")
    assert Config.load(path, "model.from=/other").model.from_ == "/other"
    assert problems(path, "model.form=x")["model.form"] == "unknown key; did you mean 'from'?"
    found = problems(path, "data.batch_tokens=", "data.iterations.flw=dcp")
    assert found["data.iterations.flw"] == "unknown key; did you mean 'flow'?"


@pytest.mark.parametrize("name", ["bytes", "kmer:3", "org/model", "missing.json"])
def test_a_tokenizer_that_is_no_file_stays_a_name(tmp_path: Path, name: str) -> None:
    """Catches a Hugging Face name or ``bytes`` that becomes a path."""
    config = Config.load(write(tmp_path, GOOD), f"data.tokenizer={name}")
    assert config.data.tokenizer == name


OVERRIDES: dict[str, tuple[str, Any]] = {
    "a number": ("run.steps=12", 12),
    "a fraction": ("optimizer.lr = 3e-4", 3e-4),
    "a bare text": ("run.name=other", "other"),
    "a quoted text": ('run.name="other"', "other"),
    "a text with an equals sign": ("data.tokenizer=a=b", "a=b"),
    "true": ("report.wandb=true", True),
    "false": ("report.html=false", False),
    "a list of texts": ('planner.recompute=["none", "full"]', ("none", "full")),
    "a list of numbers": ("planner.group_sizes=[1, 4]", (1, 4)),
    "an empty list": ("planner.group_sizes=[]", ()),
    "a count in words": ("data.context=16Ki", 16384),
    "a new section": ("checkpoint.keep=5", 5),
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_overrides(tmp_path: Path, case: str) -> None:
    """Catches a value that is read as a text, or a section that must stand in the file."""
    text, wanted = OVERRIDES[case]
    config = Config.load(write(tmp_path, GOOD), text)
    section, _, key = text.partition("=")[0].strip().partition(".")
    got = getattr(getattr(config, section), key)
    assert got == wanted
    assert type(got) is type(wanted)
    assert config.run.steps == (wanted if key == "steps" else 7), "the rest is as it was"


def test_the_last_override_counts(tmp_path: Path) -> None:
    """Catches flags applied in another order than given."""
    path = write(tmp_path, GOOD)
    assert Config.load(path, "run.steps=1", "run.steps=2").run.steps == 2


def test_nothing_unsets_a_key(tmp_path: Path) -> None:
    """Catches a key of the file that no flag can take away."""
    assert Config.load(write(tmp_path, GOOD), "run.steps=").run.steps == 100


def test_a_whole_section_can_be_given(tmp_path: Path) -> None:
    """Catches an inline table that is taken as a text."""
    config = Config.load(write(tmp_path, GOOD), "model={preset = 'gpt2'}")
    assert config.model.preset == "gpt2"
    assert config.model.layers is None


def test_overrides_nest() -> None:
    """Catches a key of three parts that lands in the wrong place."""
    value: dict[str, Any] = {"a": {"x": 1}}
    apply_overrides(value, ["a.b.c=2", "d=3"])
    assert value == {"a": {"x": 1, "b": {"c": 2}}, "d": 3}


@pytest.mark.parametrize("override", ["run.steps", "=3", ".steps=3", "run.=3", "run..steps=3", ""])
def test_malformed_overrides_are_refused(tmp_path: Path, override: str) -> None:
    """Catches a flag that changes nothing in silence."""
    with pytest.raises(ConfigError, match=r"--set .*: wanted SECTION\.KEY=VALUE"):
        Config.load(write(tmp_path, GOOD), override)


def test_an_override_inside_a_value_is_refused(tmp_path: Path) -> None:
    """Catches a TypeError where a section was expected."""
    with pytest.raises(ConfigError, match=r"--set run.steps.x=3: got steps is no section"):
        Config.load(write(tmp_path, GOOD), "run.steps.x=3")


@pytest.mark.parametrize("override", ["run.stepz=3", "runs.steps=3", "run.steps=many"])
def test_wrong_overrides_are_named_as_keys_of_the_file(tmp_path: Path, override: str) -> None:
    """Catches a flag that is not checked like the file."""
    [key] = problems(write(tmp_path, GOOD), override)
    assert override.startswith(key)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Catches tracebacks of the file system and of the parser."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml: got No such file.*wanted a TOML file"):
        Config.load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        Config.load(tmp_path)
    with pytest.raises(ConfigError, match=r"my\.toml: got no TOML .*line 1"):
        Config.load(write(tmp_path, "a = = 3\n"))
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="got no TOML"):
        Config.load(tmp_path / "latin.toml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_load(path: Path) -> None:
    """Catches an example that was left behind by a renamed key or a moved file."""
    config = read_any(path)
    if path.name == "video.toml":
        assert isinstance(config, ClipsConfig)
        return
    assert isinstance(config, Config)
    architecture = config.model.architecture(4096, config.data.context)
    assert architecture.vocabulary >= 4096
    for name in (*config.data.paths, config.data.tokenizer):
        if not name.startswith(("python:", "package:")) and name != "bytes":
            assert Path(name).exists()


def test_there_are_examples() -> None:
    """Catches a moved folder, after which the test above would pass on nothing."""
    assert EXAMPLES


def test_a_configuration_reads_back(tmp_path: Path) -> None:
    """Catches a key that the journal of a run would lose."""
    config = Config.load(write(tmp_path, GOOD), "planner.group_sizes=[1, 2]")
    assert Config.model_validate(config.to_json()) == config


@pytest.mark.parametrize(
    "key",
    [
        "optimizer.clip",
        "optimizer.eps",
        "optimizer.lr",
        "devices.hang_s",
        "devices.timeout_s",
        "model.rope_theta",
        "profile.rung_s",
        "planner.memory_margin",
        "planner.smoothing",
    ],
)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_no_number_is_infinite(tmp_path: Path, key: str, value: str) -> None:
    """Catches a run that trains until its first checkpoint, which cannot hold such a number."""
    assert "finite" in problems(write(tmp_path, GOOD), f"{key}={value}")[key]


def test_an_option_of_an_optimizer_is_finite(tmp_path: Path) -> None:
    """Catches the same in a table of free names."""
    path = write(tmp_path, GOOD)
    with pytest.raises(ConfigError, match=r"options\.momentum.*finite"):
        Config.load(path, 'optimizer.name="sgd"', "optimizer.options={ momentum = inf }")


NINES = "9" * 5000

ODD = {
    "devices.threads=100000": "1024",
    "devices.timeout_s=1.8e19": "1000000",
    "devices.timeout_s=1e-9": "1",
    f"devices.ranks={'9' * 23}": "65536",
    f"devices.memory='{NINES}.5GiB'": "5002 digits",
    f"data.context='{NINES}'": "5000 digits",
    f"data.context={NINES}": "4300 digits",
    f"run.seed={'9' * 23}": "9223372036854775807",
    "data.cache='~nosuchuser'": "home folder",
    "data.paths=['~nosuchuser/x']": "home folder",
    "data.tokenizer='~nosuchuser/x'": "home folder",
    'data.cache="a\\u0000b"': "null",
    f"data.paths={'[' * 3000}{']' * 3000}": "recursion",
    "run.steps=1.5": "fractional",
}


@pytest.mark.parametrize("change", ODD, ids=lambda text: text[:30])
def test_odd_values_are_refused_in_a_few_words(tmp_path: Path, change: str) -> None:
    """Catches an exception from the depths, and a message as long as the value."""
    with pytest.raises(ConfigError, match=ODD[change]) as caught:
        Config.load(write(tmp_path, GOOD), change)
    assert len(str(caught.value)) < 600


def test_a_name_too_long_for_a_file_is_a_name(tmp_path: Path) -> None:
    """Catches an OSError from looking whether a tokenizer's name is a file beside the file."""
    name = "x" * 5000
    assert Config.load(write(tmp_path, GOOD), f"data.tokenizer='{name}'").data.tokenizer == name


@pytest.mark.parametrize("text", ["[" * 3000 + "]" * 3000, "a" * 3, f"a = {NINES}"])
def test_a_file_that_is_no_toml(tmp_path: Path, text: str) -> None:
    """Catches the parser's own exceptions."""
    with pytest.raises(ConfigError, match="no TOML"):
        Config.load(write(tmp_path, f"x = {text}"))


def test_the_cache_is_where_the_system_keeps_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a home folder that fills though another place is named for caches."""
    path = write(tmp_path, GOOD)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Config.load(path).data.cache_folder == tmp_path / "xdg" / "headrace"
    assert Config.load(path, "data.cache=~/mine").data.cache_folder == Path.home() / "mine"
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert Config.load(path).data.cache_folder == Path.home() / ".cache" / "headrace"
