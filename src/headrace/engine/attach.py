"""What a user gives a loop, made into what drives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from headrace.adopt.axes import Adapted
from headrace.adopt.labels import Labels
from headrace.adopt.placement import Exchange
from headrace.adopt.tokens import compile as adopt
from headrace.comm.collectives import agree
from headrace.comm.launch import join_world
from headrace.comm.mesh import Groups
from headrace.config.model import PlannerConfig, cache_folder
from headrace.costs import CostModel
from headrace.data.sampler import SamplerOptions
from headrace.engine.attached import Attached
from headrace.engine.axis_model import AxisModel
from headrace.engine.held import HeldWeights
from headrace.engine.listener import ProgressLines, tell
from headrace.engine.loop_planning import LoopSetup
from headrace.engine.sample_order import DrawnOrder, LengthSource, SampleOrder, Samples, StreamOrder
from headrace.engine.spread_model import LoopModel, SampleReader
from headrace.engine.token_model import TokenModel
from headrace.errors import DataError, SpecError
from headrace.spec.method import RECOMPUTE, Recompute
from headrace.spec.step import Step
from headrace.units import parse_bytes, parse_count

__all__ = ["attach"]

_Tokens = int | str
"""How many, or a text of it: ``"64Ki"``."""


def attach(
    model: torch.nn.Module | Adapted,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    lengths: LengthSource = None,
    batch_tokens: _Tokens | None = None,
    batch_sequences: int | None = None,
    scheduler: Any = None,
    clip: float | None = None,
    epochs: int = 1,
    steps: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    labels: Labels | None = None,
    tokens: str | None = None,
    label_name: str = "labels",
    logits: bool = True,
    backend: str | None = None,
    ahead: int = 2,
    planner: Literal["adaptive", "static", "bucket", "packed", "dcp"] | PlannerConfig = "adaptive",
    static_size: int | None = None,
    sizes: Sequence[int] = (),
    exchange: Exchange | None = None,
    recompute: Sequence[Recompute] = RECOMPUTE,
    longest: _Tokens | None = None,
    memory: str | None = None,
    memory_margin: float | None = None,
    costs: CostModel | None = None,
    cache: str | Path | None = None,
    out: str | Path | None = None,
    say: Callable[[str], None] = tell,
    on_step: Callable[[Step], object] = lambda step: None,
) -> Attached:
    """Drive a training loop by plans. Collective: every rank calls it alike, under torchrun or in
    a process of its own, and it begins torch.distributed where nobody has. Arguments::

        model       a model of transformers, or one that calls scaled_dot_product_attention; alone,
                    under DDP, or sharded by FSDP2; in training mode, on its device; or what
                    ``hr.adapt`` made of a model of several axes
        dataset     items are dicts of token values [n] (``input_ids``, ``labels``), tuples of
                    tokens and labels, or tokens; by number, or an iterable. Of several axes: dicts
                    of the inputs of one sample, and ``labels`` of the places
        lengths     tokens of each item: numbers, a column's name, a function of an item; every item
                    is read once where it is left out
        batch_*     samples of one optimizer step: a budget of tokens, or a number of samples
        scheduler   takes one step after each of the optimizer's
        clip        largest norm of the gradient
        shuffle     draw samples at random; else they come in their order, as those of a stream do
        epochs      passes over the data, unless ``steps`` says how many steps to take
        labels      whether they are of the ``next`` token or of the ``same`` place
        logits      where False, models of transformers give a loss and no logits, which take
                    more memory than layers that are computed again
        ahead       steps planned by a process beside while one trains, where samples come by number
        planner     ``adaptive`` decides for each step, ``static`` has groups of ``static_size``;
                    to compare with: ``bucket`` and ``packed`` parallel, and the accumulation of
                    Data-Centric Parallel (``dcp``); or a section of a configuration, in the place
                    of static_size, sizes, recompute, memory_margin and ahead
        sizes       group sizes to consider; all where it is left out
        exchange    how attention meets other ranks' tokens; the quickest measured where left out
        recompute   levels that a plan may choose for each layer, where the model can
        longest     tokens of the longest sample of a stream; of its first one where left out
        memory      of a rank ("8GiB"); 80 % of what is free where it is left out
        costs       of the model on these ranks, as ``run.found.costs`` of another loop; measured
                    where they are left out, and kept in the folder ``cache``
        on_step     is given every finished step, with its plan and times, on the first rank
        out         folder for metrics and plans, which ``headrace report`` reads

    Raises ModelError for models that cannot be spread over ranks, DataError for data without
    tokens, InfeasiblePlan where the longest sample fits nowhere, and says what would help.
    """
    module = model.model if isinstance(model, Adapted) else model
    device = _device_of(module)
    join_world(device)
    groups = Groups(device=device)
    if isinstance(model, Adapted):
        driven: LoopModel = AxisModel(model, groups, label_name=label_name)
    else:
        adopted = adopt(
            model,
            backend=backend,
            labels=labels,
            tokens=tokens,
            groups=groups,
            label_name=label_name,
            exchange=exchange,
            logits=logits,
        )
        driven = TokenModel(adopted, label_name=label_name, exchange=exchange)
    order = _order(dataset, lengths, driven, batch_tokens, batch_sequences, seed, shuffle=shuffle)
    agree("data of the loop", order.fingerprint, groups.world)
    document = order.longest or (_tokens(longest) if longest else driven.length(order.first()))
    most = min(order.total, _tokens(batch_tokens)) if batch_tokens else order.total
    held = HeldWeights.of(module, groups.ranks)
    quiet = groups.rank > 0
    setup = LoopSetup(
        model=driven,
        held=held,
        optimizer=optimizer,
        groups=groups,
        device=device,
        seed=seed,
        options=planner
        if isinstance(planner, PlannerConfig)
        else PlannerConfig(
            name=planner,
            static_size=static_size,
            group_sizes=tuple(sizes),
            ahead=ahead,
            recompute=tuple(recompute),
            memory_margin=memory_margin,
        ),
        document=document,
        longest=max(document, most // groups.ranks),
        cache=cache_folder(cache),
        memory_bytes=parse_bytes(memory) if memory else None,
        costs=costs,
        say=(lambda text: None) if quiet else say,
        heard=on_step,
        progress=(lambda what, done, of: None) if quiet else ProgressLines(say),
    )
    return Attached(
        setup=setup,
        order=order,
        scheduler=scheduler,
        clip=clip,
        steps=steps,
        epochs=epochs,
        out=out,
    )


def _order(
    dataset: Any,
    lengths: LengthSource,
    reader: SampleReader,
    budget: _Tokens | None,
    sequences: int | None,
    seed: int,
    *,
    shuffle: bool,
) -> SampleOrder:
    many = None if budget is None else _tokens(budget)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        samples = Samples.of(dataset, lengths, reader)
        options = SamplerOptions(
            batch_tokens=many,
            batch_sequences=sequences,
            too_long="refuse",
            min_tokens=1,
            seed=seed,
            shuffle=shuffle,
        )
        return DrawnOrder(samples, options)
    if not hasattr(dataset, "__iter__"):
        raise DataError(
            "data set", got=type(dataset).__name__, wanted="items by number, or a stream"
        )
    if many is None:
        raise SpecError("batch_tokens", got="none", wanted="a budget, as samples come one by one")
    return StreamOrder(dataset, reader, batch_tokens=many)


def _tokens(value: _Tokens) -> int:
    return parse_count(value) if isinstance(value, str) else int(value)


def _device_of(model: torch.nn.Module) -> str:
    first = next(model.parameters(), None)
    if first is None:
        raise SpecError("model", got="no parameters", wanted="at least one")
    return str(first.device.type if first.device.type == "cpu" else first.device)
