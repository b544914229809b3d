"""Outside of a micro-batch (and of a call of a spread model) a model is the user's plain model."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import headrace as hr
from headrace.errors import ModelError
from ranks import run_ranks
from running.adopt.foreign import gpt
from running.engine.loops import alone, attached, batches, costs, dataset, llama, trained
from running.engine.test_clips import attached as clips_attached
from running.engine.test_clips import clips, model_error
from spread import whole

pytest.importorskip("transformers")


def logits_of(model: Any, *ids: torch.Tensor, **more: Any) -> torch.Tensor:
    """What a model gives for whole rows."""
    with torch.no_grad():
        out = model(*ids, **more)
    return (out.logits if hasattr(out, "logits") else out[0]).clone()


def evaluated(kind: str, ranks: int, folder: Path) -> list[bool]:
    """Whether all that a user does with the model within a loop is as without headrace."""
    model = llama() if kind == "registry" else gpt()
    given: dict[str, Any] = {"costs": costs(ranks), "batch_tokens": 90, "steps": 2}
    if kind != "registry":
        given["labels"] = "next"
    data: Any = dataset()
    if kind != "registry":
        data = [(item["input_ids"], item["labels"]) for item in data]
    run = attached(model, torch.optim.SGD(model.parameters(), lr=0.1), data, folder, **given)
    same = list[bool]()

    def look(count: int) -> None:
        plain = llama() if kind == "registry" else gpt()
        plain.load_state_dict(copy.deepcopy(model.state_dict()))
        ids = torch.arange(count)[None] % 61
        wanted = logits_of(plain.train(model.training), ids)
        same.append(torch.equal(logits_of(model, ids), wanted))
        twin = copy.deepcopy(model)
        same.append(torch.equal(logits_of(twin, ids), wanted))
        pickled = pickle.loads(pickle.dumps(model))
        same.append(torch.equal(logits_of(pickled, ids), wanted))
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)
        if kind == "registry":
            both = torch.cat([ids, ids])
            mask = torch.ones_like(both)
            mask[1, : count // 2] = 0
            mine, others = (logits_of(m, both, attention_mask=mask) for m in (model, plain))
            same.append(torch.equal(mine, others))
            drawn = [m.generate(ids, max_new_tokens=4, do_sample=False) for m in (model, plain)]
            same.append(torch.equal(*drawn))

    look(13)
    for step in run:
        for micro in step:
            tokens = next(iter(micro.inputs))
            outputs = model(**micro.inputs) if kind == "registry" else model(micro.inputs[tokens])
            loss = outputs.loss if kind == "registry" else micro.loss(outputs[0])
            within = copy.deepcopy(model)  # a copy made in the middle is a plain one, too
            micro.backward(loss)
            count = micro.inputs[tokens].shape[1]
            look(count)
            ids = torch.arange(count)[None] % 61
            same.append(torch.equal(logits_of(within, ids), logits_of(model, ids)))
        look(40)
    run.detach()
    look(22)
    same.append(not getattr(model, "is_gradient_checkpointing", False))
    return same


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("registry", 1), ("registry", 2), ("calls", 2), whole("calls", 1), whole("registry", 3)],
)
def test_evaluating_within_a_loop(kind: str, ranks: int, tmp_path: Path) -> None:
    """Catches borders, shifts and counts of the last micro-batch that an evaluation of as many
    tokens would use, copies that are spread, and masks that are not made."""
    for rank, same in enumerate(run_ranks(ranks, evaluated, kind, ranks, tmp_path, timeout_s=200)):
        assert same, rank
        assert all(same), (rank, same)


def taught_within(folder: Path) -> str:
    """What a teacher says that a loop gives a micro-batch."""
    model, teacher = llama(), llama().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = attached(model, optimizer, dataset(), folder, costs=costs(2), batch_tokens=90, steps=1)
    for step in run:
        for micro in step:
            try:
                logits_of(teacher, **micro.inputs)
            except ModelError as error:
                return str(error)
    return "taken"


def test_a_teacher_within_a_loop_is_refused(tmp_path: Path) -> None:
    """Catches a second model that takes parts of sequences for whole ones."""
    for said in run_ranks(2, taught_within, tmp_path):
        assert "a part of a batch given to weights [61, 16] of another model" in said
        assert "run.map(model=...)" in said


def hooks_of(model: torch.nn.Module) -> list[Any]:
    """What each module of a model runs beside its forward, and forwards of its own."""
    return [
        (dict(m._forward_pre_hooks), dict(m._forward_hooks), vars(m).get("forward"))
        for m in model.modules()
    ]


def compiled(kind: str) -> list[bool]:
    """Whether a model is plain between sharding, calling and going backward, and as it was before
    once it is detached."""
    model, plain = (llama() if kind == "registry" else gpt() for _ in range(2))
    before = hooks_of(model)
    run = hr.compile(model, labels="next", backend="eager" if kind == "graph" else None)
    ids = torch.arange(24).view(2, 12) % 61
    wanted, same = logits_of(plain, ids), []
    name = "input_ids" if kind == "registry" else "ids"
    shard = run.shard({name: ids, "labels": ids})
    same.append(torch.equal(logits_of(model, ids), wanted))
    with pytest.raises(ModelError, match="inputs of shard"):
        model(shard.inputs[name])
    outputs = run(**shard.inputs)
    same.append(torch.equal(logits_of(model, ids), wanted))
    loss = outputs.loss if kind == "registry" else outputs[1]
    run.backward(loss)
    same.append(torch.equal(logits_of(model, ids), wanted))
    same.append(torch.equal(logits_of(copy.deepcopy(model), ids), wanted))
    if kind == "registry":  # one that shares the configuration is another model
        second = type(model)(model.config).double()
        second.load_state_dict(plain.state_dict())
        run(**shard.inputs)
        same.append(torch.equal(logits_of(second, ids), wanted))
        same.append(model.config._attn_implementation == plain.config._attn_implementation)
    run.detach()
    same.append(hooks_of(model) == before)
    same.append(torch.equal(logits_of(model, ids), wanted))
    own = shard.inputs[name]
    same.append(torch.equal(logits_of(model, own), logits_of(plain, own.clone())))
    return same


@pytest.mark.parametrize("kind", ["registry", "calls", "graph"])
def test_a_compiled_model_is_plain_outside_of_its_call(kind: str) -> None:
    """Catches a placement that stays: logits were off by 0.29; and hooks that stay once the model
    is detached, so that it refuses tokens that were sharded."""
    for same in run_ranks(2, compiled, kind, timeout_s=100):
        assert all(same), same


def of_axes(folder: Path) -> list[bool]:
    """Whether a model of several axes is plain outside of its micro-batches."""
    ranks = dist.get_world_size()
    run, called = clips_attached("alone", folder, costs=costs(ranks), steps=2)
    item, same = clips()[0], list[bool]()

    def look() -> None:
        plain = copy.deepcopy(called)
        inputs = item["x"][None], item["timestep"][None], item["frames"], item["patches"]
        with torch.no_grad():
            same.append(torch.equal(called(*inputs), plain(*inputs)))
            same.append(called(*inputs).shape == item["x"][None].shape)

    for step in run:
        look()
        for micro in step:
            error = model_error(called, micro)
            micro.backward(error.square().sum() / micro.targets)
            look()
    return same


def test_a_model_of_axes_is_plain_between_micro_batches(tmp_path: Path) -> None:
    """Catches hooks that switch axes of an evaluation, or refuse it."""
    for same in run_ranks(2, of_axes, tmp_path, timeout_s=100):
        assert all(same), same


def of_axes_within(folder: Path) -> list[str]:
    """What a loop is told that evaluates other clips within a micro-batch of a model of axes."""
    run, called = clips_attached("alone", folder, costs=costs(dist.get_world_size()), steps=1)
    said = list[str]()
    for step in run:
        for micro in step:
            inputs = {k: v for k, v in micro.inputs.items() if isinstance(v, torch.Tensor)}
            other = {k: v + 1 if v.dim() else v for k, v in inputs.items()}
            rest = {k: v for k, v in micro.inputs.items() if k not in inputs}
            with torch.no_grad():
                try:
                    called(**other, **rest)
                except ModelError as error:
                    said.append(str(error))
            error = model_error(called, micro)
            micro.backward(error.square().sum() / micro.targets)
    return said


def test_other_clips_within_a_micro_batch(tmp_path: Path) -> None:
    """Catches an evaluation of clips of the micro-batch's shape, taken for parts of longer ones."""
    for said in run_ranks(2, of_axes_within, tmp_path, timeout_s=100):
        assert said
        assert all("evaluate before the micro-batch" in one for one in said)


def adapted_alone() -> list[bool]:
    """Whether an adapted model that is called directly is plain."""
    from running.adopt.test_adapted import DIMS, adapted, drawn, table

    model, x = table(), drawn(1, 1, 4, 4, 6)
    plain, run = copy.deepcopy(model), adapted(model)
    with torch.no_grad():
        wanted = plain(x)
        same = [torch.equal(model(x), wanted)]
        shard = run.shard({"x": x})
        same.append(torch.equal(model(x), wanted))
        if dist.get_world_size() > 1:
            with pytest.raises(ModelError, match="inputs of shard"):
                model(shard["x"])
        whole_result = run.collect(run(**shard), DIMS)
        same.append(bool((whole_result - wanted).abs().max() < 1e-12))
        same.append(torch.equal(model(x), wanted))
    return same


def test_an_adapted_model_is_plain_outside_of_its_call() -> None:
    """Catches an error, or a shard, where a user calls his own model."""
    for same in run_ranks(2, adapted_alone, timeout_s=100):
        assert all(same), same


def test_a_batch_is_spread_within_a_context(tmp_path: Path) -> None:
    """Catches an evaluation over all ranks that stays in force, or never begins."""
    for first, second, wanted in run_ranks(2, within_context, tmp_path, timeout_s=100):
        assert first == pytest.approx(wanted, rel=1e-6)
        assert second == wanted


def within_context(folder: Path) -> tuple[float, float, float]:
    """The loss of a batch over both ranks, of the plain model after it, and of another."""
    model, other = llama(), llama()
    run = attached(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset(),
        folder,
        costs=costs(2),
        steps=1,
    )
    ids = torch.arange(26).view(2, 13)
    with torch.no_grad(), run.shard({"input_ids": ids, "labels": ids}) as part:
        loss = model(**part.inputs).loss
    dist.all_reduce(loss)
    with torch.no_grad():
        after = float(model(ids, labels=ids).loss)
        wanted = float(other(ids, labels=ids).loss)
    trained(run, model)
    return float(loss), after, wanted


def within(kind: str, folder: Path) -> list[str]:
    """What a loop is told that calls its model with something else within a micro-batch: other
    tokens, tokens alone, and copies of its own."""
    graph = kind == "graph"
    model = llama() if kind == "registry" else gpt()
    made = costs(dist.get_world_size(), layers=1 if graph else 2)
    given: dict[str, Any] = {"costs": made, "steps": 1}
    data: Any = dataset()
    if kind != "registry":
        given |= {"labels": "next", "backend": "eager" if graph else None}
        data = [(item["input_ids"], item["labels"]) for item in data]
    run = attached(model, torch.optim.SGD(model.parameters(), lr=0.1), data, folder, **given)
    said = list[str]()

    def told(**inputs: torch.Tensor) -> None:
        try:
            with torch.no_grad():
                model(**inputs)
        except ModelError as error:
            said.append(str(error))
        else:
            said.append("taken")

    for step in run:
        for micro in step:
            name = "input_ids" if kind == "registry" else "ids"
            own = dict(micro.inputs)
            labels = own.pop("labels", None)
            other = (own[name] + 1) % 61
            told(**{name: other})
            told(**{name: own[name].clone()})
            told(**{**own, name: own[name].clone()})
            told(**{**own, name: other})
            if kind == "registry":
                micro.backward(model(**own, labels=labels).loss)
            else:
                micro.backward(micro.loss(model(**own)[0]))
    return said[:4]


@pytest.mark.parametrize("kind", ["registry", "calls", whole("graph")])
def test_other_tokens_within_a_micro_batch(kind: str, tmp_path: Path) -> None:
    """Catches an evaluation of as many tokens as the micro-batch has, which would have its borders
    and places, and a part without its places."""
    takes_places = kind == "registry"
    for said in run_ranks(2, within, kind, tmp_path, timeout_s=200):
        other, alone, copied, changed = said
        assert "within a micro-batch: got other tokens than those" in other
        assert "evaluate before the micro-batch or after its backward" in other
        if takes_places:
            assert "a part of a batch without its position_ids" in alone
        else:
            assert alone == "taken"
        assert copied == "taken"
        assert (changed == "taken") == takes_places, changed


def in_turns(ranks: int, folder: Path) -> tuple[list[float], list[float]]:
    """Losses of a model that two runs train in turns, and those of one process."""
    model, plain = llama(), llama()
    optimizer, alone_optimizer = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)
    )
    given: dict[str, Any] = {"costs": costs(ranks), "batch_tokens": 90, "steps": 3}
    items = (dataset(), dataset((31, 8, 22, 50, 3, 64)))
    runs = [attached(model, optimizer, data, folder, **given) for data in items]
    drawn = [batches(data, 3, batch_tokens=90) for data in items]
    found, wanted = list[float](), list[float]()
    for number, steps in enumerate(zip(*runs, strict=True)):
        # The second run's batch was planned before the first run's step was done.
        for step, of_run in zip(steps, drawn, strict=True):
            for micro in step:
                micro.backward(model(**micro.inputs).loss)
            found.append(step.loss)
            wanted += alone(plain, alone_optimizer, of_run[number : number + 1])
    for run in runs:
        run.detach()
    return found, wanted


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_runs_train_a_model_in_turns(ranks: int, tmp_path: Path) -> None:
    """Catches a second attach that takes the first one's steps for the loop's, or its batch."""
    for found, wanted in run_ranks(ranks, in_turns, ranks, tmp_path):
        assert found == pytest.approx(wanted, rel=1e-6)
