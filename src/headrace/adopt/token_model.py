"""Models of tokens, spread over ranks: sequence parallelism for a model that knows nothing of it.

    run = headrace.compile(model)                # says by which entry point attention is reached
    shard = run.shard({"input_ids": x, "labels": y})
    loss = run(**shard.inputs).loss              # this rank's part of the loss of the batch
    run.backward(loss)                           # gradients: sums over all ranks' tokens

The losses of a group's ranks sum to the mean over all tokens that have one, and gradients add
likewise: nothing is averaged twice, and nothing is scaled. Outside of ``run(...)`` and the backward
of its results the model is the user's plain model.

Shape legend: a batch of b rows of S tokens; s_r of every row on this rank; V tokens in a
vocabulary; N query heads and G key-value heads of D features.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import is_
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from headrace.adopt.attention_registry import attention
from headrace.adopt.block_recompute import Kept
from headrace.adopt.call_arguments import (
    of_part,
    plain,
    plain_arguments,
    refuse_arguments,
    refuse_configured,
    refuse_embedded,
    tensors_of,
)
from headrace.adopt.entry_points import ChosenLevels, EntryPointName, entry_point_of
from headrace.adopt.first_step import FirstStep, compare_first_step, ranks_that_add_up
from headrace.adopt.gradients import (
    SummedBackward,
    SummedGradients,
    add_plainly,
    is_wrapped,
    require_known_wrapper,
    require_made,
)
from headrace.adopt.held_weights import AlikeWeights, require_linear_hooks
from headrace.adopt.labels import (
    Labels,
    LossHead,
    LossSource,
    convention_of,
    count_targets,
    local_loss,
    logits_of,
    loss_of,
    predicted,
    require_labels,
    result_tensors,
)
from headrace.adopt.loss_graph import Parted, PartOf
from headrace.adopt.model_layers import Layers, find_layers
from headrace.adopt.operators import ModelSlot, StandIn
from headrace.adopt.own_hooks import hook_after, hook_before
from headrace.adopt.own_losses import OwnLosses, note_alike
from headrace.adopt.placement import (
    EXCHANGES,
    Exchange,
    Placement,
    declared_places,
    documents_of,
    fingerprint,
    group_parts,
    local_inputs,
    placed_rows,
    replica_blocks,
    require_documents,
    require_tokens,
)
from headrace.adopt.replaced_calls import compiled_within, modules_run_as_written
from headrace.adopt.samples import LabelPlace, TokenReader, named_labels, packed
from headrace.adopt.spread_model import BatchPart, Item, Levels, Pack, Watcher
from headrace.adopt.token_probe import (
    Probed,
    counts_by_ids,
    counts_by_mask,
    few_of,
    first_places,
    look_again,
    looked_at,
    own_loss,
    probe,
    run_few,
    run_plain,
    tried_tokens,
    without_padding,
)
from headrace.adopt.whole_head import WholeHead, base_of, sees_hidden_states_alone
from headrace.comm.collectives import agree, gather_floats
from headrace.comm.loop_watch import CallWatch
from headrace.comm.mesh import Groups, device_of, groups_here
from headrace.comm.waiting import Transfer
from headrace.errors import DataError, ModelError, SpecError
from headrace.ops.fused import to_device
from headrace.ops.loss import IGNORED
from headrace.ops.switch import gather
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder

__all__ = ["EntryPointName", "TokenModel", "arguments_of", "compile"]

_MODES = ("training", "gradient_checkpointing")
"""Flags that loops turn on and off, and that change no result beside dropout."""


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
    check: FirstStep | None = None,
) -> TokenModel:
    """Spread a model over ranks by its tokens.

    Args:
        model: A model of transformers, or any module that calls torch's attention; alone, or
            wrapped in DDP or FSDP2.
        backend: The backend of torch.compile (``eager``, ``aot_eager``, ``inductor``); not compiled
            where it is None.
        exchange: How attention reaches the other ranks' tokens: ``ulysses`` (where it is None),
            ``ring``, ``gather`` or ``2d``.
        labels: ``next`` where the loss compares a token's logits with the label of the next token
            (causal language models), ``same`` where with its own label; where it is None, known
            for models of transformers by their class, else ``same``. Labels that were shifted
            before are ``same`` for any model.
        tokens: The name of the argument with token ids [b, S], the model's first where it is None.
        groups: The process groups of this rank; those of the world where it is None.
        recompute: Activation recompute in the backward: ``attention`` recomputes all of a block
            but its attention, whose traffic is then not repeated; ``full`` recomputes the whole
            block. Blocks are those that models of transformers mark; of other models, a list of
            equal modules called one after another. Nothing is recomputed where it is None.
        label_name: The name of the argument with labels.
        logits: Where False, a call with labels makes its loss from chunks of the logits and
            returns no logits, to save memory; for models of transformers.
        check: ``"first step"`` compares loss and gradients of the first batch with those of the
            plain model, run whole on each rank, where a rank's memory suffices.

    Returns:
        The spread model: call it with what its ``shard`` gives.

    Raises:
        ModelError: For models whose tokens meet in ways that are not known, at once or when the
            first batch is sharded.

    Example:
        >>> run = hr.compile(model, recompute="attention")
        >>> loss = run(**run.shard(batch).inputs).loss
        >>> run.backward(loss)
        >>> loss = run.add_up(loss)
    """
    return TokenModel(
        model,
        backend=backend,
        exchange=exchange,
        labels=labels,
        tokens=tokens,
        groups=groups,
        recompute=recompute,
        label_name=label_name,
        logits=logits,
        check=check,
    )


class TokenModel:
    """A model that is spread by its tokens; see :class:`~headrace.adopt.spread_model.SpreadModel`.

    Attributes:
        model: The model as the user has it, perhaps wrapped.
        inner: The user's own module.
        tokens: The name of the argument with token ids.
        labels: Whether logits at a place predict the label of the ``next`` or of the ``same``
            place; batches given to :meth:`shard` have labels that are not shifted yet.
        exchanges: The exchanges that a plan may choose from.
        label_place: Which token, ``first`` or ``last``, has the label of a sample with one label.
    """

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
        check: FirstStep | None = None,
    ) -> None:
        """Read from the model's signature and configuration how it takes tokens, places and labels,
        and reach its attention; nothing is run yet."""
        if check not in (None, "first step"):
            raise SpecError("check", got=repr(check), wanted="'first step' or None")
        if exchange is not None and exchange not in EXCHANGES:
            raise SpecError("exchange", got=repr(exchange), wanted=", ".join(EXCHANGES))
        require_known_wrapper(model)
        self.model = model
        self._slot = ModelSlot()
        self._exchange, self._label_name = exchange, label_name
        self.exchanges: tuple[str, ...] = (exchange,) if exchange else ("ulysses", "ring")
        self.inner = inner = model.module if isinstance(model, DistributedDataParallel) else model
        # The names of the forward's arguments, as a set and in order.
        arguments = arguments_of(inner)
        self._argument_names, self._argument_order = frozenset(arguments), tuple(arguments)
        self._takes_position_ids = "position_ids" in arguments
        self._takes_labels = label_name in arguments
        not_starred = (
            name
            for name, argument in arguments.items()
            if argument.kind is not inspect.Parameter.VAR_POSITIONAL
        )
        self.tokens = tokens or next(not_starred)
        self._from_transformers = hasattr(inner, "config") and hasattr(inner, "base_model_prefix")
        has_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in arguments.values())
        # Models of transformers drop fields that they do not know.
        self._takes_any_name = has_kwargs and not self._from_transformers
        # Given in every call: a cache of this rank's tokens would be of no use.
        config = getattr(inner, "config", None)
        takes_cache = has_kwargs or "use_cache" in arguments
        caches = takes_cache and hasattr(config, "use_cache")
        self._fixed_arguments = {"use_cache": False} if caches else {}
        # How the model counts position ids: candidates for that of a row's first token; whether it
        # skips masked tokens; the padding's token id, where it skips tokens with that id.
        self._first_positions = first_places(inner)
        # Those of the model when it was last probed.
        self._modules, self._flags = tuple[torch.nn.Module, ...](), list[tuple[int, str, object]]()
        self._counts_by_mask = False
        self._skipped_padding_id: int | None = None
        self._groups = groups or groups_here(device_of(inner))
        if not labels:
            labels = convention_of(inner) if self._from_transformers else "same"
        self.labels: Labels = labels
        # The places of labels in the own loss of a transformers model, where its name says so.
        self._own_kind: Labels | None = None
        if self._from_transformers:
            with suppress(ModelError):
                self._own_kind = convention_of(inner)
        self._probed: Probed | None = None
        self._probed_modes = set[bool]()  # values of model.training in which the model was probed
        # By mode, the tokens of a row up to which the model is not probed again.
        self._probed_tokens = dict[bool, int]()
        # The error for calls with labels, where the model's own loss is not the cross entropy of
        # its logits; None where it is, or before that was tested.
        self._own_loss: ModelError | None = None
        self._loss_source = LossSource(inner)
        self._loss_modes = set[bool]()  # modes in which the loss of those functions was tested
        self._rope_limit = _dynamic_rope_limit(config)
        # The placement of each local tensor of token ids [b, s_r] that was given out.
        self._placement_by_tokens: MutableMapping[torch.Tensor, Placement] = WeakIdKeyDictionary()
        # Inputs of graphs are plain tensors.
        self._author_compiles = bool(compiled_within(model))
        self._entry = entry_point_of(model, inner, self._slot, backend, recompute)
        self._recompute = None if self.entry_point == "attention registry" else recompute
        self._layers: Layers | None = None
        self._loss_head = None if logits else LossHead(inner)  # makes the loss without logits
        # Runs the model's own head and loss on the whole batch; made where ``_own_loss`` is found.
        self._whole_head: WholeHead | None = None
        self._check = check
        # The whole batch, inputs [b, S, ...] by name, behind each local tensor of token ids.
        batches: MutableMapping[torch.Tensor, dict[str, torch.Tensor]] = WeakIdKeyDictionary()
        self._batch_by_tokens = batches
        # This rank's labels [b, s_r], in the places that predict them, for its token ids.
        self._labels_by_tokens: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()
        self._last_called: Placement | None = None  # of the last batch that a forward was run on
        # Its labels [b, s_r]; None where it has none, or the user has said how many count.
        self._last_labels: torch.Tensor | None = None
        self._shares = False  # whether the user has asked for a rank's share
        self._told = weakref.WeakSet[Placement]()  # of whose targets the user has said the number
        self._part: BatchPart | None = None  # the part given to take(), until release()
        self._loop_row: Mapping[str, torch.Tensor] | None = None  # what a loop's model is probed by
        self._hooks_seen = dict[int, Any]()  # hooks on gradients that were looked at, by id
        self._own_losses = OwnLosses(
            model,
            "run.loss(logits, part.labels), or reduction='sum' and / part.targets; "
            "part.labels are in the places that predict them, run.mean(values) is over all tokens",
            "of what modules keep aside, too: run.share * of run.mean(values), which is over all "
            "tokens, or what modules add up / part.targets",
        )
        self._watcher: Watcher | None = None  # sees the results of forwards in a loop
        self._summed, self._summed_backward = SummedGradients(model), SummedBackward(model)
        self._fsdp_sums = False  # whether FSDP2 was told to sum gradients
        self._reader: TokenReader | None = None  # made for the first item that is read
        self.label_place: LabelPlace | None = None
        self._hooks = ExitStack()  # removes the hooks on the user's modules
        self._hooks.callback(hook_before(inner, self._refuse_sharded, named=True))
        for module in modules_run_as_written(inner):
            # Models within the model, such as the layers without the head.
            if module is not inner and self.tokens in _names_of_own_forward(module):
                self._hooks.callback(hook_before(module, self._refuse_within, named=True))
        # Watches for lost ranks, unless a training loop does so itself.
        self._watch, self._watches = CallWatch(), True
        self._alike_weights = AlikeWeights(model)  # a training loop sees to them itself
        weakref.finalize(self, self._watch.close)

    @property
    def entry_point(self) -> EntryPointName:
        """How the model's attention is reached: ``attention registry``, ``calls`` or ``graph``."""
        return self._entry.name

    @property
    def door(self) -> NoReturn:
        """Renamed: raises ModelError, which names ``entry_point`` instead."""
        raise ModelError("run.door", got="its former name", wanted="run.entry_point")

    @property
    def whole(self) -> bool:
        """Whether the model is compiled as one graph, so that it can be run and measured only with
        all its layers."""
        return self.entry_point == "graph"

    @property
    def compiled(self) -> bool:
        """Whether a compiler runs the model."""
        return self._entry.compiler is not None

    @property
    def compiles(self) -> int:
        """How often the model has been compiled."""
        return 0 if self._entry.compiler is None else self._entry.compiler.times

    @property
    def _world(self) -> int:
        """The number of ranks of the world; 1 without process groups."""
        return 1 if self._groups is None else self._groups.ranks

    @property
    def _rank(self) -> int:
        """This rank's number in the world; 0 without process groups."""
        return 0 if self._groups is None else self._groups.rank

    @property
    def _marks_parts(self) -> bool:
        """Whether other models refuse inputs of parts; those of graphs are plain, also where the
        model was compiled since."""
        if not self._author_compiles:
            self._author_compiles = bool(compiled_within(self.model))
        return self._world > 1 and not self._author_compiles

    @property
    def has_blocks(self) -> bool:
        """Whether the blocks of a probed model are known, so that levels can be chosen for each."""
        if self._layers is not None:  # found in a probe
            return True
        if self.entry_point != "attention registry":
            return False
        # transformers checkpoints its blocks itself.
        return bool(getattr(self.inner, "supports_gradient_checkpointing", False))

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make the groups of ranks among which batches will be sharded. Collective: every rank of
        the world calls it alike, before :meth:`shard` with groups of its own.

        Args:
            groups: The ranks of each group.
        """
        if self._groups is not None:
            if self._watches:
                self._watch.begin(self._groups)
                self._alike_weights.require(self._groups, warnings.warn)
            parts_of_groups = [part for ranks in groups for part in group_parts(ranks)]
            self._groups.prepare(parts_of_groups)

    def shard(
        self,
        batch: Mapping[str, torch.Tensor],
        *,
        ranks: Members | None = None,
        replicas: int = 1,
        targets: int | None = None,
        exchange: Exchange | None = None,
    ) -> BatchPart:
        """This rank's part of a batch that all ranks have alike. Several may be sharded before the
        first is run. Collective.

        Args:
            batch: Token ids [b, S], labels and other values of tokens [b, S, ...];
                ``attention_mask`` [b, S] tells padding, ``position_ids`` that begin again at 0 tell
                documents.
            ranks: The ranks that share the batch, all of the world where it is None.
            replicas: The number of batches that the world works on at once (data parallel), in
                the place of ``ranks``. Neighbouring ranks share one: with 2 replicas on four
                ranks, ranks 0 and 1 have one batch, ranks 2 and 3 another.
            targets: The number of tokens of the whole step that have a loss, by which losses are
                divided. Where it is None, those of this batch, or of the batches of all replicas.
                Give it where a step has several batches, or where ``ranks`` are not all ranks.
            exchange: How attention reaches the other ranks' tokens, where this batch is to use
                another exchange than the one given to :func:`compile`.

        Returns:
            The part: call ``run(**part.inputs)``.

        Raises:
            DataError: For inputs that are not of tokens.
            SpecError: For a batch with labels of some ranks, without ``targets``, and for replicas
                that the ranks cannot be divided into.
            PlanMismatch: Where ranks have other batches.
            ModelError: Where the model cannot be run on parts of its tokens.
        """
        batch = named_labels(tensors_of(self._without_embedded(batch)), self._label_name)
        require_tokens(batch, self.tokens)
        require_documents(batch)
        world = dist.get_world_size() if self._groups is not None else 1
        blocks = replica_blocks(world, replicas)
        members = blocks[0] if ranks is None else tuple(ranks)  # one block has all ranks
        told = targets is not None
        if replicas > 1 and ranks is None:
            members = next(block for block in blocks if self._rank in block)
            if targets is None:
                targets = self._targets_of_replicas(batch, blocks)
        elif replicas > 1:
            raise SpecError("shard", got="ranks and replicas", wanted="one of them")
        if targets is None and "labels" in batch and len(members) < world:
            raise SpecError(
                f"targets of a batch for ranks {members}",
                got="none",
                wanted="the tokens with a loss of the whole step",
                hint="others work on other batches: their means would be added up as if each were "
                "of all tokens; give shard(..., targets=the sum over all batches of the step)",
            )
        self._watch.count()
        if ranks is None:
            with self._watch.during("sharding"):
                self.prepare(blocks)
        documents = documents_of(batch, self.tokens)
        require_labels(batch, self.labels)
        with self._watch.during("sharding"):
            agree(
                f"batch of ranks {members}",
                fingerprint(batch, (documents, members)),
                self._group_and_index(self._groups, members)[0],
            )
            self._probe_again(batch, documents, together=len(members) == world)
        if targets is None:
            targets = count_targets(batch, self.labels)
        # What the plain model is called with on the whole batch: its labels are not shifted.
        as_given = {self._label_name if k == "labels" else k: v for k, v in batch.items()}
        whole = {name: x for name, x in as_given.items() if name in self._argument_names}
        if "labels" in batch:
            batch["labels"] = predicted(batch["labels"], self.labels)
        part = self.place(batch, members, targets=targets, exchange=exchange)
        self._batch_by_tokens[part.inputs[self.tokens]] = whole
        if told:
            self._told.add(part.placed)
        if self._check is not None and len(members) == world:
            self._check = None
            self._compare_with_plain(part, batch)
        return part

    def place(
        self,
        values: Mapping[str, torch.Tensor],
        ranks: Members,
        *,
        targets: int | None = None,
        exchange: str | None = None,
        groups: Groups | None = None,
    ) -> BatchPart:
        """:meth:`shard` without communication: it neither compares the batch between ranks nor
        probes the model. All ``ranks`` of ``groups`` must have the same ``values``, whose
        ``labels`` are already shifted to the places that predict them. Of values in host memory
        only this rank's part is copied to the model's device, and nobody waits for it."""
        groups = groups or self._groups
        if not self._fsdp_sums and isinstance(self.model, FSDPModule):
            add_plainly(self.model)
            self._fsdp_sums = True
        self._refuse_long_rows(values)
        documents = documents_of(values, self.tokens)
        places = None if self._takes_position_ids else declared_places(values)
        row_tokens = values[self.tokens].shape[1]
        if row_tokens < len(ranks):
            raise SpecError(
                f"rows of {row_tokens} tokens",
                got=f"{len(ranks)} ranks",
                wanted="a token for each",
                hint="shard short rows among fewer ranks",
            )
        group, member = self._group_and_index(groups, ranks)
        chosen = cast("Exchange", exchange or self._exchange or "ulysses")
        balanced = chosen in ("ring", "gather", "2d")
        placement = Placement(
            tokens=placed_rows(documents, len(ranks), "zigzag" if balanced else "natural"),
            rows=len(documents),
            member=member,
            group=group,
            exchange=chosen,
            targets=targets,
            places=places,
            subgroup=lambda some: self._group_and_index(groups, tuple(ranks[m] for m in some))[0],
        )
        assert self._probed is not None, "shard() probes"
        first = self._probed.first if self._takes_position_ids else None
        if self._counts_by_mask and "attention_mask" in values and "position_ids" not in values:
            # As OPT counts: a token's position is the number of unmasked tokens before it.
            unmasked = values["attention_mask"].long()
            position_ids = (unmasked.cumsum(dim=1) - 1).clamp(min=0) + (first or 0)
            values = {**values, "position_ids": position_ids}
        if self._skipped_padding_id is not None:
            values = self._with_padding_skipped(values, self._skipped_padding_id)
        inputs, labels = local_inputs(values, self.tokens, placement, first=first)
        device = device_of(self.model)
        inputs = {name: self._of_part(to_device(x, device)) for name, x in inputs.items()}
        labels = None if labels is None else to_device(labels, device)
        self._placement_by_tokens[inputs[self.tokens]] = placement
        if labels is not None:
            self._labels_by_tokens[inputs[self.tokens]] = labels
        rest = {name: plain(inputs.pop(name)) for name in [*inputs] if not self._takes_field(name)}
        if labels is not None and (self._from_transformers or self._takes_labels):
            inputs[self._label_name] = labels
        _mark_dynamic(inputs)
        return BatchPart(
            inputs=inputs,
            rest=rest,
            labels=labels,
            group=group,
            targets=targets or 0,
            tokens=placement.width * placement.rows,
            placed=placement,
        )

    def _refuse_compiled(self) -> None:
        """Raise ModelError where the whole model was compiled after its calls were replaced, which
        no compiler can trace."""
        compiled = self.inner._compiled_call_impl is not None  # noqa: SLF001
        if compiled and self.entry_point == "calls":
            raise ModelError(
                f"{type(self.inner).__name__}.compile() after hr.compile",
                got="a graph of the plain model",
                wanted="hr.compile(model, backend=...), which compiles the spread model",
                hint="or compile its blocks (block.compile()) before",
            )

    def _of_part(self, x: torch.Tensor) -> torch.Tensor:
        """An input of a part, which other models refuse where there are several ranks."""
        return of_part(x, self.model) if self._marks_parts else x

    def _with_padding_skipped(
        self, values: Mapping[str, torch.Tensor], padding: int
    ) -> Mapping[str, torch.Tensor]:
        """The batch with ``position_ids`` [b, S] as a plain model counts them that skips tokens
        whose id is ``padding``. Raises DataError for such tokens in a batch that has position ids
        already: the plain model would count others."""
        counted = values[self.tokens] != padding  # [b, S]
        if "position_ids" not in values:
            # As RoBERTa counts: tokens from padding + 1 on, and all padding is at ``padding``.
            position_ids = counted.long().cumsum(dim=1) * counted + padding
            return {**values, "position_ids": position_ids}
        if bool(counted.all()):
            return values
        raise DataError(
            f"{self.tokens} of {type(self.inner).__name__}",
            got=f"the padding's number {padding} in a sample",
            wanted="other numbers, as the model passes over it when it counts places",
            hint="leave padding out, or give rows with an attention_mask and no position_ids",
        )

    def take(self, part: BatchPart) -> None:
        """Spread the model: its forwards work on ``part`` from now on, and refuse the tokens of
        others. What autocast keeps may be of weights as they were, or as FSDP2 has freed them."""
        torch.clear_autocast_cache()
        self._slot.take(part.placed)
        self._part, self._last_labels = part, part.labels
        part.placed.counted.clear()

    def release(self) -> None:
        """Make the model the user's plain one again."""
        self._slot.take(None)
        self._part = None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """The model's results for what :meth:`shard` returned, all of it by name. Results with
        logits, of inputs with labels, have the loss of this rank's tokens over the targets of the
        step.

        Raises:
            ModelError: For inputs that no :meth:`shard` of this model returned, caches, masks, and
                labels for a model whose loss others than transformers make, and which sees more of
                its layers than the last hidden states.
        """
        if args:
            raise ModelError(
                "inputs of the model",
                got=f"{type(args[0]).__name__} without a name",
                wanted="run(**part.inputs)",
            )
        self._refuse_compiled()
        labelled = inputs.get(self._label_name) is not None
        if self._from_transformers:
            refuse_arguments(inputs, self.tokens, labelled=labelled)
        placement = None
        if isinstance(inputs.get(self.tokens), torch.Tensor):
            placement = self._placement_by_tokens.get(inputs[self.tokens])
        if placement is None:
            raise ModelError(
                "inputs of the model",
                got="others than were sharded",
                wanted="what shard() gave",
                hint="give a shard's inputs as they are; move a batch before it is sharded",
            )
        self._require_position_ids(inputs)
        self._require_labels(inputs, placement)
        # train() or eval() since shard(), or other modules
        if self.inner.training not in self._probed_modes or self._has_other_modules():
            lengths = [placement.tokens.lengths]
            together = placement.tokens.ranks == self._world
            self._probe_again(inputs, lengths, together=together)
        self._look_at_loss(inputs, training=self.inner.training)
        self._slot.end_backward()  # of an earlier backward that failed
        before = self._slot.held
        self._slot.take(placement)
        placement.counted.clear()
        own_labels = self._labels_by_tokens.get(inputs[self.tokens])
        self._last_labels = None if placement in self._told else own_labels
        try:
            labels = inputs.pop(self._label_name, None) if self._from_transformers else None
            self._own_losses.begin()
            torch.clear_autocast_cache()  # as in take()
            with self._watch.during("forward"):
                if labels is not None and self._whole_head is not None:
                    outputs = self._call_with_whole_head(self._whole_head, placement, inputs)
                else:
                    self._prepare_loss(labels)
                    outputs = self._with_loss(self._call_with(self._entry.call, **inputs), labels)
        finally:
            self._slot.take(before)
        results = [*result_tensors(outputs)]
        self._summed_backward.require(results)
        if self._world > 1:
            parted = ((x, _part_of(x, placement)) for x in results)
            within = _parts_within(placement)
            self._own_losses.note(parted, placement.group, part_of=within)
            self._own_losses.note_labels(results, None if labelled else own_labels)
        return self._with_backward_hooks(outputs, placement)

    def install(self) -> Callable[[], None]:
        """Have the model itself do what a call of this object does while it is spread, so that a
        loop that calls the model need not change: models of transformers give the loss of
        :meth:`loss`; others are compiled in place where there is a backend. Returns a function that
        undoes this."""
        hooks = ExitStack()
        hooks.callback(self._entry.install(self._require_own, self._look_at_results))
        if self.entry_point == "graph":
            return hooks.close
        # Labels [b, s_r] of forwards that run now, from the hook before to the hook after them.
        labels_of_forwards = list[torch.Tensor | None]()

        def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            """Take the labels out of the arguments of a transformers model, whose loss is made
            here, and add the arguments that every call needs. Does nothing while the model is
            plain."""
            if self._slot.held is None:
                return None
            if self._from_transformers:
                given = {**dict(zip(self._argument_order, args, strict=False)), **named}
                labelled = given.get(self._label_name) is not None
                refuse_arguments(given, self.tokens, labelled=labelled)
            labels = named.pop(self._label_name, None) if self._from_transformers else None
            labels_of_forwards.append(labels)
            self._prepare_loss(labels)
            return args, {**self._fixed_arguments, **named}

        def after(module: Any, args: Any, outputs: Any) -> Any:
            """Add its loss to the results of a spread forward, and hooks for its backward. Does
            nothing while the model is plain."""
            if self._slot.held is None:
                return None
            with_loss = self._with_loss(outputs, labels_of_forwards.pop())
            found = self._with_backward_hooks(with_loss, self._slot.held)
            self._look_at_results(found)
            return found

        hooks.callback(hook_before(self.inner, before, named=True))
        hooks.callback(hook_after(self.inner, after))
        return hooks.close

    def detach(self) -> None:
        """Restore the model as it was: no hook or replaced function stays."""
        self.release()
        self._hooks.close()
        self._watch.close()
        self._entry.remove()
        if self._loss_head is not None:
            self._loss_head.remove()
        if self._whole_head is not None:
            self._whole_head.remove()

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The sum of the cross entropy of this rank's tokens, divided by the number of tokens of
        the whole step that have a loss: over all ranks these parts sum to the mean.

        Args:
            logits: [b, s_r, V], from a call of this object.
            labels: [b, s_r], as in :class:`~headrace.adopt.spread_model.BatchPart`.

        Returns:
            This rank's part of the loss, a single number.
        """
        now = self._slot.held or self._last_called
        if now is None:
            raise ModelError("loss", got="no batch", wanted="a call of run(**shard.inputs) before")
        return local_loss(logits, labels, now.targets)

    @torch.no_grad()
    def gather(self, results: torch.Tensor) -> torch.Tensor:
        """The results of the whole batch that was called last, on each of its ranks, in the order
        of its tokens. For evaluation: it has no gradient. Collective among the batch's ranks.

        Args:
            results: [b, s_r, ...] of the local tokens, as logits or labels.

        Returns:
            [b, S, ...].

        Raises:
            ModelError: Before a call, and for results of other tokens.

        Example:
            >>> logits = run.gather(run(**run.shard({"input_ids": ids}).inputs).logits)
        """
        now = self._last_called
        if now is None or tuple(results.shape[:2]) != (now.rows, now.width):
            raise ModelError(
                "results to gather",
                got="no batch" if now is None else f"{list(results.shape)}",
                wanted="[rows, tokens, ...] of the last call of run(**shard.inputs)",
            )
        return now.whole(results)

    @property
    def share(self) -> float:
        """One over the number of ranks that share the last batch. Losses of ranks are summed, so a
        term that all of these ranks compute alike takes this factor, as in
        ``loss + run.share * penalty``. Who never asks for it has such terms refused. Raises
        ModelError before a call."""
        self._shares = True
        return 1 / self._last_placement("share").tokens.ranks

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all tokens of the last batch, the same on all of its ranks, and
        differentiable: for losses made of such means, as those that balance experts, times
        :attr:`share`. Collective.

        Args:
            values: [b, s_r, ...] of the local tokens.

        Returns:
            [...], the mean over rows and tokens.

        Raises:
            ModelError: Before a call, and for values of other tokens.

        Example:
            >>> used = run.mean(chosen)  # [b, s_r, experts] to [experts]
            >>> run.backward(loss + run.share * (used * run.mean(scores)).sum())
        """
        now = self._last_placement("mean")
        if tuple(values.shape[:2]) != (now.rows, now.width):
            raise ModelError(
                "values of tokens",
                got=list(values.shape),
                wanted=f"[{now.rows}, {now.width}, ...] of the last call of run(**shard.inputs)",
            )
        local_sum = values.sum(dim=(0, 1))[None]  # [1, ...], gathered to [ranks, ...]
        mean = gather(local_sum, 0, now.group).sum(dim=0) / sum(now.tokens.sizes)
        note_alike(mean)
        return mean

    def _last_placement(self, what: str) -> Placement:
        """The placement that the model works on now, or of the last batch that it was called with;
        raises ModelError about ``what``, the caller's name, where there was none."""
        now = self._slot.held or self._last_called
        if not isinstance(now, Placement):
            raise ModelError(what, got="no batch", wanted="a call of run(**shard.inputs) before")
        return now

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
        """Attention of the local tokens over all tokens of their rows, for models whose own code
        calls this method, while a call of this object runs them.

        Args:
            q: Queries [b, N, s_r, D].
            k: Keys [b, G, s_r, D], as many heads as values.
            v: Values [b, G, s_r, D].
            causal: Whether a token sees only earlier ones.
            window: Tokens that a query sees on one side, itself among them; 0 for all.
            scale: What scores are multiplied by, 1 / sqrt(D) where it is None.

        Returns:
            [b, N, s_r, D].
        """
        return attention(q, k, v, self._slot.handle, causal=causal, window=window, scale=scale)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of this rank's part of a loss and add its gradients.

        Args:
            loss: This rank's part, a single number.

        Raises:
            ModelError: For a loss that was made of no result, and where the gradients of the step
                before are still there, summed over ranks.
        """
        require_made(loss, "loss given to run.backward")
        self._summed.require_dropped(self.model)
        now = self._last_called
        if self._world > 1 and now is not None:
            self._own_losses.require_sum(
                loss,
                targets=now.targets or 0,
                shares=self._shares or isinstance(self.model, FSDPModule),
                miscounted=self._miscounted,
            )
        with self._watch.during("backward"):
            self._summed_backward.run(loss)
        self._summed.note_parts(self.model)

    def watch(self, watcher: Watcher | None) -> None:
        """Have the results of spread forwards in a loop looked at, and noted for
        :meth:`checked_backward`.

        Args:
            watcher: Is given the tensors among the results of each forward; None ends it.
        """
        self._watcher = watcher

    def _look_at_results(self, outputs: Any) -> None:
        """Show the results of a spread forward in a loop to whoever watches, and note them."""
        placement = self._slot.held
        if self._watcher is None or not isinstance(placement, Placement):
            return
        results = [*result_tensors(outputs)]
        if self._loss_head is not None:  # it gives the loss in the place of logits
            results = [x for x in results if x.shape[2:] != (1,)]
        self._watcher(results)
        parted = ((x, _part_of(x, placement, alone=True)) for x in results)
        within = _parts_within(placement, alone=True)
        self._own_losses.note(parted, placement.group, part_of=within)

    def checked_backward(self, loss: torch.Tensor, *, weighed: bool) -> ModelError | None:
        """Run the backward of a loss in a loop, and tell what is wrong where its graph shows that
        it is no sum over tokens. Collective among the ranks of the part.

        Args:
            loss: This rank's part, a single number, of results that :meth:`watch` noted.
            weighed: Whether terms are weighed by this rank's share of the step.

        Returns:
            The error; None where nothing is wrong.
        """
        error = self._own_losses.error(
            loss, weighed=weighed, alike=not weighed, miscounted=self._miscounted()
        )
        loss.backward()
        return error

    def _miscounted(self) -> float:
        """By how much the means that the model made in its last forward count other labels than
        its part has: a number whose sum over ranks is 0 where each counts as many. Waits for the
        device."""
        now, labels = self._last_called, self._last_labels
        if now is None or labels is None or not now.counted:
            return 0.0
        wanted = int((labels != IGNORED).sum())
        # Factors that differ by mean, so that what one counts too much makes up for no other.
        return sum((1.0 + 104_729 * at) * (int(x) - wanted) for at, x in enumerate(now.counted))

    def add_up(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks together, once gradients are there: call it after the last
        :meth:`backward` of a step. It sums the gradients over the world where neither DDP nor FSDP2
        takes care of them. Without a backward since the last sum gradients stay as they are, so
        other losses of the step can be added up too. Collective.

        Args:
            loss: This rank's part, a single number.

        Returns:
            The sum over all ranks.
        """
        total = loss.detach().clone()
        if self._groups is not None:
            with self._watch.during("adding up gradients"):
                world = self._groups.world
                Transfer(dist.all_reduce(total, group=world, async_op=True), world, total).wait()
                require_linear_hooks(self.model, self._hooks_seen)
                self._summed.add_up(self.model, world, self._error_of_sum(loss))
        return total

    def _error_of_sum(self, loss: torch.Tensor) -> ModelError | None:
        """What is wrong on this rank with gradients that are to be summed; None where nothing
        is."""
        ran, self._summed_backward.ran = self._summed_backward.ran, False
        if self._world == 1:
            return None
        error = self._summed_backward.error()
        return self._own_losses.error_after(loss) if error is None and not ran else error

    def probe(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Test whether the model can be run on parts of its tokens, unless that was done already
        in its present mode, training or evaluation.

        Args:
            batch: Inputs of the model by name. A model of fake tensors is taken to be right.

        Raises:
            ModelError: When it cannot.
        """
        if self._probed is None or self.inner.training not in self._probed_modes:
            self._probe_again(batch, documents_of(batch, self.tokens), together=False)

    def _probe_again(
        self,
        batch: Mapping[str, torch.Tensor],
        documents: Iterable[Iterable[int]],
        *,
        together: bool,
    ) -> None:
        """:meth:`probe` a batch with ``documents`` of these lengths, row by row, once more where
        they are longer than any before: what a row of 20 tokens does not show, a longer one may.
        ``together`` says whether all ranks of the world do this with documents of these lengths:
        forwards of wrapped models wait for all of them."""
        self._refuse_long_rows(batch)
        if any(isinstance(p, FakeTensor) for p in self.inner.parameters()):
            self._probed = Probed(attentions=0, first=self._first_positions[-1])
            self._probed_modes |= {False, True}
            self._loss_modes |= {False, True}
            return
        self._probe_first(batch)
        if self._has_other_modules():
            self._probed_modes.clear()
        training, longest = self.inner.training, tried_tokens(documents)
        known = self._probed_tokens.get(training, 0)
        may_go_on = together or not is_wrapped(self.model)
        if training not in self._probed_modes or (may_go_on and longest > known):
            self._probe_mode(batch, longest, training=training)
            if may_go_on:
                # At least doubled, so that rows that grow step by step are seldom looked at again.
                self._probed_tokens[training] = max(longest, 2 * known)
        self._modules, self._flags = tuple(self.inner.modules()), _flags_of(self.inner)
        self._look_at_loss(batch, training=training)

    def _has_other_modules(self) -> bool:
        """Whether the model has other modules than when it was probed last, or other flags. A
        wrapped model is not asked, as probing it takes all ranks."""
        if not self._modules or is_wrapped(self.model):
            return False
        now = tuple(self.inner.modules())
        same = len(now) == len(self._modules) and all(map(is_, now, self._modules))
        return not same or _flags_of(self.inner) != self._flags

    def _probe_first(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Find the layers, masks and positions of the model by its first batch, and whether it can
        be run on parts of a few tokens in evaluation mode. Does nothing after the first time."""
        if self._probed is None:
            if self.entry_point != "attention registry":
                self._layers = self._find_layers(batch)
            if self._recompute is not None:
                self._add_checkpoints(self._recompute)
            known, fixed = self._probe_inputs(batch), self._fixed_arguments
            self._entry.read_masks(partial(run_plain, self.model, known, self.tokens, **fixed))
            self._probed = self._probe(batch)
            takes_mask = "attention_mask" in self._argument_names
            if self._from_transformers and self._takes_position_ids and takes_mask:
                self._find_how_positions_count(batch)

    def _find_how_positions_count(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Find out how the plain model counts positions where it is given no position ids, by
        running it on a few tokens of the batch, and set whether it skips masked tokens or
        padding."""
        known, fixed = self._probe_inputs(batch), self._fixed_arguments
        self._counts_by_mask = counts_by_mask(self.model, known, self.tokens, **fixed)
        self._skipped_padding_id = counts_by_ids(self.model, known, self.tokens, **fixed)

    def first_place(self, batch: Mapping[str, torch.Tensor]) -> int:
        """The position that the model gives to the first token of a row.

        Args:
            batch: Inputs of the model by name.

        Returns:
            The position, for models that take positions.
        """
        self.probe({k: v for k, v in batch.items() if k != "position_ids"})
        assert self._probed is not None, "probed"
        return self._probed.first

    @property
    def longest(self) -> int | None:
        """The most tokens that a row may have; None for no limit. Models with dynamic RoPE scaling
        have one: beyond it frequencies depend on the longest position, which differs by rank."""
        return self._rope_limit

    def plain_inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        """Make the arguments with which the plain model is called on token ids.

        Args:
            ids: Token numbers [b, S].

        Returns:
            Inputs by name.
        """
        return {self.tokens: ids, **self._fixed_arguments}

    def join(self, groups: Groups, *, label_name: str) -> None:
        """Work in a training loop, whose groups and labels were given when this was made."""

    def begin(self, sample: Item, device: str) -> Callable[[], None]:
        """Probe the model with a sample, compare a first step where that was asked for, and
        :meth:`install`; returns a function that undoes it and detaches the model."""
        self._watches = False  # the training loop watches for lost ranks itself
        self._own_losses = OwnLosses(
            self.model,
            "micro.loss(logits), or reduction='sum' and / micro.targets; micro.labels are in the "
            "places that predict them, and are not shifted once more",
            "of what modules keep aside, too: what they add up / micro.targets, or sums of each "
            "sequence (micro.per_sequence); a mean over one micro-batch follows the plan",
        )
        row = {name: value.to(device) for name, value in packed([sample]).items()}
        self.probe(row)
        self._probe_modes(row)
        self._loop_row = row
        if self._check is not None and row[self.tokens].shape[1] >= self._world:
            check = self._check
            self.shard(self._user_labels(row))  # compares, and clears self._check
            # A pack of two samples as well, as steps are made of packs.
            self._check = check
            short = {name: _repeated_to(value, self._world + 1) for name, value in sample.items()}
            (pack,) = self.packs([short, sample])
            self.shard(self._user_labels(pack.to(device).values))
        uninstall = self.install()

        def end() -> None:
            """Undo the installation and detach the model."""
            self._loop_row = None
            self.release()
            uninstall()
            self.detach()

        return end

    def look_again(self) -> None:
        """Probe a model in a loop once more, in both modes, where it has other modules or flags
        than at the last time."""
        if self._loop_row is not None and self._has_other_modules():
            self._probed_modes.clear()
            self._probe_modes(self._loop_row)
            self._modules, self._flags = tuple(self.inner.modules()), _flags_of(self.inner)

    def _probe_modes(self, row: Mapping[str, torch.Tensor]) -> None:
        """Probe the model with a row in those modes in which it was not."""
        for training in {False, True} - self._probed_modes:
            self._probe_mode(row, tried_tokens(documents_of(row, self.tokens)), training=training)
            self._look_at_loss(row, training=training)

    def _user_labels(self, row: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The fields of a packed row, tensors [1, t, ...] by name, as a user would give them to
        :meth:`shard`: labels are not shifted yet, and only a row of several samples keeps its
        ``position_ids``, which tell where each begins."""
        starts = row["position_ids"] == row["position_ids"][:, :1]  # where a sample begins
        several = int(starts.sum()) > 1
        batch = {
            name: value
            for name, value in row.items()
            if (several if name == "position_ids" else self._takes_field(name))
        }
        if (self._from_transformers or self._takes_labels) and "labels" in row:
            labels = row["labels"]
            if self.labels == "next":
                # Undo predicted(): move labels one place back; a sample's first token has none.
                first = labels.new_full((len(labels), 1), IGNORED)
                labels = torch.cat([first, labels[:, :-1]], dim=1).masked_fill(starts, IGNORED)
            batch[self._label_name] = labels
        return batch

    def read(self, item: Any, what: str, *, labelled: bool = True) -> Item:
        """Make a sample of an item: tensors [n, ...] by name, with labels moved to the places that
        predict them; ``what`` names the item in errors. An item that is not ``labelled`` needs no
        labels."""
        if self._reader is None:
            self._reader = TokenReader(
                tokens=self.tokens,
                kind=self.labels,
                label_name=self._label_name,
                label_place=self.label_place,
            )
        return self._reader.read(item, what, labelled=labelled)

    def forget_fields(self) -> None:
        """Let the samples that follow have other fields than those before."""
        self._reader = None

    def length(self, sample: Item) -> int:
        """Count the tokens of a sample."""
        return len(sample[self.tokens])

    def few(self, sample: Item) -> int:
        """Count the tokens of a sample: it shows the layers as it is."""
        return self.length(sample)

    def packs(self, samples: Sequence[Item]) -> list[Pack]:
        """Put all samples into one row, one pack."""
        row = packed(samples)
        assert self._probed is not None, "begin() probes"
        row["position_ids"] = row["position_ids"] + self._probed.first
        labels = row["labels"]
        return [Pack(values=row, tokens=labels.shape[1], targets=int((labels != IGNORED).sum()))]

    def made(self, sample: Item, lengths: Sequence[int], ranks: int, *, document: int) -> Pack:
        """Make a pack, for measurements, of samples with these ``lengths`` in tokens. Their values
        are those of ``sample``, repeated; a length above ``document`` becomes several samples."""
        sample_tokens = [
            min(document, length - start)
            for length in lengths
            for start in range(0, length, document)
        ]
        row = packed([{k: _repeated_to(v, n) for k, v in sample.items()} for n in sample_tokens])
        tokens = sum(lengths)
        return Pack(values=row, tokens=tokens, targets=tokens)

    def ranks_for(self, pack: Pack, ranks: Members) -> Members:
        """Choose the first of the ranks: all, or as many as the pack has tokens."""
        return ranks[: pack.tokens]

    def groups_of(self, ranks: Members) -> list[Members]:
        """List all ranks as one group, and the blocks and rings of meshes of them."""
        return group_parts(ranks)

    def number(self, outputs: Any) -> torch.Tensor:
        """A scalar to run a backward from: the loss among the model's results, else the sum of the
        log-sum-exps of its logits."""
        loss = loss_of(outputs)
        return logits_of(outputs).float().logsumexp(-1).sum() if loss is None else loss

    def order(self, exchange: str) -> TokenOrder:
        """``natural`` for Ulysses, else ``zigzag``, which balances the work of causal attention."""
        return "natural" if exchange == "ulysses" else "zigzag"

    def levels(self, layers: Sequence[torch.nn.Module]) -> Levels | None:
        """The recompute levels of blocks. Raises ModelError for blocks that the model does not know
        as such."""
        chosen = self._chosen_levels(layers)
        if chosen is None:
            return None
        return Levels(choose=chosen.choose, known=("attention", "full"))

    def forget(self) -> None:
        """Does nothing: no record of forwards is kept."""

    def _without_embedded(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same batch. Raises ModelError where it has inputs of a transformers model that take
        the place of token ids."""
        if self._from_transformers:
            refuse_embedded(batch, self.tokens)
        return batch

    def _refuse_long_rows(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Raise ModelError for rows longer than :attr:`longest`: dynamic RoPE scaling would depend
        on the longest position of each rank's own tokens."""
        if self._rope_limit is None:
            return
        position_ids = batch.get("position_ids")
        if position_ids is None:
            longest = batch[self.tokens].shape[1]
        else:
            longest = int(position_ids.max()) + 1
        if longest > self._rope_limit:
            raise ModelError(
                f"rotary embeddings of {type(self.inner).__name__}",
                got=f"{longest} places and a rope_type that changes with the longest",
                wanted=f"at most {self._rope_limit}, up to which it does not change",
                hint="ranks have other longest places: shorten the rows, or take a rope_type that "
                "does not look at them (yarn, linear, llama3)",
            )

    def _refuse_sharded(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The hook before the model: refuse tokens that it must not be called with, and give a
        spread forward those of its part as plain tensors. Raises
        ModelError where the plain model receives a part of a batch, whose tokens would see only
        those of this rank; and where the spread model receives other tokens than its part."""
        if torch.compiler.is_compiling():
            return None
        if self._slot.held is not None:
            self._require_own(args, named)
            return plain_arguments(args, named) if self._marks_parts else None
        given = named.get(self.tokens, args[0] if args else None)
        if isinstance(given, torch.Tensor) and given in self._placement_by_tokens:
            raise ModelError(
                "inputs of shard() given to the model itself",
                got=f"{type(module).__name__}(...)",
                wanted="run(**shard.inputs)",
                hint="outside of it the model is the plain one, for whole batches",
            )
        return None

    def _refuse_within(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The hook before a model within the model: raises ModelError where it is called with a
        part while the model is plain."""
        if torch.compiler.is_compiling() or self._slot.held is not None:
            return
        given = [x for x in (*args, *named.values()) if isinstance(x, torch.Tensor)]
        if any(plain(x) is not x or x in self._placement_by_tokens for x in given):
            raise ModelError(
                f"inputs of shard() given to {type(module).__name__}(...) within the model",
                got="a forward outside of run(**shard.inputs)",
                wanted="run(**shard.inputs)",
                hint="outside of it the model is the plain one, for whole batches: "
                "output_hidden_states=True gives the states of layers",
            )

    def _require_own(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note that a forward begins. Raise ModelError where the model, spread for a micro-batch,
        is called with other tokens than its part, as it would take them to have the documents and
        positions of the micro-batch; and where position ids are missing. ``args`` and ``named`` are
        the arguments of the call. It suffices that the token ids or the position ids are those of
        the part: the user may have changed the other ones on purpose."""
        self._own_losses.begin()
        if self._part is None:
            return
        given = {**dict(zip(self._argument_order, args, strict=False)), **named}
        inputs = self._part.inputs

        def is_of_part(name: str) -> bool:
            """Whether the argument ``name`` is that of the part."""
            value = given.get(name)
            return isinstance(value, torch.Tensor) and _is_same_tensor(value, inputs[name])

        if not any(is_of_part(name) for name in (self.tokens, "position_ids") if name in inputs):
            raise ModelError(
                f"{type(self.inner).__name__}(...) within a micro-batch",
                got="other tokens than those of the micro-batch",
                wanted="model(**micro.inputs)",
                hint="evaluate before the micro-batch or after its backward, where the model is "
                "the plain one; change tokens of a micro-batch in place "
                f"(micro.inputs[{self.tokens!r}].masked_fill_(...))",
            )
        self._require_position_ids(given)

    def _require_labels(self, inputs: Mapping[str, Any], placement: Placement) -> None:
        """Raise ModelError for labels that are not those of the part: token ids would be labels of
        their own places, and the targets of the step others. Collective where they are other
        tensors."""
        given = inputs.get(self._label_name)
        wanted = self._labels_by_tokens.get(inputs[self.tokens])
        if not isinstance(given, torch.Tensor) or given is wanted:
            return
        differ = wanted is None or not _is_same_tensor(plain(given), plain(wanted))
        if not any(row[0] for row in gather_floats([differ], placement.group)):
            return
        raise ModelError(
            f"{self._label_name} of a part",
            got="others than shard() gave" if wanted is not None else "some, and none in its batch",
            wanted="those of the part",
            hint="give shard() the labels of the batch: it moves them to the places that predict "
            "them, over borders of ranks, and counts the targets of the step",
        )

    def _require_position_ids(self, arguments: Mapping[str, Any]) -> None:
        """Raise ModelError for inputs of a part without ``position_ids``: the model would count
        the positions of this rank's tokens from 0."""
        if self._takes_position_ids and arguments.get("position_ids") is None:
            raise ModelError(
                f"inputs of {type(self.inner).__name__}",
                got="a part of a batch without its position_ids",
                wanted="all inputs of the part",
                hint="model(**micro.inputs), or run(**shard.inputs)",
            )

    def _chosen_levels(self, blocks: Sequence[torch.nn.Module]) -> ChosenLevels | None:
        """The object that sets the recompute levels of ``blocks``; None where the entry point
        cannot tell blocks apart."""
        return self._entry.levels(blocks)

    def _with_backward_hooks(self, outputs: Any, placement: Placement | StandIn | None) -> Any:
        """Hook the backward of ``outputs``, the results of a forward on this placement, and note
        the placement as that of the last call. Returns ``outputs``."""
        if isinstance(placement, Placement):
            self._last_called = placement
        self._slot.hook_backward(result_tensors(outputs), placement)
        return outputs

    def _prepare_loss(self, labels: torch.Tensor | None) -> None:
        """Before a forward with ``labels`` [b, s_r] or None: raise ModelError where their loss
        cannot be made, and pass the labels to a :class:`LossHead` where there is one."""
        if labels is not None:
            if self._loss_source.changed():  # within a loop, where nothing is run to look at it
                self._forget_loss()
                self._own_loss = self._loss_source.error()
            if self._own_loss is not None:
                raise self._own_loss
        if self._from_transformers:
            refuse_configured(getattr(self.inner, "config", None))
        if self._loss_head is not None:
            self._loss_head.expect(labels, self._slot.now.targets)

    def _with_loss(self, outputs: Any, labels: torch.Tensor | None) -> Any:
        """The outputs of a forward with the loss [] of this rank's ``labels`` [b, s_r] put in: as
        the field ``loss`` of their dataclass, or in front of their tuple; unchanged for None."""
        if labels is None:
            return outputs
        logits = logits_of(outputs)
        head = self._loss_head
        loss = self.loss(logits, labels) if head is None else head.take(logits)
        if isinstance(outputs, tuple):
            # With a loss head the first result stands for logits that were not made: drop it.
            rest = outputs if head is None else outputs[1:]
            return loss, *rest
        outputs.loss = loss
        if head is not None:
            outputs.logits = None
        return outputs

    def _compare_with_plain(self, part: BatchPart, batch: Mapping[str, torch.Tensor]) -> None:
        """Compare loss and gradients of the spread model on ``part``, this rank's part of a
        ``batch`` of all ranks, with those of the plain model on the whole batch; raises ModelError
        where they differ. The plain model is given rows of several documents document by document,
        as its attention may not keep them apart. Warns and returns where that would not give the
        same loss. Collective."""
        whole = dict(self._batch_by_tokens[part.inputs[self.tokens]])
        local = dict(part.inputs)
        # The inputs of each call of the plain model.
        alone = self._documents_alone(whole, documents_of(batch, self.tokens))
        if alone is None:
            text = (
                "the first step is not compared with one process: rows have padding, or documents "
                "with labels of their first tokens or a loss of the model's own"
            )
            warnings.warn(text, stacklevel=4)
            return
        # The loss of a transformers model is a mean over the targets of what it is given: means of
        # documents are weighted by their targets, so that they sum to the mean of the whole batch.
        is_mean = self._from_transformers and self._label_name in whole
        counts = [1] * len(alone)  # targets of each call, where its loss is a mean
        if is_mean:
            labels = [inputs[self._label_name] for inputs in alone]
            counts = [count_targets({"labels": x}, self.labels) or 0 for x in labels]
        total = part.targets or sum(counts) or 1

        def spread() -> torch.Tensor:
            """The loss [] of all ranks together, after its backward."""
            loss = self.number(self(**local))
            self.backward(loss)
            return self.add_up(loss)

        def plain() -> torch.Tensor:
            """The loss [] of the plain model on the whole batch, after its backward."""
            self._slot.take(None)
            losses = []
            for inputs, count in zip(alone, counts, strict=True):
                if count or len(alone) == 1:
                    loss = self.number(self.model(**{**inputs, **self._fixed_arguments}))
                    loss = loss * (max(count, 1) / total) if is_mean else loss
                    # A wrapper that sums gradients over ranks would count equal ones once each.
                    (loss / ranks_that_add_up(self.model, self._groups)).backward()
                    losses.append(loss.detach())
            return torch.stack(losses).sum()

        compare_first_step(self.model, self._groups, spread=spread, plain=plain)

    def _documents_alone(
        self, whole: Mapping[str, torch.Tensor], documents: Sequence[Sequence[int]]
    ) -> list[dict[str, torch.Tensor]] | None:
        """The inputs of each call of the plain model, by name, to run a batch document by document.

        They are cut from ``whole``, inputs [b, S, ...] by name, to [1, length, ...]; ``documents``
        are the lengths in tokens of the documents of each row. Where each row is one document, a
        single call takes all rows. None where the losses of single documents would not add up to
        that of the batch."""
        if all(len(lengths) == 1 for lengths in documents):
            return [dict(whole)]
        alone = []
        for row, lengths in enumerate(documents):
            for stop, length in zip(accumulate(lengths), lengths, strict=True):
                tokens = slice(stop - length, stop)
                # position_ids may have one row for all rows of the batch.
                alone.append({k: x[min(row, len(x) - 1)][None, tokens] for k, x in whole.items()})
        labels = [inputs[self._label_name] for inputs in alone if self._label_name in inputs]
        # A transformers model that shifts labels drops the first label of a row: that of a document
        # alone, but not that of a document within a longer row.
        first_counts = self.labels == "next" and any(
            bool((x[:, 0] != IGNORED).any()) for x in labels
        )
        # A loss of the model's own may be a mean over tokens, or a sum.
        own_loss = bool(labels) and not self._from_transformers
        return None if first_counts or own_loss or "attention_mask" in whole else alone

    def _call_with_whole_head(
        self, head: WholeHead, placement: Placement, inputs: Mapping[str, torch.Tensor]
    ) -> Any:
        """The results of a model whose own ``head`` and loss run on the whole batch on every rank,
        as the loss is no cross entropy; ``inputs`` [b, s_r, ...] are this rank's, without labels,
        and other arguments of the model. Raises ModelError for a step of several batches: the
        model's loss is a mean over one; and for arguments that are of this rank's tokens."""
        whole = self._batch_by_tokens.get(inputs[self.tokens])
        assert self._own_loss is not None, "it has one"
        if whole is None:  # placed without shard(): only this rank's part is known
            raise self._own_loss
        count = count_targets({"labels": whole[self._label_name]}, self.labels)
        if placement.targets != count:
            raise ModelError(
                f"loss of {type(self.inner).__name__}",
                got=f"a step of {placement.targets} targets, of which the batch has {count}",
                wanted="one batch for each step",
                hint="its own loss is that of one batch: call run(**inputs) without labels, and "
                "sum a loss of your own over part.labels, divided by part.targets",
            )
        known = {*whole, "position_ids"}
        extra = {name: value for name, value in inputs.items() if name not in known}
        for name, value in extra.items():
            of_part = isinstance(value, torch.Tensor) and value.shape[1:2] == (placement.width,)
            if of_part and placement.tokens.ranks > 1:
                raise ModelError(
                    f"argument {name} of {type(self.inner).__name__}",
                    got="values of this rank's tokens",
                    wanted="those of the whole batch, which its own loss sees",
                    hint="name it among the arguments of its forward, and give it to shard()",
                )
        call = partial(self._call_with, self._entry.call, **extra)
        return head(call, placement, inputs, whole, self.tokens)

    def _find_whole_head(
        self, known: Mapping[str, torch.Tensor], run: Callable[..., Any], training: bool
    ) -> None:
        """Set ``_whole_head``, so that the model's own head and loss run on the whole batch, where
        these depend on its layers only through the last hidden states; else leave it None.
        ``known`` are inputs [b, S, ...] to test that with by ``run(**inputs)``, in ``training`` or
        evaluation mode."""
        # The hooks of a WholeHead need an eager model whose attention a switch turns on and off,
        # and the model's own loss needs the logits that a LossHead does not make.
        base = base_of(self.inner)
        registry = self.entry_point == "attention registry"
        if base is None or not registry or self.compiled or self._loss_head is not None:
            return
        outside = set(self.inner.modules()) - set(base.modules())
        head_attends = any("attention" in type(m).__name__.lower() for m in outside)
        recomputes = self._recompute or any(
            getattr(m, "gradient_checkpointing", False) for m in self.inner.modules()
        )
        if recomputes and head_attends:
            return  # a recompute of the head's attention would take it for spread
        with looked_at(self.model, self._slot, training=training):
            few = few_of({k: v for k, v in known.items() if k != "labels"}, self.tokens)
            given = {**few, self._label_name: few[self.tokens].clone()}
            self._slot.take(None)
            if sees_hidden_states_alone(base, run, given, self.tokens):
                self._whole_head = WholeHead(self.inner, base, self._slot)

    def _call_with(self, call: Callable[..., Any], /, **inputs: Any) -> Any:
        """Run ``call`` on inputs and the arguments that every call needs (``use_cache=False``),
        and return its results."""
        _, inputs = plain_arguments((), inputs)
        _mark_dynamic(inputs)
        return call(**{**inputs, **self._fixed_arguments})

    def _targets_of_replicas(
        self, batch: Mapping[str, Any], blocks: Sequence[Members]
    ) -> int | None:
        """The number of tokens with a loss in the batches of all replicas, whose ranks are
        ``blocks``; None where this rank's batch has no labels. Collective."""
        count = count_targets(batch, self.labels)
        if self._groups is None:
            return count
        counts = gather_floats([float(count or 0)], self._groups.world)
        # Ranks of a block have the same batch: the first one's count stands for it.
        return None if count is None else round(sum(counts[block[0]][0] for block in blocks))

    def _group_and_index(
        self, groups: Groups | None, members: Members
    ) -> tuple[dist.ProcessGroup | None, int]:
        """The process group of the members, world ranks, and this rank's index in it; (None, 0) for
        one process."""
        if groups is None:
            return None, 0
        return groups.get(members), members.index(groups.rank)

    def _find_layers(self, batch: Mapping[str, torch.Tensor]) -> Layers | None:
        """The layers of the model, found by running it on a few tokens; None where it has no list
        of equal modules called one after another."""
        few, run = self._probe_inputs(batch), partial(self._call_with, self.inner)
        return find_layers(
            self.inner, lambda: run_few(self.inner, run, self._slot, few, self.tokens)
        )

    def _add_checkpoints(self, level: Kept) -> None:
        """Put activation checkpoints of ``level`` around the layers of a model that has none of its
        own; raises ModelError where no layers were found."""
        layers = self._layers
        chosen = None if layers is None else self._chosen_levels(layers.modules)
        if layers is None or chosen is None:
            raise ModelError(
                f"recompute of {type(self.inner).__name__}",
                got="no blocks that can be seen",
                wanted="a ModuleList of equal blocks, each called with the result of the last",
                hint="call hr.recomputed(block, x) in its forward",
            )
        chosen.choose([level] * len(layers))

    def _probe(self, batch: Mapping[str, torch.Tensor]) -> Probed:
        """Run the model on a few tokens of the batch and on parts of them: raises ModelError where
        results differ, else returns how often it calls attention and the position id of its first
        token."""
        run = partial(self._call_with, self._entry.probing)
        inputs = self._probe_inputs(batch)
        if self._from_transformers:  # they count by themselves: is that from 0 on?
            inputs.pop("position_ids", None)
        return probe(
            self.model,
            run,
            self._slot,
            inputs,
            self.tokens,
            places=self._takes_position_ids,
            firsts=self._first_positions,
        )

    def _probe_mode(
        self, batch: Mapping[str, torch.Tensor], longest: int, *, training: bool
    ) -> None:
        """Probe the model again in training or in evaluation mode, on a row of ``longest`` tokens
        too, and note the mode as probed; raises ModelError where it cannot be run on parts."""
        assert self._probed is not None, "probed"
        look_again(
            self.model,
            partial(self._call_with, self._entry.probing),
            self._slot,
            self._probe_inputs(batch),
            self.tokens,
            places=self._takes_position_ids,
            first=self._probed.first,
            longest=longest,
            training=training,
        )
        self._probed_modes.add(training)

    def _look_at_loss(self, batch: Mapping[str, torch.Tensor], *, training: bool) -> None:
        """Set ``_own_loss``, the error where the loss of a transformers model is not the cross
        entropy of its logits, and then ``_whole_head``: whose code makes it tells, and what it is
        for a few tokens of the batch. Does nothing where the same code was looked at in this mode
        of ``training`` before."""
        if not (self._from_transformers and self._takes_labels):
            return
        if self._loss_source.changed():
            self._forget_loss()
        if training in self._loss_modes:
            return
        self._loss_modes.add(training)
        if self._own_loss is not None:
            return
        run, known = partial(self._call_with, self._entry.probing), self._probe_inputs(batch)
        labels = batch.get("labels", batch.get(self._label_name))
        self._own_loss = self._loss_source.error() or own_loss(
            self.model,
            run,
            self._slot,
            known if labels is None else known | {"labels": labels},
            self.tokens,
            label_name=self._label_name,
            kind=self._own_kind or self.labels,
            training=training,
        )
        # Where the user says that labels stand elsewhere, the model's own loss is not asked for.
        if self._own_loss is not None and self._own_kind in (None, self.labels):
            self._find_whole_head(known, run, training)

    def _forget_loss(self) -> None:
        """Forget what was found out about the model's loss, as other code makes it now."""
        self._loss_source.note()
        self._loss_modes.clear()
        self._own_loss = None
        if self._whole_head is not None:
            self._whole_head.remove()
            self._whole_head = None

    def _probe_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The fields [b, S, ...] of a batch that the model takes, by the names of its arguments, to
        probe it with. Models of transformers get no labels, as their loss is tested apart, and no
        padding ids, as some leave these out when they count positions."""
        # In batches labels may stand under "labels", whatever the model calls them.
        named = {self._label_name if k == "labels" else k: v for k, v in batch.items()}
        if self._from_transformers:
            named.pop(self._label_name, None)
            named[self.tokens] = without_padding(self.inner, named[self.tokens])
        return {name: value for name, value in named.items() if self._takes_field(name)}

    def _takes_field(self, name: str) -> bool:
        """Whether the model takes the field ``name`` of a batch as an argument."""
        if name == "position_ids":
            return self._takes_position_ids
        return self._takes_any_name or name in self._argument_names or name == self.tokens


def _flags_of(model: torch.nn.Module) -> list[tuple[int, str, object]]:
    """The flags and names that modules of a model have as attributes of their own, but those of
    their modes: (number of the module, name, value)."""
    return [
        (at, name, value)
        for at, module in enumerate(model.modules())
        for name, value in vars(module).items()
        if isinstance(value, (bool, str)) and name not in _MODES and name[0] != "_"
    ]


def _dynamic_rope_limit(config: Any) -> int | None:
    """The longest row, in tokens, for which a model with dynamic RoPE scaling (the types
    ``dynamic`` and ``longrope``) has constant frequencies: for longer ones they depend on the
    longest position. None for other RoPE types. ``config`` is that of a transformers model, or
    None; those within it count, too."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    within = [_dynamic_rope_limit(part) for part in _configurations_within(config)]
    limits = [limit for limit in within if limit is not None]
    for rope in (given, *given.values()):  # one for all layers, or one for each kind
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type", rope.get("type", ""))
        most_positions = int(getattr(config, "max_position_embeddings", 0))
        if "dynamic" in str(kind):
            limits.append(most_positions)
        elif kind == "longrope":
            # The length before scaling: in the RoPE parameters, else in the configuration.
            original = getattr(config, "original_max_position_embeddings", None) or most_positions
            limits.append(int(rope.get("original_max_position_embeddings", original)))
    return min(limits, default=None)


def _configurations_within(config: Any) -> list[Any]:
    """The configurations of a transformers model's parts, such as its language model's."""
    names = getattr(config, "sub_configs", None) or {}
    parts = [getattr(config, name, None) for name in names]
    if hasattr(config, "get_text_config"):
        parts.append(config.get_text_config())
    return [part for part in parts if part is not None and part is not config]


def arguments_of(model: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a model's forward by name. A forward that passes on whatever it is given
    (``*args``, ``**named``) also has those of the model inside an adapter (peft), or of the forward
    of its parent classes."""
    found = dict(inspect.signature(model.forward).parameters)
    base = getattr(model, "get_base_model", None)
    if not _passes_arguments_on(found):
        return found
    if callable(base):
        return arguments_of(base()) | found
    for kind in type(model).__mro__[1:]:
        forward = vars(kind).get("forward")
        if forward is not None and kind is not torch.nn.Module:
            _, *rest = inspect.signature(forward).parameters.items()  # without self
            found = dict(rest) | found
            if not _passes_arguments_on(dict(rest)):
                break
    return found


def _names_of_own_forward(module: torch.nn.Module) -> Iterable[str]:
    """The names of the arguments of a module's forward; none for torch's own modules, which work
    on each token alone or are called by what has attention."""
    if type(module).__module__.startswith("torch."):
        return ()
    return inspect.signature(module.forward).parameters


def _passes_arguments_on(arguments: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a forward with these parameters has ``*args`` or ``**kwargs``, which it may pass on
    to another forward."""
    starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.kind in starred for p in arguments.values())


def _part_of(x: torch.Tensor, placement: Placement, *, alone: bool = False) -> Parted | None:
    """What part of the whole result a result ``x`` of a forward on a placement is: tokens of rows
    that several ranks share, or this one has ``alone``, beside others of a step. None for other
    results, and for a single token of each row."""
    tokens = _part_of_tokens(placement, alone=alone)
    if tokens is None or tuple(x.shape[:2]) != tokens.shape:
        return None
    # A loop's shares are of labels: a mean over all tokens is found by its gradients.
    return replace(tokens, shape=tuple(x.shape), weighed=alone)


def _part_of_tokens(placement: Placement, *, alone: bool = False) -> Parted | None:
    """What part a tensor [b, s_r] of a value for each token of a placement is; None where there is
    a single token in each row, or where no ranks share them and none has them ``alone``."""
    tokens = placement.width if alone or placement.tokens.ranks > 1 else 0
    if tokens < 2:
        return None
    shape = (placement.rows, tokens)
    return Parted(shape=shape, dims=(1,), word="tokens", group=placement.group)


def _parts_within(placement: Placement, *, alone: bool = False) -> PartOf:
    """What part a tensor of a shape is, [b, s_r, ...] or [b s_r, ...], that a forward on a
    placement has made."""
    tokens = _part_of_tokens(placement, alone=alone)

    def part_of(shape: tuple[int, ...]) -> Parted | None:
        """The part; None for a tensor of other dims."""
        dims = () if tokens is None else tuple(tokens.dims_in(shape))
        return replace(tokens, shape=shape, dims=dims) if tokens and dims else None

    return part_of


def _is_same_tensor(x: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether ``x`` is ``wanted``, a view of all of it, or has its values; fake tensors, which have
    none, are taken to be the same."""
    if x is wanted or isinstance(x, FakeTensor):
        return True
    if x.shape != wanted.shape or x.dtype != wanted.dtype or x.device != wanted.device:
        return False
    return x.data_ptr() == wanted.data_ptr() or torch.equal(x, wanted)


def _mark_dynamic(inputs: Mapping[str, Any]) -> None:
    """Mark dim 1, the tokens of a row, as dynamic for torch.compile: one graph for any number."""
    for value in inputs.values():
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            torch._dynamo.maybe_mark_dynamic(value, 1)  # noqa: SLF001


def _repeated_to(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` entries of ``x`` [n, ...], repeated from its start where n is smaller."""
    repeats = -(-count // len(x))  # rounded up
    return x.repeat(repeats, *[1] * (x.dim() - 1))[:count]
