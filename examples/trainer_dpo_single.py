"""Teach a tiny Qwen 3 preferences with TRL's DPOTrainer, on one device.

    python examples/trainer_dpo_single.py --steps 20

The task can be verified: of two answers the one in the order of the alphabet is preferred. Prints
one JSON line a step. ``trainer_dpo.py`` beside it does the same on many ranks, planned step by
step.
"""

from __future__ import annotations

import argparse
import json
import random

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig, DPOTrainer

LETTERS = "abcdefghijklmnop"


def pairs() -> Dataset:
    """Letters, in order and not, most of them few."""
    drawn, rows = random.Random(0), []
    for _ in range(160):
        letters = drawn.choices(LETTERS, k=min(40, int(drawn.lognormvariate(2.0, 0.8)) + 2))
        prompt, chosen, rejected = (" ".join(x) for x in (letters, sorted(letters), letters))
        rows.append({"prompt": f"{prompt} ", "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each letter."""
    words = ["<pad>", "<end>", *LETTERS]
    table = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<pad>"))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=table, pad_token="<pad>", eos_token="<end>")


def model() -> Qwen3ForCausalLM:
    """The same random weights whenever it is called."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=18,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/trainer_dpo_single")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    arguments = DPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_length=128,
        logging_steps=1,
        save_steps=5,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        model=model(),
        ref_model=model(),
        args=arguments,
        train_dataset=pairs(),
        processing_class=tokenizer(),
    )
    trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history:
            if "loss" in row:
                print(json.dumps({"step": row["step"], "loss": row["loss"]}))


if __name__ == "__main__":
    main()
