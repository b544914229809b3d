"""Spread models beside what users do with them: generation, adapters, a second model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.cli.foreign_models import foreign_model
from headrace.errors import DataError, ModelError
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
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}
NEAR = 1e-6  # losses of transformers are made in single precision


def llama() -> Any:
    """A small Llama in double precision."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).double()


def step(run: Any, batch: dict[str, torch.Tensor]) -> float:
    """The loss of a step of a spread model, whose gradients are those of all ranks then."""
    loss = run(**run.shard(batch).inputs).loss
    run.backward(loss)
    return float(run.add_up(loss))


def error(model: Any, run: Any, batch: dict[str, torch.Tensor], plain: Any) -> float:
    """How far loss and gradients of a step are from those of a plain model."""
    found, wanted = step(run, batch), plain(**batch).loss
    wanted.backward()
    off, largest = [0.0], 0.0
    for mine, exact in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (exact.grad is None)
        if exact.grad is not None:
            largest = max(largest, float(exact.grad.abs().max()))
            off.append(float((mine.grad - exact.grad).abs().max()))
    return max(max(off) / largest, abs(found / float(wanted) - 1))


def of_generation() -> bool:
    """Whether a spread model writes what it writes without headrace, after a step."""
    model, plain = llama().eval(), llama().eval()
    step(hr.compile(model), BATCH)
    more = {"attention_mask": torch.ones(2, 5), "max_new_tokens": 6, "do_sample": False}
    written = [one.generate(IDS[:, :5], **more) for one in (model, plain)]
    return torch.equal(*written)


def of_two() -> float:
    """The error of two spread models that share a configuration, their steps between each other."""
    config = transformers.LlamaConfig(**SMALL)
    torch.manual_seed(0)
    models = [transformers.LlamaForCausalLM(config).double() for _ in range(2)]
    plain = [copy.deepcopy(model) for model in models]
    first, second = (hr.compile(model) for model in models)
    part = first.shard(BATCH)
    short = {name: value[:, :20] for name, value in BATCH.items()}
    worst = error(models[1], second, short, plain[1])
    loss = first(**part.inputs).loss
    first.backward(loss)
    total, wanted = float(first.add_up(loss)), plain[0](**BATCH).loss
    wanted.backward()
    pairs = zip(models[0].parameters(), plain[0].parameters(), strict=True)
    off = [float((mine.grad - exact.grad).abs().max()) for mine, exact in pairs]
    return max(worst, abs(total / float(wanted) - 1), *off)


def of_an_adapter() -> float:
    """The error of a step of a model inside peft's adapter."""
    from peft import LoraConfig, get_peft_model

    chosen = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = get_peft_model(llama(), chosen).double()
    plain = copy.deepcopy(model)
    return error(model, hr.compile(model), BATCH, plain)


def of_types() -> float:
    """The error of a step of a BERT that is told of two segments."""
    config = transformers.BertConfig(
        **SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).double()
    plain = copy.deepcopy(model)
    types = (torch.arange(24) > 9).long()[None].repeat(2, 1)
    return error(model, hr.compile(model), {**BATCH, "token_type_ids": types}, plain)


@pytest.mark.parametrize("ranks", [1, 2])
def test_generation_is_the_plain_models(ranks: int) -> None:
    """Catches caches and masks of generation that meet the last batch's places."""
    assert all(run_ranks(ranks, of_generation))


@pytest.mark.parametrize(
    ("ranks", "body"),
    [(2, of_two), whole(1, of_two), (2, of_an_adapter), (2, of_types), whole(3, of_types)],
)
def test_steps_are_those_of_one_process(ranks: int, body: Callable[[], float]) -> None:
    """Catches models that share a configuration and take each other's batch, adapters whose
    gradients are lost, and segments that are not cut as tokens are."""
    if body is of_an_adapter:
        pytest.importorskip("peft")
    assert max(run_ranks(ranks, body)) < NEAR


@pytest.mark.parametrize("family", ["gpt_neo", "mpt", "bloom", "falcon"])
def test_attention_that_is_not_reached_is_named(family: str) -> None:
    """Catches models whose attention is their own, and refusals that do not say whose."""
    run = hr.compile(foreign_model(family, 0))
    with pytest.raises(ModelError, match=r"with \w+Attention.*set_attn_implementation"):
        run.shard({"input_ids": IDS})


def test_second_derivatives_are_refused_by_name() -> None:
    """Catches a penalty on gradients that ends in a traceback from the depths of torch."""
    model = llama()
    run = hr.compile(model)
    loss = run(**run.shard(BATCH).inputs).loss
    grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    penalty = torch.stack([grad.square().sum() for grad in grads]).sum()
    with pytest.raises(ModelError, match=r"create_graph=True.*wanted first gradients"):
        penalty.backward()


def test_places_of_several_kinds_are_refused() -> None:
    """Catches places of text, height and width (M-RoPE) that are taken for rows of a batch; text
    alone, whose places the model counts itself, is spread."""
    config = transformers.Qwen2VLConfig(
        text_config={**SMALL, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2},
        **{f"{kind}_token_id": 90 + i for i, kind in enumerate(("image", "video"))},
    )
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration(config).double()
    run, plain = hr.compile(model), copy.deepcopy(model)
    assert step(run, BATCH) == pytest.approx(float(plain(**BATCH).loss), rel=NEAR)
    places = torch.arange(24).expand(3, 2, 24)
    with pytest.raises(DataError, match=r"position_ids: got \[3, 2, 24\], wanted \[2, 24"):
        run.shard({**BATCH, "position_ids": places})
