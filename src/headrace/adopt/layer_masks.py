"""Which tokens each attention layer of a transformers model sees, read from the model's own masks.

A layer says whether it is causal, and how wide its window is, in attributes of which families of
models make different use: a window of 8 tokens holds 8 or 9 of them on either side, and a
configuration may turn a causal model into one that sees both sides. What counts is the mask that
the model makes. So the model is run once on a few tokens under an attention function that records
the rule of the mask that each layer is given, and the rule is asked about tokens on both sides of
all borders that it may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.errors import ModelError

__all__ = ["RECORDS_MASKS", "LayerMask", "layer_masks", "register_recorder"]

RECORDS_MASKS = "headrace_masks"
"""The name, in the registry of transformers, of the attention function that records masks."""

_RECORDS = "_headrace_records"
"""The attribute of a configuration under which a layer finds the list for its :class:`_Record`."""
_RULE = "_headrace_rule"
"""The attribute of a mask that holds its rule."""

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A mask as transformers states it: a function of the indices of row, head, query and key, which
says whether the query sees the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMask:
    """Which tokens of its document a query sees.

    Attributes:
        causal: Whether it sees no later tokens.
        window: w > 0 is a sliding window, in which it sees w tokens on one side, itself among them
            (on each side, where not causal); 0 is none; -n means the tokens of its own chunk, where
            the document is cut into chunks of n.
    """

    causal: bool
    window: int

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether queries at the places ``queries`` [n, 1] see keys at the places ``keys`` [n, m]
        of the same document, bool [n, m]."""
        seen = keys <= queries if self.causal else torch.ones_like(keys, dtype=torch.bool)
        if self.window > 0:
            seen = seen & ((queries - keys).abs() < self.window)
        elif self.window < 0:
            chunk = -self.window
            seen = seen & (queries // chunk == keys // chunk)
        return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What an attention ``layer`` gave to its attention function: the rule of its mask, which takes
    tensors on ``device``, and its argument ``sliding_window``, tokens or None."""

    layer: torch.nn.Module
    rule: MaskRule
    window: int | None
    device: torch.device


def register_recorder() -> None:
    """Add the attention function that records masks to the registry of transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(RECORDS_MASKS, _record)
    AttentionMaskInterface.register(RECORDS_MASKS, _mask_with_its_rule)


def layer_masks(
    run: Callable[[], object], configurations: Iterable[Any]
) -> dict[torch.nn.Module, LayerMask]:
    """The masks of the attention layers that ``run()`` calls, those that are given one.

    Args:
        run: Runs the model on a few tokens without padding.
        configurations: The configurations of its modules, which name :data:`RECORDS_MASKS`.

    Returns:
        The mask by layer. A layer that is called with several masks, or with a rule that none of
        :class:`LayerMask` stands for, is refused.

    Raises:
        ModelError: For such a layer, and for one whose attribute ``is_causal`` says otherwise: then
            attention functions of transformers differ by what they go by.
    """
    records = list[_Record]()
    configurations = list(configurations)
    for configuration in configurations:
        vars(configuration)[_RECORDS] = records
    try:
        with torch.compiler.set_stance("force_eager"):
            run()
    finally:
        for configuration in configurations:
            del vars(configuration)[_RECORDS]
    found = dict[torch.nn.Module, LayerMask]()
    for record in records:
        mask = _mask_of(record)
        if found.setdefault(record.layer, mask) != mask:
            raise _mask_error(record.layer, got="several masks", wanted="one in all its calls")
    return found


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for the registry of transformers that only records the rule of the
    layer's mask; returns (zeros [b, s, N, E], None for the attention weights)."""
    records: list[_Record] | None = getattr(module.config, _RECORDS, None)
    rule = getattr(attention_mask, _RULE, None)
    if attention_mask is not None and rule is not None and records is not None:
        records.append(
            _Record(layer=module, rule=rule, window=sliding_window, device=attention_mask.device)
        )
    rows, heads, tokens, _features = query.shape
    return query.new_zeros(rows, tokens, heads, value.shape[-1]), None


def _mask_with_its_rule(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskRule,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """A mask function for the registry of transformers: a mask [b, 1, queries, keys] that hides
    nothing, with the rule ``mask_function`` as an attribute."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    setattr(mask, _RULE, mask_function)
    return mask


def _mask_of(record: _Record) -> LayerMask:
    """The :class:`LayerMask` with which the rule of a record agrees. It is found by trial: the
    masks for all widths that the layer and its configuration state, compared at places around their
    borders. Raises ModelError where none agrees."""
    config: Any = record.layer.config
    named = (record.window, *(getattr(config, name, None) for name in _WIDTHS))
    widths = sorted({width for width in named if isinstance(width, int) and width > 0})
    candidates = [LayerMask(causal=causal, window=0) for causal in (True, False)]
    for width in widths:
        # Families of models count a window of ``width`` tokens with or without the query itself.
        candidates += [
            LayerMask(causal=causal, window=width + more)
            for causal in (True, False)
            for more in (0, 1)
        ]
        candidates.append(LayerMask(causal=True, window=-width))
    queries, keys = _borders(widths)
    seen = _seen_by_rule(record, queries, keys)
    for mask in candidates:
        if torch.equal(mask.sees(queries, keys), seen):
            declared = getattr(record.layer, "is_causal", mask.causal)
            if isinstance(declared, bool) and declared != mask.causal:
                raise _mask_error(
                    record.layer,
                    got=f"a mask that is {_side(mask.causal)} and is_causal = {declared}",
                    wanted="both alike",
                    hint="attention functions of transformers differ here: eager goes by the mask, "
                    "sdpa and flash attention by is_causal where nothing is padded",
                )
            return mask
    raise _mask_error(
        record.layer,
        got="a mask of its own",
        wanted="causal or full attention, in a sliding window, or in chunks",
        hint="other masks are not spread over ranks",
    )


_WIDTHS = ("sliding_window", "attention_chunk_size", "local_attention")
"""Names under which configurations state how many tokens a layer sees."""


def _borders(widths: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Places to compare masks at: (queries [n, 1], keys [n, m], m for each query). Among them are
    pairs just within and just outside of windows and chunks of each of ``widths`` tokens, and pairs
    far apart."""
    far = 4 * max(widths, default=16)
    steps = {0, 1, 2, far}
    for width in widths:
        steps |= {width // 2, width - 1, width, width + 1, 2 * width}
    distances = sorted(steps | {-step for step in steps})
    queries = torch.tensor(sorted(steps | {far + step for step in steps}))[:, None]
    return queries, (queries + torch.tensor(distances)[None]).clamp_min(0)


def _seen_by_rule(record: _Record, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Whether the rule of a record lets queries at places [n, 1] see keys at places [n, m], bool
    [n, m] on the CPU. Raises ModelError for a rule that fails there, as it looks up tensors of the
    batch, which has fewer places."""
    first = torch.zeros((), dtype=torch.int64, device=record.device)  # the first row, first head
    try:
        seen = record.rule(first, first, queries.to(first), keys.to(first))
        return torch.as_tensor(seen).cpu().expand(keys.shape)
    except (IndexError, RuntimeError) as error:
        raise _mask_error(
            record.layer,
            got=f"a mask that depends on the batch ({' '.join(str(error).split())[:100]})",
            wanted="one of places alone",
            hint="leave out the input that makes it, such as token_type_ids",
        ) from error


def _side(causal: bool) -> str:
    """The words for a mask in errors: ``causal`` or ``not causal``."""
    return "causal" if causal else "not causal"


def _mask_error(
    layer: torch.nn.Module, *, got: str, wanted: str, hint: str | None = None
) -> ModelError:
    """The error for the mask of a layer."""
    return ModelError(f"attention of {type(layer).__name__}", got=got, wanted=wanted, hint=hint)
