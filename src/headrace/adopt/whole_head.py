"""A model's own head and loss, run whole on every rank while its layers are spread.

A loss with a z-term, smoothed labels, a second head or a teacher is no cross entropy of the logits,
and a forward that makes it shifts its labels itself, so it cannot be run on parts of the tokens.
But all of it sees the layers only through their last hidden states [b, S, h]. So the model's
forward is called with the whole batch; its base model is given this rank's tokens instead, and what
it gives is gathered from all ranks. The loss is then alike on all R ranks, each of which takes
1 / R of it: the adjoint of the gathering adds up the gradients that all ranks have of a rank's own
hidden states.

Every rank computes the whole head: R times the work of one, for the logits [b, S, V] that one
process has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from headrace.adopt.labels import loss_of, result_tensors
from headrace.adopt.operators import ModelSlot
from headrace.adopt.own_hooks import hook_after, hook_before
from headrace.adopt.placement import Placement
from headrace.errors import ModelError

__all__ = ["WholeHead", "base_of", "sees_hidden_states_alone"]

_OWN = ("attention_mask", "cache_position", "past_key_values")
"""Arguments of a base model that describe the whole batch, and are dropped when it runs on a part:
the placement knows documents and padding."""


def base_of(inner: torch.nn.Module) -> torch.nn.Module | None:
    """The layers of a model of transformers without its head; None where it has no such part."""
    base = getattr(inner, str(getattr(inner, "base_model_prefix", "")), None)
    return base if isinstance(base, torch.nn.Module) and base is not inner else None


@dataclass(slots=True, kw_only=True)
class _Work:
    """The state of one call of the model: the placement of its batch, this rank's inputs
    (``local``), the token ids of the whole batch [b, S], and how often the base model was
    called."""

    placement: Placement
    local: Mapping[str, torch.Tensor]
    whole: torch.Tensor
    calls: int = 0


class WholeHead:
    """Calls ``inner`` with whole batches while its base model works on parts of them."""

    def __init__(self, inner: torch.nn.Module, base: torch.nn.Module, slot: ModelSlot) -> None:
        """Hook ``base``, the base model within ``inner``: its arguments become local and its
        results whole."""
        self._inner, self._slot = inner, slot
        self._takes = tuple(inspect.signature(base.forward).parameters)
        self._now: _Work | None = None
        self._hooks = (
            hook_before(base, self._before, named=True),
            hook_after(base, self._after),
        )

    def remove(self) -> None:
        """Take the hooks away from the base model."""
        for undo in self._hooks:
            undo()

    def __call__(
        self,
        call: Callable[..., Any],
        placement: Placement,
        local: Mapping[str, torch.Tensor],
        whole: Mapping[str, torch.Tensor],
        tokens: str,
    ) -> Any:
        """Run ``call(**whole)`` with the inputs of the whole batch, while the base model works on
        the inputs ``local``. Returns the model's results with this rank's part of the loss, and
        the logits of its tokens. ``tokens`` names the input with token ids."""
        self._now = work = _Work(placement=placement, local=local, whole=whole[tokens])
        self._slot.take(None)
        try:
            outputs = call(**whole)
        finally:
            self._now = None
        loss = loss_of(outputs)
        if loss is None or work.calls != 1:
            raise ModelError(
                f"loss of {type(self._inner).__name__}",
                got="no loss" if loss is None else f"{work.calls} calls of its base model",
                wanted="one of both",
                hint="call run(**inputs) without labels, and sum a loss of your own",
            )
        return _own_part(outputs, loss, placement, whole[tokens].shape[1])

    def _before(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Give the base model this rank's inputs in the place of the whole batch; raises ModelError
        where it is called with other tokens."""
        work = self._now
        if work is None:
            return None
        given = {**dict(zip(self._takes, args, strict=False)), **named}
        if not any(x is work.whole for x in given.values()):
            raise ModelError(
                f"base model of {type(self._inner).__name__}",
                got="other tokens than those of the batch",
                wanted="its tokens as they are",
                hint="call run(**inputs) without labels, and sum a loss of your own",
            )
        work.calls += 1
        kept = {name: value for name, value in given.items() if name not in _OWN}
        own = {name: value for name, value in work.local.items() if name in self._takes}
        self._slot.take(work.placement)
        return (), {**kept, **own}

    def _after(self, module: Any, args: Any, out: Any) -> Any:
        """Gather the hidden states of all ranks, so that the head sees the whole batch."""
        work = self._now
        if work is None:
            return None
        self._slot.take(None)
        return _replace_states(out, work.placement.gather)


def _replace_states(out: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The results of a base model with its last hidden states x replaced by ``change(x)``. Raises
    ModelError where it returns other tensors beside them."""
    if len(list(result_tensors(out))) != 1:
        raise ModelError(
            "results of the base model",
            got=f"{len(list(result_tensors(out)))} tensors",
            wanted="its last hidden states alone",
            hint="hidden states of other layers and attention weights are of this rank's tokens",
        )
    if isinstance(out, tuple):
        return (change(out[0]), *out[1:])
    out.last_hidden_state = change(out.last_hidden_state)
    return out


def _own_part(outputs: Any, loss: torch.Tensor, placement: Placement, width: int) -> Any:
    """Change results of a whole batch of rows of ``width`` tokens into this rank's: one over the
    number of ranks of the loss, and of tensors [b, S, ...] the entries of this rank's tokens."""
    index = torch.from_numpy(placement.index()).to(loss.device)

    def part(x: Any) -> Any:
        """The local tokens of a tensor [b, S, ...]; anything else unchanged."""
        if isinstance(x, torch.Tensor) and x.dim() >= 2 and x.shape[1] == width:
            return x.index_select(1, index)
        return x

    own = loss / placement.tokens.ranks
    if isinstance(outputs, tuple):
        return tuple(own if x is loss else part(x) for x in outputs)
    for name, value in list(vars(outputs).items()):
        if isinstance(value, torch.Tensor):
            setattr(outputs, name, own if value is loss else part(value))
    return outputs


@torch.no_grad()
def sees_hidden_states_alone(
    base: torch.nn.Module, run: Callable[..., Any], few: Mapping[str, torch.Tensor], tokens: str
) -> bool:
    """Whether the loss of a plain model depends on its base model through the last hidden states of
    one call alone. Tested by two runs: in the second the base model gets the tokens of ``few`` in
    reverse, and the first run's hidden states replace its result; the loss must stay the same."""
    found, calls = list[torch.Tensor](), 0  # hidden states of each call, and calls of both runs
    handed = list[torch.Tensor]()  # those to put in place; empty in the first run

    def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Count the call, and flip its tokens once hidden states are to be handed in."""
        nonlocal calls
        calls += 1
        if not handed or not any(v is few[tokens] for v in named.values()):
            return None
        other = few[tokens].flip(1)
        return args, {k: other if v is few[tokens] else v for k, v in named.items()}

    def after(module: Any, args: Any, out: Any) -> Any:
        """Note the hidden states, or put those of the first run in their place."""

        def change(x: torch.Tensor) -> torch.Tensor:
            found.append(x)
            return handed[0] if handed else x

        return _replace_states(out, change)

    hooks = hook_before(base, before, named=True), hook_after(base, after)
    try:
        losses = []
        for _ in range(2):
            loss = loss_of(run(**few))
            if loss is None or not found:
                return False
            losses.append(float(loss))
            handed[:] = found[:1]
    except ModelError:
        return False
    finally:
        for undo in hooks:
            undo()
    once, again = losses
    return calls == 2 and abs(once - again) <= 1e-6 * abs(once)
