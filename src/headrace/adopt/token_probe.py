"""Whether a model can be run on parts of its tokens: tested by a run, not by a list of names.

With attention replaced by a stand-in that looks at no other token, the model is run on a few tokens
and on parts of them. If the results of the parts are the parts of the result, everything beside
attention treats each token alone and uses its right place. If not, something that was not replaced
depends on other tokens: attention of its own, a convolution, pooling, a mean over tokens, places
that it counts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.adopt.labels import logits_of, loss_of
from headrace.adopt.operators import ModelSlot, StandIn
from headrace.errors import ModelError

__all__ = ["Probed", "first_places", "probe", "run_few"]

_TOKENS = 13
_PARTS = ((0, 5), (5, 8), (8, 13))  # of two tokens or more: graphs know one from many

_MIXES_THE_BATCH = (
    torch.nn.modules.batchnorm._BatchNorm,  # noqa: SLF001
    torch.nn.modules.instancenorm._InstanceNorm,  # noqa: SLF001
)


def first_places(model: torch.nn.Module) -> tuple[int, ...]:
    """The places that the first token of a row may have: models that keep places up to the
    padding's number for padding begin after it."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return (0,) if padding is None else (0, padding + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """``attentions`` are called in a forward; ``first`` is the place that the model counts the
    first token of a row as, where it takes places."""

    attentions: int
    first: int


@torch.no_grad()
def probe(
    model: torch.nn.Module,
    run: Callable[..., Any],
    slot: ModelSlot,
    batch: Mapping[str, torch.Tensor],
    tokens: str,
    *,
    places: bool,
    firsts: Sequence[int] = (0,),
) -> Probed:
    """Run ``model`` by ``run(**inputs)`` on a few tokens of ``batch`` as it is given them, and on
    parts of them with places that begin with one of ``firsts``. Labels are given where the model
    makes its own loss. Raises ModelError, naming what it found, when it cannot be run on parts."""
    for name, module in model.named_modules():
        if isinstance(module, _MIXES_THE_BATCH):
            raise ModelError(
                f"module {name}",
                got=type(module).__name__,
                wanted="norms of single tokens",
                hint="its statistics are those of one rank's tokens",
            )
    few, wrong = _few(batch, tokens), ModelError("places of tokens", got="none to try")
    with _evaluated(model, slot):
        whole = _run(run, slot, few, slice(0, _TOKENS))
        if not whole.calls:
            raise ModelError(
                "model",
                got="no attention that was replaced",
                wanted="at least one",
                hint="it must call scaled_dot_product_attention or transformers' registry",
            )
        for first in firsts:
            given = dict(few)
            if places and "position_ids" not in few:
                given["position_ids"] = torch.arange(_TOKENS)[None].to(few[tokens]) + first
            parts = [_run(run, slot, given, slice(*part)) for part in _PARTS]
            found = _difference(whole, parts)
            if found is None:
                return Probed(attentions=whole.calls, first=first)
            wrong = found
    raise wrong


@contextmanager
def _evaluated(model: torch.nn.Module, slot: ModelSlot) -> Iterator[None]:
    """Context in which the model runs in evaluation mode, so that nothing is random or updated."""
    training, before = [module for module in model.modules() if module.training], slot.held
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
        slot.take(before)


@torch.no_grad()
def run_few(
    model: torch.nn.Module,
    run: Callable[..., Any],
    slot: ModelSlot,
    batch: Mapping[str, torch.Tensor],
    tokens: str,
) -> None:
    """Run a model once by ``run(**inputs)``, on a few tokens and with the stand-in."""
    with _evaluated(model, slot):
        _run(run, slot, _few(batch, tokens), slice(0, _TOKENS))


def _few(batch: Mapping[str, torch.Tensor], tokens: str) -> dict[str, torch.Tensor]:
    """A few tokens of the first row, repeated where it has not as many; padding aside."""
    repeats = -(-_TOKENS // batch[tokens].shape[1])
    found = {
        name: value[:1].repeat(1, repeats, *[1] * (value.dim() - 2))[:, :_TOKENS]
        for name, value in batch.items()
        if name not in ("attention_mask", "position_ids")
    }
    for name, value in found.items():  # every place has a label, those at borders too
        if value.shape == found[tokens].shape and not value.is_floating_point():
            found[name] = torch.where(value < 0, found[tokens].to(value), value)
    if "position_ids" in batch:  # of the model's own kind, from where the row begins
        start = int(batch["position_ids"].min())
        found["position_ids"] = torch.arange(_TOKENS)[None].to(batch["position_ids"]) + start
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    logits: torch.Tensor
    loss: torch.Tensor | None
    calls: int


def _run(
    run: Callable[..., Any], slot: ModelSlot, few: Mapping[str, torch.Tensor], part: slice
) -> _Outcome:
    places = np.arange(part.start, part.stop)
    stand_in = StandIn(places=places, targets=_TOKENS)
    slot.take(stand_in)
    outputs = run(**{name: value[:, part] for name, value in few.items()})
    return _Outcome(logits=logits_of(outputs), loss=loss_of(outputs), calls=stand_in.calls)


def _difference(whole: _Outcome, parts: Sequence[_Outcome]) -> ModelError | None:
    """How results of parts differ from those of the whole."""
    together = torch.cat([part.logits for part in parts], dim=1)
    if whole.logits.shape != together.shape:
        return ModelError(
            "results of parts of the tokens",
            got=f"{list(together.shape)}",
            wanted=f"{list(whole.logits.shape)}",
            hint="the model must give one result for each token",
        )
    single = whole.logits.dtype not in (torch.float32, torch.float64)
    limit = (5e-2 if single else 1e-4) * max(float(whole.logits.abs().max()), 1e-30)
    off = (whole.logits - together).abs().flatten(2).amax(dim=2)[0]
    wrong = torch.nonzero(~(off <= limit)).flatten().tolist()
    if wrong:
        return ModelError(
            "model run on parts of its tokens",
            got=f"another result for token {wrong[0]}",
            wanted="the results of the whole",
            hint="something beside attention meets other tokens, or places are counted in it: give "
            "position_ids, use scaled_dot_product_attention with is_causal, no convolution or "
            "pooling over tokens",
        )
    if whole.loss is None:
        return None
    total = sum(float(part.loss) for part in parts if part.loss is not None)
    if abs(total - float(whole.loss)) > (5e-2 if single else 1e-4) * abs(float(whole.loss)):
        return ModelError(
            "loss of the model",
            got=f"{total:.6g} in parts",
            wanted=f"{float(whole.loss):.6g}",
            hint="a loss must be a cross_entropy of one label for each place: shift labels before "
            "the model, or take logits and use loss(logits, labels)",
        )
    return None
