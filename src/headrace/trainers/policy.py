"""GRPO: a trainer that samples its own batches, each rank a part of them.

TRL's GRPOTrainer reaches its model through one method, which gives the log-probability and the
entropy of every token of a batch: of the old policy, of the reference, and of the policy that is
trained. Ranks sample and reward each its own completions, as TRL has them do, so this method is
given values of planned forwards over the samples of all ranks; the trainer makes its loss of them,
whatever its kind, and a planned step has the gradients of these values.

Shape legend: a batch of b rows of S columns on a rank; n tokens of a sample; s_r local tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from headrace.engine.attach import Attached
from headrace.trainers.rows import columns_of, samples_of
from headrace.trainers.stand_ins import ModelStandIn, Outcome, fused_head

__all__ = ["PolicyModel", "policy_values"]


class PolicyModel(ModelStandIn):
    """Stands in for a policy that the trainer calls on a batch of rows that only this rank has. All
    ranks run their batches together, by planned forwards. Collective.

    Args:
        run: The attached run, to which each rank gives its own samples.
        model: The model in whose place it is called.
        spread: The model to run, where it is not that of the run, such as the reference.
        outcomes: A list to which the values of each call are added for the loss to be computed of,
            where gradients are enabled; None where no loss is computed.
    """

    def __init__(
        self,
        run: Attached,
        model: Any,
        *,
        spread: Any = None,
        outcomes: list[Outcome] | None = None,
    ) -> None:
        super().__init__(model)
        self._run, self._spread, self._outcomes = run, spread, outcomes

    def __call__(self, **named: Any) -> Any:
        """The outputs that TRL's models have for a batch: log-probabilities and entropies of its
        tokens, [b, S - 1] each."""
        for name in ("fused_lm_head", "use_cache", "return_dict"):
            named.pop(name, None)
        ids = named["input_ids"]
        samples = samples_of(named, "input_ids", "a batch")
        given = [sample.fields for sample in samples]
        by_sample = self._run.map(given, policy_values, model=self._spread, more=fused_head)
        # [b, S - 1, 2]: the last column predicts nothing.
        values = columns_of(by_sample, samples, tuple(ids.shape)).to(ids.device)[:, :-1]
        if self._outcomes is not None and torch.is_grad_enabled():
            # The trainer's loss has gradients by this leaf; a planned step carries them on.
            values = values.clone().requires_grad_()
            self._outcomes.append(Outcome(leaf=values, samples=samples))
        log_probs, entropy = values.unbind(-1)
        return SimpleNamespace(log_probs=log_probs, entropy=entropy, aux_loss=None)


def policy_values(outputs: Any, micro: Any) -> torch.Tensor:
    """The log-probability of each local token's label and the entropy of its prediction, as columns
    [1, s_r, 2]. The entropy is 0 for a model that computes none, such as the reference."""
    log_probs = outputs.log_probs
    entropy = getattr(outputs, "entropy", None)
    values = torch.stack(
        [log_probs, torch.zeros_like(log_probs) if entropy is None else entropy], -1
    )
    return values.to(torch.promote_types(values.dtype, torch.float32))
