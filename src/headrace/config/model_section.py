"""Keys of the model, and the architecture that they make for a tokenizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from headrace.config.section import Positive, Section
from headrace.errors import SpecError
from headrace.spec.architecture import PRESETS, Architecture

__all__ = ["ModelConfig"]


class ModelConfig(Section):
    """The model: a preset with changes, all of its shape, or one with its weights from a folder."""

    model_config = ConfigDict(validate_by_name=True, serialize_by_alias=True)

    from_: str | None = Field(default=None, alias="from")
    """Folder of a Hugging Face model whose configuration and weights are taken, and whose tokenizer
    where ``data.tokenizer`` is left out; relative to the configuration file. Llama, GPT-2 and BERT
    are native models; of these ``dropout`` goes with it, in place of all its rates. Causal language
    models of other types are adopted, as ``hr.compile`` adopts them."""

    preset: str | None = None
    """A named architecture; the other keys change it."""

    kind: Literal["llama", "gpt", "bert"] | None = None
    """Block: RMSNorm, SwiGLU and rotary positions (llama), or LayerNorm, GELU and learned positions
    (gpt); bert has the norms after the sums, sees both sides and learns to guess masked tokens."""

    layers: Positive | None = None
    """Number of Transformer layers."""

    hidden: Positive | None = None
    """Features of the residual stream."""

    heads: Positive | None = None
    """Number of query heads of attention."""

    kv_heads: Positive | None = None
    """Key-value heads (``heads`` when left out; fewer is grouped-query attention)."""

    ffn: Positive | None = None
    """Features of the feed-forward (8/3 of ``hidden`` for llama, 4 times for gpt and bert by
    default)."""

    vocabulary: Positive | None = None
    """Rows of the embedding; the tokenizer's size when left out, and one more for bert when the
    tokenizer has no mask token."""

    tied: bool | None = None
    """Whether the head uses the embedding's weights."""

    causal: bool | None = None
    """Whether a token sees only earlier ones (never for bert, by default for the others)."""

    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Rate of dropout on both branches of each layer."""

    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary positions."""

    @model_validator(mode="after")
    def _of_one_origin(self) -> ModelConfig:
        """Refuse keys of a shape beside ``from``, whose folder has a shape of its own."""
        names = set(type(self).model_fields) - {"from_", "dropout"}
        given = sorted(name for name in names if getattr(self, name) is not None)
        if self.from_ is not None and given:
            raise ValueError(f"from brings a shape of its own: leave out {', '.join(given)}")
        return self

    def fitted(self, folder: Architecture, vocabulary: int, context: int) -> Architecture:
        """Return ``folder``, the architecture of the model in :attr:`from_`, after a check that it
        fits a tokenizer of ``vocabulary`` ids and sequences of ``context`` tokens. Raises SpecError
        when it has too few rows in its embedding or too few positions."""
        if vocabulary > folder.vocabulary:
            raise SpecError(
                f"vocabulary of {self.from_}",
                got=folder.vocabulary,
                wanted=f"at least the tokenizer's {vocabulary}",
                hint="without data.tokenizer the folder's own is taken",
            )
        if folder.longest is not None and context > folder.longest:
            wanted = f"at most {folder.longest}, the positions of {self.from_}"
            raise SpecError("data.context", got=context, wanted=wanted)
        return folder

    def architecture(
        self, vocabulary: int, context: int, mask_id: int | None = None
    ) -> Architecture:
        """The architecture that these keys describe, for a tokenizer of ``vocabulary`` ids and
        sequences of ``context`` tokens.

        ``mask_id`` is the tokenizer's mask token. Where it is None, BERT takes the first id that
        the tokenizer does not use. Raises SpecError when the shape contradicts itself, is
        incomplete, or its vocabulary is too small.
        """
        given = {
            k: v for k, v in self.model_dump(exclude={"preset", "from_"}).items() if v is not None
        }
        kind = given.get("kind") or (PRESETS[self.preset].kind if self.preset in PRESETS else None)
        # How many ids the vocabulary must have, as a text for errors and as a number.
        wanted, needed = f"at least the tokenizer's {vocabulary}", vocabulary
        given["mask_id"] = None
        if kind == "bert":
            given.setdefault("causal", False)
            given["mask_id"] = vocabulary if mask_id is None else mask_id
            if mask_id is None:
                wanted, needed = f"{wanted} and one for the mask", vocabulary + 1
        if given.setdefault("vocabulary", needed) < needed:
            raise SpecError("model.vocabulary", got=given["vocabulary"], wanted=wanted)
        if kind in ("gpt", "bert"):
            given["positions"] = context
        if self.preset is not None:
            return Architecture.preset(self.preset, **given)
        missing = [name for name in ("layers", "hidden", "heads") if name not in given]
        if missing:
            raise SpecError(
                f"model.{missing[0]}", got="nothing", wanted="a value, or a model.preset"
            )
        given.setdefault("kv_heads", given["heads"])
        hidden = given["hidden"]
        # Llama's three matrices of 8/3 h have the elements of two of 4 h; in multiples of 64.
        ffn = 4 * hidden if kind in ("gpt", "bert") else -(-8 * hidden // 3 // 64) * 64
        given.setdefault("ffn", ffn)
        return Architecture(**given)
