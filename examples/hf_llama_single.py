"""Train a small Llama of transformers on Python's own sources, on one device.

    python examples/hf_llama_single.py --steps 20

Prints one JSON line a step. ``hf_llama.py`` beside it does the same on several ranks.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in zip(range(options.steps), batches(2, options.tokens), strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step, "loss": loss.item()}))


if __name__ == "__main__":
    main()
