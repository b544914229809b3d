"""Losses that a user makes of a part's results: looked at before their backward.

A rank's part of a loss is a sum over its tokens (places, samples), divided by those of the whole
step. Much that is right in one process is not of a part, and nothing but the numbers would show it:
a mean over the tokens of one rank, its first or last token, its tokens shifted by one, a maximum
over them, the logarithm of a sum over them. The graph that autograd keeps between a loss and the
model's results shows these; a mean cross entropy that is divided by hand shows in its value.

Shape legend: b rows of s tokens on this rank; V tokens in a vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction
from torch.nn import functional

from headrace.comm.collectives import gather_floats
from headrace.errors import ModelError
from headrace.ops.loss import IGNORED

__all__ = ["OwnLosses", "Parted"]

_MARK = "headrace part"
"""The key under which a node of autograd has the :class:`Parted` results that it made."""
_NODES = 1_000
"""Nodes between a loss and the results that are looked at, at most."""
_OFTEN = 8
"""Forwards and backwards that are all looked at; later those whose number is a power of two."""
_CHUNK = 2_048
"""Tokens whose cross entropy is computed at a time."""
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative differences that means in another order may have; 1 % in half types."""

_REDUCED = {"Mean": "a mean", "Std": "a deviation", "Var": "a variance"}
_JOINED = {
    "Softmax": "a softmax",
    "LogSoftmax": "a softmax",
    "Logsumexp": "a sum of exponentials",
    "Max": "a maximum",
    "Min": "a minimum",
    "Amax": "a maximum",
    "Amin": "a minimum",
    "Cumsum": "running sums",
}
"""Beginnings of the names of nodes whose functions work along dims, and what those make."""
_NOT_LINEAR = frozenset(
    {
        *("Abs", "BinaryCrossEntropyWithLogits", "Clamp", "ClampMax", "ClampMin", "Exp", "Expm1"),
        *("HuberLoss", "LinalgVectorNorm", "Log", "Log1P", "LogSigmoid", "LogSoftmax", "Logsumexp"),
        *("Max", "Maximum", "Min", "Minimum", "MseLoss", "NllLoss", "Norm", "Pow", "Reciprocal"),
        *("Relu", "Rsqrt", "Sigmoid", "SmoothL1Loss", "Softmax", "Softplus", "Sqrt", "Tanh"),
    }
)
"""Beginnings of the names of nodes whose functions are not linear."""
_MEAN = 1  # torch's number of the reduction by a mean


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


class OwnLosses:
    """Looks at the losses of the spread forwards of one model. ``hint`` says how they are made."""

    def __init__(self, hint: str) -> None:
        """Nothing was called yet."""
        self._hint = hint
        self._calls = self._backwards = 0
        # Of the last forward that was looked at: the mean cross entropy [] of this rank's labels,
        # and their number.
        self._mean: tuple[torch.Tensor, int] | None = None

    def note(self, results: Iterable[tuple[torch.Tensor, Parted | None]]) -> None:
        """Note the results of a forward; None for those that are no parts."""
        for result, parted in results:
            node: Any = result.grad_fn  # torch's types have its metadata as a function
            if node is not None:
                node.metadata[_MARK] = parted

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

    def require_sum(self, loss: torch.Tensor, *, targets: int = 0, weighed: bool = False) -> None:
        """Raise ModelError, on all ranks that share the part, where a loss is no sum over it.
        Collective among these, now and then.

        Args:
            loss: The loss, [].
            targets: The labels of the whole step.
            weighed: Whether the user weighs means by this rank's share.
        """
        self._backwards += 1
        if not _is_due(self._backwards):
            return
        nodes = _nodes_before_results(loss.grad_fn)
        found = _found(nodes, weighed=weighed) or self._mean_by_hand(loss, targets)
        # Ranks that share a part run the same code, and so make losses of the same results.
        parts = filter(None, (node.metadata.get(_MARK) for node in nodes))
        group = next((part.group for part in parts), None)
        others = group is not None and any(row[0] for row in gather_floats([bool(found)], group))
        if not found and not others:
            return
        raise ModelError(
            "loss of a part",
            got=found or "what another rank refuses",
            wanted="a sum over this rank's part, divided by what the whole step has",
            hint=self._hint,
        )

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


def _found(nodes: Sequence[Any], *, weighed: bool) -> str:
    """What the ``nodes`` between a loss and the results of forwards do that is wrong for parts;
    nothing where there is nothing. Means may be ``weighed``."""
    made_of = dict[Any, Parted]()  # a result that a node depends on
    # What is taken of a node's result along a dim: [start, stop) of so many, each time.
    taken: dict[tuple[Any, int], list[tuple[int, int, int]]] = {}
    for node in nodes:
        if _MARK in node.metadata:
            parted = node.metadata[_MARK]
        else:
            given = [made_of.get(parent) for parent, _ in node.next_functions]
            # What a function of Python makes is not known: it may be of all ranks.
            opaque = isinstance(node, BackwardCFunction)
            parted = None if opaque else next(filter(None, given), None)
            said = "" if parted is None else _said_of(node, parted, given, weighed=weighed)
            if said:
                return said
            picked = None if parted is None else _picked(node, parted)
            if picked is not None:
                dim, start, stop, size = picked
                places = taken.setdefault((node.next_functions[0][0], dim), [])
                places.append((start, stop, size))
            if parted is not None and not parted.summed and _is_sum(node, parted):
                parted = replace(parted, summed=True)
        if parted is not None:
            made_of[node] = parted
    if all(map(_covers, taken.values())):
        return ""
    return "some of the places of one rank, by their numbers in its part"


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


def _nodes_before_results(last: Any) -> list[Any]:
    """The nodes of autograd from the results of forwards up to ``last``, each after those that it
    depends on; none where they are too many. Nodes behind results are left out."""
    order, seen, stack = list[Any](), set[Any](), [(last, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            if len(seen) > _NODES:
                return []
            stack.append((node, True))
            if _MARK not in node.metadata:
                stack += [(parent, False) for parent, _ in node.next_functions]
    return order


def _is_sum(node: Any, parted: Parted) -> bool:
    """Whether a node sums over the part."""
    shape = _shape_of(node)
    if shape is None or _kind(node) not in ("Sum", "Nansum"):
        return False
    dims = list(_dims_of(node, len(shape)))
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
        wrong = products or kind in _NOT_LINEAR
        said = f"a function of sums over {parted.word} of one rank that is not linear ({kind})"
        return said if wrong else ""
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
    made = "a mean" if is_mean else _REDUCED.get(kind) or _JOINED.get(kind)
    return f"{made} over {parted.word} of one rank" if made else ""


def _shape_of(node: Any) -> tuple[int, ...] | None:
    """The shape of what the function of a node was given, where the node knows it."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        return tuple(map(int, sizes))
    for name in ("_saved_self", "_saved_result"):
        kept = getattr(node, name, None)
        if isinstance(kept, torch.Tensor):
            return tuple(kept.shape)
    return None


def _dims_of(node: Any, count: int) -> Iterator[int]:
    """The dims, of ``count``, along which the function of a node works; all where it names none."""
    given = getattr(node, "_saved_dim", None)
    if given is None or given == ():
        yield from range(count)
        return
    for dim in given if isinstance(given, tuple) else (given,):
        signed = _signed(dim)
        yield signed + count if signed < 0 else signed


def _signed(number: int) -> int:
    """A number that autograd shows without a sign, as it is."""
    return number - (1 << 64) if number >= 1 << 63 else number
