"""A model's own head and loss, run whole on every rank while its layers are spread.

A loss with a z-term, smoothed labels, a second head or a teacher is no cross entropy of the logits,
and a forward that makes it shifts its labels itself, so it cannot be run on parts of the tokens.
But all of it sees the layers only through their last hidden states [b, S, h]. So the model's
forward is called with the whole batch; its base model is given this rank's tokens instead, and the
hidden states that it returns are gathered from all ranks. The loss is then alike on all R ranks,
each of which takes 1 / R of it: the adjoint of the gathering adds up the gradients that all ranks
have of a rank's own hidden states.

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

_OF_WHOLE_BATCH = ("attention_mask", "cache_position", "past_key_values")
"""Arguments of a base model that describe the whole batch, and are dropped when it runs on a part:
the placement knows documents and padding."""


def base_of(inner: torch.nn.Module) -> torch.nn.Module | None:
    """The base model of a model of transformers, or of the one inside an adapter (peft): its layers
    without the head, named by its ``base_model_prefix``. None where it has no such part."""
    adapted = getattr(inner, "get_base_model", None)
    if callable(adapted):
        inner = adapted()
    base = getattr(inner, str(getattr(inner, "base_model_prefix", "")), None)
    return base if isinstance(base, torch.nn.Module) and base is not inner else None


@dataclass(slots=True, kw_only=True)
class _RunningCall:
    """The state of one call of the model: the placement of its batch, this rank's inputs
    [b, s_r, ...] by name (``local``), the token ids of the whole batch [b, S] (``whole``), and how
    often the base model was called."""

    placement: Placement
    local: Mapping[str, torch.Tensor]
    whole: torch.Tensor
    calls: int = 0


class WholeHead:
    """Calls the user's module ``inner`` with whole batches, so that its own head and loss see all
    tokens, while hooks give its base model this rank's tokens alone."""

    def __init__(self, inner: torch.nn.Module, base: torch.nn.Module, slot: ModelSlot) -> None:
        """Hook ``base``, the base model within ``inner``: its arguments become local and its
        results whole."""
        self._inner, self._slot = inner, slot
        self._argument_names = tuple(inspect.signature(base.forward).parameters)
        self._running: _RunningCall | None = None
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
        """Run ``call(**whole)`` with the inputs [b, S, ...] of the whole batch, while the base
        model works on the inputs ``local`` [b, s_r, ...]. Returns the model's results with this
        rank's part of the loss, and the logits of its tokens. ``tokens`` names the input with token
        ids. Raises ModelError where there is no loss, or the base model is not called once."""
        self._running = running = _RunningCall(
            placement=placement, local=local, whole=whole[tokens]
        )
        self._slot.take(None)
        try:
            outputs = call(**whole)
        finally:
            self._running = None
        loss = loss_of(outputs)
        if loss is None or running.calls != 1:
            raise ModelError(
                f"loss of {type(self._inner).__name__}",
                got="no loss" if loss is None else f"{running.calls} calls of its base model",
                wanted="one of both",
                hint="call run(**inputs) without labels, and sum a loss of your own",
            )
        return _own_part(outputs, loss, placement, whole[tokens].shape[1])

    def _before(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The hook before the base model: give it this rank's inputs in the place of the whole
        batch, and spread it. Raises ModelError where it is called with other tokens."""
        running = self._running
        if running is None:
            return None
        given = {**dict(zip(self._argument_names, args, strict=False)), **named}
        if not any(x is running.whole for x in given.values()):
            raise ModelError(
                f"base model of {type(self._inner).__name__}",
                got="other tokens than those of the batch",
                wanted="its tokens as they are",
                hint="call run(**inputs) without labels, and sum a loss of your own",
            )
        running.calls += 1
        kept = {name: value for name, value in given.items() if name not in _OF_WHOLE_BATCH}
        local = {name: x for name, x in running.local.items() if name in self._argument_names}
        self._slot.take(running.placement)
        return (), {**kept, **local}

    def _after(self, module: Any, args: Any, out: Any) -> Any:
        """The hook after the base model: make the model plain again, and replace its hidden states
        [b, s_r, h] by those of all ranks [b, S, h], so that the head sees the whole batch."""
        running = self._running
        if running is None:
            return None
        self._slot.take(None)
        return _replace_states(out, running.placement.gather)


def _replace_states(out: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The results of a base model with its last hidden states x replaced by ``change(x)``. Raises
    ModelError where it returns other tensors beside them."""
    count = len(list(result_tensors(out)))
    if count != 1:
        raise ModelError(
            "results of the base model",
            got=f"{count} tensors",
            wanted="its last hidden states alone",
            hint="hidden states of other layers and attention weights are of this rank's tokens",
        )
    if isinstance(out, tuple):
        return (change(out[0]), *out[1:])
    out.last_hidden_state = change(out.last_hidden_state)
    return out


def _own_part(outputs: Any, loss: torch.Tensor, placement: Placement, width: int) -> Any:
    """Change the results for a whole batch, rows of ``width`` tokens, into this rank's part of them
    and return them: its ``loss`` divided by the number of ranks, and of other tensors [b, S, ...]
    the entries [b, s_r, ...] of this rank's tokens."""
    index = torch.from_numpy(placement.index()).to(loss.device)
    # All ranks have the same loss, and losses are summed over ranks.
    local_loss = loss / placement.tokens.ranks

    def part(x: Any) -> Any:
        """This rank's part of one result: of the loss, or the entries [b, s_r, ...] of a tensor
        [b, S, ...]; anything else unchanged."""
        if x is loss:
            return local_loss
        if isinstance(x, torch.Tensor) and x.dim() >= 2 and x.shape[1] == width:
            return x.index_select(1, index)
        return x

    if isinstance(outputs, tuple):
        return tuple(part(x) for x in outputs)
    for name, value in list(vars(outputs).items()):
        if isinstance(value, torch.Tensor):
            setattr(outputs, name, part(value))
    return outputs


@torch.no_grad()
def sees_hidden_states_alone(
    base: torch.nn.Module, run: Callable[..., Any], few: Mapping[str, torch.Tensor], tokens: str
) -> bool:
    """Whether the loss of a plain model depends on its base model ``base`` only through the last
    hidden states that a single call of it returns.

    Tested by two runs ``run(**few)`` on inputs [1, n, ...], of which ``tokens`` names the token
    ids. In the second run the base model gets the token ids in reverse order, but its result is
    replaced by the hidden states of the first run: the loss must stay the same.
    """
    calls = 0  # of the base model in both runs
    states_of_calls = list[torch.Tensor]()  # [1, n, h] each
    replacement = list[torch.Tensor]()  # the hidden states of the first run, once it has ended

    def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Count the call, and in the second run reverse its tokens."""
        nonlocal calls
        calls += 1
        if not replacement or not any(v is few[tokens] for v in named.values()):
            return None
        reverse = few[tokens].flip(1)
        return args, {k: reverse if v is few[tokens] else v for k, v in named.items()}

    def after(module: Any, args: Any, out: Any) -> Any:
        """Record the hidden states, and in the second run put those of the first in their place."""

        def change(x: torch.Tensor) -> torch.Tensor:
            """Record the hidden states x [1, n, h]; return those of the first run, or x in it."""
            states_of_calls.append(x)
            return replacement[0] if replacement else x

        return _replace_states(out, change)

    hooks = hook_before(base, before, named=True), hook_after(base, after)
    try:
        losses = []
        for _ in range(2):
            loss = loss_of(run(**few))
            if loss is None or not states_of_calls:
                return False
            losses.append(float(loss))
            replacement[:] = states_of_calls[:1]
    except ModelError:
        return False
    finally:
        for undo in hooks:
            undo()
    first, second = losses
    # Two calls in all: one in each run.
    return calls == 2 and abs(first - second) <= 1e-6 * abs(first)
