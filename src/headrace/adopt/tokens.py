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
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from headrace.adopt.attention_registry import attention
from headrace.adopt.block_recompute import Kept
from headrace.adopt.entry_points import ChosenLevels, Door, open_door
from headrace.adopt.gradients import add_plainly, add_up, is_wrapped, summed_loss
from headrace.adopt.labels import Labels, LossHead, convention_of, count_targets, local_loss
from headrace.adopt.model_layers import Layers, find_layers
from headrace.adopt.operators import ModelSeat, StandIn
from headrace.adopt.placement import (
    EXCHANGES,
    Exchange,
    LocalBatch,
    Placement,
    declared_places,
    documents_of,
    fingerprint,
    group_parts,
    local_inputs,
    placed_rows,
    require_tokens,
)
from headrace.adopt.token_probe import (
    Probed,
    first_places,
    logits_of,
    probe,
    result_tensors,
    run_few,
)
from headrace.comm.collectives import agree
from headrace.comm.mesh import Groups, device_of, groups_here
from headrace.errors import ModelError, SpecError
from headrace.spec.method_facts import Members

__all__ = ["Adopted", "Door", "compile"]


def compile(
    model: torch.nn.Module,
    *,
    backend: str | None = None,
    exchange: Exchange | None = None,
    labels: Labels | None = None,
    tokens: str | None = None,
    groups: Groups | None = None,
    recompute: Kept | None = None,
    label_name: str = "labels",
    logits: bool = True,
) -> Adopted:
    """Adopt ``model``, which may be wrapped in DDP or FSDP2.

    ``backend``: that of torch.compile (``eager``, ``aot_eager``, ``inductor``); not compiled where
    it is None.
    ``exchange``: how attention meets the other ranks' tokens, ``ulysses`` where it is None.
    ``label_name`` is the input with labels: of the ``next`` token or of the ``same`` place,
    ``labels`` says which, and it is known for models of transformers. ``tokens``: the name of the
    argument with the token numbers [b, S], the model's first where it is None.

    ``recompute``: what blocks compute again in the backward: all but their ``attention``, whose
    traffic is then not repeated, or ``full``. Blocks are those that models of transformers know,
    and of others a list of equal modules called one after another.

    ``logits``: where it is False, results of inputs with labels have no logits, of which only some
    are alive at a time, for models of transformers.

    Raises ModelError for models whose tokens meet in ways that are not known, at once or when the
    first batch is sharded.
    """
    return Adopted(
        model,
        backend=backend,
        exchange=exchange,
        labels=labels,
        tokens=tokens,
        groups=groups,
        recompute=recompute,
        label_name=label_name,
        logits=logits,
    )


class Adopted:
    """A model with sequence parallelism."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        backend: str | None,
        exchange: Exchange | None,
        labels: Labels | None,
        tokens: str | None,
        groups: Groups | None,
        recompute: Kept | None,
        label_name: str,
        logits: bool,
    ) -> None:
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
        self._firsts = first_places(inner)
        self._groups = groups or groups_here(device_of(inner))
        self.labels: Labels = labels or (convention_of(inner) if self._hugging else "same")
        self._probed: Probed | None = None
        self._placed: MutableMapping[torch.Tensor, Placement] = WeakIdKeyDictionary()
        self._door = open_door(model, inner, self._seat, backend, recompute)
        self._recompute = None if self.door == "attention registry" else recompute
        self._layers: Layers | None = None
        self._ends = None if logits else LossHead(inner)
        self._adds = False

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make the groups of ranks among which batches will be sharded. Collective: every rank of
        the world calls it alike, before :meth:`shard` with groups of its own."""
        if self._groups is not None:
            wanted = list(groups)
            self._groups.prepare([some for ranks in wanted for some in group_parts(ranks)])

    def shard(
        self,
        batch: Mapping[str, torch.Tensor],
        *,
        ranks: Members | None = None,
        targets: int | None = None,
        exchange: Exchange | None = None,
    ) -> LocalBatch:
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
            f"batch of ranks {members}",
            fingerprint(batch, (documents, members)),
            self._group(self._groups, members)[0],
        )
        self.probe(batch)
        count = count_targets(batch, self.labels) if targets is None else targets
        return self.place(batch, members, targets=count, exchange=exchange)

    def place(
        self,
        batch: Mapping[str, torch.Tensor],
        ranks: Members,
        *,
        targets: int | None,
        exchange: Exchange | None = None,
        groups: Groups | None = None,
    ) -> LocalBatch:
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
                f"rows of {width} tokens",
                got=f"{len(ranks)} ranks",
                wanted="a token for each",
                hint="shard short rows among fewer ranks",
            )
        group, me = self._group(groups, ranks)
        chosen: Exchange = exchange or self._exchange or "ulysses"
        balanced = chosen in ("ring", "gather", "2d")
        placement = Placement(
            tokens=placed_rows(documents, len(ranks), "zigzag" if balanced else "natural"),
            rows=len(documents),
            member=me,
            group=group,
            exchange=chosen,
            targets=targets,
            places=places,
            subgroup=lambda some: self._group(groups, tuple(ranks[m] for m in some))[0],
        )
        assert self._probed is not None, "shard() probes"
        inputs, labels = local_inputs(
            batch,
            self.tokens,
            placement,
            self.labels,
            first=self._probed.first if self._takes_places else None,
        )
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
                "inputs of the model",
                got="others than were sharded",
                wanted="what shard() gave",
                hint="give a shard's inputs as they are; move a batch before it is sharded",
            )
        self._seat.take(placement)
        labels = inputs.pop(self._label_name, None) if self._hugging else None
        self._expect(labels)
        outputs = self._with_loss(self._called(self._door.call, **inputs), labels)
        return self._bound(outputs, placement)

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
        need not change: of models of transformers the loss is that of :meth:`loss`; with a backend
        others are compiled in place. Returns what takes it back. :meth:`take` says which shard."""
        model = self.inner
        hooks = ExitStack()
        hooks.callback(self._door.install())
        if self._ends is not None:
            hooks.callback(self._ends.remove)
        if self.door == "graph":
            return hooks.close
        coming = list[torch.Tensor | None]()

        def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            coming.append(named.pop(self._label_name, None) if self._hugging else None)
            self._expect(coming[-1])
            return args, {**self._always, **named}

        def after(module: Any, args: Any, outputs: Any) -> Any:
            return self._bound(self._with_loss(outputs, coming.pop()), self._seat.held)

        hooks.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(model.register_forward_hook(after).remove)
        return hooks.close

    def _bound(self, outputs: Any, placement: Placement | StandIn | None) -> Any:
        """Have the backward of ``outputs`` work on their placement: what it computes again is of
        their batch, whatever was run since."""

        def begin(_: Sequence[torch.Tensor]) -> None:
            self._seat.take(placement)

        for value in result_tensors(outputs):
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(begin)
        return outputs

    def _expect(self, labels: torch.Tensor | None) -> None:
        if self._ends is not None:
            self._ends.expect(labels, self._seat.now.targets)

    def _with_loss(self, outputs: Any, labels: torch.Tensor | None) -> Any:
        if labels is None:
            return outputs
        logits = logits_of(outputs)
        loss = self.loss(logits, labels) if self._ends is None else self._ends.take(logits)
        if isinstance(outputs, tuple):
            return loss, *outputs[self._ends is not None :]
        outputs.loss = loss
        if self._ends is not None:
            outputs.logits = None
        return outputs

    def _called(self, call: Callable[..., Any], /, **inputs: Any) -> Any:
        _mark_dynamic(inputs)
        return call(**inputs, **self._always)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross entropy of this rank's tokens, summed, over the targets of the step.

        logits   [b, s_r, V]
        labels   [b, s_r]      as in :class:`LocalBatch`
        """
        return local_loss(logits, labels, self._seat.now.targets)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        window: int = 0,
        scale: float | None = None,
    ) -> torch.Tensor:
        """:func:`headrace.adopt.attention_registry.attention` of the batch in force, for
        models that call it themselves."""
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
        return self._door.compiler is not None

    @property
    def compiles(self) -> int:
        """How often the model has been compiled."""
        return 0 if self._door.compiler is None else self._door.compiler.times

    @property
    def door(self) -> Door:
        """How its attention is reached."""
        return self._door.name

    @property
    def has_blocks(self) -> bool:
        """Whether what blocks compute again can be told, of a model that was probed."""
        knows = getattr(self.inner, "supports_gradient_checkpointing", False)
        return self._layers is not None or (self.door == "attention registry" and bool(knows))

    def levels(self, blocks: Sequence[torch.nn.Module]) -> ChosenLevels | None:
        """What chooses what blocks compute again in the next forward; None where that cannot be
        told. Raises ModelError for blocks that the model does not know as such."""
        return self._door.levels(blocks)

    def probe(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Look whether the model can be run on parts of its tokens, if that was not done yet.
        Raises ModelError when it cannot. Of fake tensors nothing can be told."""
        if any(isinstance(p, FakeTensor) for p in self.inner.parameters()):
            self._probed = Probed(attentions=0, first=self._firsts[-1])
        if self._probed is None:
            if self.door != "attention registry":
                self._layers = self._seen_layers(batch)
            if self._recompute is not None:
                self._compute_again(self._recompute)
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

    def _seen_layers(self, batch: Mapping[str, torch.Tensor]) -> Layers | None:
        few, run = self._known(batch), partial(self._called, self.inner)
        return find_layers(
            self.inner, lambda: run_few(self.inner, run, self._seat, few, self.tokens)
        )

    def _compute_again(self, level: Kept) -> None:
        """Have the blocks of a model that does not know them compute ``level`` again."""
        layers = self._layers
        levels = None if layers is None else self.levels(layers.modules)
        if layers is None or levels is None:
            raise ModelError(
                f"recompute of {type(self.inner).__name__}",
                got="no blocks that can be seen",
                wanted="a ModuleList of equal blocks, each called with the result of the last",
                hint="call hr.recomputed(block, x) in its forward",
            )
        levels.choose([level] * len(layers))

    def _probe(self, batch: Mapping[str, torch.Tensor]) -> Probed:
        run = partial(self._called, self._door.probing)
        return probe(
            self.model,
            run,
            self._seat,
            self._known(batch),
            self.tokens,
            places=self._takes_places,
            firsts=self._firsts,
        )

    def _known(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the model takes of a batch when it is probed."""
        named = {self._label_name if k == "labels" else k: v for k, v in batch.items()}
        if self._hugging or not self._takes_labels:
            named.pop(self._label_name, None)
        if not self._takes_places:
            named.pop("position_ids", None)
        return named


def _mark_dynamic(inputs: Mapping[str, Any]) -> None:
    """Graphs of these inputs serve any number of tokens."""
    for value in inputs.values():
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            torch._dynamo.maybe_mark_dynamic(value, 1)  # noqa: SLF001
