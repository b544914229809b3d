"""Fine-tune a tiny Qwen 3 with TRL's SFTTrainer on a file of chats, on one device.

    python examples/trainer_sft_single.py --steps 20

The task can be verified: an assistant repeats what it was told, backwards. Prints one
JSON line a step. ``trainer_sft.py`` beside it does the same on many ranks, planned step by step.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

import torch
from datasets import load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

LETTERS = "abcdefghijklmnop"


def chats(file: Path) -> str:
    """A file of messages, most of them short; returns its name."""
    drawn = random.Random(0)
    with file.open("w") as out:
        for _ in range(160):
            letters = drawn.choices(LETTERS, k=min(60, int(drawn.lognormvariate(2.2, 0.8)) + 1))
            turns = [("user", letters), ("assistant", letters[::-1])]
            messages = [{"role": role, "content": " ".join(text)} for role, text in turns]
            out.write(json.dumps({"messages": messages}) + "\n")
    return str(file)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each letter, and a template that marks what the assistant says."""
    words = ["<pad>", "<end>", "<user>", "<assistant>", *LETTERS]
    table = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<pad>"))
    table.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=table, pad_token="<pad>", eos_token="<end>")
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} {% else %}"
        "<assistant> {% generation %}{{ m.content }} <end> {% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    return made


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="runs/trainer_sft_single")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=20,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    arguments = SFTConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        packing=True,
        max_length=128,
        assistant_only_loss=True,
        logging_steps=1,
        save_steps=5,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        data = load_dataset("json", data_files=chats(Path(folder, "chats.jsonl")), split="train")
        trainer = SFTTrainer(
            model=Qwen3ForCausalLM(config),
            args=arguments,
            train_dataset=data,
            processing_class=tokenizer(),
        )
        trainer.train(resume_from_checkpoint=options.resume)
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history:
            if "loss" in row:
                print(json.dumps({"step": row["step"], "loss": row["loss"]}))


if __name__ == "__main__":
    main()
