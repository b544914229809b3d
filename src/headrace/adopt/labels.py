"""Labels of tokens, the loss of those that a rank has, where a model's results hold logits and
loss, and whose code makes the loss of a model of transformers.

Only a loss that transformers itself makes is known to be the cross entropy of the logits in every
batch. One that others have written may equal it at first, with a coefficient that is still 0 or
labels that it does not mask yet, so what it gives for a few tokens tells nothing of later ones.

Shape legend: a batch of b rows of S tokens; s_r of every row on rank r; V tokens in a vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from headrace.errors import DataError, ModelError
from headrace.ops.fused import widened
from headrace.ops.loss import IGNORED, head_loss
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS

__all__ = [
    "Labels",
    "LossHead",
    "LossSource",
    "convention_of",
    "count_targets",
    "local_loss",
    "logits_of",
    "loss_of",
    "own_loss_error",
    "predicted",
    "require_labels",
    "result_tensors",
]

Labels = Literal["next", "same"]
"""Whether logits at a place predict the label of the next place, as causal models of transformers
do, or that of the same place."""

_CONVENTIONS: dict[str, Labels] = {
    "ForCausalLM": "next",
    "LMHeadModel": "next",
    "ForMaskedLM": "same",
    "ForTokenClassification": "same",
}
"""Which labels a transformers model predicts, by the ending of its class name."""

_WITH_IMAGES = "ForConditionalGeneration"
"""The ending of models that continue a text and take images or sounds. Encoders with decoders have
it, too."""


def convention_of(model: torch.nn.Module) -> Labels:
    """Whether a transformers model predicts the label of the next or of the same place, by the end
    of its class name, or of that of the model inside an adapter (peft). Raises ModelError for other
    names."""
    base = getattr(model, "get_base_model", None)
    plain: Any = base() if callable(base) else model
    name = type(plain).__name__
    for end, kind in _CONVENTIONS.items():
        if name.endswith(end):
            return kind
    if name.endswith(_WITH_IMAGES) and not plain.config.is_encoder_decoder:
        return "next"
    raise ModelError(
        f"loss of {name}",
        got="unknown labels",
        wanted=f"a model named ...{', ...'.join(_CONVENTIONS)}",
        hint="give labels='next' or 'same' if its logits are of tokens",
    )


def predicted(labels: torch.Tensor, kind: Labels) -> torch.Tensor:
    """The labels [b, S] that the logits at each place are compared with, made of ``labels`` [b, S]
    of the tokens themselves: for ``next`` they are shifted one place to the left, and the last
    place has none (IGNORED)."""
    if kind == "same":
        return labels
    last = labels.new_full((labels.shape[0], 1), IGNORED)
    return torch.cat([labels[:, 1:], last], dim=1)


def count_targets(batch: Mapping[str, torch.Tensor], kind: Labels) -> int | None:
    """Tokens of a batch that have a loss; None where it has no labels."""
    labels = batch.get("labels")
    return None if labels is None else int((predicted(labels, kind) != IGNORED).sum())


def local_loss(logits: torch.Tensor, labels: torch.Tensor, targets: int | None) -> torch.Tensor:
    """The sum of the cross entropy of this rank's tokens, divided by ``targets``, the tokens of the
    whole step that have a loss. Computed in single precision at least.

        logits   [b, s_r, V]
        labels   [b, s_r]      of the local places, IGNORED (-100) where there is no loss
    """
    flat = logits.flatten(0, -2)
    total = cross_entropy(
        flat.float() if flat.element_size() < 4 else flat,
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )
    return total / max(1, targets or 0)


def logits_of(outputs: Any) -> torch.Tensor:
    """The tensor [b, s, ...] of one result for each token among a model's results: its logits, else
    the last hidden states, else the first tensor of two dims or more. Raises ModelError where there
    is none."""
    for name in ("logits", "last_hidden_state"):
        found = _named(outputs, name)
        if isinstance(found, torch.Tensor):
            return found
    for part in _listed(outputs):
        if isinstance(part, torch.Tensor) and part.dim() >= 2:
            return part
    raise ModelError(
        "results of the model",
        got=type(outputs).__name__,
        wanted="logits of its tokens",
        hint="a tensor, a tuple or a dict that has one, or an attribute 'logits' or "
        "'last_hidden_state'",
    )


def _named(outputs: Any, name: str) -> Any:
    """The result of a model under a name, as an attribute or in a dict; None where it has none."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _listed(outputs: Any) -> Iterable[Any]:
    """The results of a model, one after the other."""
    if isinstance(outputs, Mapping):
        return outputs.values()
    return outputs if isinstance(outputs, (tuple, list)) else (outputs,)


def require_labels(batch: Mapping[str, torch.Tensor], kind: Labels) -> None:
    """Raise DataError for labels, not shifted yet, that the plain model predicts from padding:
    what it makes of padding, which sees other tokens, differs from what a spread model makes."""
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if labels is None or mask is None or labels.shape != mask.shape:
        return
    from_padding = (labels != IGNORED) & (mask == 0)
    if kind == "next":
        from_padding = (labels[:, 1:] != IGNORED) & (mask[:, :-1] == 0)
    if bool(from_padding.any()):
        raise DataError(
            "labels",
            got=f"{int(from_padding.sum())} that are predicted from padding",
            wanted=f"{IGNORED} there",
            hint="labels.masked_fill(attention_mask == 0, -100)"
            + (", and -100 for a row's first token behind padding" if kind == "next" else ""),
        )


def result_tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors among a model's results, however they are nested."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (tuple, list, Mapping)):
        parts = outputs.values() if isinstance(outputs, Mapping) else outputs
        for part in parts:
            yield from result_tensors(part)
    elif hasattr(outputs, "__dict__"):
        yield from result_tensors(tuple(vars(outputs).values()))


def loss_of(outputs: Any) -> torch.Tensor | None:
    """The loss [] of a model's results: their ``loss``, else the first tensor without dims; None
    where there is neither."""
    found = _named(outputs, "loss")
    if isinstance(found, torch.Tensor):
        return found
    parts = _listed(outputs)
    return next((x for x in parts if isinstance(x, torch.Tensor) and x.dim() == 0), None)


_TRUSTED = ("transformers", "torch", "accelerate", "contextlib")
"""Packages whose forwards, and wrappers of forwards, leave the loss as transformers makes it."""
_ADAPTERS = (*_TRUSTED, "peft")
"""Packages whose classes of adapters leave it so, as they return what the model inside returns."""
_WRAPPERS = (*_ADAPTERS, "trl", "headrace")
"""Packages that wrap the forward of a single model and leave it so."""


class LossSource:
    """The functions that make the loss of ``model``, which may be an adapter around another: the
    forwards of both, and the inner one's ``loss_function``."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Note the functions of now."""
        self._model: Any = model
        base = getattr(model, "get_base_model", None)
        core: Any = base() if callable(base) else model
        self._core = getattr(core, "_orig_mod", core)  # within what torch.compile returns
        self._noted = self._functions()

    def _functions(self) -> tuple[Any, ...]:
        """The functions that make the loss now, None for forwards that no instance has."""
        model, core = self._model, self._core
        function = getattr(core, "loss_function", None)
        of_core = function, type(core).forward, vars(core).get("forward")
        if core is model:
            return of_core
        return *of_core, type(model).forward, vars(model).get("forward")

    def changed(self) -> bool:
        """Whether any of the functions is another than when they were noted."""
        return any(a is not b for a, b in zip(self._functions(), self._noted, strict=True))

    def note(self) -> None:
        """Note the functions of now."""
        self._noted = self._functions()

    def error(self) -> ModelError | None:
        """The error that says which of the functions is not transformers' own; None where all are,
        so that the loss is the cross entropy of the logits if it is so for a few tokens."""
        # In the order of _functions().
        trusted = _TRUSTED, _TRUSTED, _WRAPPERS, _ADAPTERS, _WRAPPERS
        for number, function in enumerate(self._functions()):
            names = list(_modules_of(function))
            others = [name for name in names if name.split(".")[0] not in trusted[number]]
            if others:
                return own_loss_error(
                    self._core if number < 3 else self._model,
                    got=f"a {'forward' if number else 'loss_function'} of the model's own, "
                    f"of {others[0]}",
                    wanted="transformers' own, whose loss is the cross entropy of its logits",
                )
        return None


def own_loss_error(model: torch.nn.Module, *, got: str, wanted: str) -> ModelError:
    """The error for a loss of a model that cannot be made of parts of its logits."""
    return ModelError(
        f"loss of {type(model).__name__}",
        got=got,
        wanted=wanted,
        hint="what else is in it cannot be summed over ranks: call run(**inputs) without labels "
        "and use run.loss(logits, part.labels), or sum a loss of your own over part.labels and "
        "divide it by part.targets",
    )


def _modules_of(function: Any) -> Iterator[str]:
    """The names of the modules whose code runs in a function: its own, and those of the functions
    that it wraps. A wrapper claims the module of what it wraps, but not its global names."""
    while function is not None:
        plain = getattr(function, "__func__", function)  # of a bound method
        names: dict[str, Any] = getattr(plain, "__globals__", {})
        yield str(names.get("__name__") or getattr(plain, "__module__", ""))
        function = getattr(plain, "__wrapped__", None)


class LossHead:
    """Replaces the forward of the linear output head of a transformers ``model``, so that the loss
    is computed in chunks of tokens and the logits of all tokens are never held at once.

    Before a forward, :meth:`expect` is given the labels. The head then returns the loss in the
    place of logits, the model passes it on in its results, and :meth:`take` reads it there. Raises
    ModelError for a model without a linear head."""

    def __init__(self, model: Any) -> None:
        """Replace the forward of the model's output layer by one that returns the loss; raises
        ModelError where that layer is not linear."""
        find = getattr(model, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if not isinstance(head, torch.nn.Linear):
            raise ModelError(
                f"logits=False of {type(model).__name__}",
                got="no head" if head is None else f"{type(head).__name__} as its head",
                wanted="a linear one (get_output_embeddings of transformers)",
                hint="leave logits=False out, or sum the losses of chunks in its forward",
            )
        self._head = cast("Any", head)
        self._own_forward = head.forward
        self._labels: torch.Tensor | None = None  # [b, s_r] of the coming forward
        self._targets: int | None = None
        self._loss_made: torch.Tensor | None = None  # [], that of the current forward, detached
        self._seen_unchanged = False  # whether the model was seen to return the loss as it was made
        self._head.forward = self._forward_or_loss

    def remove(self) -> None:
        """Restore the model's own head."""
        self._head.forward = self._own_forward

    def expect(self, labels: torch.Tensor | None, targets: int | None) -> None:
        """Have the next forward compute the loss of ``labels`` [b, s_r], divided by ``targets``,
        the tokens of the whole step that have a loss; for None it computes logits as ever."""
        self._labels, self._targets, self._loss_made = labels, targets, None

    def take(self, logits: torch.Tensor) -> torch.Tensor:
        """The loss [] that the head returned in the place of ``logits`` [b, s_r, 1], which are
        those of the model's results. Raises ModelError where the model has changed it in between,
        as by a softcap; only the first forward is checked, as reading numbers waits for a
        device."""
        loss, made = logits.flatten()[0], self._loss_made  # every place has the loss
        self._labels = self._loss_made = None
        if not self._seen_unchanged and not isinstance(loss, FakeTensor):
            if made is None or float(loss.detach()) != float(made):
                raise ModelError(
                    "logits=False",
                    got="logits that the model changes after its head",
                    wanted="those of its head",
                    hint="leave it out",
                )
            self._seen_unchanged = True
        return loss

    @torch.compiler.disable
    def _forward_or_loss(self, x: torch.Tensor) -> torch.Tensor:
        """The head's new forward: hidden states x [b, s_r, h] to logits [b, s_r, V]; or where
        labels are expected, to [b, s_r, 1], the loss [] of all tokens together, repeated for each
        token."""
        if self._labels is None:
            return self._own_forward(x)
        weight, bias = self._head.weight, self._head.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        flat, labels = x.flatten(0, -2), self._labels.flatten()
        if torch.is_grad_enabled():
            scale = 1 / max(1, self._targets or 0)
            loss = _HeadLoss.apply(flat, weight, bias, labels, scale)
        else:
            chunks = flat.split(HEAD_CHUNK_TOKENS), labels.split(HEAD_CHUNK_TOKENS)
            # No name holds the logits of a chunk: they are freed before those of the next are made.
            losses = [
                local_loss(torch.nn.functional.linear(states, weight, bias), own, self._targets)
                for states, own in zip(*chunks, strict=True)
            ]
            loss = torch.stack(losses).sum()
        self._loss_made = loss.detach()
        return loss.expand(*x.shape[:-1], 1)


class _HeadLoss(torch.autograd.Function):
    """The loss of a linear head as an autograd function, whose forward computes the gradients as
    well, chunk by chunk, so that no logits are kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """The loss [] of x [tokens, h] and labels [tokens], for ``weight`` [V, h] and ``bias`` [V],
        with dx, dweight and dbias kept for the backward; ``scale`` is one over the targets."""
        of_weight = _WeightGradient(weight)
        of_bias = None if bias is None else _WeightGradient(bias)
        loss, dx = head_loss(x, labels, of_weight, scale, HEAD_CHUNK_TOKENS, of_bias)
        ctx.save_for_backward(dx, of_weight.grad, None if of_bias is None else of_bias.grad)
        return loss.to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The kept gradients of x, weight and bias, times ``grad`` [], that of the loss; labels and
        scale have none."""
        grads = [None if x is None else (x * grad).to(x.dtype) for x in ctx.saved_tensors]
        return *grads, None, None


class _WeightGradient:
    """A weight in the form that :func:`head_loss` takes, which asks it for its rows and adds
    gradients to it. The gradient is kept in ``grad`` of this object, not in ``weight.grad``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight.detach()
        self.grad = torch.empty(0)

    def rows(self) -> torch.Tensor:
        """The weight itself, which every rank has whole."""
        return self._weight

    def sums(self) -> torch.Tensor:
        """Zeros of the weight's shape to accumulate the gradient in: in float32, or float64 where
        the weight is."""
        return torch.zeros_like(self._weight, dtype=widened(self._weight[:0]).dtype)

    def add(self, grad: torch.Tensor) -> None:
        """Keep the complete gradient in ``grad``, in the dtype of the weight."""
        self.grad = grad.to(self._weight.dtype)

    def add_product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Keep the complete gradient left^T right, [n, V] and [n, h] to [V, h]."""
        self.add(left.t() @ right)
