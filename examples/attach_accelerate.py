"""Train a small Llama with Accelerate on Python's own sources, planned step by step.

    torchrun --nproc-per-node 2 examples/attach_accelerate.py --steps 20

Prints one JSON line a step. ``attach_accelerate_single.py`` beside it does the same
on one device, without headrace.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import headrace as hr

CONTEXT = 512


def documents() -> Iterator[dict[str, torch.Tensor]]:
    """The bytes of the standard library's modules, each up to the context."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        ids = torch.tensor(list(file.read_bytes()[: CONTEXT + 1]))
        if len(ids) > 1:
            yield {"input_ids": ids}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT + 1,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    data = list(documents())
    run = hr.attach(
        model,
        optimizer,
        data,
        batch_tokens=4096,
        steps=options.steps,
        samples=hr.SampleOptions(shuffle=False),
    )
    for step in run:
        for micro in step:
            micro.backward(model(**micro.inputs).loss)
        if accelerator.is_main_process:
            print(json.dumps({"step": step.number, "loss": step.loss}))


if __name__ == "__main__":
    main()
