"""TRL's trainers with planned steps equal the plain ones on one process, in all that they log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import headrace as hr
from headrace.errors import SpecError
from headrace.trainers.stand_ins import PartOfModel
from headrace.trainers.train_loader import lengths_of
from running.trainers.scripts import Script, both
from spread import whole

for name in ("transformers", "accelerate", "datasets", "trl", "peft"):
    pytest.importorskip(name)

SFT = {"base": "SFTTrainer", "evaluates": True}
DPO = {"base": "DPOTrainer", "evaluates": True}

SCRIPTS = {
    "sft": Script(**SFT),
    "sft, twenty steps": Script(**SFT, arguments={"max_steps": 20}),
    "sft, packed": Script(**SFT, arguments={"packing": True, "max_steps": 4}),
    "sft, dft": Script(**SFT, arguments={"loss_type": "dft"}),
    "sft, smoothed": Script(**SFT, arguments={"label_smoothing_factor": 0.1}),
    "sft, lora": Script(**SFT, lora=True),
    "sft, fsdp2": Script(**SFT, sharded=True),
    "sft, fsdp2, lora": Script(**SFT, sharded=True, lora=True),
    "dpo": Script(**DPO, accumulates=2),
    "dpo, coupled": Script(
        **DPO,
        arguments={"loss_type": ["aot", "sft", "bco_pair"], "loss_weights": [0.3, 0.5, 0.2]},
    ),
    "dpo, fsdp2": Script(**DPO, sharded=True),
    "rewards": Script(base="RewardTrainer", evaluates=True),
    "rewards, padded by the last token": Script(
        base="RewardTrainer", evaluates=True, padding="<eos>", arguments={"max_steps": 4}
    ),
    "rewards, fsdp2": Script(base="RewardTrainer", evaluates=True, sharded=True),
    "rewards, lora": Script(base="RewardTrainer", evaluates=True, lora=True),
}

EACH_TIME = ("sft", "dpo", "rewards, padded by the last token", "rewards, fsdp2")


def assert_equal(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """All numbers of two logs agree."""
    assert [sorted(row) for row in found] == [sorted(row) for row in wanted]
    for own, row in zip(found, wanted, strict=True):
        assert own == pytest.approx(row, rel=2e-5, abs=2e-5)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [n if n in EACH_TIME else whole(n) for n in SCRIPTS])
def test_equals_one_process(name: str, tmp_path: Path) -> None:
    """Catches a loss, a gradient norm, or any other number of the log that is not that of one
    process: in training, and in evaluation after it."""
    plain, planned = both(SCRIPTS[name], tmp_path)
    assert sum("loss" in row for row in plain) >= 4
    assert sum("eval_loss" in row for row in plain) == 1
    assert_equal(planned, plain)


@pytest.mark.timeout(120)
def test_metrics_of_a_step_that_is_taken_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches metrics that count the tokens of an attempt that ran out of memory."""
    script = Script(base="SFTTrainer", arguments={"max_steps": 3})
    wanted = script.run(2, tmp_path / "whole")
    call, calls = PartOfModel.__call__, list[int]()

    def failing(self: Any, **named: Any) -> Any:
        """The tenth call on rank 1, within an attempt that has others before, has no memory."""
        calls.append(1)
        if len(calls) == 10 and dist.get_rank() == 1:
            (tmp_path / "failed").touch()
            raise torch.OutOfMemoryError("planted")
        return call(self, **named)

    monkeypatch.setattr(PartOfModel, "__call__", failing)
    found = script.run(2, tmp_path / "again")
    assert (tmp_path / "failed").exists()
    assert_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rewards_in_mixed_precision(tmp_path: Path) -> None:
    """Catches forwards of a reward model that leave out the trainer's autocast."""
    script = Script(base="RewardTrainer", arguments={"bf16": True})
    plain, planned = both(script, tmp_path / "half")
    _, single = both(Script(base="RewardTrainer"), tmp_path / "single")
    norms = [[row["grad_norm"] for row in log if "loss" in row] for log in (plain, planned, single)]
    assert norms[1] == pytest.approx(norms[0], rel=0.06)
    assert norms[1] != pytest.approx(norms[2], rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_dpo_of_an_adapter(tmp_path: Path) -> None:
    """Catches a reference that is not the model without its adapter. In the first step both are the
    same, so who is right there is a matter of rounding."""
    plain, planned = both(Script(base="DPOTrainer", lora=True), tmp_path)
    for row in (*plain, *planned):
        row.pop("rewards/accuracies", None)
    assert_equal(planned, plain)


REFUSED = {
    "wrapped": (
        Script(base="SFTTrainer", arguments={"packing": True, "packing_strategy": "wrapped"}),
        "packing_strategy: got wrapped",
    ),
    "offloading": (
        Script(base="SFTTrainer", arguments={"activation_offloading": True}),
        "activation_offloading",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    """Catches arguments that are passed over without a word."""
    script, words = REFUSED[name]
    with pytest.raises(AssertionError, match=words):
        script.run(1, tmp_path)


def test_trainers_that_are_not_known() -> None:
    """Catches a trainer whose loss is made in a way that nobody has looked at."""
    from trl import RLOOTrainer

    with pytest.raises(SpecError, match="TRL's RLOOTrainer"):
        hr.trainer(RLOOTrainer)


@pytest.mark.parametrize("name", ["chosen_ids", "input_ids"])
def test_the_tokens_of_an_item_whatever_holds_it(name: str) -> None:
    """Catches pairs of a list that count without their prompt, unlike those of a table."""
    from datasets import Dataset

    others = {"chosen_ids": "rejected_ids", "input_ids": "labels"}
    prompt = {"chosen_ids": 2, "input_ids": 0}[name]
    rows = [
        {name: [1] * count, others[name]: [1] * 3} | ({"prompt_ids": [1] * 2} if prompt else {})
        for count in (1, 4, 7)
    ]
    wanted = [3, 4, 7] if prompt else [1, 4, 7]
    assert lengths_of(rows).tolist() == [count + prompt for count in wanted]
    assert lengths_of(Dataset.from_list(rows)).tolist() == [count + prompt for count in wanted]
