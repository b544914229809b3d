"""Adopted models: sequence parallelism for a model that knows nothing of it.

    run = headrace.compile(model)                # says by which door attention is reached
    shard = run.shard({"input_ids": x, "labels": y})
    loss = run(**shard.inputs).loss              # this rank's part of the loss of the batch
    run.backward(loss)                           # gradients: sums over all ranks' tokens

The losses of a group's ranks sum to the mean over all tokens that have one, and gradients add
likewise: nothing is averaged twice, and nothing is scaled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from headrace.comm.collectives import agree
from headrace.comm.mesh import Groups, groups_here
from headrace.errors import ModelError, SpecError
from headrace.passes.gradients import add_plainly, add_up, is_wrapped, summed_loss
from headrace.passes.graph import Compiler
from headrace.passes.heads import attention
from headrace.passes.interface import asks_registry, take_interface
from headrace.passes.labels import Labels, convention_of, count_targets, local_loss
from headrace.passes.operators import ModelSeat
from headrace.passes.placement import EXCHANGES, Exchange, Placement, placed_rows
from headrace.passes.probe import Probed, logits_of, probe
from headrace.passes.recompute import Kept, recompute_blocks
from headrace.passes.shard import (
    LocalBatch,
    declared_places,
    documents_of,
    fingerprint,
    local_inputs,
    require_tokens,
)
from headrace.spec.method_facts import Members
from headrace.spec.rank_blocks import RankBlocks

__all__ = ["Adopted", "Door", "compile", "group_parts"]

Door = Literal["attention registry", "graph"]


def compile(
    model: torch.nn.Module, *, backend: str | None = None, exchange: Exchange | None = None,
    labels: Labels | None = None, tokens: str | None = None, groups: Groups | None = None,
    recompute: Kept | None = None, label_name: str = "labels",
) -> Adopted:  # fmt: skip
    """Adopt ``model``, which may be wrapped in DDP or FSDP2.

    ``backend``: that of torch.compile (``eager``, ``aot_eager``, ``inductor``); not compiled where
    it is None, unless the model is reached through its graph, which takes ``eager`` then.
    ``exchange``: how attention meets the other ranks' tokens, ``ulysses`` where it is None.
    ``label_name`` is the input with labels: of the ``next`` token or of the ``same`` place,
    ``labels`` says which, and it is known for models of transformers. ``tokens``: the name of the
    argument with the token numbers [b, S], the model's first where it is None.

    ``recompute``: what blocks compute again in the backward: all but their ``attention``, whose
    traffic is then not repeated, or ``full``; for models of transformers that know their blocks.

    Raises ModelError for models whose tokens meet in ways that are not known, at once or when the
    first batch is sharded.
    """
    return Adopted(
        model, backend=backend, exchange=exchange, labels=labels, tokens=tokens, groups=groups,
        recompute=recompute, label_name=label_name,
    )  # fmt: skip


class Adopted:
    """A model with sequence parallelism. ``door``: how its attention is reached."""

    def __init__(
        self, model: torch.nn.Module, *, backend: str | None, exchange: Exchange | None,
        labels: Labels | None, tokens: str | None, groups: Groups | None,
        recompute: Kept | None, label_name: str,
    ) -> None:  # fmt: skip
        if exchange is not None and exchange not in EXCHANGES:
            raise SpecError("exchange", got=repr(exchange), wanted=", ".join(EXCHANGES))
        self.model = model
        self._seat = ModelSeat()
        self._exchange, self._label_name = exchange, label_name
        self.inner = inner = model.module if isinstance(model, DistributedDataParallel) else model
        takes = inspect.signature(inner.forward).parameters
        self._takes_places = "position_ids" in takes
        self._takes_labels = label_name in takes
        self.tokens = tokens or next(iter(takes))
        self._hugging = hasattr(inner, "config") and hasattr(inner, "base_model_prefix")
        config = getattr(inner, "config", None)
        self._always = {"use_cache": False} if hasattr(config, "use_cache") else {}
        self._firsts = (0, *_padded(inner))
        self._groups = groups or groups_here()
        self.labels: Labels = labels or (convention_of(inner) if self._hugging else "same")
        self._probed: Probed | None = None
        self._placed: MutableMapping[torch.Tensor, Placement] = WeakIdKeyDictionary()
        self._give_back: Callable[[], None] = lambda: None
        registry = asks_registry(inner)
        self.door: Door = "attention registry" if registry else "graph"
        if registry:
            self._give_back = take_interface(inner, self._seat)
            if recompute is not None:
                recompute_blocks(inner, recompute)
        elif recompute is not None:
            raise ModelError(
                f"recompute of {type(inner).__name__}", got="blocks that are not known",
                wanted="a model of transformers", hint="call hr.recomputed(block, x) in forward",
            )  # fmt: skip
        elif isinstance(model, FSDPModule):
            raise ModelError(
                "model under FSDP2", got="attention reached by its graph",
                wanted="by the registry of transformers, or called by hand",
                hint="FSDP2's hooks break graphs; under DDP it can be compiled whole",
            )  # fmt: skip
        self._compiler = None if registry and backend is None else Compiler(
            backend or "eager", None if registry else self._seat
        )  # fmt: skip
        self._call = self._compiled(self._compiler)
        self._adds = False

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make the groups of ranks among which batches will be sharded. Collective: every rank of
        the world calls it alike, before :meth:`shard` with groups of its own."""
        if self._groups is not None:
            wanted = list(groups)
            self._groups.prepare([some for ranks in wanted for some in group_parts(ranks)])

    def shard(
        self, batch: Mapping[str, torch.Tensor], *, ranks: Members | None = None,
        targets: int | None = None, exchange: Exchange | None = None,
    ) -> LocalBatch:  # fmt: skip
        """This rank's part of ``batch``, which all ``ranks`` (all of the world where it is None)
        have alike. Several may be sharded before the first is run.

            batch    token numbers [b, S], labels and other values of tokens [b, S, ...];
                     ``attention_mask`` [b, S] tells padding, ``position_ids`` that begin again
                     at 0 tell documents
            targets  tokens of the whole step that have a loss, those of this batch where it is
                     None: give it where a step has several batches

        Raises DataError for inputs that are not of tokens, PlanMismatch where ranks have other
        batches, and ModelError where the model cannot be run on parts of its tokens.
        """
        batch = {"labels" if k == self._label_name else k: v for k, v in batch.items()}
        require_tokens(batch, self.tokens)
        world = dist.get_world_size() if self._groups is not None else 1
        members = tuple(range(world)) if ranks is None else tuple(ranks)
        if ranks is None:
            self.prepare([members])
        documents = documents_of(batch, self.tokens)
        agree(
            f"batch of ranks {members}", fingerprint(batch, (documents, members)),
            self._group(self._groups, members)[0],
        )  # fmt: skip
        self.probe(batch)
        count = count_targets(batch, self.labels) if targets is None else targets
        return self.place(batch, members, targets=count, exchange=exchange)

    def place(
        self, batch: Mapping[str, torch.Tensor], ranks: Members, *, targets: int | None,
        exchange: Exchange | None = None, groups: Groups | None = None,
    ) -> LocalBatch:  # fmt: skip
        """:meth:`shard` of a batch that is known to be alike on all ``ranks`` of ``groups``, its
        labels under the name ``labels``, for a model that was probed: no rank is asked."""
        groups = groups or self._groups
        if not self._adds and isinstance(self.model, FSDPModule):
            add_plainly(self.model)
            self._adds = True
        documents = documents_of(batch, self.tokens)
        places = None if self._takes_places else declared_places(batch)
        width = batch[self.tokens].shape[1]
        if width < len(ranks):
            raise SpecError(
                f"rows of {width} tokens", got=f"{len(ranks)} ranks", wanted="a token for each",
                hint="shard short rows among fewer ranks",
            )  # fmt: skip
        group, me = self._group(groups, ranks)
        chosen: Exchange = exchange or self._exchange or "ulysses"
        balanced = chosen in ("ring", "gather", "2d")
        placement = Placement(
            tokens=placed_rows(documents, len(ranks), "zigzag" if balanced else "natural"),
            rows=len(documents), member=me, group=group, exchange=chosen, targets=targets,
            places=places,
            subgroup=lambda some: self._group(groups, tuple(ranks[m] for m in some))[0],
        )  # fmt: skip
        assert self._probed is not None, "shard() probes"
        inputs, labels = local_inputs(
            batch, self.tokens, placement, self.labels,
            first=self._probed.first if self._takes_places else None,
        )  # fmt: skip
        self._seat.take(placement)
        self._placed[inputs[self.tokens]] = placement
        if labels is not None:
            inputs[self._label_name] = labels
        _mark_dynamic(inputs)
        return LocalBatch(inputs=inputs, labels=labels, placement=placement)

    def __call__(self, **inputs: Any) -> Any:
        """The model's results for what :meth:`shard` returned. Results with logits, of inputs with
        labels, have the loss of this rank's tokens over the targets of the step."""
        placement = self._placed.get(inputs[self.tokens]) if self.tokens in inputs else None
        if placement is None:
            raise ModelError(
                "inputs of the model", got="others than were sharded", wanted="what shard() gave",
                hint="give a shard's inputs as they are; move a batch before it is sharded",
            )  # fmt: skip
        self._seat.take(placement)
        labels = inputs.pop(self._label_name, None) if self._hugging else None
        return self._with_loss(self._called(self._call, inputs), labels)

    def accepted(self, shard: LocalBatch) -> dict[str, torch.Tensor]:
        """The inputs of a shard, with labels where the model takes them."""
        if self._hugging or self._takes_labels:
            return shard.inputs
        return {k: v for k, v in shard.inputs.items() if k != self._label_name}

    def take(self, shard: LocalBatch) -> None:
        """Work on a shard from here on: what the next call of the model is about."""
        self._seat.take(shard.placement)

    def install(self) -> Callable[[], None]:
        """Have the model itself do what a call of this does, so that a loop that calls the model
        need not change: of models of transformers the loss is that of :meth:`loss`, others are
        compiled in place. Returns what takes it back. :meth:`take` says which shard is meant."""
        model = self.inner
        if self.door == "graph":
            model.compile(backend=self._compiler, fullgraph=True, dynamic=True)
            return lambda: setattr(model, "_compiled_call_impl", None)
        coming = list[torch.Tensor | None]()

        def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            coming.append(named.pop(self._label_name, None))
            return args, {**self._always, **named}

        def after(module: Any, args: Any, outputs: Any) -> Any:
            return self._with_loss(outputs, coming.pop())

        hooks = ExitStack()
        hooks.callback(self._give_back)
        hooks.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(model.register_forward_hook(after).remove)
        return hooks.close

    def _with_loss(self, outputs: Any, labels: torch.Tensor | None) -> Any:
        if labels is None:
            return outputs
        loss = self.loss(logits_of(outputs), labels)
        if isinstance(outputs, tuple):
            return loss, *outputs
        outputs.loss = loss
        return outputs

    def _called(self, call: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        _mark_dynamic(inputs)
        return call(**inputs, **self._always)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross entropy of this rank's tokens, summed, over the targets of the step.

            logits   [b, s_r, V]
            labels   [b, s_r]      as in :class:`LocalBatch`
        """  # fmt: skip
        return local_loss(logits, labels, self._seat.now.targets)

    def attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, window: int = 0,
        scale: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """:func:`headrace.passes.heads.attention` of the batch in force, for models that call it
        themselves."""
        return attention(q, k, v, self._seat.handle, causal=causal, window=window, scale=scale)

    def backward(self, loss: torch.Tensor) -> None:
        """Add gradients of this rank's part of the loss."""
        summed_loss(self.model, loss).backward()

    def add_up(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks together, once gradients are there: call it after the last
        :meth:`backward` of a step. It sums the gradients over the world where neither DDP nor FSDP2
        takes care of them. Collective."""
        whole = loss.detach().clone()
        if self._groups is not None:
            dist.all_reduce(whole)
            if not is_wrapped(self.model):
                add_up(self.model.parameters())
        return whole

    @property
    def compiled(self) -> bool:
        """Whether a compiler runs it."""
        return self._compiler is not None

    @property
    def compiles(self) -> int:
        """How often the model has been compiled."""
        return 0 if self._compiler is None else self._compiler.times

    def probe(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Look whether the model can be run on parts of its tokens, if that was not done yet.
        Raises ModelError when it cannot."""
        if self._probed is None:
            self._probed = self._probe(batch)

    def first_place(self, batch: Mapping[str, torch.Tensor]) -> int:
        """The place that the model counts the first token of a row as, where it takes places."""
        self.probe({k: v for k, v in batch.items() if k != "position_ids"})
        assert self._probed is not None, "probed"
        return self._probed.first

    def plain_inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        """What the model itself is given for token numbers."""
        return {self.tokens: ids, **self._always}

    def _group(
        self, groups: Groups | None, members: Members
    ) -> tuple[dist.ProcessGroup | None, int]:
        if groups is None:
            return None, 0
        return groups.get(members), members.index(groups.rank)

    def _compiled(self, compiler: Compiler | None) -> Callable[..., Any]:
        """The model, compiled where there is a compiler. Hooks of wrappers break graphs; what a
        broken graph may hide the probe finds."""
        if compiler is None:
            return self.model
        whole = self.door == "graph" and not is_wrapped(self.model)
        compiled = torch.compile(self.model, backend=compiler, fullgraph=whole, dynamic=True)

        def call(**inputs: Any) -> Any:
            # What attention keeps has a size that is known only when it runs.
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):  # noqa: SLF001
                return compiled(**inputs)

        return call

    def _probe(self, batch: Mapping[str, torch.Tensor]) -> Probed:
        graph = self.door == "graph"
        call = self._compiled(Compiler("eager", self._seat)) if graph else self.model
        named = {self._label_name if k == "labels" else k: v for k, v in batch.items()}
        if self._hugging or not self._takes_labels:
            named.pop(self._label_name, None)
        if not self._takes_places:
            named.pop("position_ids", None)

        def run(**inputs: Any) -> Any:
            return self._called(call, inputs)

        return probe(
            self.model, run, self._seat, named, self.tokens, places=self._takes_places,
            firsts=self._firsts,
        )  # fmt: skip


def _mark_dynamic(inputs: Mapping[str, Any]) -> None:
    """Graphs of these inputs serve any number of tokens."""
    for value in inputs.values():
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            torch._dynamo.maybe_mark_dynamic(value, 1)  # noqa: SLF001


def group_parts(ranks: Members) -> list[Members]:
    """A group, and the blocks and rings of all meshes that it may be."""
    found = [ranks]
    for inner in (d for d in range(2, len(ranks)) if len(ranks) % d == 0):
        mesh = RankBlocks(ranks=len(ranks), inner=inner)
        found += [tuple(ranks[m] for m in some) for some in (*mesh.blocks, *mesh.rings)]
    return found


def _padded(model: torch.nn.Module) -> tuple[int, ...]:
    """Where models begin to count that keep places up to the padding's number for padding."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return () if padding is None else (padding + 1,)
