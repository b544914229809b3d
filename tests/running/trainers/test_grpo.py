"""TRL's GRPOTrainer with planned steps equals the plain one on as many processes: each samples the
same completions, and all numbers of the logs agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from running.trainers.scripts import Script
from running.trainers.test_trl import assert_equal
from spread import whole

for name in ("transformers", "accelerate", "datasets", "trl", "peft"):
    pytest.importorskip(name)

GRPO: dict[str, Any] = {"base": "GRPOTrainer", "options": {"longest": 64}}

SCRIPTS = {
    "a reference, several updates": (
        Script(**GRPO, accumulates=2, arguments={"beta": 0.1, "num_iterations": 2}),
        2,
    ),
    "one process": (Script(**GRPO, arguments={"beta": 0.1, "max_steps": 3}), 1),
    "ratios of sequences": (
        Script(
            **GRPO,
            arguments={"importance_sampling_level": "sequence", "steps_per_generation": 4},
        ),
        2,
    ),
    "means of sequences, ends masked": (
        Script(**GRPO, arguments={"loss_type": "grpo", "mask_truncated_completions": True}),
        2,
    ),
    "entropy": (
        Script(
            **GRPO,
            accumulates=2,
            arguments={
                "loss_type": "bnpo",
                "use_adaptive_entropy": True,
                "entropy_coef": 0.05,
                "top_entropy_quantile": 0.5,
            },
        ),
        2,
    ),
    "evaluated": (
        Script(**GRPO, evaluates=True, arguments={"beta": 0.1, "num_generations_eval": 2}),
        2,
    ),
    "lora": (Script(**GRPO, lora=True, arguments={"beta": 0.1}), 2),
    "fsdp2": (Script(**GRPO, sharded=True, arguments={"beta": 0.1}), 2),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [n if n in ("a reference, several updates", "fsdp2") else whole(n) for n in SCRIPTS],
)
def test_equals_the_plain_trainer(name: str, tmp_path: Path) -> None:
    """Catches gradients of other ranks' completions, or counted once for each rank; values of
    tokens that are no completion; a reference that is trained; and numbers of the log."""
    script, ranks = SCRIPTS[name]
    plain = script.run(ranks, tmp_path / "plain", planned=False)
    planned = script.run(ranks, tmp_path / "planned")
    losses = [row["loss"] for row in plain if "loss" in row]
    assert len(losses) >= 3
    assert len({round(loss, 6) for loss in losses}) > 1
    assert [_unknown(row) for row in planned] == [_unknown(row) for row in plain]
    assert_equal([_known(row) for row in planned], [_known(row) for row in plain])


def _unknown(row: dict[str, Any]) -> list[str]:
    """What TRL could not count, as where no completion ended."""
    return [name for name, value in row.items() if value is None]


def _known(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


REFUSED = {
    "no longest": (Script(base="GRPOTrainer"), "no longest="),
    "a budget": (
        Script(base="GRPOTrainer", options={"longest": 64, "batch_tokens": 300}),
        "batch_tokens: got a budget",
    ),
    "too long": (
        Script(base="GRPOTrainer", options={"longest": 20}),
        "tokens, wanted at most 20, the longest that the run was made for",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    """Catches completions that are cut or planned for without a word."""
    script, words = REFUSED[name]
    with pytest.raises(AssertionError, match=words):
        script.run(1, tmp_path)
