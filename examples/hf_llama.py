"""Train a small Llama of transformers on Python's own sources, every row spread over all ranks.

    torchrun --nproc-per-node 2 examples/hf_llama.py --steps 20

Prints one JSON line a step. ``hf_llama_single.py`` beside it does the same on one device.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import headrace as hr


def batches(rows: int, tokens: int) -> Iterator[dict[str, torch.Tensor]]:
    """Rows of the bytes of the standard library's modules, one file after the other."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    for start in range(0, len(text) - rows * tokens, rows * tokens):
        ids = torch.tensor(list(text[start : start + rows * tokens])).view(rows, tokens)
        yield {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=options.tokens,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    run = hr.compile(model, recompute="attention")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in zip(range(options.steps), batches(2, options.tokens), strict=False):
        loss = run(**run.shard(batch).inputs).loss
        run.backward(loss)
        loss = run.add_up(loss)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "loss": loss.item()}))


if __name__ == "__main__":
    main()
