"""One script for each trainer: plain on one process, and with planned steps on several."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import headrace as hr
from ranks import run_ranks
from running.engine.loops import Drawn, costs

SEQUENCES = 8
"""Samples of a step, on all ranks together."""

TIMES = ("runtime", "per_second", "total_flos", "step_time")


def numbers(log: list[dict[str, float]], *names: str) -> list[list[float]]:
    """What was logged under some names, entry by entry."""
    return [[row[name] for name in names] for row in log if names[0] in row]


def data(count: int = 40, seed: int = 1) -> list[dict[str, list[int]]]:
    """Items of 5 to 59 tokens; the first third has no labels."""
    draw, items = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        n = int(torch.randint(5, 60, (1,), generator=draw))
        ids = torch.randint(4, 64, (n,), generator=draw).tolist()
        labels = [-100] * (n // 3) + ids[n // 3 :]
        items.append({"input_ids": ids, "labels": labels, "attention_mask": [1] * n})
    return items


def evaluation_data() -> list[dict[str, list[int]]]:
    """Items to evaluate on."""
    return data(21, seed=2)


def padded(items: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A data collator."""
    most = max(len(item["input_ids"]) for item in items)
    filled = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    return {
        name: torch.tensor([[*item[name], *[fill] * (most - len(item[name]))] for item in items])
        for name, fill in filled.items()
    }


def language_model(**more: Any) -> Any:
    """A tiny Qwen 3."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(_config(**more))


def _config(**more: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        pad_token_id=0,
        **more,
    )


@dataclass(frozen=True, kw_only=True)
class Script:
    """A user's script: a ``base`` class, its arguments, and what is beside them."""

    base: str = "Trainer"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    lora: bool = False
    sharded: bool = False
    evaluates: bool = False
    measures: bool = True
    compute_loss: str = ""
    resume: bool = False
    drawn: bool = True
    padding: str = "<pad>"
    items: Callable[[], Any] = data
    evaluated: Callable[[], Any] = evaluation_data
    collate: Callable[[Any], dict[str, torch.Tensor]] = padded
    model: Callable[[], Any] = language_model
    accumulates: int = 1

    def run(self, ranks: int, folder: Path, *, planned: bool = True) -> list[dict[str, float]]:
        """The log of the script on so many processes."""
        return run_ranks(ranks, _run, self, ranks, folder, planned, timeout_s=240)[0]


def both(script: Script, folder: Path, ranks: int = 2) -> tuple[list[Any], list[Any]]:
    """The logs of the plain script on one process and of the planned one on several."""
    plain = script.run(1, folder / "plain", planned=False)
    return plain, script.run(ranks, folder / "planned")


def trainer_of(script: Script, ranks: int, folder: Path, *, planned: bool) -> Any:
    """The trainer that a script makes."""
    classes = {
        "Trainer": _of_transformers,
        "SFTTrainer": _of_sft,
        "DPOTrainer": _of_preferences,
        "RewardTrainer": _of_preferences,
        "GRPOTrainer": _of_rollouts,
    }
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": SEQUENCES // ranks // script.accumulates,
        "gradient_accumulation_steps": script.accumulates,
        "per_device_eval_batch_size": 4,
        "max_steps": 6,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        **script.arguments,
    }
    if script.sharded and ranks > 1:
        common |= {
            "fsdp": True,
            "fsdp_config": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
        }
    made: Callable[..., Any] = classes[script.base]
    return made(script, common, lambda base: _planned(base, script, ranks) if planned else base)


def _planned(base: Any, script: Script, ranks: int) -> Any:
    given = {"measure": hr.MeasureOptions(costs=costs(ranks)), "say": lambda text: None}
    return hr.trainer(base, **{**given, **script.options})


def _arguments(kind: Any, script: Script, common: dict[str, Any]) -> Any:
    found = kind(**common)
    if script.sharded and dist.get_world_size() > 1:  # Accelerate shards on GPUs only
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        assert found.device.type == "cpu"
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return found


def _of_transformers(script: Script, common: dict[str, Any], over: Callable[[Any], Any]) -> Any:
    from transformers import Trainer, TrainingArguments

    model, more = script.model(), dict[str, Any]()
    if script.lora:
        from peft import get_peft_model

        model = get_peft_model(model, _lora())
    base: Any = LOSSES.get(script.compute_loss, lambda: Trainer)()
    if script.compute_loss == "func":
        more["compute_loss_func"] = smoothed
    if script.evaluates:
        more["eval_dataset"] = script.evaluated()
        more |= {"compute_metrics": accuracy} if script.measures else {}
    return over(base)(
        model=model,
        args=_arguments(TrainingArguments, script, common),
        train_dataset=script.items(),
        data_collator=script.collate,
        **more,
    )


def _lora(**options: Any) -> Any:
    from peft import LoraConfig

    layers = ["q_proj", "v_proj", "down_proj"]
    return LoraConfig(r=4, lora_alpha=8, target_modules=layers, **options)


def accuracy(found: Any) -> dict[str, float]:
    labels = found.label_ids[:, 1:]
    right = found.predictions[:, :-1].argmax(-1) == labels
    return {"accuracy": float(right[labels >= 0].mean()), "rows": float(len(labels))}


def smoothed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss as users write it, for ``compute_loss_func``."""
    flat, kept = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(
        flat, kept, ignore_index=-100, reduction="sum", label_smoothing=0.1
    )
    return total / num_items_in_batch


def _own(loss: Callable[..., torch.Tensor]) -> Callable[[], Any]:
    def made() -> Any:
        from transformers import Trainer

        class Own(Trainer):  # type: ignore[misc]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch=None
            ) -> Any:
                labels, weights = inputs.pop("labels"), inputs.pop("loss_weights", None)
                outputs = model(**inputs)
                found = loss(outputs, labels, num_items_in_batch)
                found = found if weights is None else found * weights.mean()
                return (found, outputs) if return_outputs else found

        return Own

    return made


def _mean(outputs: Any, labels: torch.Tensor, items: Any) -> torch.Tensor:
    flat, kept = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(flat, kept, ignore_index=-100)


def _unshifted(outputs: Any, labels: torch.Tensor, items: Any) -> torch.Tensor:
    flat, kept = outputs.logits.flatten(0, 1), labels.flatten()
    total = torch.nn.functional.cross_entropy(flat, kept, ignore_index=-100, reduction="sum")
    return total / items


def _called(loss: Callable[[Any, Any, Any], tuple[torch.Tensor, Any]], **more: Any) -> Any:
    """A trainer whose loss and outputs are ``loss(model, inputs, items)``."""

    def made() -> Any:
        from transformers import Trainer

        class Own(Trainer):  # type: ignore[misc]
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch=None
            ) -> Any:
                found, outputs = loss(model, inputs, num_items_in_batch)
                return (found, outputs) if return_outputs else found

        for name, value in more.items():
            setattr(Own, name, value)
        return Own

    return made


def _of_the_model(model: Any, inputs: Any, items: Any) -> tuple[torch.Tensor, Any]:
    """The model's own loss; the model is told nothing."""
    outputs = model(**inputs)
    return outputs.loss, outputs


def _labels_kept(model: Any, inputs: Any, items: Any) -> tuple[torch.Tensor, Any]:
    """A loss of logits of a model that is given labels all the same."""
    outputs, labels = model(**inputs), inputs["labels"]
    if items is None:  # while evaluating
        items = (labels[:, 1:] != -100).sum()
    return smoothed(outputs, labels, items), outputs


def _masked(model: Any, inputs: Any, items: Any) -> tuple[torch.Tensor, Any]:
    """A loss that is multiplied by the attention mask."""
    labels, mask = inputs.pop("labels"), inputs["attention_mask"]
    outputs = model(**inputs)
    flat = outputs.logits[:, :-1].transpose(1, 2)
    each = torch.nn.functional.cross_entropy(flat, labels[:, 1:], reduction="none")
    return (each * mask[:, 1:]).sum() / items, outputs


LOSSES: dict[str, Callable[[], Any]] = {
    "own": _own(smoothed),
    "mean": _own(_mean),
    "unshifted": _own(_unshifted),
    "of the model": _called(_of_the_model),
    "mean of means": _called(_of_the_model, loss_is_scaled_for_ga=False),
    "labels kept": _called(_labels_kept),
    "masked": _called(_masked),
}


def tokenizer(padding: str = "<pad>") -> Any:
    """Words of a chat, padded with the token ``padding``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<user>", "<assistant>", *(f"w{i}" for i in range(60))]
    table = {word: at for at, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(table, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=padding, eos_token="<eos>")
    found.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}<user> {{ m['content'] }} {% else %}"
        "<assistant> {% generation %}{{ m['content'] }} <eos> {% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    return found


def _text(draw: torch.Generator) -> str:
    count = int(torch.randint(2, 30, (1,), generator=draw))
    return " ".join(f"w{int(x)}" for x in torch.randint(0, 60, (count,), generator=draw))


def _rows(seed: int, count: int, made: Callable[[torch.Generator], dict[str, Any]]) -> Any:
    from datasets import Dataset

    draw = torch.Generator().manual_seed(seed)
    return Dataset.from_list([made(draw) for _ in range(count)])


def _chat(draw: torch.Generator) -> dict[str, Any]:
    asked = {"role": "user", "content": _text(draw)}
    return {"messages": [asked, {"role": "assistant", "content": _text(draw)}]}


def _pair(draw: torch.Generator) -> dict[str, Any]:
    return {"prompt": f"{_text(draw)} ", "chosen": _text(draw), "rejected": _text(draw)}


def _of_sft(script: Script, common: dict[str, Any], over: Callable[[Any], Any]) -> Any:
    from trl import SFTConfig, SFTTrainer

    common = {"assistant_only_loss": True, "max_length": 64, **common}
    return over(SFTTrainer)(
        model=language_model(),
        args=_arguments(SFTConfig, script, common),
        train_dataset=_rows(1, 40, _chat),
        eval_dataset=_rows(2, 13, _chat) if script.evaluates else None,
        processing_class=tokenizer(),
        **({"peft_config": _lora()} if script.lora else {}),
    )


def _of_preferences(script: Script, common: dict[str, Any], over: Callable[[Any], Any]) -> Any:
    from transformers import Qwen3ForSequenceClassification
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

    common, more = {"max_length": 128, **common}, dict[str, Any]()
    if script.base == "DPOTrainer":
        base, kind, model = DPOTrainer, DPOConfig, language_model()
        if script.lora:
            more["peft_config"] = _lora()
        else:
            more["ref_model"] = language_model()
            with torch.no_grad():
                more["ref_model"].lm_head.weight.mul_(1.1)
    else:
        base, kind = RewardTrainer, RewardConfig
        torch.manual_seed(0)
        model = Qwen3ForSequenceClassification(_config(num_labels=1))
        if script.lora:
            more["peft_config"] = _lora(task_type="SEQ_CLS")
    return over(base)(
        model=model,
        args=_arguments(kind, script, common),
        train_dataset=_rows(1, 40, _pair),
        eval_dataset=_rows(2, 13, _pair) if script.evaluates else None,
        processing_class=tokenizer(script.padding),
        **more,
    )


def _prompt(draw: torch.Generator) -> dict[str, Any]:
    return {"prompt": _text(draw)}


def evenness(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that can be computed: the share of even tokens."""
    return [sum(token % 2 == 0 for token in own) / len(own) for own in completion_ids]


def brevity(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward of short completions."""
    return [-len(own) / 16 for own in completion_ids]


def _of_rollouts(script: Script, common: dict[str, Any], over: Callable[[Any], Any]) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    common = {"num_generations": 4, "max_completion_length": 12, "temperature": 0.9, **common}
    saved = Path(common["output_dir"], "model")  # the trainer reads its reference from there
    if dist.get_rank() == 0:
        language_model().save_pretrained(saved)
    dist.barrier()
    return over(GRPOTrainer)(
        model=str(saved),
        args=_arguments(GRPOConfig, script, common),
        reward_funcs=[evenness, brevity],
        train_dataset=_rows(1, 40, _prompt),
        eval_dataset=_rows(2, 4, _prompt) if script.evaluates else None,
        processing_class=tokenizer(),
        **({"peft_config": _lora()} if script.lora else {}),
    )


def set_launcher(ranks: int) -> None:
    """Set what a launcher tells the processes that it starts; nothing for a single one."""
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks)}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    if ranks == 1:  # as a process that no launcher started
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[name]


def _run(script: Script, ranks: int, folder: Path, planned: bool) -> list[dict[str, float]]:
    set_launcher(ranks)
    warnings.simplefilter("ignore")
    trainer = trainer_of(script, ranks, folder, planned=planned)
    if planned and script.drawn:
        _draw_plans(trainer, script, ranks)
    trainer.train(resume_from_checkpoint=script.resume or None)
    if script.evaluates:
        trainer.evaluate()
    found = trainer.state.log_history
    return [{k: v for k, v in row.items() if not any(word in k for word in TIMES)} for row in found]


def _draw_plans(trainer: Any, script: Script, ranks: int) -> None:
    """Have plans drawn at random from the first step on."""
    from transformers import TrainerCallback

    class Draw(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            semantics = "lockstep" if script.sharded and ranks > 1 else "free"
            levels = ("none",) if script.sharded else ("none", "attention", "full")
            drawn = Drawn(ranks=ranks, layers=2, seed=7, semantics=semantics, levels=levels)
            trainer._run.engine.planner = drawn

    trainer.add_callback(Draw())
