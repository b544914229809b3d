"""Loops over attached models, and the same steps of one process."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import headrace as hr
from headrace.adopt.samples import TokenReader
from headrace.costs import CostModel
from headrace.costs.cost_model import ExchangeCost, OptionCost
from headrace.costs.quadratic import Linear, Quadratic
from headrace.data.sampler import Sampler, SamplerOptions
from headrace.engine.attach import Attached
from headrace.engine.sample_order import DrawnOrder, LoopBatch, Samples
from headrace.spec.cluster import Cluster
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.model_shape import ModelShape
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.step import Exhausted, Planned, Step
from headrace.spec.strategy import Scheme

with suppress(ModuleNotFoundError):  # ranks are forked from here: each would load it anew
    importlib.import_module("transformers.models.llama.modeling_llama")

VOCABULARY = 61
LENGTHS = (5, 40, 17, 33, 70, 9, 12, 64, 2, 1, 50, 11)

Loss = Callable[[Any, Any], torch.Tensor]


def llama(layers: int = 2) -> Any:
    """A Llama of transformers in fp64, four heads of keys for two ranks, in training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).double().train()


def dataset(lengths: tuple[int, ...] = LENGTHS, ignored: bool = True) -> list[dict[str, Any]]:
    """Items of random tokens; every third label of some is ignored."""
    drawn = torch.Generator().manual_seed(1)
    items = []
    for at, count in enumerate(lengths):
        ids = torch.randint(0, VOCABULARY, (count,), generator=drawn)
        labels = ids.clone()
        if ignored and at % 2:
            labels[::3] = -100
        items.append({"input_ids": ids, "labels": labels})
    return items


@dataclass
class Drawn:
    """Plans drawn at random: groups of any ranks, packs of any samples, some layers computed
    again."""

    ranks: int
    layers: int
    seed: int
    semantics: str = "free"
    levels: tuple[str, ...] = ("none", "attention", "full")
    strategies: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def plan(self, lengths: Lengths) -> Planned:
        """The plan of a batch."""
        random_ = random.Random(f"{self.seed} {len(self.strategies)}")
        order = list(range(len(lengths)))
        random_.shuffle(order)
        pipelines, micros = list[Pipeline](), list[MicroBatch]()
        while order:
            free = list(range(self.ranks))
            random_.shuffle(free)
            while free and order:
                p = random_.randint(1, len(free))
                ranks, free = tuple(sorted(free[:p])), free[p:]
                take = random_.randint(1, min(4, len(order)))
                held, order = tuple(order[:take]), order[take:]
                method = random_.choice(["ulysses", "ring", "gather"]) if p > 1 else "local"
                options = tuple(
                    LayerOption.of(method, random_.choice(self.levels))  # type: ignore[arg-type]
                    for _ in range(self.layers)
                )
                pipelines.append(Pipeline(scheme=Scheme(context=p), ranks=ranks))
                micros.append(
                    MicroBatch(
                        pipeline=len(pipelines) - 1,
                        sequences=held,
                        layers=LayerPlan(options=options),
                        order="zigzag" if method in ("ring", "gather") else "natural",
                    )
                )
        plan = Plan(
            lengths=lengths,
            devices=self.ranks,
            pipelines=tuple(pipelines),
            micro_batches=tuple(micros),
            predicted_s=1.0,
            lower_bound_s=0.0,
            semantics=self.semantics,  # type: ignore[arg-type]
        )
        self.strategies.append(str(plan.strategy))
        nothing = Timeline(source="predicted", rows=(), devices=self.ranks)
        return Planned(plan=plan, predicted=nothing, peak_bytes=(0,) * self.ranks, planning_s=0.0)

    def plan_forward(self, lengths: Lengths) -> Planned:
        """Another plan of the batch."""
        return self.plan(lengths)

    def observe(self, predicted_s: float, measured_s: float, *, retries: int = 0) -> None:
        """Learn nothing."""

    def learn(self, step: Step) -> tuple[str, ...]:
        """Say nothing."""
        return ()

    def compared(self, step: Step) -> Step:
        """Compare with nothing."""
        return step

    def replan(self, lengths: Lengths, failed: Plan, exhausted: Exhausted) -> Planned:
        """Another plan of the batch."""
        self.failed.append(str(exhausted))
        return self.plan(lengths)

    replan_forward = replan


def hugging_loss(model: Any, micro: Any) -> torch.Tensor:
    """As transformers' own loops have it."""
    return model(**micro.inputs).loss  # type: ignore[no-any-return]


def trained(run: Attached, model: Any, loss: Loss = hugging_loss) -> list[float]:
    """The losses of all steps."""
    found = []
    for step in run:
        for micro in step:
            micro.backward(loss(model, micro))
        found.append(step.loss)
    return found


def may_have_children() -> None:
    """Let a rank of a test start processes, which multiprocessing keeps its daemons from."""
    vars(multiprocessing.current_process())["_config"]["daemon"] = False


def weights(model: torch.nn.Module) -> list[Any]:
    """All parameters, whole, as arrays."""
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return [w.detach().numpy() for w in whole]


def batches(
    items: Any, steps: int, *, tokens: str = "input_ids", kind: str = "next", **options: Any
) -> list[LoopBatch]:
    """The batches that an attached loop draws, of labels of a ``kind``."""
    samples = Samples.of(items, None, TokenReader(tokens=tokens, kind=kind))
    chosen = SamplerOptions(too_long="refuse", min_tokens=1, **options)
    order = DrawnOrder(samples, Sampler(samples, chosen))
    return [order.next_batch() for _ in range(steps)]


def alone(
    model: Any,
    optimizer: Any,
    drawn: list[LoopBatch],
    *,
    tokens: str = "input_ids",
    clip: float | None = None,
    scheduler: Any = None,
) -> list[float]:
    """The losses of one process, which runs every sample by itself."""
    found = []
    for batch in drawn:
        items = [batch.read(i) for i in range(len(batch.lengths))]
        targets = sum(int((item["labels"] != -100).sum()) for item in items)
        total = 0.0
        for item in items:
            outputs = model(**{tokens: item[tokens][None]})
            logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
            summed = cross_entropy(logits[0], item["labels"], ignore_index=-100, reduction="sum")
            (summed / targets).backward()
            total += float(summed.detach()) / targets
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def costs(ranks: int, layers: int = 2) -> CostModel:
    """Made up: longer packs on more ranks pay."""
    option = OptionCost(
        forward=Quadratic(a=1e-9, b=1e-7, c=1e-5),
        backward=Quadratic(a=2e-9, b=2e-7, c=2e-5),
        kept=Linear(slope=100.0, constant=0.0),
        transient=Linear(slope=100.0, constant=0.0),
    )
    sizes = range(1, ranks + 1)
    names = {p: "local" if p == 1 else "ulysses" for p in sizes}
    return CostModel(
        shape=ModelShape(
            name="made up",
            layers=layers,
            hidden=16,
            split_elements=(0,) * (layers + 2),
            whole_elements=(1,) * (layers + 2),
        ),
        cluster=Cluster(devices=ranks, memory_bytes=1 << 30, device="cpu"),
        fingerprint="made=up",
        options={p: {names[p]: option} for p in sizes},
        ends=dict.fromkeys(sizes, option),
        exchange_s=ExchangeCost(),
        state_bytes=0,
        working_bytes={p: {"replicated": 0, "sharded": 0} for p in sizes},
    )


def attached(model: Any, optimizer: Any, items: Any, folder: Any, **options: Any) -> Attached:
    """:func:`headrace.attach` with a folder of caches of its own, without a word."""
    given: dict[str, Any] = {
        "say": lambda text: None,
        "memory": "256MiB",
        "batch_tokens": 150,
        "cache": folder,
        **options,
    }
    return hr.attach(model, optimizer, items, **in_values(given))


def in_values(given: dict[str, Any]) -> dict[str, Any]:
    """Options of :func:`headrace.attach`, given flat, in the values that it takes. Plans are not
    made ahead unless told."""
    rest = {"ahead": 0, **given}
    found: dict[str, Any] = {}
    for name, kind in (
        ("samples", hr.SampleOptions),
        ("spread", hr.SpreadOptions),
        ("measure", hr.MeasureOptions),
    ):
        fields = [field.name for field in dataclasses.fields(kind)]
        found[name] = kind(**{key: rest.pop(key) for key in fields if key in rest})
    keys = {"planner": "name", "sizes": "group_sizes"}
    names = ("planner", "static_size", "sizes", "recompute", "memory_margin", "ahead")
    planner = {keys.get(key, key): rest.pop(key) for key in names if key in rest}
    return {**rest, **found, "planner": hr.PlannerConfig(**planner)}
