"""What a loop over given batches is refused for: by name, on all ranks, with nothing trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.engine.attach import Attached
from headrace.errors import HeadraceError, SpecError
from ranks import run_ranks
from running.adopt.foreign import gpt
from running.engine.loops import Drawn, attached, costs, dataset, llama, weights
from running.engine.test_given_batches import (
    BATCHES,
    by_tokens,
    given,
    log_probabilities,
    sgd,
    steps_of,
    token_values,
)

pytest.importorskip("transformers")

Loop = Callable[[Attached, Any, int], object]
"""What a rank does with a run and its model."""


def trained(run: Attached, model: Any, batch: Any, **more: Any) -> Any:
    """One step."""
    step = run.step(batch, **more)
    for micro in step:
        micro.backward(by_tokens(model(**micro.inputs).logits, micro))
    return step


def with_loss(loss: Callable[[torch.Tensor, Any], torch.Tensor], **more: Any) -> Loop:
    """A step with a loss."""

    def loop(run: Attached, model: Any, rank: int) -> None:
        for micro in run.step(BATCHES[0], **more):
            micro.backward(loss(model(**micro.inputs).logits, micro))

    return loop


def of_sums(made: Callable[[torch.Tensor, Any], torch.Tensor], **more: Any) -> Loop:
    """A step with a loss of the mean log-probabilities of sequences."""

    def loss(logits: torch.Tensor, micro: Any) -> torch.Tensor:
        sums = 0.1 * micro.per_sequence(log_probabilities(logits, micro.labels))
        return made(sums, micro)

    return with_loss(loss, **more)


def other_samples(run: Attached, model: Any, rank: int) -> None:
    run.step(BATCHES[0] if rank else BATCHES[1])


def other_values(run: Attached, model: Any, rank: int) -> None:
    batch = [dict(item) for item in BATCHES[0]]
    batch[3]["reward"] = float(rank)
    run.step(batch)


def not_read(run: Attached, model: Any, rank: int) -> None:
    run.step([{"ids": [1, 2]}] if rank else BATCHES[0])


def not_looped(run: Attached, model: Any, rank: int) -> None:
    run.step(BATCHES[0])
    run.step(BATCHES[0])


def left_by_all(run: Attached, model: Any, rank: int) -> None:
    for micro in run.step(BATCHES[0]):
        micro.backward(by_tokens(model(**micro.inputs).logits, micro))
        break
    run.map(BATCHES[0], token_values)


def left_by_an_error(run: Attached, model: Any, rank: int) -> None:
    try:
        for _ in run.step(BATCHES[0]):
            raise ZeroDivisionError
    except ZeroDivisionError:
        run.step(BATCHES[0])


def within_a_loop(run: Attached, model: Any, rank: int) -> None:
    for _ in run.step(BATCHES[2]):
        run.map(BATCHES[1], token_values)


def other_counts(run: Attached, model: Any, rank: int) -> None:
    if rank:
        run.step(BATCHES[0])
    else:
        run.save("nowhere")


def no_number(run: Attached, model: Any, rank: int) -> None:
    for micro in run.step(BATCHES[0]):
        micro.backward(by_tokens(model(**micro.inputs).logits, micro) * float("nan"))


def fails_on_one(run: Attached, model: Any, rank: int) -> None:
    def fn(outputs: Any, micro: Any) -> torch.Tensor:
        if rank:
            raise ZeroDivisionError("of this rank")
        return token_values(outputs, micro)

    run.map(BATCHES[0], fn)


def by_gradients(gradients: Callable[[list[Any]], Any]) -> Loop:
    """A step by gradients."""

    def loop(run: Attached, model: Any, rank: int) -> None:
        run.backward(BATCHES[0], token_values, gradients(run.map(BATCHES[0], token_values)))

    return loop


def of_tokens(found: torch.Tensor, micro: Any) -> torch.Tensor:
    return (found * micro.sequence_share).sum()


CASES: dict[str, tuple[Loop, str]] = {
    "other samples": (
        other_samples,
        "rank 1 asks for: got step 0 of 6 samples .* wanted step 0 of 4",
    ),
    "other values": (other_values, "of other values"),
    "not read": (not_read, "input_ids"),
    "too long": (
        lambda run, model, rank: run.step([*BATCHES[0], {"input_ids": [1] * 81}]),
        "fields of sample 6",
    ),
    "longer than the longest": (
        lambda run, model, rank: run.step([{"input_ids": [1] * 9}, {"input_ids": [1] * 81}]),
        "sample 1: got 81 tokens, wanted at most 80.*longest=",
    ),
    "together too long": (
        lambda run, model, rank: run.step(BATCHES[0], together=[(1, 4)]),
        r"samples \[1, 4\], kept together: got 110 tokens",
    ),
    "together twice": (
        lambda run, model, rank: run.step(BATCHES[0], together=[(0, 1), (2, 1)]),
        "together=: got sample 1",
    ),
    "no sample": (lambda run, model, rank: run.step([]), "samples: got none"),
    "a padded batch": (
        lambda run, model, rank: run.map({"input_ids": torch.ones(2, 3)}, token_values),
        "list of single samples",
    ),
    "no label": (
        lambda run, model, rank: trained(run, model, [BATCHES[0][1]]),
        "labels of the step",
    ),
    "not looped over": (not_looped, "step 0: got no loop over it"),
    "left by all": (left_by_all, "left it half way"),
    "left by an error": (left_by_an_error, "left it half way"),
    "no number": (no_number, "loss of step 0: got nan"),
    "fn fails on one": (fails_on_one, "of this rank"),
    "fn of no shape": (
        lambda run, model, rank: run.map(BATCHES[0], lambda outputs, micro: outputs.logits[:, 1:]),
        r"fn\(outputs, micro\): got shape",
    ),
    "another class": (
        lambda run, model, rank: run.map(BATCHES[0], token_values, model=gpt().double()),
        "class of model=",
    ),
    "too few gradients": (by_gradients(lambda values: values[1:]), "gradients: got 5, wanted 6"),
    "gradients of others": (
        by_gradients(lambda values: values[::-1]),
        "gradient of sample 0: got shape",
    ),
    "gradients of sequences": (
        by_gradients(lambda values: [v.sum() for v in values]),
        "as the values of fn",
    ),
    "no finite gradient": (
        by_gradients(lambda values: [v / 0 for v in values]),
        "gradient of sample 0: got no finite",
    ),
    "a mean over sequences": (
        of_sums(lambda sums, micro: sums.exp().mean()),
        "not half of",
    ),
    "sequences by targets": (
        of_sums(lambda sums, micro: sums.exp().sum() / micro.targets),
        "a sequence without a share",
    ),
    "sequences that meet": (
        of_sums(lambda sums, micro: (sums.softmax(0) * micro.sequence_share).sum()),
        "a sequence without a share",
    ),
    "values of other tokens": (
        with_loss(lambda logits, micro: micro.per_sequence(logits).sum()),
        "values to add up by sequence",
    ),
}


def refused(folder: Path) -> Any:
    """Of each case the error of a rank, and of the step that follows. Weights are as they were."""
    run, model, called, drawn = given("alone", 2, folder)
    before = weights(llama())
    found = {}
    for case, (loop, _) in CASES.items():
        drawn.seed += 1
        try:
            loop(run, called, run.rank)
            found[case] = ["nothing"]
        except HeadraceError as error:
            found[case] = [f"{type(error).__name__}: {error}"]
        except ZeroDivisionError as error:
            found[case] = [str(error)]
        assert all((x == y).all() for x, y in zip(before, weights(model), strict=True)), case
        try:
            list(run.map(BATCHES[2], token_values))
        except HeadraceError as error:
            found[case].append(str(error))
    list(run.map(BATCHES[2], token_values))
    step = trained(run, called, BATCHES[0])
    return found, step.number, step.loss


def test_refused_on_all_ranks(tmp_path: Path) -> None:
    """Catches a mistake that only one rank hears of, that changes a weight, or after which nothing
    can be trained."""
    wanted = run_ranks(1, steps_of, "alone", 1, tmp_path, "tokens")[0][0]
    for found, number, loss in run_ranks(2, refused, tmp_path, timeout_s=100):
        for case, (text, *after) in found.items():
            assert re.search(CASES[case][1], text), (case, text)
            # An error of the loop's own leaves the step, which is said once.
            assert all("left it half way" in later for later in after), (case, after)
        assert number == 0
        assert loss == pytest.approx(wanted[0], rel=1e-10)


def apart(folder: Path, case: str) -> str:
    """The error of a rank of a loop after which nothing goes on."""
    run, _, called, _ = given("alone", 2, folder, check_loss=False)
    try:
        ENDS[case][0](run, called, run.rank)
    except HeadraceError as error:
        return str(error)
    return "nothing"


def left_by_one(run: Attached, model: Any, rank: int) -> None:
    run.engine.planner = Single(ranks=2, layers=2, seed=0)
    for micro in run.step(BATCHES[0]):
        micro.backward(by_tokens(model(**micro.inputs).logits, micro))
        if rank:
            break
    run.step(BATCHES[1])


class Single(Drawn):
    """Plans of groups of one rank."""

    def plan(self, lengths: Any) -> Any:
        while True:
            found = super().plan(lengths)
            if all(len(pipeline.ranks) == 1 for pipeline in found.plan.pipelines):
                return found


ENDS: dict[str, tuple[Loop, str]] = {
    "within a loop": (within_a_loop, "a call within the loop|loop that left it"),
    "other counts": (
        other_counts,
        "rank 1 asks for: got step 0, wanted a checkpoint before step 0, as rank 0",
    ),
    "left by one": (left_by_one, "left it half way|on rank 1: got a loop that left it, and step 0"),
}


@pytest.mark.parametrize("case", ENDS)
def test_ranks_that_part(case: str, tmp_path: Path) -> None:
    """Catches ranks that wait for each other in different places."""
    for text in run_ranks(2, apart, tmp_path, case, timeout_s=30):
        assert re.search(ENDS[case][1], text), text


def options_that_say_nothing(tmp_path: Path) -> None:
    """Options of a data set without one, and the other way around."""
    model = llama()
    optimizer = sgd(model)

    def refusal(items: Any, **options: Any) -> str:
        asked = {"costs": costs(1), "batch_tokens": None, **options}
        with pytest.raises(HeadraceError) as error:
            attached(model, optimizer, items, tmp_path, **asked)
        return str(error.value)

    assert "no longest=" in refusal(None)
    assert "hr.attach(steps=...): got no data set" in refusal(None, longest=9, steps=3)
    assert "hr.attach(epochs=...)" in refusal(None, longest=9, epochs=2)
    assert "hr.attach(example=...): got a data set" in refusal(dataset(), example=[1, 2])
    plain = gpt()
    with pytest.raises(SpecError, match="no example"):
        hr.attach(plain, sgd(plain), longest=9, say=lambda text: None)


def two_kinds_of_runs(tmp_path: Path) -> None:
    """What each is asked that the other one does."""
    model = llama()
    run = attached(model, sgd(model), dataset(), tmp_path, costs=costs(1))
    with pytest.raises(SpecError, match="a run with a data set"):
        run.step(BATCHES[0])
    run.detach()
    options = {"longest": "80", "batch_tokens": 200, "costs": costs(1)}
    run = attached(model, sgd(model), None, tmp_path, **options)
    with pytest.raises(SpecError, match=r"run\.step\(samples\)"):
        next(iter(run))
    with pytest.raises(TypeError):
        len(run)


@pytest.mark.parametrize("case", [options_that_say_nothing, two_kinds_of_runs])
def test_a_data_set_and_given_batches_are_two_things(case: Any, tmp_path: Path) -> None:
    """Catches options that are dropped without a word, a loop over nothing, and samples that an
    order of a data set does not know."""
    run_ranks(1, case, tmp_path)
