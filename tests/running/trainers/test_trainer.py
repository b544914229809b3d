"""transformers' Trainer with planned steps equals the plain one on one process."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import headrace as hr
from headrace.errors import DataError, HeadraceError, SpecError
from headrace.trainers.planned_trainer import _Planned
from headrace.trainers.rows import samples_of
from ranks import run_ranks
from running.trainers.scripts import (
    LOSSES,
    Script,
    both,
    data,
    language_model,
    numbers,
    padded,
    set_launcher,
    trainer_of,
)
from spread import whole

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

NUMBERS = ("loss", "grad_norm", "learning_rate", "epoch")

SCRIPTS = {
    "ddp": Script(),
    "accumulated": Script(accumulates=2, arguments={"max_steps": -1, "num_train_epochs": 2}),
    "sequential, last batch dropped": Script(
        arguments={
            "train_sampling_strategy": "sequential",
            "dataloader_drop_last": True,
            "max_steps": -1,
            "num_train_epochs": 2,
        },
        accumulates=2,
    ),
    "own loss": Script(compute_loss="own"),
    "loss function": Script(compute_loss="func"),
    "smoothed": Script(arguments={"label_smoothing_factor": 0.1}),
    "checkpointed": Script(arguments={"gradient_checkpointing": True}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [n if n == "ddp" else whole(n) for n in SCRIPTS])
def test_equals_one_process(name: str, tmp_path: Path) -> None:
    """Catches other samples, counts, gradients, updates or logs than those of one process."""
    plain, planned = both(SCRIPTS[name], tmp_path)
    assert len(numbers(plain, *NUMBERS)) >= 6
    for found, wanted in zip(numbers(planned, *NUMBERS), numbers(plain, *NUMBERS), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_on_other_numbers_of_ranks(ranks: int, tmp_path: Path) -> None:
    """Catches what is right on two ranks alone; 20 steps."""
    script = Script(arguments={"max_steps": 20, "per_device_train_batch_size": 12 // ranks})
    plain = Script(arguments={"max_steps": 20, "per_device_train_batch_size": 12})
    wanted = plain.run(1, tmp_path / "plain", planned=False)
    found = script.run(ranks, tmp_path / "planned")
    assert len(numbers(wanted, *NUMBERS)) == 20
    for own, row in zip(numbers(found, *NUMBERS), numbers(wanted, *NUMBERS), strict=True):
        assert own == pytest.approx(row, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sharded", [False, True])
def test_evaluation_and_prediction(sharded: bool, tmp_path: Path) -> None:
    """Catches an evaluation by which ranks count other batches than one process, or a metric of
    some rows, while training and after it."""
    script = Script(
        evaluates=True,
        sharded=sharded,
        arguments={
            "eval_strategy": "steps",
            "eval_steps": 3,
            "include_num_input_tokens_seen": "non_padding",
        },
    )
    names = ("eval_loss", "eval_accuracy", "eval_rows", "num_input_tokens_seen")
    plain, planned = both(script, tmp_path)
    assert len(numbers(plain, *names)) == 3
    for found, wanted in zip(numbers(planned, *names), numbers(plain, *names), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("sharded", [False, True])
def test_goes_on_from_a_checkpoint(sharded: bool, tmp_path: Path) -> None:
    """Catches a run that goes on with other samples, weights or plans than without a break: within
    an epoch, and over the end of one."""
    kept = {"save_strategy": "steps", "save_steps": 2}
    made = {"sharded": sharded, "drawn": False}
    through = Script(arguments={"max_steps": 8, **kept}, **made).run(2, tmp_path / "through")
    folder = tmp_path / "broken"
    Script(arguments={"max_steps": 8, **kept, "save_total_limit": 9}, **made).run(2, folder)
    for late in ("checkpoint-6", "checkpoint-8"):
        (folder / late).rename(tmp_path / late)
    script = Script(arguments={"max_steps": 8, **kept}, resume=True, **made)
    again = script.run(2, folder)
    assert (folder / "checkpoint-4" / "headrace.json").exists()
    names = ("loss", "grad_norm", "learning_rate")
    wanted = numbers(through, *names)
    assert len(wanted) == 8
    for found, row in zip(numbers(again, *names), wanted, strict=True):
        assert found == pytest.approx(row, rel=1e-5)


def a_longer_one() -> dict[str, list[dict[str, list[int]]]]:
    """Items to evaluate of which one is longer than all that are trained."""
    items = data(5, seed=2)
    return {"short": items[:2], "long": [*items, {k: row * 12 for k, row in items[0].items()}]}


@pytest.mark.timeout(120)
def test_evaluates_what_is_longer_than_all_that_is_trained(tmp_path: Path) -> None:
    """Catches a run that ends at its first evaluation."""
    assert max(len(item["input_ids"]) for item in a_longer_one()["long"]) > 60
    kept = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    script = Script(arguments=kept, evaluates=True, evaluated=a_longer_one)
    plain, planned = both(script, tmp_path)
    for name in ("eval_short_loss", "eval_long_loss"):
        wanted = numbers(plain, name)
        assert wanted
        for found, row in zip(numbers(planned, name), wanted, strict=True):
            assert found == pytest.approx(row, rel=1e-5)


def resumed(folder: Path, where: str) -> tuple[list[float], str, list[str]]:
    """The losses of three steps of a run that goes on after the second, with its file of planning
    as ``where`` says; what it says; and the files of the checkpoint."""
    rank, said = dist.get_rank(), list[str]()
    own = folder / (f"node {rank}" if where == "on each node" else "shared")
    kept = {"save_strategy": "steps", "save_steps": 2, "save_on_each_node": own.name != "shared"}
    script = Script(arguments={"max_steps": 3, **kept}, options={"say": said.append}, drawn=False)
    set_launcher(2)
    if where == "on each node":
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    trainer_of(script, 2, own, planned=True).train()
    path = own / "checkpoint-2" / "headrace.json"
    dist.barrier()
    if not rank:
        shutil.rmtree(own / "checkpoint-3")
        text = path.read_text()
        path.write_text({"half": text[: len(text) // 2], "of no plans": "{}"}.get(where, text))
        assert "costs" in text
    dist.barrier()
    if where == "on each node" and rank:
        shutil.rmtree(own / "checkpoint-3")
        assert not path.exists()
        # What transformers writes on the first rank alone is copied by users.
        for file in (folder / "node 0" / "checkpoint-2").iterdir():
            if file.name != "headrace.json" and not (path.parent / file.name).exists():
                shutil.copy(file, path.parent)
    trainer = trainer_of(script, 2, own, planned=True)
    trainer.train(resume_from_checkpoint=True)
    files = sorted(file.name for file in path.parent.iterdir())
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, " ".join(said), files


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["half", "of no plans", "on each node"])
def test_goes_on_without_the_state_of_planning(where: str, tmp_path: Path) -> None:
    """Catches a checkpoint that cannot be used as planning's file in it is cut, and ranks without
    that file, as on another node, that leave the others waiting."""
    found = run_ranks(2, resumed, tmp_path, where, timeout_s=100)
    assert all(len(losses) == 3 for losses, *_ in found)
    assert found[0][0] == pytest.approx(found[1][0])
    assert not any(name.endswith(".new") for *_, files in found for name in files)
    if where != "on each node":
        assert "headrace.json is passed over" in found[0][1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_budget_of_tokens(tmp_path: Path) -> None:
    """Catches steps that lose samples, have others on another number of ranks, or are far from
    their budget."""
    script = Script(
        options={"batch_tokens": 300, "on_step": lambda step: None},
        arguments={"max_steps": -1, "num_train_epochs": 2, "include_num_input_tokens_seen": "all"},
    )
    alone, several = script.run(1, tmp_path / "one"), script.run(2, tmp_path / "two")
    names = ("loss", "grad_norm", "epoch", "num_input_tokens_seen")
    for found, row in zip(numbers(several, *names), numbers(alone, *names), strict=True):
        assert found == pytest.approx(row, rel=1e-5)
    seen = [0, *(int(row["num_input_tokens_seen"]) for row in alone if "loss" in row)]
    steps = [after - before for before, after in pairwise(seen)]
    total = sum(len(item["input_ids"]) for item in data())
    assert sum(steps) == 2 * total
    assert sum(steps[: len(steps) // 2]) == total
    assert max(steps) <= 300 + 60
    assert min(steps) >= 200


REFUSED: dict[str, tuple[Script, str]] = {
    "fp16": (Script(arguments={"fp16": True}), "fp16"),
    "compiled": (Script(arguments={"torch_compile": True}), "torch_compile"),
    "noise": (Script(arguments={"neftune_noise_alpha": 5.0}), "neftune_noise_alpha: got 5.0"),
    "batch sizes": (Script(arguments={"auto_find_batch_size": True}), "auto_find_batch_size"),
    "split": (
        Script(arguments={"accelerator_config": {"split_batches": True}}),
        "split_batches: got True",
    ),
    "layerwise": (
        Script(arguments={"optim": "galore_adamw_layerwise", "optim_target_modules": ["mlp"]}),
        "optim: got galore_adamw_layerwise",
    ),
    "budget": (
        Script(options={"batch_tokens": 300}, accumulates=2),
        "gradient_accumulation_steps: got 2",
    ),
    "liger": (Script(arguments={"use_liger_kernel": True}), "use_liger_kernel"),
    "means that are added up": (
        Script(compute_loss="of the model", accumulates=2),
        "in 2 batches that are added up",
    ),
    "means by choice": (
        Script(compute_loss="mean of means", accumulates=2),
        "gradient_accumulation_steps: got 2",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    """Catches arguments that are passed over without a word."""
    script, words = REFUSED[name]
    with pytest.raises(AssertionError, match=re.escape(words)):
        script.run(1, tmp_path)


def _with(change: Callable[[Any], object]) -> Any:
    """A trainer that is set up as by another launcher, once it is made."""

    class Own(transformers.Trainer):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            change(self)

    return Own


def _parallel(**sizes: int) -> Callable[[Any], object]:
    from accelerate import ParallelismConfig

    def change(trainer: Any) -> None:
        trainer.accelerator.state.parallelism_config = ParallelismConfig(**sizes)

    return change


LAUNCHED: dict[str, tuple[Callable[[Any], object], str]] = {
    "DeepSpeed": (
        lambda trainer: setattr(trainer, "is_deepspeed_enabled", True),
        "deepspeed: got DeepSpeed, wanted none beside planned steps; use DDP or FSDP2",
    ),
    "ring attention": (_parallel(cp_size=2), "cp_size: got cp_size=2"),
    "Ulysses": (_parallel(sp_size=2), "sp_size: got sp_size=2"),
    "tensor parallel": (_parallel(tp_size=2), "tp_size: got tp_size=2"),
    "replicas": (
        _parallel(dp_replicate_size=2, dp_shard_size=2),
        "dp_replicate_size: got dp_replicate_size=2",
    ),
    "FSDP1": (
        lambda trainer: setattr(
            trainer.accelerator.state, "fsdp_plugin", SimpleNamespace(fsdp_version=1)
        ),
        "fsdp: got FSDP1",
    ),
    "loaded in shards": (
        lambda trainer: setattr(trainer, "is_distributed_loading_by_transformers", True),
        "model: got sharded when it was loaded",
    ),
    "several devices": (
        lambda trainer: setattr(trainer, "is_model_parallel", True),
        "model parallel: got layers on several devices of a process",
    ),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_other_parallelism_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Catches a second way to spread a model or its sequences that is passed over without a word:
    ranks would share samples that each of them is thought to have."""
    change, words = LAUNCHED[name]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False
    )
    given = {"model": language_model(), "args": args, "train_dataset": data()}
    Own = _with(change)
    try:
        with pytest.raises(SpecError, match=re.escape(words)):
            hr.trainer(Own)(**given, data_collator=padded)
    finally:  # Accelerate's state is of the process
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    hr.trainer(_with(lambda trainer: None))(**given, data_collator=padded)


LOSS_ERRORS = {
    "mean": "as compute_loss makes of them in one batch",
    "unshifted": "as compute_loss makes of them in one batch",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LOSS_ERRORS)
def test_losses_that_are_no_sums_are_refused(name: str, tmp_path: Path) -> None:
    """Catches a user's loss that parts of a batch cannot have, on every rank."""
    with pytest.raises(AssertionError) as caught:
        Script(compute_loss=name).run(2, tmp_path)
    assert str(caught.value).count(LOSS_ERRORS[name]) == 2


def with_weights(items: Any) -> dict[str, Any]:
    """A batch with a weight for each token."""
    batch = padded(items)
    return batch | {"loss_weights": torch.ones(batch["input_ids"].shape)}


def from_the_left(items: Any) -> dict[str, Any]:
    """A batch with padding before the tokens."""
    batch, lengths = padded(items), [len(item["input_ids"]) for item in items]
    return {
        name: torch.stack([row.roll(-n) for row, n in zip(rows, lengths, strict=True)])
        for name, rows in batch.items()
    }


def learned_positions() -> Any:
    """A tiny GPT-2."""
    torch.manual_seed(0)
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2}
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))


def of_two_lengths() -> list[dict[str, list[int]]]:
    """Items of which several are the shortest."""
    return [{name: row[:20] for name, row in item.items()} for item in data() if item][:9] + data()


def token_classes(count: int = 40, seed: int = 1) -> list[dict[str, list[int]]]:
    """Items of which each token is one of five classes."""
    items = data(count, seed=seed)
    return [item | {"labels": [token % 5 for token in item["input_ids"]]} for item in items]


def classifier() -> Any:
    """A tiny BERT that classifies tokens."""
    torch.manual_seed(0)
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_labels": 5}
    config = transformers.BertConfig(num_hidden_layers=2, num_attention_heads=4, **sizes, **drops)
    return transformers.BertForTokenClassification(config)


@pytest.mark.timeout(120)
def test_classes_of_tokens(tmp_path: Path) -> None:
    """Catches a model that is tried with tokens in the place of its labels."""
    script = Script(model=classifier, items=token_classes, arguments={"max_steps": 3})
    plain, planned = both(script, tmp_path)
    assert len(numbers(plain, *NUMBERS)) == 3
    for found, wanted in zip(numbers(planned, *NUMBERS), numbers(plain, *NUMBERS), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.timeout(120)
def test_accumulated_means_of_a_model_are_refused(tmp_path: Path) -> None:
    """Catches a model that takes the number of a step's items and passes it over: transformers adds
    up the means of its batches."""
    script = Script(model=classifier, items=token_classes, accumulates=2)
    with pytest.raises(AssertionError, match="in 2 batches that are added up"):
        script.run(2, tmp_path)


def shortest_without_a_target() -> list[dict[str, list[int]]]:
    """Items of which the shortest have no label."""
    return [
        item | ({"labels": [-100] * len(item["labels"])} if len(item["labels"]) < 12 else {})
        for item in data()
    ]


@pytest.mark.timeout(120)
def test_accumulated_means_are_refused_whatever_has_a_target(tmp_path: Path) -> None:
    """Catches a comparison with the mean of a batch without a target, which is no number."""
    items = shortest_without_a_target()
    assert max(min(items, key=lambda item: len(item["labels"]))["labels"]) < 0
    script = Script(compute_loss="of the model", accumulates=2, items=shortest_without_a_target)
    with pytest.raises(AssertionError, match="in 2 batches that are added up"):
        script.run(1, tmp_path)


def first_labels() -> list[dict[str, list[int]]]:
    """Items of which the long ones have a label on their first token, too."""
    return [
        item | ({"labels": item["input_ids"]} if len(item["input_ids"]) > 40 else {})
        for item in data()
    ]


def one_by_one(items: Any) -> dict[str, torch.Tensor]:
    """A collator that puts no items of several lengths together."""
    return {name: torch.tensor([item[name] for item in items]) for name in items[0]}


def with_an_empty_one() -> list[dict[str, list[int]]]:
    """Items of which one has no tokens."""
    items = data()
    items[4] = {name: [] for name in items[4]}
    return items


class Streamed(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A data set without a length; its last batch is not full."""

    def __iter__(self) -> Any:
        return iter(data(18, seed=3))


ONE_STEP = {"max_steps": 2}
ORDINARY: dict[str, Script] = {
    "first labels of GPT-2": Script(model=learned_positions, items=first_labels),
    "labels kept": Script(compute_loss="labels kept", arguments=ONE_STEP, evaluates=True),
    "a mask in the loss": Script(compute_loss="masked", arguments=ONE_STEP),
    "an empty item": Script(items=with_an_empty_one, arguments={"max_steps": 5}),
    "evaluation of a stream": Script(
        compute_loss="of the model",
        evaluates=True,
        measures=False,
        evaluated=Streamed,
        options={"longest": 64},
        arguments={**ONE_STEP, "eval_strategy": "steps", "eval_steps": 1},
    ),
    "evaluation of logits": Script(
        compute_loss="labels kept",
        evaluates=True,
        measures=False,
        arguments={**ONE_STEP, "eval_strategy": "steps", "eval_steps": 1},
    ),
}


RARER = ("a mask in the loss", "an empty item", "evaluation of logits")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [whole(n) if n in RARER else n for n in ORDINARY])
def test_ordinary_scripts_equal_one_process(name: str, tmp_path: Path) -> None:
    """Catches labels that transformers counts and that have no token before them, losses that read
    labels, logits or the mask, collators of single items, items without tokens, and the last batch
    of a stream."""
    plain, planned = both(ORDINARY[name], tmp_path)
    for names in (NUMBERS, ("eval_loss",)):
        wanted = numbers(plain, *names)
        assert len(wanted) >= 2 or (
            names != NUMBERS and "eval_strategy" not in ORDINARY[name].arguments
        )
        for found, row in zip(numbers(planned, *names), wanted, strict=True):
            assert found == pytest.approx(row, rel=1e-5)


@pytest.mark.timeout(120)
def test_batches_of_one_item_need_no_padding(tmp_path: Path) -> None:
    """Catches a collator of single items that is called with two, as a rank never does."""
    made = {"collate": one_by_one, "arguments": ONE_STEP}
    plain = Script(accumulates=8, **made).run(1, tmp_path / "plain", planned=False)
    planned = Script(accumulates=4, **made).run(2, tmp_path / "planned")
    assert len(numbers(plain, *NUMBERS)) == 2
    for found, wanted in zip(numbers(planned, *NUMBERS), numbers(plain, *NUMBERS), strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_metrics_that_are_left_out_are_said_once() -> None:
    """Catches metrics of a user's loss that are in no log, without a word."""
    said: list[str] = []
    own = SimpleNamespace(
        _collected={"entropy", "mine"},
        _said=set(),
        _metrics={"train": {"entropy": [1.0]}},
        _planned=SimpleNamespace(say=said.append),
        is_world_process_zero=lambda: True,
    )
    for _ in range(2):
        own._collected |= {"entropy", "mine"}
        _Planned._say_what_is_unreported(own)  # type: ignore[arg-type]
    (line,) = said
    assert "not logged in training: mine" in line


def test_holes_of_a_mask_are_refused() -> None:
    """Catches tokens in the middle of a row that are cut out as padding: places would change."""
    row = {"input_ids": torch.ones(1, 5, dtype=torch.long)}
    for mask in ([1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]):
        assert (
            len(samples_of({**row, "attention_mask": torch.tensor([mask])}, "input_ids", "x")) <= 1
        )
    with pytest.raises(DataError, match="one run of ones in every row"):
        samples_of({**row, "attention_mask": torch.tensor([[1, 0, 1, 1, 0]])}, "input_ids", "x")


KEPT = {"remove_unused_columns": False, "max_steps": 2}
INEXACT: dict[str, tuple[Script, str]] = {
    "weights of tokens": (
        Script(compute_loss="own", collate=with_weights, arguments=KEPT),
        "loss_weights in compute_loss: got a column of tokens",
    ),
    "left padding of learned positions": (
        Script(model=learned_positions, items=of_two_lengths, collate=from_the_left),
        "as compute_loss makes of them in one batch",
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", INEXACT)
def test_what_parts_of_a_batch_cannot_have_is_refused(name: str, tmp_path: Path) -> None:
    """Catches columns that a loss reads and a part does not have, and a batch whose padding counts,
    which was not seen where the items that are compared need none."""
    script, words = INEXACT[name]
    with pytest.raises(AssertionError) as caught:
        script.run(2, tmp_path)
    assert str(caught.value).count(words) == 2


@pytest.mark.timeout(120)
def test_a_column_that_no_loss_reads_is_left_out(tmp_path: Path) -> None:
    """Catches a refusal of what makes no difference."""
    script = Script(collate=with_weights, arguments=KEPT)
    assert len(numbers(script.run(2, tmp_path), "loss")) == 2


@pytest.mark.timeout(120)
def test_a_mean_is_refused_on_one_rank(tmp_path: Path) -> None:
    """Catches a mean over what one rank has: there all of a batch is in one place."""
    with pytest.raises(AssertionError, match=r"micro\.targets|num_items_in_batch"):
        Script(compute_loss="mean").run(1, tmp_path)


class _OwnLoader(transformers.Trainer):  # type: ignore[misc]
    def get_train_dataloader(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (_OwnLoader, "a get_train_dataloader of its own"),
        (dict, "hr.trainer: got dict"),
        (3, "hr.trainer: got int"),
    ],
)
def test_classes_that_are_refused(base: Any, words: str) -> None:
    """Catches a class whose own method planned steps would pass over."""
    with pytest.raises(SpecError, match=re.escape(words)):
        hr.trainer(base)


def test_what_the_class_says() -> None:
    """Catches a class that callbacks, model cards or logs take for another."""
    made = hr.trainer(LOSSES["own"]())
    assert made.__name__ == "Own"
    assert issubclass(made, transformers.Trainer)


@pytest.mark.apart
def test_update_is_the_loop_s_own(tmp_path: Path) -> None:
    """Catches a step that takes the optimizer's, drops gradients, or adds to those before it."""
    from running.engine.loops import costs

    model = language_model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = hr.attach(
        model,
        optimizer,
        longest=64,
        batch_tokens=512,
        update=False,
        say=lambda text: None,
        measure=hr.MeasureOptions(costs=costs(1)),
    )
    samples = [{k: torch.tensor(v) for k, v in item.items()} for item in data(6)]
    before = [p.detach().clone() for p in model.parameters()]
    for micro in run.step(samples):
        micro.backward(model(**micro.inputs).loss)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    found = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(HeadraceError, match="gradients of step 1: got some"):
        list(run.step(samples))
    model.zero_grad()
    model(**padded(data(6))).loss.backward()
    for own, p in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(own, p.grad, rtol=1e-4, atol=1e-6)
    run.detach()
    with pytest.raises(SpecError, match=r"update=False"):
        hr.attach(model, optimizer, longest=64, update=False, clip=1.0)
