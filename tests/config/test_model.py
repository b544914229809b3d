"""The keys of a configuration: texts with units, what goes together, shapes, descriptions."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.cli.reference import config_markdown, keys
from headrace.config import Config
from headrace.config.model import (
    DataConfig,
    DevicesConfig,
    IterationsConfig,
    ModelConfig,
    OptimizerConfig,
    PlannerConfig,
    ProfileConfig,
)
from headrace.errors import HeadraceError, SpecError
from headrace.spec import Architecture
from headrace.spec.draw_options import DrawOptions
from headrace.units import GIB


def data(**changes: Any) -> DataConfig:
    return DataConfig(**({"paths": ("a",), "batch_tokens": 64} | changes))


def test_counts_are_numbers_or_texts() -> None:
    """Catches a context of 32 tokens for "32Ki"."""
    assert data(context="32Ki").context == 32_768
    assert data(context=100).context == 100
    assert data(batch_tokens="4M").batch_tokens == 4_000_000
    assert data(batch_tokens=None, batch_sequences=8).batch_tokens is None
    assert ProfileConfig(longest="1k").longest == 1000
    assert ProfileConfig().longest is None


def test_memory_is_a_text_or_auto() -> None:
    """Catches a limit of two bytes for "2GiB"."""
    assert DevicesConfig(memory="2GiB").memory_bytes == 2 * GIB
    assert DevicesConfig().memory_bytes is None


BAD: dict[str, tuple[type, dict[str, Any], str]] = {
    "no budget": (DataConfig, {"batch_tokens": None}, "either batch_tokens or batch_sequences"),
    "two budgets": (DataConfig, {"batch_sequences": 3}, "either batch_tokens or batch_sequences"),
    "iterations of a size": (DataConfig, {"iterations": "dcp"}, "fills the ranks: no batch_tokens"),
    "iterations of a number": (
        DataConfig,
        {"iterations": {}, "batch_tokens": None, "batch_sequences": 3},
        "fills the ranks: no batch_sequences",
    ),
    "iterations of a curriculum": (
        DataConfig,
        {
            "iterations": "dcp",
            "batch_tokens": None,
            "curriculum": "short-to-long",
            "curriculum_steps": 3,
        },
        "at any time: no curriculum",
    ),
    "iterations of nobody": (
        DataConfig,
        {"iterations": "dpc", "batch_tokens": None},
        "should be 'dcp' or 'bucket'",
    ),
    "a width of no flow": (IterationsConfig, {"width": 2}, "wanted flow 'bucket' with it"),
    "buckets of one length": (IterationsConfig, {"bucket_ratio": 1.0}, "greater than 1"),
    "no accumulation step": (IterationsConfig, {"most_steps": 0}, "greater than or equal to 1"),
    "a curriculum without steps": (DataConfig, {"curriculum": "short-to-long"}, "go together"),
    "steps without a curriculum": (DataConfig, {"curriculum_steps": 3}, "go together"),
    "no paths": (DataConfig, {"paths": ()}, "at least 1 item"),
    "context of no number": (DataConfig, {"context": "many"}, "'many', wanted a number"),
    "context of nothing": (DataConfig, {"context": "0"}, "greater than or equal to 1"),
    "context zero": (DataConfig, {"context": 0}, "greater than or equal to 1"),
    "budget of no number": (DataConfig, {"batch_tokens": "4X"}, "'4X', wanted a number"),
    "memory of no number": (DevicesConfig, {"memory": "lots"}, "'lots', wanted a number"),
    "memory of a count": (DevicesConfig, {"memory": "4M"}, "'4M', wanted a number"),
    "no memory": (DevicesConfig, {"memory": "0GiB"}, "at least one byte"),
    "static without a size": (PlannerConfig, {"name": "static"}, "go together"),
    "a size without static": (PlannerConfig, {"static_size": 2}, "go together"),
    "no recompute level": (PlannerConfig, {"recompute": ()}, "at least one level"),
    "options of AdamW": (OptimizerConfig, {"options": {"eps": 0.1}}, "options of AdamW are beta1"),
    "beta1 of Adam": (OptimizerConfig, {"name": "adam", "beta1": 0.9}, r"options, .*betas = \[0.9"),
    "beta2 of Adam": (OptimizerConfig, {"name": "adam", "beta2": 0.9}, "beta2 is AdamW's"),
    "eps of SGD": (OptimizerConfig, {"name": "sgd", "eps": 0.1}, "eps is AdamW's"),
    "decay as an option": (
        OptimizerConfig,
        {"name": "sgd", "options": {"weight_decay": 0.1}},
        "options.weight_decay: wanted optimizer.decay",
    ),
    "the rate as an option": (
        OptimizerConfig,
        {"name": "sgd", "options": {"lr": 0.1}},
        "options.lr: wanted optimizer.lr",
    ),
    "betas of three": (
        OptimizerConfig,
        {"name": "adam", "options": {"betas": [0.1, 0.2, 0.3]}},
        "betas",
    ),
    "a folder and a preset": (
        ModelConfig,
        {"from": "m", "preset": "gpt2", "heads": 2},
        "leave out heads, preset",
    ),
    "a group of nobody": (PlannerConfig, {"group_sizes": (1, 0)}, "greater than or equal to 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_values_that_cannot_be_meant_are_refused(case: str) -> None:
    """Catches a key that is ignored because another one is missing."""
    section, changes, text = BAD[case]
    base: dict[str, Any] = {"paths": ("a",), "batch_tokens": 64} if section is DataConfig else {}
    with pytest.raises(ValidationError, match=text):
        section(**(base | changes))


def test_iterations_are_a_name_or_a_table() -> None:
    """Catches other defaults than those of a loop, a seed that is not the run's, and what is saved
    of a configuration and means something else."""
    named = data(batch_tokens=None, iterations="bucket")
    assert named.iterations == IterationsConfig(flow="bucket")
    assert DataConfig(**named.model_dump(mode="json")) == named
    chosen = IterationsConfig(flow="bucket", width=2, most_steps=3)
    assert chosen.options(7) == DrawOptions(flow="bucket", width=2, most_steps=3, seed=7)
    assert IterationsConfig().options(0) == DrawOptions()
    with pytest.raises(ValidationError, match="planner 'strategies' has pipelines"):
        Config(
            data={"paths": ("a",), "iterations": "dcp"},
            model={"preset": "llama-tiny"},
            planner={"name": "strategies"},
        )


def test_options_of_other_optimizers() -> None:
    """Catches betas that nobody can give, or that are not what torch takes."""
    found = OptimizerConfig(name="adam", options={"betas": [0.5, 0.9], "amsgrad": True, "eps": 1})
    assert found.options == {"betas": (0.5, 0.9), "amsgrad": True, "eps": 1.0}
    assert OptimizerConfig(**found.model_dump(mode="json")) == found


def test_the_longest_pack_is_checked_when_the_file_is_read() -> None:
    """Catches a mistake that shows after the ranks have started."""
    with pytest.raises(ValidationError, match="'long', wanted a number"):
        ProfileConfig(longest="long")


def test_nothing_changes_after_reading() -> None:
    """Catches a command that would write into its configuration."""
    with pytest.raises(ValidationError, match="frozen"):
        data().context = 3  # type: ignore[misc]


SHAPE: dict[str, Any] = {"layers": 2, "hidden": 192, "heads": 6}


def test_what_a_shape_leaves_out() -> None:
    """Catches a feed-forward that is not 8/3 of the width (in steps of 64) or four times it."""
    llama = ModelConfig(**SHAPE).architecture(300, 512)
    assert llama == Architecture(
        layers=2, hidden=192, heads=6, kv_heads=6, ffn=512, vocabulary=300, kind="llama"
    )
    wide = ModelConfig(**SHAPE | {"hidden": 204, "heads": 6}).architecture(300, 512)
    assert wide.ffn == 576, "544 rounded up to a multiple of 64"
    gpt = ModelConfig(**SHAPE, kind="gpt").architecture(300, 512)
    assert (gpt.kind, gpt.ffn, gpt.positions, gpt.longest) == ("gpt", 768, 512, 512)


def test_what_a_bert_needs_besides() -> None:
    """Catches a mask that is a token of the text, and one that has no row of the embedding."""
    bert = ModelConfig(**SHAPE, kind="bert").architecture(300, 512)
    assert (bert.ffn, bert.positions, bert.causal) == (768, 512, False)
    assert (bert.mask_id, bert.vocabulary) == (300, 301)
    known = ModelConfig(**SHAPE, kind="bert").architecture(300, 512, mask_id=4)
    assert (known.mask_id, known.vocabulary) == (4, 300)
    wide = ModelConfig(**SHAPE, kind="bert", vocabulary=320).architecture(300, 512)
    assert (wide.mask_id, wide.vocabulary) == (300, 320)
    with pytest.raises(SpecError, match=r"300, wanted at least the tokenizer's 300 and one for"):
        ModelConfig(**SHAPE, kind="bert", vocabulary=300).architecture(300, 512)
    with pytest.raises(SpecError, match=r"model\.causal: got True, wanted False"):
        ModelConfig(**SHAPE, kind="bert", causal=True).architecture(300, 512)
    assert ModelConfig(**SHAPE).architecture(300, 512, mask_id=4).mask_id is None


def test_a_shape_in_full() -> None:
    """Catches a key that does not reach the architecture."""
    given: dict[str, Any] = {
        "kind": "llama",
        "layers": 3,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 40,
        "vocabulary": 999,
        "tied": False,
        "causal": False,
        "dropout": 0.25,
        "rope_theta": 5e5,
    }
    assert set(given) == set(ModelConfig.model_fields) - {"preset", "from_"}
    assert ModelConfig(**given).architecture(300, 512) == Architecture(**given)


def test_a_model_of_a_folder_has_its_tokenizer_unless_told() -> None:
    """Catches bytes fed to a model that was trained on other ids, and a saved configuration that
    says less than was meant."""
    plain = {"paths": ("a",), "batch_tokens": 64}
    config = Config(data=plain, model={"from": "/m", "dropout": 0.0})
    assert (config.model.from_, config.data.tokenizer) == ("/m", "/m")
    assert Config(**config.to_json()) == config
    assert config.to_json()["model"]["from"] == "/m"
    assert Config(data=DataConfig(**plain), model=ModelConfig(from_="/m")).data.tokenizer == "/m"
    told = Config(data=plain | {"tokenizer": "bytes"}, model={"from": "/m"})
    assert told.data.tokenizer == "bytes"
    assert Config(data=plain, model={"preset": "gpt2"}).data.tokenizer == "bytes"


def test_presets_with_changes() -> None:
    """Catches a preset whose vocabulary or positions do not fit the data."""
    found = ModelConfig(preset="gpt-tiny", layers=9).architecture(300, 128)
    wanted = Architecture.preset("gpt-tiny", layers=9, vocabulary=300, positions=128)
    assert found == wanted
    llama = ModelConfig(preset="llama-tiny", tied=False).architecture(300, 128)
    assert llama == Architecture.preset("llama-tiny", vocabulary=300, tied=False)
    bert = ModelConfig(preset="bert-large").architecture(300, 128)
    assert bert == Architecture.preset("bert-large", vocabulary=301, positions=128, mask_id=300)
    turned = ModelConfig(preset="llama-tiny", kind="gpt").architecture(300, 128)
    assert (turned.kind, turned.positions) == ("gpt", 128)


def test_shapes_that_cannot_be() -> None:
    """Catches a KeyError for a shape that is incomplete, and a late one for a wrong preset."""
    for name in SHAPE:
        part = {key: value for key, value in SHAPE.items() if key != name}
        with pytest.raises(HeadraceError, match=rf"model\.{name}: got nothing.*model\.preset"):
            ModelConfig(**part).architecture(300, 512)
    with pytest.raises(SpecError, match="did you mean 'llama-tiny'"):
        ModelConfig(preset="llama-tinny").architecture(300, 512)
    with pytest.raises(SpecError, match=r"model\.hidden: got 192, wanted a multiple of 7"):
        ModelConfig(**SHAPE | {"heads": 7}).architecture(300, 512)


def test_the_vocabulary_holds_the_tokenizers() -> None:
    """Catches an index error inside the embedding, on every rank, at the first rare token."""
    assert ModelConfig(**SHAPE, vocabulary=300).architecture(300, 512).vocabulary == 300
    with pytest.raises(SpecError, match=r"model\.vocabulary: got 299, wanted"):
        ModelConfig(**SHAPE, vocabulary=299).architecture(300, 512)


def _documented() -> list[tuple[str, str, str, str]]:
    return list(keys())


@pytest.mark.parametrize("row", _documented(), ids=lambda row: row[0])
def test_every_key_has_a_meaning(row: tuple[str, str, str, str]) -> None:
    """Catches a key without a docstring, and a type that is shown as nothing."""
    key, kind, default, meaning = row
    assert len(meaning) > 10, key
    assert meaning.rstrip().endswith("."), key
    assert kind
    assert kind != "value"
    assert default
    assert meaning.isascii()


def test_every_key_is_listed() -> None:
    """Catches a section that the reference leaves out."""
    listed = [row[0] for row in _documented()]
    wanted = []
    for section, field in Config.model_fields.items():
        assert isinstance(field.annotation, type)
        inner = field.annotation.model_fields
        wanted += [f"{section}.{one.alias or key}" for key, one in inner.items()]
    tables = [f"data.iterations.{key}" for key in IterationsConfig.model_fields]
    at = wanted.index("data.iterations") + 1
    wanted[at:at] = tables
    assert listed == wanted
    page = config_markdown()
    for name in Config.model_fields:
        assert f"## `[{name}]`" in page
    for key in wanted:
        assert f"| `{key.partition('.')[2]}` |" in page


def test_the_defaults_are_shown() -> None:
    """Catches a required key shown with a default, or a default that is not the real one."""
    shown = {key: (kind, default) for key, kind, default, _ in _documented()}
    assert shown["data.paths"] == ("list of string", "required")
    assert shown["run.steps"] == ("integer", "100")
    names = "adaptive or static or strategies or bucket or packed or dcp or flexsp or hydraulis"
    names += " or hydraulis-tuned or paradyse or karmarkar-karp or dp-balanced or hybrid-cp"
    names += " or max-length or token-balance"
    assert shown["planner.name"] == (names, '"adaptive"')
    assert shown["data.context"] == ("integer", "8192")
    assert shown["report.html"] == ("boolean", "true")
