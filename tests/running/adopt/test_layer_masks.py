"""What attention layers see is what the masks of their model say, whatever their attributes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headrace as hr
from headrace.adopt.attention_registry import RegisteredAttention, registered
from headrace.adopt.layer_masks import LayerMask
from headrace.adopt.operators import ModelSlot
from headrace.cli.foreign_models import foreign_model
from headrace.errors import ModelError
from ranks import run_ranks
from spread import whole

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(200)

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}


def model_of(family: str, **more: Any) -> Any:
    """A small causal model of a family, in double precision."""
    torch.manual_seed(0)
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**SMALL, **more})
    return getattr(transformers, f"{family}ForCausalLM")(config).double().eval()


def both_sides(ranks: int, window: int) -> float:
    """The largest error of logits of a Gemma 3 that sees both sides, on several ranks."""
    given = {"sliding_window": window, "use_bidirectional_attention": True, **BOTH}
    model = model_of("Gemma3", **given)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    run, worst = hr.compile(model), 0.0
    with torch.no_grad():
        wanted = model(ids).logits
        for exchange in ("ulysses", "ring"):
            shard = run.shard({"input_ids": ids}, exchange=exchange)
            worst = max(worst, float((run.gather(run(**shard.inputs).logits) - wanted).abs().max()))
    return worst / float(wanted.abs().max())


@pytest.mark.parametrize(("ranks", "window"), [(2, 8), (1, 9), whole(3, 30), whole(2, 500)])
def test_windows_on_both_sides(ranks: int, window: int) -> None:
    """Catches windows that are a token wider than the model's: logits were off by 0.7."""
    # Norms of Gemma are single precision.
    assert max(run_ranks(ranks, both_sides, ranks, window)) < 1e-5


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("Gemma2", {"use_bidirectional_attention": True, "sliding_window": 8, **BOTH}),
        ("Llama", {"is_causal": False}),
    ],
)
def test_masks_and_is_causal_that_differ(family: str, change: dict[str, Any]) -> None:
    """Catches models that are causal under one attention function of transformers, and not under
    another."""
    run = hr.compile(model_of(family, **change))
    with pytest.raises(ModelError, match=r"attention of \w+: got a mask that is .*is_causal = "):
        run.shard({"input_ids": torch.arange(3, 30)[None]})


def masks_of(model: Any, **more: Any) -> list[LayerMask]:
    """The masks of a model's layers, in their order."""
    switch = registered(model, ModelSlot())
    switch.read_masks(lambda: model(torch.arange(3, 16)[None], **more))
    return list(switch._masks.values())


def test_masks_are_read() -> None:
    """Catches windows, chunks and layers that are taken for others."""
    full = LayerMask(causal=True, window=0)
    assert masks_of(model_of("Llama")) == [full, full]
    assert masks_of(foreign_model("bert", 0)) == [LayerMask(causal=False, window=0)] * 2
    gemma = model_of("Gemma3", sliding_window=8, **BOTH)
    assert masks_of(gemma) == [LayerMask(causal=True, window=8), full]
    both = model_of("Gemma3", sliding_window=8, use_bidirectional_attention=True, **BOTH)
    assert masks_of(both) == [LayerMask(causal=False, window=5), LayerMask(causal=False, window=0)]
    assert {mask.causal for mask in masks_of(foreign_model("modernbert", 0))} == {False}
    chunked = foreign_model("llama4_text", 0)
    size = chunked.config.attention_chunk_size
    assert LayerMask(causal=True, window=-size) in masks_of(chunked)


def test_reading_masks_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches configurations that name a recorder afterwards, one that failed too."""
    model = model_of("Llama")
    before = dict(vars(model.config))
    masks_of(model)

    def fail() -> None:
        raise ValueError("no forward")

    with pytest.raises(ValueError, match="no forward"):
        registered(model, ModelSlot()).read_masks(fail)
    assert vars(model.config) == before
    assert all(module.config is model.config for module in model.modules() if has_config(module))


def has_config(module: Any) -> bool:
    """Whether a module has a configuration."""
    return "config" in vars(module)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda b, h, q, k: (k <= q) & (k % 3 != 1), "got a mask of its own"),
        (lambda b, h, q, k: torch.zeros(1, 13)[b, k] == 0, "got a mask that depends on the batch"),
    ],
)
def test_other_masks_are_refused(rule: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a mask that is taken for the nearest that is known."""
    modeling = transformers.models.llama.modeling_llama
    usual = modeling.create_causal_mask
    planted = lambda **given: usual(**given, and_mask_function=rule)  # noqa: E731
    monkeypatch.setattr(modeling, "create_causal_mask", planted)
    with pytest.raises(ModelError, match=f"attention of LlamaAttention: {says}"):
        hr.compile(model_of("Llama")).shard({"input_ids": torch.arange(3, 30)[None]})


def test_layers_of_one_configuration_keep_their_masks() -> None:
    """Catches one copy of a configuration for layers with and without a window."""
    model = model_of("Gemma3", sliding_window=8, **BOTH)
    slot = ModelSlot()
    switch: RegisteredAttention = registered(model, slot)
    switch.read_masks(lambda: model(torch.arange(3, 16)[None]))
    switch(True)
    layers: Any = model.model.layers
    windows = [layer.self_attn.config._headrace_mask.window for layer in layers]
    switch(False)
    assert windows == [8, 0]
