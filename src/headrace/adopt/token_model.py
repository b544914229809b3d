"""Models of tokens, spread over ranks: sequence parallelism for a model that knows nothing of it.

    run = headrace.compile(model)                # says by which entry point attention is reached
    shard = run.shard({"input_ids": x, "labels": y})
    loss = run(**shard.inputs).loss              # this rank's part of the loss of the batch
    run.backward(loss)                           # gradients: sums over all ranks' tokens

The losses of a group's ranks sum to the mean over all tokens that have one, and gradients add
likewise: nothing is averaged twice, and nothing is scaled. Outside of ``run(...)`` and the backward
of its results the model is the user's plain model.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from headrace.adopt.attention_registry import attention
from headrace.adopt.block_recompute import Kept
from headrace.adopt.entry_points import ChosenLevels, EntryPointName, entry_point_of
from headrace.adopt.first_step import FirstStep, compare_first_step, ranks_that_add_up
from headrace.adopt.gradients import add_plainly, add_up, is_wrapped, summed_loss
from headrace.adopt.labels import (
    Labels,
    LossHead,
    convention_of,
    count_targets,
    local_loss,
    logits_of,
    loss_of,
    predicted,
    result_tensors,
)
from headrace.adopt.model_layers import Layers, find_layers
from headrace.adopt.operators import ModelSlot, StandIn
from headrace.adopt.own_hooks import hook_after, hook_before
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
    require_tokens,
)
from headrace.adopt.samples import LabelPlace, TokenReader, packed
from headrace.adopt.spread_model import BatchPart, Item, Levels, Pack
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
    tried_tokens,
    without_padding,
)
from headrace.adopt.whole_head import WholeHead, base_of, sees_hidden_states_alone
from headrace.comm.collectives import agree, gather_floats
from headrace.comm.loop_watch import CallWatch
from headrace.comm.mesh import Groups, device_of, groups_here
from headrace.comm.waiting import Transfer
from headrace.errors import DataError, ModelError, SpecError
from headrace.ops.loss import IGNORED
from headrace.ops.switch import gather
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder

__all__ = ["EntryPointName", "TokenModel", "arguments_of", "compile"]


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
        exchange: How attention meets the other ranks' tokens: ``ulysses`` (where it is None),
            ``ring``, ``gather`` or ``2d``.
        labels: Whether labels are of the ``next`` token or of the ``same`` place; known for models
            of transformers.
        tokens: The argument with the token numbers [b, S], the model's first where it is None.
        groups: The groups of this rank; those of the world where it is None.
        recompute: What blocks compute again in the backward: all but their ``attention``, whose
            traffic is then not repeated, or ``full``. Blocks are those that models of transformers
            know, and of others a list of equal modules called one after another.
        label_name: The argument with labels.
        logits: Where False, results of inputs with labels have no logits, of which only some are
            alive at a time; for models of transformers.
        check: ``"first step"`` compares loss and gradients of the first batch with those of the
            plain model on each rank alone, where its memory suffices.

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
        tokens: The name of the argument with token numbers.
        labels: Whether labels of :meth:`shard` are of the ``next`` token or of the ``same`` place.
        exchanges: How ranks of a group may meet when a plan decides.
        label_place: The token that has the label of a sample with a single one.
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
        self.model = model
        self._slot = ModelSlot()
        self._exchange, self._label_name = exchange, label_name
        self.exchanges: tuple[str, ...] = (exchange,) if exchange else ("ulysses", "ring")
        self.inner = inner = model.module if isinstance(model, DistributedDataParallel) else model
        takes = arguments_of(inner)
        self._takes, self._order = frozenset(takes), tuple(takes)
        any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values())
        self._takes_places = "position_ids" in takes
        self._takes_labels = label_name in takes
        named = (k for k, p in takes.items() if p.kind is not inspect.Parameter.VAR_POSITIONAL)
        self.tokens = tokens or next(named)
        self._hugging = hasattr(inner, "config") and hasattr(inner, "base_model_prefix")
        self._takes_any = any_name and not self._hugging  # transformers' drop what they do not know
        config = getattr(inner, "config", None)
        self._always = {"use_cache": False} if hasattr(config, "use_cache") else {}
        self._firsts = first_places(inner)
        self._counts_by_mask = False
        self._passes_over: int | None = None  # tokens of this number have no place of their own
        self._groups = groups or groups_here(device_of(inner))
        self.labels: Labels = labels or (convention_of(inner) if self._hugging else "same")
        self._probed: Probed | None = None
        self._looked = set[bool]()  # in evaluation, in training
        self._own_loss: ModelError | None = None
        self._far = _far_place(config)
        self._placed: MutableMapping[torch.Tensor, Placement] = WeakIdKeyDictionary()
        self._entry = entry_point_of(model, inner, self._slot, backend, recompute)
        self._recompute = None if self.entry_point == "attention registry" else recompute
        self._layers: Layers | None = None
        self._ends = None if logits else LossHead(inner)
        self._whole_head: WholeHead | None = None
        self._check = check
        self._wholes: MutableMapping[torch.Tensor, dict[str, torch.Tensor]] = WeakIdKeyDictionary()
        self._called_last: Placement | None = None
        self._part: BatchPart | None = None
        self._adds = self._leaving = False
        self._reader: TokenReader | None = None
        self.label_place: LabelPlace | None = None
        self._stop_refusing = hook_before(inner, self._refuse_sharded, named=True)
        self._watch, self._watched = CallWatch(), True
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
        """Whether the model is compiled: its layers alone are not what runs."""
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
        return 1 if self._groups is None else self._groups.ranks

    @property
    def _rank(self) -> int:
        return 0 if self._groups is None else self._groups.rank

    @property
    def has_blocks(self) -> bool:
        """Whether the blocks of a probed model are known, so that levels can be chosen for each."""
        knows = getattr(self.inner, "supports_gradient_checkpointing", False)
        registry = self.entry_point == "attention registry"
        return self._layers is not None or (registry and bool(knows))

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make the groups of ranks among which batches will be sharded. Collective: every rank of
        the world calls it alike, before :meth:`shard` with groups of its own.

        Args:
            groups: The ranks of each group.
        """
        if self._groups is not None:
            if self._watched:
                self._watch.begin(self._groups)
            wanted = list(groups)
            self._groups.prepare([some for ranks in wanted for some in group_parts(ranks)])

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
            batch: Token numbers [b, S], labels and other values of tokens [b, S, ...];
                ``attention_mask`` [b, S] tells padding, ``position_ids`` that begin again at 0 tell
                documents.
            ranks: The ranks that share the batch, all of the world where it is None.
            replicas: How many batches are worked on at once, each by so many neighbouring ranks,
                which have it alike, in the place of ``ranks``: with 2 on four ranks the batch of
                ranks 0 and 1, and that of ranks 2 and 3.
            targets: Tokens of the whole step that have a loss, those of this batch, or of all
                replicas', where it is None: give it where a step has several batches, as it has
                where ``ranks`` are some.
            exchange: How attention meets the other ranks' tokens, in the place of the model's own.

        Returns:
            The part: call ``run(**part.inputs)``.

        Raises:
            DataError: For inputs that are not of tokens.
            SpecError: For a batch with labels of some ranks, without ``targets``, and for replicas
                that the ranks cannot be divided into.
            PlanMismatch: Where ranks have other batches.
            ModelError: Where the model cannot be run on parts of its tokens.
        """
        batch = {"labels" if k == self._label_name else k: v for k, v in batch.items()}
        self._refuse_fields(batch)
        require_tokens(batch, self.tokens)
        world = dist.get_world_size() if self._groups is not None else 1
        blocks = replica_blocks(world, replicas)
        members, rank = blocks[0] if ranks is None else tuple(ranks), self._rank
        if replicas > 1 and ranks is None:
            members = next(block for block in blocks if rank in block)
            targets = self._of_replicas(batch, blocks) if targets is None else targets
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
        if ranks is None:
            self.prepare(blocks)
        self._watch.count()
        documents = documents_of(batch, self.tokens)
        with self._watch.during("sharding"):
            agree(
                f"batch of ranks {members}",
                fingerprint(batch, (documents, members)),
                self._group(self._groups, members)[0],
            )
            self.probe(batch)
        count = count_targets(batch, self.labels) if targets is None else targets
        whole = {self._label_name if k == "labels" else k: v for k, v in batch.items()}
        if "labels" in batch:
            batch["labels"] = predicted(batch["labels"], self.labels)
        part = self.place(batch, members, targets=count, exchange=exchange)
        self._wholes[part.inputs[self.tokens]] = {
            name: x for name, x in whole.items() if name in self._takes
        }
        if self._check is not None and len(members) == world:
            self._check = None
            self._compare(part, batch)
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
        """:meth:`shard` without communication, for a batch that is alike on all ``ranks`` of
        ``groups`` and a model that was probed. Its ``labels`` are already shifted to the places
        that predict them."""
        groups = groups or self._groups
        if not self._adds and isinstance(self.model, FSDPModule):
            add_plainly(self.model)
            self._adds = True
        self._refuse_far(values)
        documents = documents_of(values, self.tokens)
        places = None if self._takes_places else declared_places(values)
        width = values[self.tokens].shape[1]
        if width < len(ranks):
            raise SpecError(
                f"rows of {width} tokens",
                got=f"{len(ranks)} ranks",
                wanted="a token for each",
                hint="shard short rows among fewer ranks",
            )
        group, me = self._group(groups, ranks)
        chosen = cast("Exchange", exchange or self._exchange or "ulysses")
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
        first = self._probed.first if self._takes_places else None
        if self._counts_by_mask and "attention_mask" in values and "position_ids" not in values:
            seen = values["attention_mask"].long()
            counted = (seen.cumsum(dim=1) - 1).clamp(min=0) + (first or 0)
            values = {**values, "position_ids": counted}
        if self._passes_over is not None:
            values = self._passed_over(values, self._passes_over)
        inputs, labels = local_inputs(values, self.tokens, placement, first=first)
        self._placed[inputs[self.tokens]] = placement
        rest = {name: inputs.pop(name) for name in [*inputs] if not self._takes_field(name)}
        if labels is not None and (self._hugging or self._takes_labels):
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

    def _passed_over(
        self, values: Mapping[str, torch.Tensor], padding: int
    ) -> Mapping[str, torch.Tensor]:
        """A batch with the places that the plain model would count. Raises DataError for tokens of
        the padding's number beside given places, which it would count otherwise."""
        ids = values[self.tokens]
        kept = ids != padding
        if "position_ids" not in values:
            places = kept.long().cumsum(dim=1) * kept + padding
            return {**values, "position_ids": places}
        if bool(kept.all()):
            return values
        raise DataError(
            f"{self.tokens} of {type(self.inner).__name__}",
            got=f"the padding's number {padding} in a sample",
            wanted="other numbers, as the model passes over it when it counts places",
            hint="leave padding out, or give rows with an attention_mask and no position_ids",
        )

    def take(self, part: BatchPart) -> None:
        """Spread the model: its forwards work on ``part`` from now on, and refuse the tokens of
        others."""
        self._slot.take(part.placed)
        self._part = part

    def release(self) -> None:
        """Make the model the user's plain one again."""
        self._slot.take(None)
        self._part = None

    def __call__(self, **inputs: Any) -> Any:
        """The model's results for what :meth:`shard` returned. Results with logits, of inputs with
        labels, have the loss of this rank's tokens over the targets of the step.

        Raises:
            ModelError: For inputs that no :meth:`shard` of this model returned, caches, and labels
                for a model whose own loss is another than the cross entropy of its logits.
        """
        if self._hugging:
            _refuse_options(inputs)
        placement = self._placed.get(inputs[self.tokens]) if self.tokens in inputs else None
        if placement is None:
            raise ModelError(
                "inputs of the model",
                got="others than were sharded",
                wanted="what shard() gave",
                hint="give a shard's inputs as they are; move a batch before it is sharded",
            )
        self._require_places(inputs)
        if self.inner.training not in self._looked:  # sharded in evaluation
            self.probe(inputs)
        if self._leaving:  # a backward that failed
            self._end_backward()
        before = self._slot.held
        self._slot.take(placement)
        try:
            labels = inputs.pop(self._label_name, None) if self._hugging else None
            with self._watch.during("forward"):
                if labels is not None and self._whole_head is not None:
                    outputs = self._with_own_head(self._whole_head, placement, inputs)
                else:
                    self._expect(labels)
                    outputs = self._with_loss(self._call_with(self._entry.call, **inputs), labels)
        finally:
            self._slot.take(before)
        return self._bound(outputs, placement)

    def install(self) -> Callable[[], None]:
        """Have the model itself do what a call of this object does while it is spread, so that a
        loop that calls the model need not change: models of transformers give the loss of
        :meth:`loss`; others are compiled in place where there is a backend. Returns a function that
        undoes this."""
        model = self.inner
        hooks = ExitStack()
        hooks.callback(self._entry.install(self._require_own))
        if self.entry_point == "graph":
            return hooks.close
        coming = list[torch.Tensor | None]()

        def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            """Take the labels out of the arguments of a transformers model, whose loss is made
            here, and add what it always needs."""
            if self._slot.held is None:
                return None
            if self._hugging:
                _refuse_options(named)
            coming.append(named.pop(self._label_name, None) if self._hugging else None)
            self._expect(coming[-1])
            return args, {**self._always, **named}

        def after(module: Any, args: Any, outputs: Any) -> Any:
            if self._slot.held is None:
                return None
            return self._bound(self._with_loss(outputs, coming.pop()), self._slot.held)

        hooks.callback(hook_before(model, before, named=True))
        hooks.callback(hook_after(model, after))
        return hooks.close

    def detach(self) -> None:
        """Restore the model as it was: no hook or replaced function stays."""
        self.release()
        self._stop_refusing()
        self._watch.close()
        self._entry.remove()
        if self._ends is not None:
            self._ends.remove()
        if self._whole_head is not None:
            self._whole_head.remove()

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross entropy of this rank's tokens, summed, over the targets of the step.

        Args:
            logits: [b, s_r, V], which a call of this gave.
            labels: [b, s_r], as in :class:`~headrace.adopt.spread_model.BatchPart`.

        Returns:
            This rank's part of the loss, a single number.
        """
        now = self._slot.held or self._called_last
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
        now = self._called_last
        if now is None or tuple(results.shape[:2]) != (now.rows, now.width):
            raise ModelError(
                "results to gather",
                got="no batch" if now is None else f"{list(results.shape)}",
                wanted="[rows, tokens, ...] of the last call of run(**shard.inputs)",
            )
        return now.whole(results)

    @property
    def share(self) -> float:
        """What a term that all ranks of the last batch have alike counts on each of them: one over
        their number, as in ``loss + run.share * penalty``. Raises ModelError before a call."""
        return 1 / self._last("share").tokens.ranks

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all tokens of the last batch, alike on its ranks, with its adjoint: for
        losses of such means, as those that balance experts, times :attr:`share`. Collective.

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
        now = self._last("mean")
        if tuple(values.shape[:2]) != (now.rows, now.width):
            raise ModelError(
                "values of tokens",
                got=list(values.shape),
                wanted=f"[{now.rows}, {now.width}, ...] of the last call of run(**shard.inputs)",
            )
        own = values.sum(dim=(0, 1))[None]
        return gather(own, 0, now.group).sum(dim=0) / sum(now.tokens.sizes)

    def _last(self, what: str) -> Placement:
        """The placement of the last batch that the model was called with; raises ModelError where
        there was none."""
        now = self._slot.held or self._called_last
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
        """Attention of the local tokens over all tokens of their rows, for models that call it
        themselves, within a call of this.

        Args:
            q: Queries [b, N, s_r, D].
            k: Keys [b, G, s_r, D], as many heads as values.
            v: Values [b, G, s_r, D].
            causal: Whether a token sees only earlier ones.
            window: Tokens that a query sees with itself on one side, 0 for all.
            scale: What scores are multiplied by, 1 / sqrt(D) where it is None.

        Returns:
            [b, N, s_r, D].
        """
        return attention(q, k, v, self._slot.handle, causal=causal, window=window, scale=scale)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of this rank's part of a loss and add its gradients.

        Args:
            loss: This rank's part, a single number.
        """
        with self._watch.during("backward"):
            summed_loss(self.model, loss).backward()

    def add_up(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks together, once gradients are there: call it after the last
        :meth:`backward` of a step. It sums the gradients over the world where neither DDP nor FSDP2
        takes care of them. Collective.

        Args:
            loss: This rank's part, a single number.

        Returns:
            The sum over all ranks.
        """
        whole = loss.detach().clone()
        if self._groups is not None:
            with self._watch.during("adding up gradients"):
                Transfer(dist.all_reduce(whole, async_op=True), None, whole).wait()
                if not is_wrapped(self.model):
                    add_up(self.model.parameters())
        return whole

    def probe(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Look whether the model can be run on parts of its tokens, if that was not done yet.

        Args:
            batch: Inputs of the model by name; of fake tensors nothing can be told.

        Raises:
            ModelError: When it cannot.
        """
        self._refuse_far(batch)
        if any(isinstance(p, FakeTensor) for p in self.inner.parameters()):
            self._probed = Probed(attentions=0, first=self._firsts[-1])
            self._looked |= {False, True}
        if self._probed is None:
            if self.entry_point != "attention registry":
                self._layers = self._find_layers(batch)
            if self._recompute is not None:
                self._compute_again(self._recompute)
            self._probed = self._probe(batch)
            if self._hugging and self._takes_places and "attention_mask" in self._takes:
                known, always = self._probe_inputs(batch), self._always
                self._counts_by_mask = counts_by_mask(self.model, known, self.tokens, **always)
                self._passes_over = counts_by_ids(self.model, known, self.tokens, **always)
        if self.inner.training not in self._looked:
            self._look(batch, training=self.inner.training)

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
        """Tokens of the longest row that is taken, None where no length is refused: rotary
        embeddings that look at the longest place would see another one on each rank."""
        return self._far

    def plain_inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        """Make what the plain model is given for some tokens.

        Args:
            ids: Token numbers [b, S].

        Returns:
            Inputs by name.
        """
        return {self.tokens: ids, **self._always}

    def join(self, groups: Groups, *, label_name: str) -> None:
        """Work in a training loop, whose groups and labels were given when this was made."""

    def begin(self, sample: Item, device: str) -> Callable[[], None]:
        """Probe the model with a sample, and :meth:`install`; returns a function that undoes
        both."""
        self._watched = False  # the loop watches
        row = {name: value.to(device) for name, value in packed([sample]).items()}
        self.probe(row)
        for training in {False, True} - self._looked:
            self._look(row, training=training)
        if self._check is not None and row[self.tokens].shape[1] >= self._world:
            check = self._check
            self.shard(self._user_labels(row))
            # A pack of two samples as well, as steps are made of packs.
            self._check = check
            short = {name: _repeat_to(value, self._world + 1) for name, value in sample.items()}
            pack = self.packs([short, sample]).pop().values
            self.shard(self._user_labels({name: x.to(device) for name, x in pack.items()}))
        installed = self.install()

        def end() -> None:
            self.release()
            installed()
            self.detach()

        return end

    def _user_labels(self, row: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A row of one sample or several as a batch, with labels as a user has them."""
        starts = row["position_ids"] == row["position_ids"][:, :1]
        several = int(starts.sum()) > 1
        names = [k for k in row if several or k != "position_ids"]
        found = {k: row[k] for k in names if k == "position_ids" or self._takes_field(k)}
        if (self._hugging or self._takes_labels) and "labels" in row:
            labels = row["labels"]
            if self.labels == "next":
                first = labels.new_full((len(labels), 1), IGNORED)
                labels = torch.cat([first, labels[:, :-1]], dim=1).masked_fill(starts, IGNORED)
            found[self._label_name] = labels
        return found

    def read(self, item: Any, what: str) -> Item:
        """The tokens and labels of an item, labels moved to the places that predict them."""
        if self._reader is None:
            self._reader = TokenReader(
                tokens=self.tokens,
                kind=self.labels,
                label_name=self._label_name,
                label_place=self.label_place,
            )
        return self._reader.read(item, what)

    def forget_fields(self) -> None:
        """Let the samples that follow have other fields than those before."""
        self._reader = None

    def length(self, sample: Item) -> int:
        """Count the tokens of a sample."""
        return len(sample[self.tokens])

    def packs(self, samples: Sequence[Item]) -> list[Pack]:
        """Put all samples into one row, one pack."""
        row = packed(samples)
        assert self._probed is not None, "begin() probes"
        row["position_ids"] = row["position_ids"] + self._probed.first
        labels = row["labels"]
        return [Pack(values=row, tokens=labels.shape[1], targets=int((labels != IGNORED).sum()))]

    def made(self, sample: Item, lengths: Sequence[int], ranks: int, *, document: int) -> Pack:
        """Make a pack of the tokens of a sample, begun again as often as needed."""
        parts = [min(document, n - start) for n in lengths for start in range(0, n, document)]
        row = packed([{k: _repeat_to(v, n) for k, v in sample.items()} for n in parts])
        tokens = sum(lengths)
        return Pack(values=row, tokens=tokens, targets=tokens)

    def ranks_for(self, pack: Pack, ranks: Members) -> Members:
        """Choose as many ranks as the pack has tokens."""
        return ranks[: pack.tokens]

    def groups_of(self, ranks: Members) -> list[Members]:
        """List all ranks as one group, and the blocks and rings of meshes of them."""
        return group_parts(ranks)

    def number(self, outputs: Any) -> torch.Tensor:
        """The loss among the model's results, or the sizes of its logits."""
        loss = loss_of(outputs)
        return logits_of(outputs).float().logsumexp(-1).sum() if loss is None else loss

    def order(self, exchange: str) -> TokenOrder:
        """Natural where ranks exchange heads for tokens, else balanced for causal attention."""
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

    def _refuse_fields(self, batch: Mapping[str, Any]) -> None:
        """Raise ModelError for what models of transformers take beside token numbers."""
        for name in batch:
            if self._hugging and name != self.tokens and name.startswith(_NO_TOKENS):
                raise ModelError(
                    f"input {name}",
                    got="what is no number of a token",
                    wanted=f"{self.tokens} alone",
                    hint="only token numbers, labels and places are spread over ranks: give "
                    "hr.compile the language model alone, or a module of your own that takes "
                    "token numbers and calls the model with what it makes of them",
                )

    def _refuse_far(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Raise ModelError for places at which rotary embeddings look at the longest place: ranks
        have others."""
        if self._far is None:
            return
        places, width = batch.get("position_ids"), batch[self.tokens].shape[1]
        longest = width if places is None else int(places.max()) + 1
        if longest > self._far:
            raise ModelError(
                f"rotary embeddings of {type(self.inner).__name__}",
                got=f"{longest} places and a rope_type that changes with the longest",
                wanted=f"at most {self._far}, up to which it does not change",
                hint="ranks have other longest places: shorten the rows, or take a rope_type that "
                "does not look at them (yarn, linear, llama3)",
            )

    def _refuse_sharded(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raise ModelError where the plain model receives a part of a batch: its tokens would see
        only those of this rank; and where the spread one receives other tokens than its part."""
        if torch.compiler.is_compiling():
            return
        if self._slot.held is not None:
            self._require_own(args, named)
            return
        given = named.get(self.tokens, args[0] if args else None)
        if isinstance(given, torch.Tensor) and given in self._placed:
            raise ModelError(
                "inputs of shard() given to the model itself",
                got=f"{type(module).__name__}(...)",
                wanted="run(**shard.inputs)",
                hint="outside of it the model is the plain one, for whole batches",
            )

    def _require_own(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Raise ModelError where the model, spread for a micro-batch, is called with other tokens,
        whose borders and places it would take for those of the micro-batch; or without its
        places."""
        if self._part is None:
            return
        given = {**dict(zip(self._order, args, strict=False)), **named}
        own = self._part.inputs
        if not any(
            isinstance(x := given.get(name), torch.Tensor) and _is_same(x, own[name])
            for name in (self.tokens, "position_ids")
            if name in own
        ):
            raise ModelError(
                f"{type(self.inner).__name__}(...) within a micro-batch",
                got="other tokens than those of the micro-batch",
                wanted="model(**micro.inputs)",
                hint="evaluate before the micro-batch or after its backward, where the model is "
                "the plain one; change tokens of a micro-batch in place "
                f"(micro.inputs[{self.tokens!r}].masked_fill_(...))",
            )
        self._require_places(given)

    def _require_places(self, arguments: Mapping[str, Any]) -> None:
        """Raise ModelError for inputs of a part without the places of its tokens: the model would
        begin at the first one."""
        if self._takes_places and arguments.get("position_ids") is None:
            raise ModelError(
                f"inputs of {type(self.inner).__name__}",
                got="a part of a batch without its position_ids",
                wanted="all inputs of the part",
                hint="model(**micro.inputs), or run(**shard.inputs)",
            )

    def _chosen_levels(self, blocks: Sequence[torch.nn.Module]) -> ChosenLevels | None:
        return self._entry.levels(blocks)

    def _bound(self, outputs: Any, placement: Placement | StandIn | None) -> Any:
        """Have the backward of ``outputs`` use their placement, so that recompute works on their
        batch whatever was run since."""
        if isinstance(placement, Placement):
            self._called_last = placement

        def begin(_: Sequence[torch.Tensor]) -> None:
            """Put the placement in the slot as the backward reaches the outputs; where the model
            was plain, it is so again after the backward."""
            if not self._leaving and self._slot.held is None:
                self._leaving = True
                queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
                queue(self._end_backward)
            self._slot.take(placement)

        for value in result_tensors(outputs):
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(begin)
        return outputs

    def _end_backward(self) -> None:
        """End a backward that ran while the model was plain: the model is plain again."""
        self._leaving = False
        self._slot.take(None)

    def _expect(self, labels: torch.Tensor | None) -> None:
        """Check before a forward that a loss of these labels can be made, and pass them to a head
        that makes the loss without logits."""
        if labels is not None and self._own_loss is not None:
            raise self._own_loss
        if getattr(getattr(self.inner, "config", None), "output_router_logits", False):
            _refuse_options({"output_router_logits": True})
        if self._ends is not None:
            self._ends.expect(labels, self._slot.now.targets)

    def _with_loss(self, outputs: Any, labels: torch.Tensor | None) -> Any:
        """The outputs of a transformers model with the loss [] of this rank's labels, in its
        dataclass or in front of its tuple."""
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

    def _compare(self, part: BatchPart, batch: Mapping[str, torch.Tensor]) -> None:
        """Compare a batch of all ranks with the plain model, which is given rows of several
        documents one document after the other, as it may not part them."""
        whole = dict(self._wholes[part.inputs[self.tokens]])
        local = dict(part.inputs)
        parts = self._given_alone(whole, documents_of(batch, self.tokens))
        if parts is None:
            text = (
                "the first step is not compared with one process: rows have padding, or documents "
                "with labels of their first tokens or a loss of the model's own"
            )
            warnings.warn(text, stacklevel=4)
            return
        means = self._hugging and self._label_name in whole
        counts = [
            count_targets({"labels": one[self._label_name]}, self.labels) if means else 1
            for one in parts
        ]
        total = part.targets or sum(counts) or 1

        def spread() -> torch.Tensor:
            loss = self.number(self(**local))
            self.backward(loss)
            return self.add_up(loss)

        def plain() -> torch.Tensor:
            self._slot.take(None)
            losses = []
            for one, count in zip(parts, counts, strict=True):
                if count or len(parts) == 1:
                    loss = self.number(self.model(**{**one, **self._always}))
                    loss = loss * (max(count, 1) / total) if means else loss
                    (loss / ranks_that_add_up(self.model, self._groups)).backward()
                    losses.append(loss.detach())
            return torch.stack(losses).sum()

        compare_first_step(self.model, self._groups, spread=spread, plain=plain)

    def _given_alone(
        self, whole: Mapping[str, torch.Tensor], documents: Sequence[Sequence[int]]
    ) -> list[dict[str, torch.Tensor]] | None:
        """The inputs of each document, cut from ``whole`` rows by the lengths of the ``documents``
        of each row; all rows at once where each is one document. None where a plain model would
        not do the same with them."""
        if all(len(row) == 1 for row in documents):
            return [dict(whole)]
        found = []
        for at, row in enumerate(documents):
            for stop, length in zip(accumulate(row), row, strict=True):
                cut = slice(stop - length, stop)
                found.append({k: x[min(at, len(x) - 1)][None, cut] for k, x in whole.items()})
        # Models of transformers have no loss of a row's first label.
        labels = [one[self._label_name] for one in found if self._label_name in one]
        said = self.labels == "next" and any(bool((x[:, 0] != IGNORED).any()) for x in labels)
        own = bool(labels) and not self._hugging  # a loss that may be a mean, or not
        return None if said or own or "attention_mask" in whole else found

    def _with_own_head(
        self, head: WholeHead, placement: Placement, inputs: Mapping[str, torch.Tensor]
    ) -> Any:
        """The results of a model whose own head and loss are run whole. Raises ModelError for a
        step of several batches: its loss is that of one."""
        whole = self._wholes.get(inputs[self.tokens])
        assert self._own_loss is not None, "it has one"
        if whole is None:
            raise self._own_loss
        labels = {"labels": whole[self._label_name]}
        if placement.targets != (count := count_targets(labels, self.labels)):
            raise ModelError(
                f"loss of {type(self.inner).__name__}",
                got=f"a step of {placement.targets} targets, of which the batch has {count}",
                wanted="one batch for each step",
                hint="its own loss is that of one batch: call run(**inputs) without labels, and "
                "sum a loss of your own over part.labels, divided by part.targets",
            )
        return head(
            partial(self._call_with, self._entry.call), placement, inputs, whole, self.tokens
        )

    def _find_own_head(self, known: Mapping[str, torch.Tensor], run: Any, training: bool) -> None:
        """Have a model run its own head and loss whole, where these see nothing of its layers but
        the last hidden states."""
        base = base_of(self.inner)
        registry = self.entry_point == "attention registry"
        if base is None or not registry or self.compiled or self._ends is not None:
            return
        outside = set(self.inner.modules()) - set(base.modules())
        flags = (getattr(m, "gradient_checkpointing", False) for m in self.inner.modules())
        again = self._recompute or any(flags)
        if again and any("attention" in type(m).__name__.lower() for m in outside):
            return  # what computes attention of the head again would take it for spread
        with looked_at(self.model, self._slot, training=training):
            few = few_of({k: v for k, v in known.items() if k != "labels"}, self.tokens)
            given = {**few, self._label_name: few[self.tokens].clone()}
            self._slot.take(None)
            if sees_hidden_states_alone(base, run, given, self.tokens):
                self._whole_head = WholeHead(self.inner, base, self._slot)

    def _call_with(self, call: Callable[..., Any], /, **inputs: Any) -> Any:
        _mark_dynamic(inputs)
        return call(**{**inputs, **self._always})

    def _of_replicas(self, batch: Mapping[str, Any], blocks: Sequence[Members]) -> int | None:
        """The tokens of the batches of all replicas that have a loss. Collective."""
        count = count_targets(batch, self.labels)
        if self._groups is None:
            return count
        counts = gather_floats([float(count or 0)], self._groups.world)
        return None if count is None else round(sum(counts[block[0]][0] for block in blocks))

    def _group(
        self, groups: Groups | None, members: Members
    ) -> tuple[dist.ProcessGroup | None, int]:
        """The process group of the members, world ranks, and this rank's index in it; (None, 0) for
        one process."""
        if groups is None:
            return None, 0
        return groups.get(members), members.index(groups.rank)

    def _find_layers(self, batch: Mapping[str, torch.Tensor]) -> Layers | None:
        """The layers of the model as seen in a run on a few tokens; None where no list of layers
        was found."""
        few, run = self._probe_inputs(batch), partial(self._call_with, self.inner)
        return find_layers(
            self.inner, lambda: run_few(self.inner, run, self._slot, few, self.tokens)
        )

    def _compute_again(self, level: Kept) -> None:
        """Have the blocks of a model without support for checkpoints recompute by ``level``."""
        layers = self._layers
        levels = None if layers is None else self._chosen_levels(layers.modules)
        if layers is None or levels is None:
            raise ModelError(
                f"recompute of {type(self.inner).__name__}",
                got="no blocks that can be seen",
                wanted="a ModuleList of equal blocks, each called with the result of the last",
                hint="call hr.recomputed(block, x) in its forward",
            )
        levels.choose([level] * len(layers))

    def _probe(self, batch: Mapping[str, torch.Tensor]) -> Probed:
        """Run the model on a few tokens of the batch and on parts of them, to learn whether it can
        be spread."""
        run = partial(self._call_with, self._entry.probing)
        return probe(
            self.model,
            run,
            self._slot,
            self._probe_inputs(batch),
            self.tokens,
            places=self._takes_places,
            firsts=self._firsts,
        )

    def _look(self, batch: Mapping[str, torch.Tensor], *, training: bool) -> None:
        """Look at a model that was probed in training or in evaluation, and at its own loss."""
        assert self._probed is not None, "probed"
        run, known = partial(self._call_with, self._entry.probing), self._probe_inputs(batch)
        look_again(
            self.model,
            run,
            self._slot,
            known,
            self.tokens,
            places=self._takes_places,
            first=self._probed.first,
            longest=tried_tokens(batch, self.tokens),
            training=training,
        )
        if self._hugging and self._takes_labels and self._own_loss is None:
            labels = batch.get("labels", batch.get(self._label_name))
            self._own_loss = own_loss(
                self.model,
                run,
                self._slot,
                known if labels is None else known | {"labels": labels},
                self.tokens,
                label_name=self._label_name,
                kind=self.labels,
                training=training,
            )
            if self._own_loss is not None:
                self._find_own_head(known, run, training)
        self._looked.add(training)

    def _probe_inputs(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs of a batch that the model is given when it is probed."""
        named = {self._label_name if k == "labels" else k: v for k, v in batch.items()}
        if self._hugging:
            named.pop(self._label_name, None)
            named[self.tokens] = without_padding(self.inner, named[self.tokens])
        return {name: value for name, value in named.items() if self._takes_field(name)}

    def _takes_field(self, name: str) -> bool:
        """Whether the model is given a field of the batch."""
        if name == "position_ids":
            return self._takes_places
        return self._takes_any or name in self._takes or name == self.tokens


_NO_TOKENS = ("inputs_embeds", "pixel_values", "input_features", "input_values")


_REFUSED_OPTIONS = {
    "use_cache": "a cache of this rank's tokens knows none of others: generate with the model, "
    "which is the plain one outside of run(...)",
    "past_key_values": "a cache of this rank's tokens knows none of others",
    "output_router_logits": "the loss of the router is a mean over tokens of one rank",
}


def _refuse_options(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError for what a call of a model of transformers may ask, and a part cannot."""
    for name, why in _REFUSED_OPTIONS.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            got = "True" if value is True else type(value).__name__
            raise ModelError(name, got=got, wanted="none", hint=why)


def _far_place(config: Any) -> int | None:
    """The number of places beyond which rotary embeddings look at the longest place, if any do."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = list[int]()
    for rope in (given, *given.values()):  # one for all layers, or one for each kind
        kind = rope.get("rope_type", rope.get("type", "")) if isinstance(rope, dict) else ""
        most = int(getattr(config, "max_position_embeddings", 0))
        if "dynamic" in str(kind):
            found.append(most)
        elif kind == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            found.append(int(rope.get("original_max_position_embeddings", own or most)))
    return min(found, default=None)


def arguments_of(model: Any) -> dict[str, inspect.Parameter]:
    """What the forward of ``model`` takes. One that hands on whatever it is given (``*args``,
    ``**named``) takes what that of its parent takes, or that of the model inside an adapter
    (peft)."""
    found = dict(inspect.signature(model.forward).parameters)
    base = getattr(model, "get_base_model", None)
    if not _hands_on(found):
        return found
    if callable(base):
        return arguments_of(base()) | found
    for kind in type(model).__mro__[1:]:
        forward = vars(kind).get("forward")
        if forward is not None and kind is not torch.nn.Module:
            _, *rest = inspect.signature(forward).parameters.items()
            found = dict(rest) | found
            if not _hands_on(dict(rest)):
                break
    return found


def _hands_on(arguments: Mapping[str, inspect.Parameter]) -> bool:
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.kind in rest for p in arguments.values())


def _is_same(x: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether ``x`` is ``own``, a view of all of it, or has its values."""
    if x is own or isinstance(x, FakeTensor):
        return True
    if x.shape != own.shape or x.dtype != own.dtype or x.device != own.device:
        return False
    return x.data_ptr() == own.data_ptr() or torch.equal(x, own)


def _mark_dynamic(inputs: Mapping[str, Any]) -> None:
    """Mark the number of tokens as dynamic, so that one graph serves any number."""
    for value in inputs.values():
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            torch._dynamo.maybe_mark_dynamic(value, 1)  # noqa: SLF001


def _repeat_to(x: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` values; the values are repeated where there are not as many."""
    return x.repeat(-(-count // len(x)), *[1] * (x.dim() - 1))[:count]
