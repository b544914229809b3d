"""Losses that a user makes of a part's results: looked at before their backward.

A rank's part of a loss is a sum over its tokens (places, samples), divided by those of the whole
step. Much that is right in one process is not of a part, and nothing but the numbers would show it:
a mean over the tokens of one rank, its first or last token, its tokens shifted by one, a maximum
over them, the logarithm of a sum over them, products of tokens with others. The graph that autograd
keeps between a loss and the model's results shows these
(:mod:`headrace.adopt.loss_graph`); a mean cross entropy that is divided by
hand shows in its value. What else is divided by counts of one rank shows in the factors of the
graph: whatever is no part is alike on all ranks, and so is what a part is multiplied with. Tensors
that modules keep aside in a forward, and a loss is made of, are looked at as results are: autograd
numbers its nodes as they are made, which tells those of a forward.

Shape legend: b rows of s tokens on this rank; V tokens in a vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite, prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import functional

from headrace.adopt.loss_graph import (
    ADD_UP,
    ALIKE,
    MARK,
    SHARERS,
    WITHIN,
    Made,
    Parted,
    PartOf,
    dims_named,
    follow,
    kind_of,
    nodes_before_results,
    shape_given,
)
from headrace.comm.collectives import gather_floats
from headrace.errors import ModelError
from headrace.ops.loss import IGNORED

__all__ = ["OwnLosses", "functions_of", "note_alike", "note_whole"]

_FORWARDS = 64
"""The last forwards that a loss may use tensors of which modules kept aside."""
_OFTEN = 8
"""Forwards and backwards that are all looked at; later those whose number is a power of two."""
_CHUNK = 2_048
"""Tokens whose cross entropy is computed at a time."""
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative differences that means in another order may have; 1 % in half types."""

_FACTORS = 16
"""Factors of a loss that are compared between ranks, at most."""
_FEW = 8
"""Places that a loss may pick by numbers of its own, at most; more are picked by what they hold."""
_CHANCES = 2
"""Losses in a row that a number of labels may equal that of a rank's tokens in, by chance."""
_FEWEST = 16
"""Tokens of a rank that a divisor is told from any other small number by."""

_CARRYING = frozenset(
    {
        *("Alias", "Clone", "Neg", "ReshapeAlias", "Squeeze", "Sum", "ToCopy", "UnsafeView"),
        *("Unsqueeze", "View"),
    }
)
"""Linear functions of one tensor, before or behind which a single factor is the same."""


_ADDING = frozenset(
    {
        *("Add", "Alias", "Cat", "Clone", "Expand", "Mean", "Nansum", "Neg", "Permute"),
        *("ReshapeAlias", "Rsub", "Select", "Slice", "Split", "Squeeze", "Stack", "Sub", "Sum"),
        *("ToCopy", "Transpose", "Unbind", "UnsafeView", "Unsqueeze", "View"),
    }
)
"""Functions whose results are sums of what they were given, or some of these."""


class OwnLosses:
    """Looks at the losses of the spread forwards of one ``model``. ``hint`` says how they are
    made, ``aside`` how those of tensors that modules keep aside."""

    def __init__(self, model: torch.nn.Module, hint: str, aside: str = "") -> None:
        """Nothing was called yet."""
        self._model, self._hint, self._aside = model, hint, aside or hint
        self._began: int | None = None  # the number of the first node of the forward that runs
        self._made = deque[Made](maxlen=_FORWARDS)
        self._calls = self._backwards = 0
        # Of the last forward that was looked at: the mean cross entropy [] of this rank's labels,
        # and their number.
        self._mean: tuple[torch.Tensor, int] | None = None
        # Shapes of parts whose losses were divided by as many as their tokens, one after another.
        self._suspected = list[tuple[int, ...]]()
        self._last: Parted | None = None  # the last part that was noted

    def begin(self) -> None:
        """Note that a forward begins, whose results are noted when it has ended."""
        self._began = _next_number()

    def note(
        self,
        results: Iterable[tuple[torch.Tensor, Parted | None]],
        sharers: dist.ProcessGroup | None = None,
        *,
        part_of: PartOf,
    ) -> None:
        """Note the results of a forward; None for those that are no parts. Of losses among these
        that the model makes, ``sharers`` have the other terms. ``part_of`` tells what part a tensor
        is that modules keep aside."""
        began, self._began = self._began, None
        stop = _next_number() if began is not None else None
        if began is not None and stop is not None:
            self._made.append(Made(first=began, stop=stop, part_of=part_of))
        for result, parted in results:
            node: Any = result.grad_fn  # torch's types have its metadata as a function
            if node is not None:
                node.metadata[MARK] = parted
                node.metadata[SHARERS] = sharers
            if parted is not None:
                self._last = parted

    def note_labels(self, results: Iterable[torch.Tensor], labels: torch.Tensor | None) -> None:
        """Note the results of a forward, among them perhaps logits [b, s, V], whose part has
        ``labels`` [b, s]; None where the forward had them."""
        self._calls += 1
        self._mean = None
        if labels is not None and _is_due(self._calls) and not labels.is_floating_point():
            size = labels.shape
            logits = next((x for x in results if x.dim() == 3 and x.shape[:2] == size), None)
            count = int((labels != IGNORED).sum()) if logits is not None else 0
            if logits is not None and logits.requires_grad and count:
                self._mean = _cross_entropy_sum(logits.detach(), labels) / count, count

    def require_sum(
        self,
        loss: torch.Tensor,
        *,
        targets: int = 0,
        weighed: bool = False,
        shares: bool = True,
        miscounted: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Raise ModelError, on all ranks that share the part, where a loss is no sum over it.
        Collective among these, now and then.

        Args:
            loss: The loss, [].
            targets: The labels of the whole step.
            weighed: Whether the user weighs means by this rank's share.
            shares: Whether the user has asked for this rank's share: terms are taken to have it.
            miscounted: As for :meth:`error`; it is called where the loss is looked at.
        """
        self._backwards += 1
        if not _is_due(self._backwards):
            return
        error = self.error(
            loss, targets=targets, weighed=weighed, shares=shares, miscounted=miscounted()
        )
        if error is not None:
            raise error

    def error(
        self,
        loss: torch.Tensor,
        *,
        targets: int = 0,
        weighed: bool = False,
        alike: bool = True,
        shares: bool = True,
        miscounted: float = 0.0,
    ) -> ModelError | None:
        """What is wrong with a loss that is no sum over the part, on all ranks that share the part;
        None where nothing is. Collective among these.

        Args:
            loss: The loss, [].
            targets: The labels of the whole step.
            weighed: Whether the user weighs means by this rank's share.
            alike: Whether what parts are multiplied with must be alike on all ranks: not where
                shares are, which differ.
            shares: Whether terms that ranks have alike are taken to have this rank's share.
            miscounted: By how much mean losses count other labels than the step does: a number
                whose sum over ranks is 0 where they count as many.

        Returns:
            The error.
        """
        nodes = self._nodes_of(loss)
        # A loss that the model makes is among its results, and no part: it may be left unused.
        if all(node.metadata.get(MARK, nodes) is not None for node in nodes) and nodes:
            miscounted = 0.0
        made_of, wrong = follow(nodes, weighed=weighed)
        factors = _factors(nodes, made_of)
        found = (
            self._learnt_beside(nodes)
            or _compiled_within(nodes)
            or ("" if shares else self._added_by_all(nodes))
            or ("" if wrong.startswith(ADD_UP) else wrong)
            or self._mean_by_hand(loss, targets)
            or self._divided_by_tokens(nodes, made_of, factors, targets)
        )
        # Ranks that share a part run the same code, and so make losses of the same results.
        parts = filter(None, (node.metadata.get(MARK) for node in nodes))
        # Nothing is known of a graph that is too large; that of another rank may be smaller.
        known = parts if nodes else filter(None, [self._last])
        group = next((part.group for part in known), None)
        sharers = (node.metadata.get(SHARERS) for node in nodes)
        group = group or next(filter(None, sharers), None)
        if group is None and not found:
            if wrong:
                return self._error_of(wrong, nodes)
            return _miscounting() if miscounted else None
        compared = factors, _indices(nodes, made_of), _weights(nodes, made_of)
        told = [[float(len(own)), *_checksums(own)] for own in compared]
        rows = gather_floats([bool(found), miscounted, bool(wrong), *chain(*told)], group)
        others = group is not None and any(row[0] for row in rows)
        if not found and not others:
            if sum(row[1] for row in rows):
                return _miscounting()
            size = len(told[0])
            numbers, picked, weights = (
                [row[at : at + size] for row in rows] for at in range(3, 3 + 3 * size, size)
            )
            # One rank may have all that the whole step has.
            if sum(row[2] for row in rows) > 1:
                found = f"{ADD_UP} over tokens of one rank"
            found = found or (_said_of_factors(numbers) if alike else "")
            if _are_alike(picked):
                found = found or "some of the places of one rank, by their numbers in its part"
            if _are_alike(weights):
                found = found or "weights of places that each rank counts from its first one"
            if not found:
                return None
        return self._error_of(found or "what another rank refuses", nodes)

    def error_after(self, loss: torch.Tensor, *, weighed: bool = False) -> ModelError | None:
        """What is wrong with a loss whose gradients were made without :meth:`require_sum`, on this
        rank, as far as its graph still tells.

        Args:
            loss: The loss, [].
            weighed: Whether the user weighs means by this rank's share.

        Returns:
            The error; None where nothing is wrong.
        """
        nodes = self._nodes_of(loss)
        try:
            found = self._learnt_beside(nodes) or _compiled_within(nodes)
            found = found or follow(nodes, weighed=weighed)[1]
        except RuntimeError:  # of tensors that a backward has freed
            found = ""
        return self._error_of(found, nodes) if found else None

    def require_own(self, loss: torch.Tensor) -> None:
        """Raise ModelError for a loss that ranks have alike, [], by which others than the model's
        weights learn: their gradients are summed by nobody."""
        nodes = self._nodes_of(loss)
        found = self._learnt_beside(nodes)
        if found:
            raise self._error_of(found, nodes)

    def _nodes_of(self, loss: torch.Tensor) -> list[Any]:
        """The nodes between a loss and results, as :func:`nodes_before_results` has them, where
        parts that modules kept aside are results, too, and are marked as these are."""
        return nodes_before_results(loss.grad_fn, made=self._made)

    def _learnt_beside(self, nodes: Sequence[Any]) -> str:
        """What is said of weights between a loss and the results of forwards that are not the
        model's; nothing where there are none. What a user makes of tokens (detached logits, a
        disturbance of each token) has gradients of its own rank."""
        # A number that is only added to a loss, as one to begin with, learns nothing.
        used = [
            parent
            for node in nodes
            for parent, _ in node.next_functions
            if hasattr(parent, "variable")
            and (parent.variable.numel() > 1 or kind_of(node) not in ("Add", "Sub"))
        ]
        leaves = [node.variable for node in used]
        learnt = [x for x in leaves if isinstance(x, torch.nn.Parameter) or self._is_learnt(x)]
        own = list(self._model.parameters()) if learnt else []
        known = set(map(id, own))
        # FSDP2 gathers shards into other tensors, which are told by their shapes alone.
        gathered = {x.shape for x in own if isinstance(x, DTensor)}
        shapes = (list(x.shape) for x in learnt if id(x) not in known and x.shape not in gathered)
        said = "weights {} beside the model, whose gradients nobody sums"
        return next((said.format(shape) for shape in shapes), "")

    def _added_by_all(self, nodes: Sequence[Any]) -> str:
        """What is said of a loss with a term that all ranks which share a part add alike: of the
        model's weights, or of means over all tokens; nothing of others."""
        part = self._last
        if not nodes or part is None or part.group is None:
            return ""
        own = set(map(id, self._model.parameters()))
        for term in _terms(nodes[-1]):
            inner = nodes_before_results(term, ALIKE)
            leaves = [node.variable for node in inner if hasattr(node, "variable")]
            is_alike = any(ALIKE in node.metadata for node in inner) or bool(leaves)
            is_alike &= all(id(leaf) in own for leaf in leaves)
            if is_alike and not any(MARK in node.metadata or _is_of(part, node) for node in inner):
                return "terms of weights, or of run.mean, that every rank adds"
        return ""

    def _is_learnt(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf of autograd's that is no parameter is a number, or a few, of no token."""
        return leaf.dim() < 2 and not (self._last and self._last.dims_in(leaf.shape))

    def _error_of(self, found: str, nodes: Sequence[Any]) -> ModelError:
        """The error for a loss, made by ``nodes``, of which this was found."""
        if found.startswith("weights ["):
            wanted = "the model's own"
            hint = "make one module of both, or torch.no_grad() around what is not to learn"
        elif found.startswith("terms"):
            wanted, hint = "run.share of each", "write loss + run.share * term"
        else:
            wanted = "a sum over this rank's part, divided by what the whole step has"
            aside = any(WITHIN in node.metadata for node in nodes)
            hint = self._aside if aside else self._hint
        return ModelError("loss of a part", got=found, wanted=wanted, hint=hint)

    def _divided_by_tokens(
        self,
        nodes: Sequence[Any],
        made_of: Mapping[Any, Parted],
        factors: Sequence[torch.Tensor],
        targets: int,
    ) -> str:
        """What is said of a loss that is divided by the tokens of one rank; nothing of others.
        Where the labels of the step are not known, they may be as many by chance: it is said once
        that was so for tokens of another number, or three times in a row."""
        said = _divided_by_tokens(nodes, factors, targets)
        if said and targets and _divides_by(nodes, made_of, targets):
            return ""  # with another factor as many as the tokens by chance
        parts = [node.metadata[MARK] for node in nodes if node.metadata.get(MARK) is not None]
        if not said or targets or parts[0].word != "tokens":
            self._suspected.clear()
            return said
        self._suspected.append(parts[0].shape)
        follows = len(set(self._suspected)) > 1 or len(self._suspected) > _CHANCES
        return f"{said}: say shard(batch, targets=) where it is of the step" if follows else ""

    def _mean_by_hand(self, loss: torch.Tensor, targets: int) -> str:
        """What is said of a loss that is the mean cross entropy of this rank's labels; nothing
        where it is another."""
        if self._mean is None:
            return ""
        mean, count = self._mean
        tolerance = _TOLERANCES.get(loss.dtype, 1e-2)
        same = bool((loss.detach() - mean).abs() <= tolerance * mean.abs())
        wrong = same and count != targets
        return f"the mean cross entropy of the {count} labels of one rank" if wrong else ""


def _miscounting() -> ModelError:
    """The error for means that the model makes of other labels than those of the step."""
    return ModelError(
        "mean cross entropy that the model makes",
        got="other labels than those that are counted as the step's targets",
        wanted="as many labels that are not -100",
        hint="leave labels out of the batch (-100) rather than in the forward; sum other losses "
        '(reduction="sum") over a number of the whole step, or say shard(..., targets=) for one '
        "whose labels the model chooses",
    )


def _next_number() -> int | None:
    """The number that autograd gives the next node; None where it makes none."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        node: Any = torch.zeros((), device="cpu", requires_grad=True).clone().grad_fn
    return None if node is None else int(node._sequence_nr()) + 1  # noqa: SLF001


def note_alike(x: torch.Tensor) -> None:
    """Note that ranks which share a part have a tensor alike, and each may add terms of it."""
    node: Any = x.grad_fn
    if node is not None:
        node.metadata[ALIKE] = True


def note_whole(x: torch.Tensor) -> None:
    """Note that a tensor which was made of parts is none: ranks that share them have it alike."""
    node: Any = x.grad_fn
    if node is not None:
        node.metadata[MARK] = None


def functions_of(loss: torch.Tensor) -> frozenset[str]:
    """Name the functions that a loss is made by from the results of forwards that were noted.

    Args:
        loss: The loss, [].

    Returns:
        Beginnings of the names of autograd's nodes; none where there are too many nodes.
    """
    return frozenset(map(kind_of, nodes_before_results(loss.grad_fn)))


def _is_due(number: int) -> bool:
    """Whether the forward or backward of this number is looked at."""
    return number <= _OFTEN or not number & (number - 1)


def _cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum [] of the cross entropies of ``logits`` [b, s, V], a chunk of tokens at a time."""
    pairs = zip(logits.flatten(0, 1).split(_CHUNK), labels.flatten().split(_CHUNK), strict=True)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    sums = [
        functional.cross_entropy(some.to(wide), own, ignore_index=IGNORED, reduction="sum")
        for some, own in pairs
    ]
    return torch.stack(sums).sum()


def _factors(nodes: Sequence[Any], made_of: Mapping[Any, Parted]) -> list[torch.Tensor]:
    """What parts, and sums over them, are multiplied with on the way to the loss and is no part
    itself: products of neighbouring factors, so that a mean weighed by its count is as a sum."""
    factor_of, found = dict[Any, torch.Tensor](), list[torch.Tensor]()
    for node in nodes:
        parted = made_of.get(node)
        if parted is None or MARK in node.metadata:
            continue
        kind, before = kind_of(node), [factor_of.get(parent) for parent, _ in node.next_functions]
        own = _own_factor(node, kind, parted)
        carried = next((factor for factor in before if factor is not None), None)
        of_one = sum(parent is not None for parent, _ in node.next_functions) == 1
        fits = carried is None or carried.dim() == 0
        fits = fits or (own is not None and own.shape in ((), carried.shape))
        carries = own is not None or (kind in _CARRYING and carried is not None)
        if carries and of_one and fits:
            product = own if carried is None else carried if own is None else own * carried
            assert product is not None, "a node that carries has a factor"
            factor_of[node] = product
            continue
        found += [factor for factor in (*before, own) if factor is not None]
    last = factor_of.get(nodes[-1]) if nodes else None
    return (found if last is None else [*found, last])[-_FACTORS:]


def _indices(nodes: Sequence[Any], made_of: Mapping[Any, Parted]) -> list[torch.Tensor]:
    """The numbers by which a few places of parts are picked."""
    found = list[torch.Tensor]()
    for node in nodes:
        kind = kind_of(node)
        if kind not in ("Gather", "Index", "IndexSelect") or MARK in node.metadata:
            continue
        parted, shape = made_of.get(node.next_functions[0][0]), shape_given(node)
        if parted is None or parted.summed or shape is None or parted.word == "samples":
            continue
        if WITHIN in node.metadata or not parted.dims:
            continue
        dims = parted.dims
        if kind == "Index":
            picked = [x for dim, x in enumerate(node._saved_indices) if dim in dims]  # noqa: SLF001
        else:
            named = dims_named(node, len(shape)) or []
            picked = [node._saved_index] if set(named) & set(dims) else []  # noqa: SLF001
        most = min(_FEW * (shape[0] if 0 not in dims else 1), shape[dims[0]] // 4)
        for x in picked:
            if x is not None and x.dtype != torch.bool:
                count = x.shape[dims[0]] if kind == "Gather" else x.numel()
                found += [x.to(torch.float64)] if 0 < count <= most else []
    return found[-_FACTORS:]


def _weights(nodes: Sequence[Any], made_of: Mapping[Any, Parted]) -> list[torch.Tensor]:
    """The first weights of tokens that parts are multiplied with, which differ and are no masks."""
    found = list[torch.Tensor]()
    for node in nodes:
        part = made_of.get(node)
        if part is None or len(part.dims) != 1 or MARK in node.metadata:
            continue
        if part.word == "samples" or WITHIN in node.metadata or kind_of(node) != "Mul":
            continue
        kept = [getattr(node, f"_saved_{name}", None) for name in ("self", "other")]
        tensors = [x.detach() for x in kept if isinstance(x, torch.Tensor)]
        if len(tensors) == 1 and part.varies_with(tensors[0].shape):
            dim = part.dims[0] - len(part.shape)
            rows = tensors[0].movedim(dim, 0).flatten(1) if tensors[0].dim() > 1 else tensors[0]
            first = (rows[:, 0] if rows.dim() > 1 else rows)[:_FEWEST].to(torch.float64)
            is_mask = bool(((first == 0) | (first == 1)).all())
            differ = bool((first != first[0]).any())
            found += [first] if len(first) == _FEWEST and differ and not is_mask else []
    return found[-_FACTORS:]


def _own_factor(node: Any, kind: str, parted: Parted) -> torch.Tensor | None:
    """What a node multiplies a part with, in fp64; None where that is nothing, a part too, or has
    a gradient."""
    if kind not in ("Mul", "Div") or WITHIN in node.metadata:
        return None
    one, other = (getattr(node, f"_saved_{name}", None) for name in ("self", "other"))
    if kind == "Div":
        factor = other if one is None else None
    else:
        factor = (other if one is None else one) if (one is None) != (other is None) else None
    if isinstance(factor, (int, float)):
        factor = torch.tensor(float(factor), dtype=torch.float64, device=_device_of(node))
    if not isinstance(factor, torch.Tensor) or parted.varies_with(factor.shape):
        return None
    wide = factor.detach().to(torch.float64).squeeze()
    if wide.dim() and wide.numel() and bool((wide == wide.flatten()[0]).all()):
        wide = wide.flatten()[0]  # one number, repeated for each row or class
    # Others than single ones are of rows; what else there is may be of tokens in another shape.
    if wide.dim() and (wide.shape != parted.shape[:1] or 0 in parted.dims):
        return None
    return wide.reciprocal() if kind == "Div" else wide


def _divides_by(nodes: Sequence[Any], made_of: Mapping[Any, Parted], count: int) -> bool:
    """Whether a node divides what is made of a part by ``count``."""
    inner = [node for node in nodes if node in made_of and MARK not in node.metadata]
    factors = (_own_factor(node, kind_of(node), made_of[node]) for node in inner)
    return any(x is not None and not x.dim() and abs(float(x) * count - 1) < 1e-9 for x in factors)


def _device_of(node: Any) -> torch.device:
    """Where the result of a node is."""
    return torch.device(node._input_metadata[0].device)  # noqa: SLF001


def _checksums(factors: Sequence[torch.Tensor]) -> list[float]:
    """One number for each of so many factors, the same wherever they are; 0 for those that are
    missing."""
    sums = [
        (factor.flatten() * torch.arange(1, factor.numel() + 1, device=factor.device)).sum()
        for factor in factors
    ]
    numbers: list[float] = torch.stack(sums).tolist() if sums else []
    return numbers + [0.0] * (_FACTORS - len(numbers))


def _said_of_factors(rows: Sequence[Sequence[float]]) -> str:
    """What is said of factors that differ between ranks, given for each rank their number and
    checksums; nothing where they are alike. A rank without a label may count 0."""
    if any(row[0] != rows[0][0] for row in rows):
        return ""
    for numbers in list(zip(*rows, strict=True))[1:]:
        least, most = min(numbers), max(numbers)
        known = all(map(isfinite, numbers)) and all(numbers)
        if known and most - least > 1e-6 * max(abs(least), abs(most)):
            return "what is divided by numbers that differ between ranks, such as their own counts"
    return ""


def _are_alike(rows: Sequence[Sequence[float]]) -> bool:
    """Whether some tensor is the same on all ranks, given for each rank their number and
    checksums."""
    if any(row[0] != rows[0][0] for row in rows):
        return False
    columns = list(zip(*rows, strict=True))[1 : 1 + int(rows[0][0])]
    return any(len(set(numbers)) == 1 for numbers in columns)


def _divided_by_tokens(nodes: Sequence[Any], factors: Sequence[torch.Tensor], targets: int) -> str:
    """What is said of a loss that is divided by the tokens of one rank; nothing of others."""
    marks = [node.metadata[MARK] for node in nodes if node.metadata.get(MARK) is not None]
    if not marks or not factors or factors[-1].dim() or not float(factors[-1]):
        return ""
    divisor, part = 1 / abs(float(factors[-1])), marks[0]
    first = max(part.dims, default=0)
    ends = {prod(part.shape[: end + 1]) for end in range(first, len(part.shape))}
    # What the whole step has may be as many as this rank has of something else.
    of_all = {count * dist.get_world_size(part.group) for count in ends} | {targets}
    counts = ends | {prod(part.shape[dim] for dim in part.dims)}
    same = [count for count in counts - of_all if abs(divisor - count) < 1e-6 * count]
    found = any(count >= _FEWEST for count in same)
    return f"what is divided by the {part.word} of one rank" if found else ""


def _terms(last: Any) -> Iterator[Any]:
    """Yield the nodes whose results, each perhaps times a number, are added up to that of
    ``last``."""
    stack = [last]
    while stack:
        node = stack.pop()
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        kind, ends = kind_of(node), MARK in node.metadata or ALIKE in node.metadata
        size = prod(node._input_metadata[0].shape)  # noqa: SLF001
        adds = kind in _ADDING and size < _FEWEST  # of numbers, and not of tokens
        times = kind in ("Mul", "Div", "Dot", "Mv") and len(parents) == 1
        if times and kind == "Mul" and _is_zero(node):
            continue  # people add 0 * weights, so that each weight has a gradient
        if parents and not ends and (adds or times):
            stack += parents
        else:
            yield node


def _is_zero(node: Any) -> bool:
    """Whether a node multiplies something by 0."""
    kept = (getattr(node, f"_saved_{name}", None) for name in ("self", "other"))
    factors = [x for x in kept if isinstance(x, (int, float, torch.Tensor))]
    return len(factors) == 1 and not bool(torch.as_tensor(factors[0]).any())


def _is_of(part: Parted, node: Any) -> bool:
    """Whether a node made something of the tokens of a part, by the shapes of its results."""
    return any(part.dims_in(tuple(x.shape)) for x in getattr(node, "_input_metadata", ()))


def _compiled_within(nodes: Sequence[Any]) -> str:
    """What is said of numbers that compiled modules make in a forward and keep aside; nothing where
    there are none."""
    kept = (node for node in nodes if WITHIN in node.metadata and MARK not in node.metadata)
    found = any(node.name().startswith("CompiledFunction") for node in kept)
    return "numbers that a compiled module makes and keeps aside" if found else ""
