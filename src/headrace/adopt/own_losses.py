"""Losses that a user makes of a part's results: looked at before their backward.

A rank's part of a loss is a sum over its tokens (places, samples), divided by those of the whole
step. Much that is right in one process is not of a part, and nothing but the numbers would show it:
a mean over the tokens of one rank, its first or last token, its tokens shifted by one, a maximum
over them, the logarithm of a sum over them, products of tokens with others. The graph that autograd
keeps between a loss and the model's results shows these; a mean cross entropy that is divided by
hand shows in its value. What else is divided by counts of one rank shows in the factors of the
graph: whatever is no part is alike on all ranks, and so is what a part is multiplied with. Tensors
that modules keep aside in a forward, and a loss is made of, are looked at as results are: autograd
numbers its nodes as they are made, which tells those of a forward.

Shape legend: b rows of s tokens on this rank; V tokens in a vocabulary.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite, prod
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor
from torch.nn import functional

from headrace.comm.collectives import gather_floats
from headrace.errors import ModelError
from headrace.ops.loss import IGNORED

__all__ = ["OwnLosses", "PartOf", "Parted", "functions_of", "note_alike", "note_whole"]

_MARK = "headrace part"
"""The key under which a node of autograd has the :class:`Parted` results that it made."""
_SHARERS = "headrace sharers"
"""The key under which it has the group of ranks that share the batch of its forward."""
_WITHIN = "headrace within"
"""The key of nodes that a forward has made. What they have saved is not read, as a checkpoint would
compute it again."""
_ALIKE = "headrace alike"
"""The key of nodes whose results ranks have alike, as those of ``run.mean``."""
_FORWARDS = 64
"""The last forwards that a loss may use tensors of which modules kept aside."""
_NODES = 1_000
"""Nodes between a loss and the results that are looked at, at most."""
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

_REDUCED = {
    "Mean": "a mean",
    "Std": "a deviation",
    "StdMean": "a deviation",
    "Var": "a variance",
    "VarMean": "a variance",
}
_JOINED = {
    "Softmax": "a softmax",
    "LogSoftmax": "a softmax",
    "Logsumexp": "a sum of exponentials",
    "Max": "a maximum",
    "Min": "a minimum",
    "Amax": "a maximum",
    "Amin": "a minimum",
    "Cumsum": "running sums",
    "Cumprod": "running products",
    "Logcumsumexp": "running sums",
    "Prod": "a product",
    "Norm": "a norm",
    "LinalgVectorNorm": "a norm",
    "Median": "a median",
    "Nanmedian": "a median",
    "Kthvalue": "a median",
    "Mode": "a mode",
    "Sort": "an order",
    "Topk": "the largest",
    "Flip": "other places",
    "Roll": "other places",
    "Convolution": "a convolution",
    "NativeLayerNorm": "a norm",
    "NativeBatchNorm": "a norm",
    "CudnnBatchNorm": "a norm",
}
"""Beginnings of the names of nodes whose functions work along dims, and what those make."""
_WINDOWS = ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Upsample")
"""Beginnings of the names of nodes whose functions work along the last dims, behind the second."""
_PRODUCTS = {"Bmm": ("self", "mat2"), "Mm": ("self", "mat2"), "Cdist": ("x1", "x2")}
"""Products of matrices, in which all rows of one meet all of the other, and the names of both."""
_CARRYING = frozenset(
    {
        *("Alias", "Clone", "Neg", "ReshapeAlias", "Squeeze", "Sum", "ToCopy", "UnsafeView"),
        *("Unsqueeze", "View"),
    }
)
"""Linear functions of one tensor, before or behind which a single factor is the same."""
_NOT_LINEAR = frozenset(
    {
        *("Abs", "BinaryCrossEntropyWithLogits", "Clamp", "ClampMax", "ClampMin", "Exp", "Expm1"),
        *("HuberLoss", "LinalgVectorNorm", "Log", "Log1P", "LogSigmoid", "LogSoftmax", "Logsumexp"),
        *("Max", "Maximum", "Min", "Minimum", "MseLoss", "NllLoss", "Norm", "Pow", "Reciprocal"),
        *("Relu", "Rsqrt", "Sigmoid", "SmoothL1Loss", "Softmax", "Softplus", "Sqrt", "Tanh"),
    }
)
"""Beginnings of the names of nodes whose functions are not linear."""
_MEAN, _SUM = 1, 2  # torch's numbers of the reductions by a mean and by a sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """A result of a spread forward, of which every rank has a part.

    Attributes:
        shape: Its shape on this rank.
        dims: The dims along which it is a part.
        word: What lies along them: ``tokens``, ``places`` or ``samples``.
        known: Whether ``dims`` are all of them; else only what works along all dims is looked at.
        weighed: Whether means over the part may be weighed by ``run.share``, exactly.
        summed: Whether it was summed over its part since, and so has no such dims any more.
        group: The ranks that share the part; None for one alone.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    word: str
    known: bool = True
    weighed: bool = False
    summed: bool = False
    group: dist.ProcessGroup | None = None

    def dims_in(self, shape: Sequence[int]) -> list[int]:
        """The dims of the part in a tensor of ``shape`` that was made of the result, with the same
        dims or the first of them flattened; none where it has none."""
        if not shape or not self.shape:
            return []
        same_rows = shape[0] == self.shape[0]
        found = [
            dim
            for dim in self.dims
            if same_rows and len(shape) > dim and shape[dim] == self.shape[dim]
        ]
        first = max(self.dims, default=0)
        flat = [prod(self.shape[:end]) for end in range(first + 1, len(self.shape) + 1)]
        return found or ([0] if first and shape[0] in flat else [])


PartOf = Callable[[tuple[int, ...]], Parted | None]
"""What part a tensor of a shape is, which a forward has made; None where it is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """The nodes of autograd that a forward has made: those of the numbers [``first``, ``stop``).
    ``part_of`` tells what part a tensor of a shape is."""

    first: int
    stop: int
    part_of: PartOf

    def part(self, node: Any, number: int) -> Parted | None:
        """What part a result of one of these nodes is, by its shape; None where it is none."""
        return self.part_of(tuple(node._input_metadata[number].shape))  # noqa: SLF001


class OwnLosses:
    """Looks at the losses of the spread forwards of one ``model``. ``hint`` says how they are
    made, ``aside`` how those of tensors that modules keep aside."""

    def __init__(self, model: torch.nn.Module, hint: str, aside: str = "") -> None:
        """Nothing was called yet."""
        self._model, self._hint, self._aside = model, hint, aside or hint
        self._began: int | None = None  # the number of the first node of the forward that runs
        self._made = deque[_Made](maxlen=_FORWARDS)
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
            self._made.append(_Made(first=began, stop=stop, part_of=part_of))
        for result, parted in results:
            node: Any = result.grad_fn  # torch's types have its metadata as a function
            if node is not None:
                node.metadata[_MARK] = parted
                node.metadata[_SHARERS] = sharers
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
        if all(node.metadata.get(_MARK, nodes) is not None for node in nodes) and nodes:
            miscounted = 0.0
        made_of = _parts_made_of(nodes)
        factors = _factors(nodes, made_of)
        found = (
            self._learnt_beside(nodes)
            or _compiled_within(nodes)
            or ("" if shares else self._added_by_all(nodes))
            or _found(nodes, made_of, weighed=weighed)
            or self._mean_by_hand(loss, targets)
            or self._divided_by_tokens(nodes, factors, targets)
        )
        # Ranks that share a part run the same code, and so make losses of the same results.
        parts = filter(None, (node.metadata.get(_MARK) for node in nodes))
        # Nothing is known of a graph that is too large; that of another rank may be smaller.
        known = parts if nodes else filter(None, [self._last])
        group = next((part.group for part in known), None)
        sharers = (node.metadata.get(_SHARERS) for node in nodes)
        group = group or next(filter(None, sharers), None)
        if group is None and not found:
            return _miscounting() if miscounted else None
        indices = _indices(nodes, made_of)
        told = [[float(len(own)), *_checksums(own)] for own in (factors, indices)]
        rows = gather_floats([bool(found), miscounted, *told[0], *told[1]], group)
        others = group is not None and any(row[0] for row in rows)
        if not found and not others:
            if sum(row[1] for row in rows):
                return _miscounting()
            middle = 2 + len(told[0])
            found = _said_of_factors([row[2:middle] for row in rows]) if alike else ""
            found = found or _said_of_indices([row[middle:] for row in rows])
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
            found = found or _found(nodes, _parts_made_of(nodes), weighed=weighed)
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
        """The nodes between a loss and results, as :func:`_nodes_before_results` has them, where
        parts that modules kept aside are results, too, and are marked as these are."""
        return _nodes_before_results(loss.grad_fn, made=self._made)

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
            and (parent.variable.dim() or _kind(node) not in ("Add", "Sub"))
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
            inner = _nodes_before_results(term, _ALIKE)
            leaves = [node.variable for node in inner if hasattr(node, "variable")]
            is_alike = any(_ALIKE in node.metadata for node in inner) or bool(leaves)
            is_alike &= all(id(leaf) in own for leaf in leaves)
            if is_alike and not any(_MARK in node.metadata or _is_of(part, node) for node in inner):
                return "terms of weights, or of run.mean, that every rank adds"
        return ""

    def _is_learnt(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf of autograd's that is no parameter is a number, or a few, of no token."""
        return leaf.dim() < 2 and not (self._last and self._last.dims_in(leaf.shape))

    def _error_of(self, found: str, nodes: Sequence[Any]) -> ModelError:
        """The error for a loss, made by ``nodes``, of which this was found."""
        if found.startswith("weights"):
            wanted = "the model's own"
            hint = "make one module of both, or torch.no_grad() around what is not to learn"
        elif found.startswith("terms"):
            wanted, hint = "run.share of each", "write loss + run.share * term"
        else:
            wanted = "a sum over this rank's part, divided by what the whole step has"
            aside = any(_WITHIN in node.metadata for node in nodes)
            hint = self._aside if aside else self._hint
        return ModelError("loss of a part", got=found, wanted=wanted, hint=hint)

    def _divided_by_tokens(
        self, nodes: Sequence[Any], factors: Sequence[torch.Tensor], targets: int
    ) -> str:
        """What is said of a loss that is divided by the tokens of one rank; nothing of others.
        Where the labels of the step are not known, they may be as many by chance: it is said once
        that was so for tokens of another number, or three times in a row."""
        said = _divided_by_tokens(nodes, factors, targets)
        parts = [node.metadata[_MARK] for node in nodes if node.metadata.get(_MARK) is not None]
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


def note_alike(x: torch.Tensor) -> None:
    """Note that ranks which share a part have a tensor alike, and each may add terms of it."""
    node: Any = x.grad_fn
    if node is not None:
        node.metadata[_ALIKE] = True


def note_whole(x: torch.Tensor) -> None:
    """Note that a tensor which was made of parts is none: ranks that share them have it alike."""
    node: Any = x.grad_fn
    if node is not None:
        node.metadata[_MARK] = None


def functions_of(loss: torch.Tensor) -> frozenset[str]:
    """Name the functions that a loss is made by from the results of forwards that were noted.

    Args:
        loss: The loss, [].

    Returns:
        Beginnings of the names of autograd's nodes; none where there are too many nodes.
    """
    return frozenset(map(_kind, _nodes_before_results(loss.grad_fn)))


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


def _parts_made_of(nodes: Sequence[Any]) -> dict[Any, Parted]:
    """For each of the ``nodes`` that depends on a part, the part with the shape and dims that the
    node's result has of it."""
    made_of = dict[Any, Parted]()
    for node in nodes:
        if _MARK in node.metadata:
            parted = node.metadata[_MARK]
        elif isinstance(node, BackwardCFunction):
            parted = None  # what a function of Python makes is not known: it may be of all ranks
        else:
            given = [made_of.get(parent) for parent, _ in node.next_functions]
            parted = next(filter(None, given), None)
            if parted is not None and not parted.summed:
                summed = _is_sum(node, parted)
                parted = replace(parted, summed=True) if summed else _turned(node, parted)
        if parted is not None:
            made_of[node] = parted
    return made_of


def _turned(node: Any, parted: Parted) -> Parted:
    """A part with the shape and dims that it has in the result of a node that transposes it, gives
    it a dim or takes one, or picks some of its tokens; the same for any other node."""
    kind, count = _kind(node), len(parted.shape)
    if not parted.known:
        return parted
    if kind in ("Index", "MaskedSelect"):
        return _of_picked(node, parted)
    dims = list(range(count))  # of the part, in the order of the result; -1 is a new one
    if kind == "Transpose":
        one, other = (_signed(at) % count for at in (node._saved_dim0, node._saved_dim1))  # noqa: SLF001
        dims[one], dims[other] = dims[other], dims[one]
    elif kind == "Unsqueeze":
        dims.insert(_signed(node._saved_dim) % (count + 1), -1)  # noqa: SLF001
    elif kind == "Squeeze" and isinstance(getattr(node, "_saved_dim", None), int):
        squeezed = _signed(node._saved_dim) % count  # noqa: SLF001
        dims = [dim for dim in dims if dim != squeezed or parted.shape[dim] != 1]
    else:
        return parted
    shape = tuple(parted.shape[dim] if dim >= 0 else 1 for dim in dims)
    kept = tuple(at for at, dim in enumerate(dims) if dim in parted.dims)
    return replace(parted, shape=shape, dims=kept)


def _of_picked(node: Any, parted: Parted) -> Parted:
    """A part of which a node picks tokens, by a mask or by their numbers: they lie along the first
    dim then."""
    shape = _shape_of(node) or ()
    if _WITHIN in node.metadata:
        return replace(parted, shape=tuple(node._input_metadata[0].shape), dims=(0,))  # noqa: SLF001
    if _kind(node) == "MaskedSelect":
        mask = node._saved_mask  # noqa: SLF001
        is_of_tokens = bool(parted.dims_in(mask.shape))
        return replace(parted, shape=(int(mask.sum()),), dims=(0,)) if is_of_tokens else parted
    indices = list(node._saved_indices)  # noqa: SLF001
    if not indices or any(x is None for x in indices):
        return parted
    # A mask stands for as many dims as it has, numbers for one.
    covered = sum(x.dim() if x.dtype == torch.bool else 1 for x in indices)
    if not any(dim < covered for dim in parted.dims_in(shape)):
        return parted
    first = indices[0]
    count = int(first.sum()) if first.dtype == torch.bool else first.numel()
    return replace(parted, shape=(count, *shape[covered:]), dims=(0,))


def _found(nodes: Sequence[Any], made_of: Mapping[Any, Parted], *, weighed: bool) -> str:
    """What the ``nodes`` between a loss and the results of forwards do that is wrong for parts;
    nothing where there is nothing. Means may be ``weighed``."""
    # What is taken of a node's result along a dim: [start, stop) of so many, each time.
    taken: dict[tuple[Any, int], list[tuple[int, int, int]]] = {}
    used = defaultdict[Any, set[int]](set)  # which of its several results are used, by node
    for node in nodes:
        for parent, number in node.next_functions:
            used[parent].add(number)
    for node in nodes:
        if _MARK in node.metadata or node not in made_of:
            continue
        given = [made_of.get(parent) for parent, _ in node.next_functions]
        parted = next(filter(None, given))
        said = _said_of(node, parted, given, weighed=weighed)
        if said:
            return said
        picked = _picked(node, parted)
        if picked is not None:
            dim, start, stop, size = picked
            places = taken.setdefault((node.next_functions[0][0], dim), [])
            places.append((start, stop, size))
        if len(used[node]) < _pieces(node, parted):
            return f"some of the {parted.word} of one rank, by their numbers in its part"
    if all(map(_covers, taken.values())):
        return ""
    return "some of the places of one rank, by their numbers in its part"


def _pieces(node: Any, parted: Parted) -> int:
    """Into how many pieces a node cuts a part along its dims; 0 where it does not."""
    kind = _kind(node)
    if kind not in ("Split", "Unbind") or parted.summed or parted.word == "samples":
        return 0
    dim = _signed(node._saved_dim) % len(parted.shape)  # noqa: SLF001
    shape = parted.shape if kind == "Unbind" else _shape_of(node) or ()
    if dim not in parted.dims_in(shape):
        return 0
    return shape[dim] if kind == "Unbind" else -(-shape[dim] // int(node._saved_split_size))  # noqa: SLF001


def _factors(nodes: Sequence[Any], made_of: Mapping[Any, Parted]) -> list[torch.Tensor]:
    """What parts, and sums over them, are multiplied with on the way to the loss and is no part
    itself: products of neighbouring factors, so that a mean weighed by its count is as a sum."""
    factor_of, found = dict[Any, torch.Tensor](), list[torch.Tensor]()
    for node in nodes:
        parted = made_of.get(node)
        if parted is None or _MARK in node.metadata:
            continue
        kind, before = _kind(node), [factor_of.get(parent) for parent, _ in node.next_functions]
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
        kind = _kind(node)
        if kind not in ("Gather", "Index", "IndexSelect"):
            continue
        parted = next(
            filter(None, (made_of.get(parent) for parent, _ in node.next_functions)), None
        )
        shape = _shape_of(node)
        if parted is None or parted.summed or shape is None or parted.word == "samples":
            continue
        if _WITHIN in node.metadata:
            continue
        dims = parted.dims_in(shape)
        if kind == "Index":
            picked = [x for dim, x in enumerate(node._saved_indices) if dim in dims]  # noqa: SLF001
        else:
            picked = [node._saved_index] if next(_dims_of(node, len(shape))) in dims else []  # noqa: SLF001
        most = min(_FEW * parted.shape[0], shape[dims[0]] // 4) if dims else 0
        for x in picked:
            if x is not None and x.dtype != torch.bool:
                count = x.shape[dims[0]] if kind == "Gather" else x.numel()
                found += [x.to(torch.float64)] if 0 < count <= most else []
    return found[-_FACTORS:]


def _own_factor(node: Any, kind: str, parted: Parted) -> torch.Tensor | None:
    """What a node multiplies a part with, in fp64; None where that is nothing, a part too, or has
    a gradient."""
    if kind not in ("Mul", "Div") or _WITHIN in node.metadata:
        return None
    one, other = (getattr(node, f"_saved_{name}", None) for name in ("self", "other"))
    if kind == "Div":
        factor = other if one is None else None
    else:
        factor = (other if one is None else one) if (one is None) != (other is None) else None
    if not isinstance(factor, torch.Tensor) or (parted.dims_in(factor.shape) and not parted.summed):
        return None
    wide = factor.detach().to(torch.float64).squeeze()
    # Others than single ones are of rows; what else there is may be of tokens in another shape.
    if wide.dim() and (wide.shape != parted.shape[:1] or 0 in parted.dims):
        return None
    return wide.reciprocal() if kind == "Div" else wide


def _add_up_to_one(node: Any) -> bool:
    """Whether a node multiplies tokens with weights that are no mask and add up to 1."""
    if _WITHIN in node.metadata:
        return False
    kept = [getattr(node, f"_saved_{name}", None) for name in ("self", "other", "tensor")]
    tensors = [x for x in kept if isinstance(x, torch.Tensor)]
    if len(tensors) != 1 or tensors[0].numel() < _FEWEST or tensors[0].requires_grad:
        return False
    weights = tensors[0].detach()
    is_mask = bool(((weights == 0) | (weights == 1)).all())
    return not is_mask and abs(float(weights.to(torch.float64).sum()) - 1) < 1e-6


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


def _said_of_indices(rows: Sequence[Sequence[float]]) -> str:
    """What is said of places that all ranks pick by the same numbers, given for each rank how often
    places are picked, and checksums of the numbers; nothing where these differ."""
    if any(row[0] != rows[0][0] for row in rows):
        return ""
    columns = list(zip(*rows, strict=True))[1 : 1 + int(rows[0][0])]
    same = any(len(set(numbers)) == 1 for numbers in columns)
    return "some of the places of one rank, by their numbers in its part" if same else ""


def _divided_by_tokens(nodes: Sequence[Any], factors: Sequence[torch.Tensor], targets: int) -> str:
    """What is said of a loss that is divided by the tokens of one rank; nothing of others."""
    marks = [node.metadata[_MARK] for node in nodes if node.metadata.get(_MARK) is not None]
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


def _picked(node: Any, parted: Parted) -> tuple[int, int, int, int] | None:
    """(dim, first, end, of how many) of the places that a node takes of a part; None where it takes
    all or none."""
    kind, shape = _kind(node), _shape_of(node)
    if kind not in ("Select", "Slice") or parted.summed or parted.word == "samples":
        return None
    if shape is None:
        return None
    dim = next(_dims_of(node, len(shape)))
    if dim not in parted.dims_in(shape):
        return None
    size = shape[dim]
    if kind == "Select":
        at = _signed(node._saved_index) % size  # noqa: SLF001
        return dim, at, at + 1, size
    start, end = _signed(node._saved_start), _signed(node._saved_end)  # noqa: SLF001
    start, end = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    return dim, start, end if node._saved_step == 1 else start, size  # noqa: SLF001


def _covers(taken: Sequence[tuple[int, int, int]]) -> bool:
    """Whether the places [start, stop) of so many that were taken are all, each taken once: a loss
    in chunks, or slices of everything."""
    size = taken[0][2]
    parts = sorted((start, stop) for start, stop, _ in taken if (start, stop) != (0, size))
    borders = [(0, 0), *parts, (size, size)] if parts else []
    return all(one[1] == other[0] for one, other in pairwise(borders))


def _terms(last: Any) -> Iterator[Any]:
    """Yield the nodes whose results, each perhaps times a number, are added up to that of
    ``last``."""
    stack = [last]
    while stack:
        node = stack.pop()
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        kind, ends = _kind(node), _MARK in node.metadata or _ALIKE in node.metadata
        adds = kind in ("Add", "Sub", "Neg", "ToCopy", "Stack", "Sum")
        adds = adds and len(node._input_metadata[0].shape) < 2  # noqa: SLF001
        if parents and not ends and (adds or (kind in ("Mul", "Div") and len(parents) == 1)):
            stack += parents
        else:
            yield node


def _is_of(part: Parted, node: Any) -> bool:
    """Whether a node made something of the tokens of a part, by the shapes of its results."""
    return any(part.dims_in(tuple(x.shape)) for x in getattr(node, "_input_metadata", ()))


def _nodes_before_results(last: Any, *ends: str, made: Sequence[_Made] = ()) -> list[Any]:
    """The nodes of autograd from the results of forwards up to ``last``, each after those that it
    depends on; none where they are too many. Nodes behind results are left out, and those behind
    nodes with one of the keys ``ends``. What a forward has ``made`` that is a part, and was kept
    aside, is marked as a result."""
    order, seen, stack = list[Any](), set[Any](), [(last, 0, False)]
    while stack:
        node, number, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            if len(seen) > _NODES:
                return []
            forward = _forward_of(node, made) if made and _MARK not in node.metadata else None
            if forward is not None:
                node.metadata[_WITHIN] = True
                part = forward.part(node, number)
                if part is not None:
                    node.metadata[_MARK] = part
            stack.append((node, 0, True))
            if not any(key in node.metadata for key in (_MARK, *ends)):
                stack += [(parent, at, False) for parent, at in node.next_functions]
    return order


def _next_number() -> int | None:
    """The number that autograd gives the next node; None where it makes none."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        node: Any = torch.zeros((), device="cpu", requires_grad=True).clone().grad_fn
    return None if node is None else int(node._sequence_nr()) + 1  # noqa: SLF001


def _forward_of(node: Any, made: Sequence[_Made]) -> _Made | None:
    """The forward that made a node; None for a node of no forward, or of the leaves."""
    number = node._sequence_nr()  # noqa: SLF001
    return next((one for one in made if one.first <= number < one.stop), None)


def _compiled_within(nodes: Sequence[Any]) -> str:
    """What is said of numbers that compiled modules make in a forward and keep aside; nothing where
    there are none."""
    kept = (node for node in nodes if _WITHIN in node.metadata and _MARK not in node.metadata)
    found = any(node.name().startswith("CompiledFunction") for node in kept)
    return "numbers that a compiled module makes and keeps aside" if found else ""


def _is_sum(node: Any, parted: Parted) -> bool:
    """Whether a node sums over the part, or takes a mean, which is a sum where it is weighed."""
    kind, shape = _kind(node), _shape_of(node)
    if kind == "Dot":  # of vectors, one of which is of tokens
        return True
    of_all = getattr(node, "_saved_reduction", None) in (_SUM, _MEAN)
    if shape is None or not (of_all or kind in ("Sum", "Nansum", "Mean")):
        return False
    dims = [*range(len(shape))] if of_all else list(_dims_of(node, len(shape)))
    return any(dim in dims for dim in parted.dims_in(shape))


def _kind(node: Any) -> str:
    """The beginning of a node's name, which says what its function does."""
    return str(node.name().partition("Backward")[0])


def _said_of(node: Any, parted: Parted, given: Sequence[Parted | None], *, weighed: bool) -> str:
    """What is said of a node that works along the dims of a part, or on sums over it as no linear
    function does; nothing of others. ``given`` are the results that what it was given is made of.
    Means may be ``weighed``."""
    kind, shape = _kind(node), _shape_of(node)
    if parted.summed:
        of_sums = [one is not None and one.summed for one in given]
        products = kind == "Mul" and all(of_sums) and len(of_sums) > 1
        products |= kind == "Div" and len(of_sums) > 1 and of_sums[1]
        if kind in ("Mul", "Div") and _WITHIN in node.metadata and not products:
            return f"sums over {parted.word} of one rank that a module multiplies or divides"
        wrong = products or kind in _NOT_LINEAR
        said = f"a function of sums over {parted.word} of one rank that is not linear ({kind})"
        return said if wrong else ""
    if kind in ("Mul", "Dot") and _add_up_to_one(node):
        return f"weights that add up to 1 over {parted.word} of one rank"
    of_parts = all(one is not None and not one.summed for one in given)
    if kind in _PRODUCTS and of_parts and not _is_of_each_token(node, kind, given):
        return f"products of {parted.word} with others of one rank"
    if shape is None and kind in ("Flip", "Roll"):
        shape = parted.shape
    if shape is None:
        return ""
    is_mean = getattr(node, "_saved_reduction", None) == _MEAN
    dims = [*range(len(shape))] if is_mean else list(_dims_of(node, len(shape)))
    along = [dim for dim in parted.dims_in(shape) if dim in dims]
    if not parted.known:
        along = dims if len(dims) == len(shape) == len(parted.shape) else []
    if not along or ((is_mean or kind == "Mean") and weighed and parted.weighed):
        return ""
    if parted.word == "samples" and not (is_mean or kind in _REDUCED):
        return ""
    window = "values of windows" if kind.startswith(_WINDOWS) else ""
    made = "a mean" if is_mean else _REDUCED.get(kind) or _JOINED.get(kind) or window
    return f"{made} over {parted.word} of one rank" if made else ""


def _is_of_each_token(node: Any, kind: str, given: Sequence[Parted | None]) -> bool:
    """Whether each token of a part is a matrix of its own in a product of matrices of parts."""
    if kind == "Mm":
        return False
    if _WITHIN in node.metadata:
        metadata = [parent._input_metadata[number] for parent, number in node.next_functions]  # noqa: SLF001
        return all(
            one is not None and one.dims_in(tuple(side.shape)) == [0]
            for one, side in zip(given, metadata, strict=True)
        )
    sides = [getattr(node, f"_saved_{name}", None) for name in _PRODUCTS[kind]]
    return all(
        one is not None and side is not None and one.dims_in(side.shape) == [0]
        for one, side in zip(given, sides, strict=True)
    )


def _shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of what the function of a node was given, where the node knows it."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        return tuple(map(int, sizes))
    if _WITHIN in node.metadata:
        return _shape_given(node)
    for name in ("_saved_self", "_saved_input", "_saved_result"):
        try:
            kept = getattr(node, name, None)
        except RuntimeError:  # a backward has freed it
            return _shape_given(node)
        if isinstance(kept, torch.Tensor):
            return tuple(kept.shape)
    return None


def _shape_given(node: Any) -> tuple[int, ...] | None:
    """The shape of what the function of a node was given first, as what has made it knows it."""
    parent, number = node.next_functions[0]
    return None if parent is None else tuple(parent._input_metadata[number].shape)  # noqa: SLF001


def _dims_of(node: Any, count: int) -> Iterator[int]:
    """The dims, of ``count``, along which the function of a node works; all where it names none."""
    kind = _kind(node)
    if kind == "Convolution" or kind.startswith(_WINDOWS):
        yield from range(2, count)
        return
    if kind in ("NativeBatchNorm", "CudnnBatchNorm"):
        yield from (dim for dim in range(count) if dim != 1) if node._saved_training else ()  # noqa: SLF001
        return
    if kind == "NativeLayerNorm":
        yield from range(count - len(node._saved_normalized_shape), count)  # noqa: SLF001
        return
    given = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    if given is None or given == ():
        yield from range(count)
        return
    for dim in given if isinstance(given, tuple) else (given,):
        signed = _signed(dim)
        yield signed + count if signed < 0 else signed


def _signed(number: int) -> int:
    """A number that autograd shows without a sign, as it is."""
    return number - (1 << 64) if number >= 1 << 63 else number
