"""What becomes of parts between the results of forwards and a loss, by the graph of autograd.

A rank has a *part* of a result: some of its tokens (places, samples). A loss must be a sum over
them, divided by what the whole step has. So every node of autograd is asked what it makes of the
parts that it is given: whether each token is treated alone, and along which dims its tokens lie
then; whether tokens are added up, behind which only linear functions give sums that ranks may add;
or neither, which is wrong. A function that is not known is taken to treat each token alone where it
keeps their dims, and names no dim of theirs; where it does not, they cannot be followed.

Functions of Python (``autograd.Function``) and compiled ones end what can be seen, as do constants:
statistics of detached results, and weights of places that a rank counts from its first one.

Shape legend: b rows of s tokens on this rank; V tokens in a vocabulary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction

__all__ = [
    "ADD_UP",
    "ALIKE",
    "MARK",
    "SHARERS",
    "WITHIN",
    "Made",
    "PartOf",
    "Parted",
    "add_up_to_one",
    "dims_named",
    "follow",
    "kind_of",
    "nodes_before_results",
    "shape_given",
]

MARK = "headrace part"
"""The key under which a node of autograd has the :class:`Parted` result that it made."""
SHARERS = "headrace sharers"
"""The key under which it has the group of ranks that share the batch of its forward."""
ALIKE = "headrace alike"
"""The key of nodes whose results ranks have alike, as those of ``run.mean``."""
WITHIN = "headrace within"
"""The key of nodes that a forward has made. What they have saved is not read, as a checkpoint would
compute it again."""
ADD_UP = "weights that add up to 1"
"""What is said of weights by which a sum over the tokens of one rank is a mean over them."""
_NODES = 1_000
"""Nodes between a loss and the results that are looked at, at most."""
_FEWEST = 4
"""Weights of tokens that add up to 1 by chance are fewer."""

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of the reductions of losses
_ALL_DIMS = (None, ())
"""What nodes have in the place of dims where their function works along all."""

_MEANS = {
    "Mean": "a mean",
    "Std": "a deviation",
    "StdMean": "a deviation",
    "Var": "a variance",
    "VarMean": "a variance",
}
_NAMES = {
    **_MEANS,
    "Softmax": "a softmax",
    "LogSoftmax": "a softmax",
    "Logsumexp": "a sum of exponentials",
    "Max": "a maximum",
    "Min": "a minimum",
    "Amax": "a maximum",
    "Amin": "a minimum",
    "Aminmax": "a maximum",
    "Cummax": "a running maximum",
    "Cummin": "a running minimum",
    "Cumsum": "running sums",
    "Cumprod": "running products",
    "Logcumsumexp": "running sums",
    "Prod": "a product",
    "Norm": "a norm",
    "Dist": "a norm",
    "Renorm": "a norm",
    "LinalgVectorNorm": "a norm",
    "Median": "a median",
    "Nanmedian": "a median",
    "Kthvalue": "a median",
    "Mode": "a mode",
    "Sort": "an order",
    "Topk": "the largest",
    "Flip": "other places",
    "Roll": "other places",
    "ConstantPadNd": "other places",
    "Tril": "a mask of places",
    "Triu": "a mask of places",
    "FftR2C": "a transform",
    "FftC2C": "a transform",
    "FftC2R": "a transform",
    "Convolution": "a convolution",
    "NativeLayerNorm": "a norm",
    "FusedRmsNorm": "a norm",
    "NativeGroupNorm": "a norm",
    "NativeBatchNorm": "a norm",
    "CudnnBatchNorm": "a norm",
    "Unfold": "values of windows",
}
"""What functions along tokens make, by the beginnings of the names of their nodes."""
_WINDOWS = ("AvgPool", "MaxPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Upsample", "FractionalMax")
"""Beginnings of the names of nodes whose functions work along the last dims, behind the second."""
_TWO_DIMS = ("Linalg", "Cholesky", "MatrixExp", "Tril", "Triu", "Lu", "TriangularSolve")
"""Those whose functions see the last two dims together, where they name no dim."""
_LINEAR = frozenset(
    {
        *("Add", "Alias", "AsStrided", "Clone", "Conj", "ConstantPadNd", "Copy", "CopySlices"),
        *("Cumsum", "Diagonal", "DiagEmbed", "Div", "Expand", "FftC2C", "FftC2R", "FftR2C", "Flip"),
        *("Gather", "Imag", "Index", "IndexAdd", "IndexCopy", "IndexFill", "IndexPut"),
        *("IndexSelect", "MaskedFill", "MaskedScatter", "MaskedSelect", "Mean", "Mul", "Nansum"),
        "NanToNum",
        *("Neg", "Permute", "PixelShuffle", "PixelUnshuffle", "Real", "Repeat", "ReshapeAlias"),
        *("Roll", "Rsub", "Scatter", "ScatterAdd", "Select", "Slice", "Split", "SplitWithSizes"),
        *("Squeeze", "Stack", "Cat", "Sub", "Sum", "T", "Take", "ToCopy", "Trace", "Transpose"),
        *("Tril", "Triu", "Unbind", "Unfold", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View"),
        *("ViewAsComplex", "ViewAsReal"),
    }
)
"""Those whose functions of one tensor are linear."""
_PRODUCTS = frozenset(
    {"Addbmm", "Addmm", "Addmv", "Baddbmm", "Bmm", "Convolution", "Dot", "Mm", "Mul", "Mv", "Vdot"}
)
"""Those whose functions are linear in either of two tensors, but for one that is added."""
_OVER = frozenset({"Div"})
"""Those whose functions are not linear in what comes second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """A tensor of which every rank has a part: a result of a spread forward, or what is made of it.

    Attributes:
        shape: Its shape on this rank.
        dims: The dims along which it is a part; none where it is of a single token, or summed.
        word: What lies along them: ``tokens``, ``places`` or ``samples``.
        known: Whether ``dims`` are all of them; else only what works along all dims is looked at.
        weighed: Whether means over the part may be weighed by ``run.share``, exactly.
        summed: Whether it has sums over tokens, or differences of some, and so no such dims.
        group: The ranks that share the part; None for one alone.
        size: How many tokens this rank has along the dims of the result; 0: as many as along the
            first of ``dims``.
        order: What tells tensors of other tokens, or of another order, apart; None for those of
            all in their order.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    word: str
    known: bool = True
    weighed: bool = False
    summed: bool = False
    group: dist.ProcessGroup | None = None
    size: int = 0
    order: Hashable = None

    def dims_in(self, shape: Sequence[int]) -> list[int]:
        """The dims of the part in a tensor of ``shape`` that has the same dims, or the first of
        them flattened; none where it has none."""
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

    def varies_with(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of ``shape`` that is broadcast to this one differs along its dims."""
        shift = len(self.shape) - len(shape)
        return any(dim >= shift and shape[dim - shift] > 1 for dim in self.dims)


PartOf = Callable[[tuple[int, ...]], Parted | None]
"""What part a tensor of a shape is, which a forward has made; None where it is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The nodes of autograd that a forward has made: those of the numbers [``first``, ``stop``).
    ``part_of`` tells what part a tensor of a shape is."""

    first: int
    stop: int
    part_of: PartOf

    def part(self, node: Any, number: int) -> Parted | None:
        """What part a result of one of these nodes is, by its shape; None where it is none."""
        return self.part_of(tuple(node._input_metadata[number].shape))  # noqa: SLF001


def nodes_before_results(last: Any, *ends: str, made: Iterable[Made] = ()) -> list[Any]:
    """Find what a tensor is made by.

    Args:
        last: Its node of autograd.
        ends: Keys of nodes behind which none is wanted.
        made: What forwards have made: of that what is a part, and was kept aside, is marked as a
            result.

    Returns:
        The nodes from the results of forwards up to ``last``, each after those that it depends on;
        none where they are too many. Nodes behind results are left out.
    """
    order, seen, stack = list[Any](), set[Any](), [(last, 0, False)]
    forwards = list(made)
    while stack:
        node, number, done = stack.pop()
        if done:
            order.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            if len(seen) > _NODES:
                return []
            _mark_within(node, number, forwards)
            stack.append((node, 0, True))
            if not any(key in node.metadata for key in (MARK, *ends)):
                stack += [(parent, at, False) for parent, at in node.next_functions]
    return order


def _mark_within(node: Any, number: int, forwards: Sequence[Made]) -> None:
    """Mark a node that one of ``forwards`` has made; as a result, where that is a part."""
    if not forwards or MARK in node.metadata:
        return
    at = node._sequence_nr()  # noqa: SLF001
    forward = next((one for one in forwards if one.first <= at < one.stop), None)
    if forward is not None:
        node.metadata[WITHIN] = True
        part = forward.part(node, number)
        if part is not None:
            node.metadata[MARK] = part


def kind_of(node: Any) -> str:
    """The beginning of a node's name, which says what its function does."""
    return str(node.name().partition("Backward")[0]).removeprefix("torch::autograd::")


def shape_given(node: Any) -> tuple[int, ...] | None:
    """The shape of what the function of a node was given first; None for a constant."""
    parent, number = node.next_functions[0]
    return None if parent is None else tuple(parent._input_metadata[number].shape)  # noqa: SLF001


def dims_named(node: Any, count: int) -> list[int] | None:
    """The dims, of ``count``, that a node names, along which its function works; None where it has
    none to name."""
    for name in ("dim", "dims", "dimension", "axis"):
        given = getattr(node, f"_saved_{name}", node)
        if given is not node:
            several = given if isinstance(given, (tuple, list)) else (given,)
            every = given in _ALL_DIMS
            return [*range(count)] if every else [_signed(dim) % max(1, count) for dim in several]
    return None


def _signed(number: int) -> int:
    """A number that autograd shows without a sign, as it is."""
    return number - (1 << 64) if number >= 1 << 63 else number


def add_up_to_one(node: Any, count: int = 0, dims: Sequence[int] = ()) -> bool:
    """Whether a node multiplies tokens, which lie along ``dims`` of ``count``, with weights that
    are no mask and add up to 1, all of them or those of each row."""
    if WITHIN in node.metadata:
        return False
    names = ("self", "other", "tensor", "vec", "mat2", "mat1", "batch1", "batch2")
    kept = {name: getattr(node, f"_saved_{name}", None) for name in names}
    tensors = {name: x for name, x in kept.items() if isinstance(x, torch.Tensor)}
    if len(tensors) != 1:
        return False
    ((name, weights),) = tensors.items()
    matrix = kind_of(node) not in ("Mul", "Dot", "Vdot")
    along = [dim - count + weights.dim() for dim in dims]  # dims of the weights, as broadcast
    if matrix and weights.dim() > 1:
        along = [weights.dim() - (2 if name in ("mat2", "batch2") else 1)]
    elif not dims:
        along = [*range(weights.dim())]
    if any(dim < 0 or weights.shape[dim] < 2 for dim in along) or weights.requires_grad:
        return False  # alike for all tokens
    wide = weights.detach().to(torch.float64)
    if bool(((wide == 0) | (wide == 1)).all()):
        return False
    if wide.numel() < _FEWEST and not matrix:
        return False
    sums = wide.sum(along)
    return any(bool(((x - 1).abs() < 1e-6).all()) for x in (sums, sums.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One call of a function: its node, what it was ``given`` (the part, or None, and the shape;
    None for a constant), and the shape of what it made. Means may be ``weighed``."""

    node: Any
    kind: str
    given: Sequence[tuple[Parted | None, tuple[int, ...] | None]]
    out: tuple[int, ...]
    weighed: bool

    @property
    def parts(self) -> list[Parted]:
        """The parts among what was given."""
        return [part for part, _ in self.given if part is not None]

    @property
    def first(self) -> Parted:
        """The first of the parts that were given."""
        return self.parts[0]

    @property
    def order(self) -> Hashable:
        """What tells the tokens of all parts apart, where there are some."""
        return next((part.order for part in self.parts if part.order is not None), None)

    @property
    def mixes(self) -> bool:
        """Whether parts of other tokens meet."""
        return len({part.order for part in self.parts}) > 1

    def of_tokens(self, dims: Iterable[int], order: Hashable = None) -> _Result:
        """What was made is of each token alone, along ``dims``."""
        part = self.first
        size = part.size or (part.shape[part.dims[0]] if part.dims else 0)
        order = self.order if order is None else (self.order, order)
        return (
            replace(part, shape=self.out, dims=tuple(sorted(set(dims))), size=size, order=order),
            "",
        )

    def summed(self, said: str = "") -> _Result:
        """What was made has sums over tokens; or, where something is ``said``, is wrong."""
        return replace(self.first, shape=self.out, dims=(), summed=True, order=None), said

    def wrong(self, what: str = "") -> _Result:
        """What was made, ``what`` over tokens, is wrong."""
        name = what or _NAMES.get(self.kind) or f"a function ({self.kind})"
        return self.summed(f"{name} over {self.first.word} of one rank")

    def reduced(self) -> _Result:
        """What was made is a mean over tokens, which may be weighed."""
        if self.weighed and all(part.weighed for part in self.parts):
            return self.summed()
        return self.wrong("a mean" if self.kind not in _NAMES else "")


_Result = tuple[Parted | None, str]
"""What a function made of parts, and what is said of it where it is wrong."""


def follow(nodes: Sequence[Any], *, weighed: bool) -> tuple[dict[Any, Parted], str]:
    """Follow the parts among ``nodes``, each after those that it depends on, to a loss.

    Args:
        nodes: What :func:`nodes_before_results` has found.
        weighed: Whether the user weighs means by this rank's share.

    Returns:
        What the result of each node is that depends on a part; and what is said of tokens that are
        left out, or of the first node that is wrong; nothing where none is.
    """
    made_of, said = dict[Any, Parted](), ""
    for node in nodes:
        part = None
        if MARK in node.metadata:
            part = node.metadata[MARK]
        elif not isinstance(node, BackwardCFunction):  # what one of Python makes is not known
            given = [_given(parent, number, made_of) for parent, number in node.next_functions]
            if any(part for part, _ in given):
                out = tuple(node._input_metadata[0].shape)  # noqa: SLF001
                call = _Call(node=node, kind=kind_of(node), given=given, out=out, weighed=weighed)
                part, wrong = _made(call)
                said = said or wrong
        if part is not None:
            made_of[node] = part
    return made_of, _left_out(nodes, made_of) or said


def _given(
    parent: Any, number: int, made_of: Mapping[Any, Parted]
) -> tuple[Parted | None, tuple[int, ...] | None]:
    """What a function was given by the result of this number of a node: the part, and its shape."""
    if parent is None:
        return None, None
    shape, part = tuple(parent._input_metadata[number].shape), made_of.get(parent)  # noqa: SLF001
    if part is not None and part.shape != shape and MARK not in parent.metadata:
        part = replace(part, shape=shape)  # of several results
    if part is not None and _cuts(parent, made_of):
        sizes = tuple(tuple(x.shape) for x in parent._input_metadata)  # noqa: SLF001
        part = replace(part, order=(part.order, ("cut", kind_of(parent), sizes, number)))
    return part, shape


def _cuts(node: Any, made_of: Mapping[Any, Parted]) -> bool:
    """Whether a node cuts a part along its dims into several results."""
    if MARK in node.metadata or kind_of(node) not in _CUTS:
        return False
    part = made_of.get(node.next_functions[0][0])
    if part is None or part.summed or not part.known:
        return False
    return any(dim in part.dims for dim in dims_named(node, len(part.shape)) or ())


def _made(call: _Call) -> _Result:
    """What a function makes of the parts that it was given."""
    if call.first.word == "samples":
        part, said = _by_rule(call)
        # Samples are trained on alone, but for means, whose numbers differ between ranks.
        matters = said.startswith((*_MEANS.values(), "a function of sums"))
        return part, said if matters else ""
    return _by_rule(call)


def _by_rule(call: _Call) -> _Result:
    """What a function makes of parts, by the rule for its kind."""
    if not all(part.known for part in call.parts):
        return _of_unknown(call)
    if any(part.summed for part in call.parts):
        return _of_sums(call)
    if call.kind in _RULES:
        return _RULES[call.kind](call)
    if hasattr(call.node, "_saved_reduction"):
        return _loss(call)
    if call.kind.startswith(_WINDOWS):
        return _windows(call)
    return _each_token(call)


def _of_unknown(call: _Call) -> _Result:
    """Of parts whose dims are not known: what works along all dims."""
    part, shape = next((part, shape) for part, shape in call.given if part is not None)
    reduction = getattr(call.node, "_saved_reduction", _NONE)
    of_all = bool(shape) and call.out == ()
    if of_all and (reduction == _MEAN or (call.kind in _NAMES and reduction == _NONE)):
        return call.reduced() if call.kind in _MEANS or reduction == _MEAN else call.wrong()
    if of_all and (reduction == _SUM or call.kind in ("Sum", "Nansum", "Dot")):
        return call.summed()
    if part.summed:
        return _of_sums(call)
    kept = shape is not None and len(shape) == len(call.out)
    same = kept and all(shape[dim] == call.out[dim] for dim in part.dims)
    return replace(part, shape=call.out, dims=part.dims if same else ()), ""


def _of_sums(call: _Call) -> _Result:
    """Of sums over tokens: what is not linear in them is wrong."""
    word, parts = call.first.word, call.parts
    if not all(part.summed for part in parts) and any(part.dims for part in parts):
        return call.summed(f"sums over {word} of one rank beside each of them")
    products = call.kind in _PRODUCTS and sum(p is not None for p, _ in call.given[-2:]) > 1
    over = call.kind in _OVER and len(call.given) > 1 and call.given[1][0] is not None
    if call.kind in ("Mul", "Div") and WITHIN in call.node.metadata and not (products or over):
        return call.summed(f"sums over {word} of one rank that a module multiplies or divides")
    linear = call.kind in _LINEAR or call.kind in _PRODUCTS
    if linear and not products and not over:
        return call.summed()
    return call.summed(
        f"a function of sums over {word} of one rank that is not linear ({call.kind})"
    )


def _each_token(call: _Call) -> _Result:
    """A function of one tensor, or of several that are broadcast: of each token alone where it
    keeps their dims and names none of them."""
    named = _along(call)
    if named is None:
        return call.wrong()
    dims, crosses = _aligned(call)
    if crosses:
        return call.summed(f"products of {call.first.word} with others of one rank")
    if dims is not None:
        if call.mixes:  # sums and differences of other tokens
            linear = call.kind in ("Add", "Sub", "Rsub")
            return call.summed() if linear else call.wrong("a function of several")
        if call.kind == "Mul" and add_up_to_one(call.node, len(call.out), dims):
            return call.wrong(ADD_UP)
        return call.of_tokens(dims)
    part = call.first
    left = {dim: dim - sum(low < dim for low in named) for dim in part.dims}
    kept = len(call.out) == len(part.shape) - len(set(named))
    if kept and all(call.out[new] == part.shape[dim] for dim, new in left.items()):
        return call.of_tokens(left.values())
    return call.wrong() if part.dims else call.of_tokens(())


def _along(call: _Call) -> list[int] | None:
    """The dims along which a function works that are not those of tokens; None where it works along
    some of those."""
    part = call.first
    named = dims_named(call.node, len(part.shape))
    if call.kind == "Renorm":
        named = [dim for dim in range(len(part.shape)) if dim not in (named or ())]
    if named is None and part.shape and (call.out == () or call.kind == "Dist"):
        named = [*range(len(part.shape))]
    if named is None and call.kind.startswith(_TWO_DIMS):
        named = [*range(len(part.shape))[-2:]]
    named = named or []
    return None if any(dim in part.dims for dim in named) else named


def _aligned(call: _Call) -> tuple[list[int] | None, bool]:
    """The dims of tokens in what a function made by broadcasting; None where it has others. And
    whether tokens of one part are broadcast over those of another."""
    found = set[int]()
    broadcasts = len(call.given) > 1 or call.kind == "Expand"
    for at, part in enumerate(call.parts):
        shift = len(call.out) - len(part.shape)
        if shift > 0 and not broadcasts:  # a new dim, which may be anywhere
            return None, False
        dims = [dim + shift for dim in part.dims]
        if shift < 0 or any(call.out[dim] != part.shape[dim - shift] for dim in dims):
            several = len(call.parts) > 1  # a token is broadcast over others
            return None, several
        if at and dims and found and set(dims) != found:
            return None, True
        found |= set(dims)
    return sorted(found), False


def _sum(call: _Call) -> _Result:
    """A sum over some dims."""
    return call.summed() if _reduces_tokens(call) else _each_token(call)


def _mean(call: _Call) -> _Result:
    """A mean, a deviation or a variance over some dims."""
    return call.reduced() if _reduces_tokens(call) else _each_token(call)


def _reduces_tokens(call: _Call) -> bool:
    """Whether tokens lie along the dims over which a node reduces: all where it names none."""
    part = call.first
    named = dims_named(call.node, len(part.shape))
    return bool(part.dims) if named is None else any(dim in part.dims for dim in named)


def _loss(call: _Call) -> _Result:
    """A loss of torch's, of each entry or of each row of classes, perhaps reduced."""
    reduction = call.node._saved_reduction  # noqa: SLF001
    if any(part.dims for part in call.parts) and reduction != _NONE:
        return call.reduced() if reduction == _MEAN else call.summed()
    part, of_classes = call.first, len(call.out) < len(call.first.shape)
    if not of_classes or not call.out:
        return _each_token(call)
    classes = min(1, len(part.shape) - 1)
    if classes in part.dims:
        return call.wrong()
    return call.of_tokens(dim - (dim > classes) for dim in part.dims)


def _viewed(call: _Call) -> _Result:
    """Other dims of the same entries in their order."""
    part = call.first
    tokens = part.size or (part.shape[part.dims[0]] if part.dims else 0)
    return call.of_tokens(_regrouped(part.shape, call.out, part.dims, tokens))


def _regrouped(
    before: Sequence[int], after: Sequence[int], dims: Sequence[int], tokens: int
) -> set[int]:
    """The dims of a tensor of the shape ``after`` that have what lies along ``dims`` of ``before``,
    of so many ``tokens``, where entries keep their order."""
    found, olds = set[int](), [dim for dim, size in enumerate(before) if size != 1]
    news = [dim for dim, size in enumerate(after) if size != 1]
    while olds and news:
        one, other = [olds.pop(0)], [news.pop(0)]
        while prod(before[dim] for dim in one) != prod(after[dim] for dim in other):
            fewer = prod(before[dim] for dim in one) < prod(after[dim] for dim in other)
            (one if fewer else other).append((olds if fewer else news).pop(0))
        if any(dim in dims for dim in one):
            exact = [dim for dim in other if after[dim] == tokens]
            found |= set(exact if len(exact) == 1 else other)
    return found


def _permuted(call: _Call) -> _Result:
    """The same dims in another order."""
    node, count = call.node, len(call.out)
    if call.kind == "Permute":
        order = [_signed(dim) % count for dim in node._saved_dims]  # noqa: SLF001
    else:
        order, swapped = [*range(count)], (0, min(1, count - 1))
        if call.kind == "Transpose":
            given = (node._saved_dim0, node._saved_dim1)  # noqa: SLF001
            swapped = (_signed(given[0]) % count, _signed(given[1]) % count)
        order[swapped[0]], order[swapped[1]] = order[swapped[1]], order[swapped[0]]
    return call.of_tokens(at for at, dim in enumerate(order) if dim in call.first.dims)


def _selected(call: _Call) -> _Result:
    """One entry along a dim, or several of them apart: of a single token where these are tokens."""
    part = call.first
    (dim,) = dims_named(call.node, len(part.shape)) or [0]
    left = [at - (at > dim) for at in part.dims if at != dim]
    index = getattr(call.node, "_saved_index", None)
    picks = dim in part.dims and index is not None
    order = ("select", _signed(index) % part.shape[dim], part.shape[dim]) if picks else None
    return call.of_tokens(left, order)


def _sliced(call: _Call) -> _Result:
    """Some entries along a dim, consecutive or not."""
    part, order = call.first, None
    (dim,) = dims_named(call.node, len(part.shape)) or [0]
    if dim in part.dims and call.kind == "Slice":
        start, stop = _range_of(call.node, part.shape[dim])
        whole = (start, stop) == (0, part.shape[dim])
        step = call.node._saved_step  # noqa: SLF001
        order = None if whole else ("slice", start, stop, step, part.shape[dim])
    return call.of_tokens(part.dims, order)


def _range_of(node: Any, size: int) -> tuple[int, int]:
    """[start, stop) of what a slice takes of so many."""
    start, stop = _signed(node._saved_start), _signed(node._saved_end)  # noqa: SLF001
    start, stop = (min(max(at + size if at < 0 else at, 0), size) for at in (start, stop))
    return start, stop if node._saved_step == 1 else start  # noqa: SLF001


def _joined(call: _Call) -> _Result:
    """Tensors one after the other along a dim."""
    part = call.first
    (dim,) = dims_named(call.node, len(part.shape)) or [0]
    if not any(dim in one.dims for one in call.parts):
        dims, crosses = _aligned(call)
        if call.mixes or crosses or dims is None:
            return call.summed()
        return call.of_tokens(dims)
    if len(call.parts) < len(call.given):
        return call.wrong("others beside those")
    orders: list[Any] = [one.order for one in call.parts]
    if not call.mixes:
        return replace(part, shape=call.out), ""
    if _are_consecutive(orders):
        return replace(part, shape=call.out, order=orders[0][0]), ""
    return call.of_tokens(part.dims, ("joined", tuple(orders)))


def _are_consecutive(orders: Sequence[Any]) -> bool:
    """Whether pieces are all that was cut of one tensor, from the first to the last."""
    if not all(isinstance(order, tuple) and order[0] == orders[0][0] for order in orders):
        return False
    pieces = [order[1] for order in orders]
    kinds = {piece[0] for piece in pieces}
    if kinds == {"cut"}:
        same = len({piece[2] for piece in pieces}) == 1 and len(pieces) == len(pieces[0][2])
        return same and [piece[3] for piece in pieces] == [*range(len(pieces))]
    if kinds == {"select"}:
        same = {piece[2] for piece in pieces} == {len(pieces)}
        return same and [piece[1] for piece in pieces] == [*range(len(pieces))]
    if kinds == {"slice"}:
        chained = all(one[2] == other[1] for one, other in pairwise(pieces))
        return chained and pieces[0][1] == 0 and pieces[-1][2] == pieces[-1][4]
    return False


def _stacked(call: _Call) -> _Result:
    """Tensors one beside the other along a new dim."""
    part, count = call.first, len(call.out)
    dim = _signed(call.node._saved_dim) % count  # noqa: SLF001
    dims = [at + (at >= dim) for at in part.dims]
    if not call.mixes and all(one.dims == part.dims for one in call.parts):
        return call.of_tokens(dims)
    if any(one.dims for one in call.parts):
        return call.wrong("several beside each other")
    orders: list[Any] = [one.order for one in call.parts]  # of single tokens
    if len(orders) == len(call.given) and _are_consecutive(orders):
        return replace(part, shape=call.out, dims=(dim,), order=orders[0][0]), ""
    return call.of_tokens([dim], ("stacked", tuple(orders)))


def _indexed(call: _Call) -> _Result:
    """Entries that are picked by a mask or by numbers."""
    part, node = call.first, call.node
    if WITHIN in node.metadata:
        same = len(call.out) == len(part.shape)
        return call.of_tokens(part.dims if same else (0,))
    if call.kind == "MaskedSelect":
        mask = node._saved_mask  # noqa: SLF001
        picks = part.varies_with(mask.shape)
        order = _order_of_picks(part.shape, [mask]) if picks else None
        return call.of_tokens((0,) if picks else part.dims, order)
    indices = list(node._saved_indices)  # noqa: SLF001
    # A mask stands for as many dims as it has, numbers for one.
    taken, at = set[int](), 0
    for x in indices:
        span = x.dim() if x is not None and x.dtype == torch.bool else 1
        taken |= set(range(at, at + span)) if x is not None else set()
        at += span
    # What is picked lies where its dims were, where these stand together, else in front.
    first, count = min(taken), len(call.out) - (len(part.shape) - len(taken))
    at = first if taken == set(range(first, first + len(taken))) else 0
    left = [dim for dim in range(len(part.shape)) if dim not in taken]
    places = [*left[:at], *([-1] * count), *left[at:]]  # the old dim of each
    picks = bool(taken & set(part.dims))
    found = [new for new, old in enumerate(places) if old in part.dims or (old < 0 and picks)]
    order = _order_of_picks(part.shape, indices) if picks else None
    return call.of_tokens(found, order)


def _order_of_picks(shape: Sequence[int], indices: Sequence[torch.Tensor | None]) -> Hashable:
    """What tells picks of other entries of a tensor of ``shape`` apart, where all of its first dims
    are picked from: by their numbers in these dims flattened, whatever form they have."""
    known = [x for x in indices if x is not None]
    if len(known) < len(indices) or any(x.dim() != 1 for x in known if x.dtype != torch.bool):
        return _order_of(known)
    flat, at = torch.zeros((), dtype=torch.int64, device=known[0].device), 0
    for x in known:
        numbers = x.nonzero().unbind(1) if x.dtype == torch.bool else [x]
        for own in numbers:
            flat = flat * shape[at] + own
            at += 1
    return _order_of([flat])


def _order_of(indices: Sequence[torch.Tensor]) -> Hashable:
    """What tells picks by other numbers or masks apart."""
    sums = []
    for x in indices:
        flat = x.detach().flatten().to(torch.float64)
        ramp = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=torch.float64)
        sums.append((tuple(x.shape), float((flat * ramp).sum()), float((flat * ramp.sin()).sum())))
    return ("picked", *sums)


def _picked_along(call: _Call) -> _Result:
    """Entries along a dim that are picked by their numbers."""
    part = call.first
    (dim,) = dims_named(call.node, len(part.shape)) or [0]
    within = WITHIN in call.node.metadata
    order = None if within else _order_of([call.node._saved_index])  # noqa: SLF001
    if any(call.out[at] != part.shape[at] for at in part.dims if at != dim):
        return call.wrong("some")
    if call.kind == "IndexSelect" and not dim and not within:
        order = _order_of_picks(part.shape, [call.node._saved_index])  # noqa: SLF001
    return call.of_tokens(part.dims, order if dim in part.dims else None)


def _scattered(call: _Call) -> _Result:
    """Entries that are put, or added up, at others along a dim."""
    node, source = call.node, call.given[-1][0]
    reduce = getattr(node, "_saved_reduce", "sum")
    if source is None:  # constants are put into a part
        return call.of_tokens(call.first.dims)
    base, picked = call.given[0][0], _picked_for(call)
    if picked is not None and source.dims and source.order == picked:  # back to their own places
        dims = [dim for dim, size in enumerate(call.out[:2]) if size == source.size]
        flat = [0] if not dims or len(call.out) == 1 else dims
        whole = replace(source, shape=call.out, dims=tuple(flat), order=picked[0])
        return (whole if base is None else replace(base, shape=call.out)), ""
    if call.kind == "CopySlices" and base is not None and not call.mixes:
        sizes = [[one.shape[dim] for dim in one.dims] for one in call.parts]
        if all(own == sizes[0] for own in sizes):  # features of the same tokens
            return replace(base, shape=call.out), ""
    if call.mixes:
        return call.summed() if reduce == "sum" else call.wrong(f"a {reduce}")
    dims = dims_named(node, len(source.shape))
    along = dims is None or any(dim in source.dims for dim in dims)
    if along and source.dims:
        return call.summed() if reduce == "sum" else call.wrong(f"a {reduce}")
    if len(call.out) == len(source.shape):
        return call.of_tokens(source.dims)
    return call.summed() if source.dims else call.of_tokens(())


def _picked_for(call: _Call) -> Any:
    """The order of the tokens that a function puts to where a mask or numbers say; None where
    others are put, or nothing is known."""
    node = call.node
    if WITHIN in node.metadata or call.kind not in ("IndexPut", "MaskedScatter"):
        return None
    if call.kind == "MaskedScatter":
        mask = node._saved_mask  # noqa: SLF001
        return None, _order_of_picks(call.out, [mask])
    return None, _order_of_picks(call.out, list(node._saved_indices))  # noqa: SLF001


def _restrided(call: _Call) -> _Result:
    """The same entries by other strides: after a change of a view in place."""
    strides, size = [*call.node._saved_stride], 1  # noqa: SLF001
    for dim in range(len(call.out) - 1, -1, -1):
        if call.out[dim] != 1 and strides[dim] != size:
            return call.wrong()
        size *= call.out[dim]
    same = prod(call.out) == prod(call.first.shape)
    return _viewed(call) if same else call.wrong()


def _repeated(call: _Call) -> _Result:
    """All entries several times along some dims."""
    shift = len(call.out) - len(call.first.shape)
    return call.of_tokens(dim + shift for dim in call.first.dims)


def _product(call: _Call) -> _Result:
    """A product of matrices, or of a matrix or a vector with a vector; what is added to it first
    does not matter."""
    (one, a), (other, b) = call.given[-2:]
    if one is None and other is None:
        return _each_token(call)
    dims_a, dims_b = (set(part.dims) if part is not None else set() for part in (one, other))
    batched = call.kind in ("Bmm", "Baddbmm")
    ends = len(a or b or ()) - 1 if call.kind in ("Dot", "Vdot") else None
    inner_a = ends if ends is not None else 2 if batched else 1
    inner_b = 0 if call.kind in ("Dot", "Vdot", "Mv", "Addmv") else 1 if batched else 0
    contracts = inner_a in dims_a or inner_b in dims_b
    rows = {dim for dim in dims_a if dim != inner_a}
    columns = {dim for dim in dims_b if dim != inner_b}
    shared = {0} if batched else set[int]()
    mixes = bool(rows - shared) and bool(columns - shared)
    mixes |= bool(shared & rows) != bool(shared & columns) and bool(dims_a) and bool(dims_b)
    mixes |= contracts and bool(rows | columns)
    # Of two parts those tokens meet that are the same.
    both = bool(dims_a) and bool(dims_b)
    mixes |= call.mixes or (both and (inner_a in dims_a) != (inner_b in dims_b))
    if mixes:
        return call.summed(f"products of {call.first.word} with others of one rank")
    if contracts:
        return call.wrong(ADD_UP) if add_up_to_one(call.node) else call.summed()
    last = len(call.out) - 1
    return call.of_tokens([*rows, *(dim if dim in shared else last for dim in columns)])


def _with_new_dim(call: _Call) -> _Result:
    """The same dims and another one behind them, or without the last one: windows along a dim, and
    the two parts of a complex number."""
    part = call.first
    named = dims_named(call.node, len(part.shape)) or []
    return call.wrong() if set(named) & set(part.dims) else call.of_tokens(part.dims)


def _diagonal(call: _Call) -> _Result:
    """Entries with the same place along two dims, which lie along the last one then."""
    part, count = call.first, len(call.first.shape)
    pair = {_signed(getattr(call.node, f"_saved_dim{at}")) % count for at in (1, 2)}
    left = [dim for dim in range(count) if dim not in pair]
    if pair & set(part.dims):
        return call.wrong()
    return call.of_tokens(new for new, dim in enumerate(left) if dim in part.dims)


def _distances(call: _Call) -> _Result:
    """Distances of all rows of one tensor from all of another."""
    (one, _), (other, _) = call.given[:2]
    if one is not None and other is not None:
        return call.summed(f"products of {call.first.word} with others of one rank")
    shift = 0 if one is not None else 1
    return call.of_tokens(dim + shift for dim in call.first.dims)


def _windows(call: _Call) -> _Result:
    """Along the dims behind the second."""
    part = call.first
    channels = call.kind == "Convolution" and 1 in part.dims
    if channels or any(dim > 1 for dim in part.dims):
        return call.wrong("" if call.kind in _NAMES else "values of windows")
    return call.of_tokens(part.dims)


def _normed(call: _Call) -> _Result:
    """Norms of layers, of groups of channels or of a batch."""
    part, node = call.first, call.node
    along = set(range(1, len(part.shape)))
    if call.kind in ("NativeLayerNorm", "FusedRmsNorm"):
        along = set(range(len(part.shape))[-len(node._saved_normalized_shape) :])  # noqa: SLF001
    elif call.kind != "NativeGroupNorm":
        along = set(range(len(part.shape))) - {1} if node._saved_training else set()  # noqa: SLF001
    return call.wrong() if along & set(part.dims) else call.of_tokens(part.dims)


def _attended(call: _Call) -> _Result:
    """Attention, along the dim before the last."""
    before_last = any(len(part.shape) - 2 in part.dims for part in call.parts)
    return call.wrong("attention") if before_last else call.of_tokens(call.first.dims)


def _padded(call: _Call) -> _Result:
    """More entries at the ends of the last dims."""
    part, count = call.first, len(call.out)
    pads = call.node._saved_pad  # noqa: SLF001
    padded = {count - 1 - at // 2 for at, pad in enumerate(pads) if _signed(pad)}
    return call.wrong() if padded & set(part.dims) else call.of_tokens(part.dims)


def _taken(call: _Call) -> _Result:
    """Entries that are picked by their numbers among all."""
    said = f"some of the places of one rank, by their numbers in its {call.first.word}"
    return call.summed(said if call.first.dims else "")


_CUTS = ("Split", "SplitWithSizes", "UnsafeSplit", "Unbind")
"""Kinds of nodes that have several pieces of one tensor as results."""

_RULES: dict[str, Callable[[_Call], _Result]] = {
    **dict.fromkeys(("Sum", "Nansum"), _sum),
    **dict.fromkeys(_MEANS, _mean),
    **dict.fromkeys(("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"), _viewed),
    **dict.fromkeys(("Permute", "Transpose", "T"), _permuted),
    **dict.fromkeys(("Select", "Unbind"), _selected),
    **dict.fromkeys(("Slice", "Split", "SplitWithSizes", "UnsafeSplit"), _sliced),
    **dict.fromkeys(("Index", "MaskedSelect"), _indexed),
    **dict.fromkeys(("Gather", "IndexSelect"), _picked_along),
    **dict.fromkeys(
        (
            *("IndexAdd", "IndexCopy", "IndexPut", "IndexReduce", "Scatter", "ScatterAdd"),
            *("ScatterReduce", "CopySlices", "SegmentReduce", "MaskedScatter"),
        ),
        _scattered,
    ),
    **dict.fromkeys(("Mm", "Bmm", "Addmm", "Baddbmm", "Mv", "Addmv", "Dot", "Vdot"), _product),
    **dict.fromkeys(
        ("NativeLayerNorm", "FusedRmsNorm", "NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm"),
        _normed,
    ),
    **dict.fromkeys(
        (
            *("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttentionForCpu"),
            *("ScaledDotProductEfficientAttention", "ScaledDotProductCudnnAttention"),
        ),
        _attended,
    ),
    **dict.fromkeys(("Unfold", "ViewAsReal", "ViewAsComplex"), _with_new_dim),
    "Diagonal": _diagonal,
    "Cat": _joined,
    "Stack": _stacked,
    "Repeat": _repeated,
    "AsStrided": _restrided,
    "Cdist": _distances,
    "Convolution": _windows,
    "ConstantPadNd": _padded,
    "Take": _taken,
}
"""What functions make of parts, by kinds; of others :func:`_each_token` and losses."""


def _left_out(nodes: Sequence[Any], made_of: Mapping[Any, Parted]) -> str:
    """What is said of tokens that a loss leaves out by their numbers; nothing where it has all."""
    # What is taken of a node's result along a dim: [start, stop) of so many, each time.
    taken: dict[tuple[Any, int], list[tuple[int, int, int]]] = {}
    used = defaultdict[Any, set[int]](set)  # which of its several results are used, by node
    for node in nodes:
        for parent, number in node.next_functions:
            used[parent].add(number)
    for node in nodes:
        if MARK in node.metadata or node not in made_of or not node.next_functions:
            continue
        parent, number = node.next_functions[0]
        part, shape = _given(parent, number, made_of)
        if part is None or shape is None or part.summed:
            continue
        if part.word == "samples" or kind_of(node) not in ("Select", "Slice", *_CUTS):
            continue
        (dim,) = dims_named(node, len(shape)) or [0]
        if dim not in part.dims:
            continue
        if kind_of(node) in _CUTS:
            if len(used[node]) < len(node._input_metadata):  # noqa: SLF001
                return f"some of the {part.word} of one rank, by their numbers in its part"
            continue
        size = shape[dim]
        start, stop = _range_of(node, size) if kind_of(node) == "Slice" else _place(node, size)
        taken.setdefault((parent, dim), []).append((start, stop, size))
    if all(map(_covers, taken.values())):
        return ""
    return "some of the places of one rank, by their numbers in its part"


def _place(node: Any, size: int) -> tuple[int, int]:
    """[start, stop) of the one entry that a node takes of so many."""
    at = _signed(node._saved_index) % size  # noqa: SLF001
    return at, at + 1


def _covers(taken: Sequence[tuple[int, int, int]]) -> bool:
    """Whether the places [start, stop) of so many that were taken are all, each as often: a loss in
    chunks, or slices of everything."""
    size = taken[0][2]
    counts = Counter((start, stop) for start, stop, _ in taken if (start, stop) != (0, size))
    parts = sorted(counts) if len(set(counts.values())) < 2 else [(-1, -1)]
    borders = [(0, 0), *parts, (size, size)] if parts else []
    return all(one[1] == other[0] for one, other in pairwise(borders))
