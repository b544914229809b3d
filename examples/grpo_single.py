"""Train a small Llama by GRPO: sampled answers, a reward that is computed, two updates a batch.

    python examples/grpo_single.py --steps 10

A prompt repeats one digit, few times or very often; an answer earns the share of its tokens that
are this digit. Prints one JSON line and writes a checkpoint a step; ``--resume`` goes on from it.
``grpo.py`` beside it does the same on many ranks, planned step by step.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

END, LONGEST, ANSWER = 10, 160, 16
PROMPTS, ANSWERS, UPDATES = 4, 6, 2


@torch.no_grad()
def rollouts(model: Any, draw: torch.Generator) -> list[dict[str, torch.Tensor]]:
    """Answers to some prompts, with labels of the answers and the advantage of each in its
    group."""
    found = []
    for _ in range(PROMPTS):
        digit = int(torch.randint(0, 10, (), generator=draw))
        count = min(LONGEST - ANSWER, int(4 * torch.rand((), generator=draw) ** -1.5))
        ids = torch.full((ANSWERS, count), digit)
        for _ in range(ANSWER):
            chances = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=draw)], dim=1)
        answers = [row[: [*row.tolist(), END].index(END) + 1] for row in ids[:, count:]]
        reward = torch.stack([(row == digit).double().mean() for row in answers])
        advantages = (reward - reward.mean()) / (reward.std() + 1e-4)
        for row, earned, advantage in zip(answers, reward, advantages, strict=True):
            own = torch.cat([torch.full((count,), digit), row])
            labels = torch.cat([torch.full((count,), -100), row])
            found.append(
                {"input_ids": own, "labels": labels, "reward": earned, "advantages": advantage}
            )
    return found


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[1, s] of the labels; 0 where there is none."""
    return -cross_entropy(logits[0], labels[0], ignore_index=-100, reduction="none")[None]


def clipped(logp: torch.Tensor, labels: torch.Tensor, rest: Any) -> torch.Tensor:
    """The losses of tokens, summed: the clipped ratio to the old model, and what parts the model
    from its reference."""
    ratio, apart = (logp - rest["old"]).exp(), rest["reference"] - logp
    gain = torch.minimum(ratio * rest["advantages"], ratio.clamp(0.8, 1.2) * rest["advantages"])
    losses = 0.02 * (apart.exp() - apart - 1) - gain
    return (losses * (labels != -100)).sum()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    model: Any = LlamaForCausalLM(config).double().train()
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start, saved = 0, Path("runs/grpo.pt")
    saved.parent.mkdir(exist_ok=True)
    if options.resume:
        start, weights, state = torch.load(saved)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    for step in range(start, options.steps):
        samples = rollouts(model, torch.Generator().manual_seed(step))
        labels = [torch.cat([x["labels"][1:], torch.tensor([-100])])[None] for x in samples]
        targets = sum((own != -100).sum() for own in labels)
        for sample, own in zip(samples, labels, strict=True):
            with torch.no_grad():
                first, second = (
                    log_probabilities(net(input_ids=sample["input_ids"][None]).logits, own)[0]
                    for net in (model, reference)
                )
            sample |= {"old": first, "reference": second}
        for _ in range(UPDATES):
            loss = 0.0
            for sample, own in zip(samples, labels, strict=True):
                logp = log_probabilities(model(input_ids=sample["input_ids"][None]).logits, own)
                part = clipped(logp, own, sample) / targets
                part.backward()
                loss += part.item()
            optimizer.step()
            optimizer.zero_grad()
        reward = torch.stack([sample["reward"] for sample in samples]).mean().item()
        print(json.dumps({"step": step, "loss": loss, "reward": reward}))
        torch.save((step + 1, model.state_dict(), optimizer.state_dict()), saved)


if __name__ == "__main__":
    main()
