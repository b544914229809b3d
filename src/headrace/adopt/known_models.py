"""Adapters for models with axes that are known by class: Latte, CogVideoX, Wan and others.

An adapter declares the stages and inputs of a model, and hooks the modules that need to know more
than this rank's part, such as those that make positions. Dims have these letters: b samples, c
channels, t frames, y and x points of a frame, s patches of a frame (h rows by w columns of them), n
or m words of a text, d or e features, j heads, k a dim of size 1. ``run.shards.local`` cuts a
tensor with the places of all ranks to this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from headrace.adopt.axis_model import AxisModel, Sizes
from headrace.adopt.axis_shards import Dims
from headrace.adopt.axis_stages import AxisStage
from headrace.adopt.first_step import FirstStep
from headrace.adopt.gradients import require_known_wrapper
from headrace.comm.mesh import Groups
from headrace.errors import DataError, InfeasiblePlan, ModelError

__all__ = [
    "KNOWN",
    "adapt",
    "adapt_cogvideox",
    "adapt_hunyuan",
    "adapt_latte",
    "adapt_ltx",
    "adapt_mochi",
    "adapt_timesformer",
    "adapt_transformer_2d",
    "adapt_wan",
]


def _patches(inputs: Mapping[str, torch.Tensor], high: int, wide: int) -> dict[str, int]:
    """The size of axis ``s``, as ``{"s": size}``: the number of patches, of ``high`` by ``wide``
    points, in a frame of the input ``hidden_states`` [..., height, width]."""
    *_, height, width = inputs["hidden_states"].shape
    return {"s": (height // high) * (width // wide)}


def _of_all_frames(run: AxisModel) -> Callable[[Any, dict[str, Any]], Any]:
    """Make a hook to run before a module that makes positions from the shape of a video [b, c, t,
    y, x], without reading its values: so that it makes those of the frames of all ranks."""

    def before(args: Any, named: dict[str, Any]) -> Any:
        """Replace the video by zeros with all frames; as one zero is expanded, they take no
        memory."""
        (x,) = args
        b, c, _, *side = x.shape
        return (x.new_zeros(()).expand(b, c, run.places_of("t"), *side),), named

    return before


def _own_places(run: AxisModel, dims: Dims) -> Callable[[Any, Any], tuple[torch.Tensor, ...]]:
    """Make a hook to run after a module that returns tensors of ``dims`` with the places of all
    ranks, such as rotary embeddings (cos, sin)."""

    def after(_: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Cut each tensor to this rank's part."""
        assert run.shards is not None, "sharded"
        return tuple(run.shards.local(x, dims) for x in out)

    return after


_LATTE_STAGES = (
    AxisStage(modules="transformer_blocks.*", mixes="s", dims="(b t) s d"),
    AxisStage(
        modules="temporal_transformer_blocks.*", mixes="t", dims="(b s) t d", sides={4: "(b s) e"}
    ),
)

_LATTE_INPUTS = {"hidden_states": "b c t y x", "timestep": "b", "encoder_hidden_states": "b n e"}


def adapt_latte(
    model: Any,
    *,
    groups: Groups | None = None,
    check: bool | FirstStep = True,
    compare: bool = True,
) -> AxisModel:
    """Adapt a Latte; inputs must be given by name."""
    inner: Any = getattr(model, "module", model)
    side = inner.config.patch_size

    def sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The number of patches of a frame, which no input shows."""
        return _patches(inputs, side, side)

    run = AxisModel(
        model,
        stages=_LATTE_STAGES,
        inputs=_LATTE_INPUTS,
        axis="t",
        batch="b",
        sizes=sizes,
        groups=groups,
        check=check,
        compare=compare,
    )
    # Latte adds positions of all frames to the first temporal block's input while frames are in
    # shards. So it adds zeros there, and the block adds the positions once it has all frames.
    own_positions = list[torch.Tensor]()  # [1, frames, d], while a forward runs

    def hide_positions(args: Any, named: dict[str, Any]) -> Any:
        """Keep the model's positions for :func:`add_positions`, and put zeros in their place."""
        own_positions.append(inner.temp_pos_embed)
        inner.temp_pos_embed = torch.zeros_like(own_positions[-1][:, :1])
        return args, named

    def restore_positions(_: Any, out: Any) -> Any:
        """Give the model its positions back, after a forward that raised, too."""
        inner.temp_pos_embed = own_positions.pop()
        return out

    def add_positions(args: Any, named: dict[str, Any]) -> Any:
        """Add positions to x [b s, frames, d]. A recompute, which runs after the forward has
        restored them, finds them in the model."""
        x, *rest = args
        if x.shape[1] > 1:  # Latte adds none to a single frame
            positions = own_positions[-1] if own_positions else inner.temp_pos_embed
            x = x + positions.to(x.dtype)
        return (x, *rest), named

    run.on(inner, hide_positions, restore_positions, always=True)
    run.on(inner.temporal_transformer_blocks[0], add_positions)
    return run


# Of TimeSformer: the patches of attention over space, the clip's token in front of them, and the
# patches as they are embedded.
_PATCHES, _CLIP = Dims.parse("(b t) (h w) d"), Dims.parse("(b t) k d")
_EMBEDDED = Dims.parse("b (h w t) d")


def adapt_timesformer(
    model: Any,
    *,
    groups: Groups | None = None,
    check: bool | FirstStep = True,
    compare: bool = True,
) -> AxisModel:
    """Adapt a TimeSformer; its result [b, 1 + patches of this rank, d] begins with the clip's
    token, which all ranks have alike. Rows of patches (h) are sharded; around attention over space,
    which hooks do, frames are. Raises ModelError for attention that is not divided into attention
    over time and over space."""
    inner = getattr(model, "module", model)
    config = inner.config
    if config.attention_type != "divided_space_time":
        raise ModelError(
            "TimeSformer", got=f"attention {config.attention_type}", wanted="divided_space_time"
        )

    def sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The number of rows of patches of a frame."""
        return {"h": inputs["pixel_values"].shape[3] // config.patch_size}

    prefix = "timesformer." if hasattr(inner, "timesformer") else ""
    body = getattr(inner, "timesformer", inner)
    over_time = AxisStage(
        modules=f"{prefix}encoder.layer.*.temporal_attention", mixes="t", dims="(b h w) t d"
    )
    run = AxisModel(
        model,
        stages=[over_time],
        inputs={"pixel_values": "b t c y x"} | ({"labels": "b"} if prefix else {}),
        axis="h",
        batch="b",
        switched=["t"],
        sizes=sizes,
        groups=groups,
        check=check,
        compare=compare,
    )

    def own_patches(_: Any, out: torch.Tensor) -> torch.Tensor:
        """Cut embeddings [b, 1 + all patches, d] to the clip's token and this rank's patches."""
        clip, patches = out[:, :1], out[:, 1:]
        assert run.shards is not None, "sharded"
        return torch.cat([clip, run.shards.local(patches, _EMBEDDED)], dim=1)

    def to_frames(args: Any, named: dict[str, Any]) -> Any:
        """Switch the patches of x [b t, 1 + h w, d] from shards of rows to shards of frames, as
        attention over space needs all rows of a frame. The clip's token, which stands in front of
        them in every frame, is on every rank for all frames: it is cut to this rank's frames."""
        x, *rest = args
        shards = run.shards
        assert shards is not None, "sharded"
        if shards.group is None:
            return args, named
        patches = shards.switched(x[:, 1:], _PATCHES, "t")
        return (torch.cat([shards.cut(x[:, :1], _CLIP), patches], dim=1), *rest), named

    def to_rows(_: Any, out: Any) -> Any:
        """Undo :func:`to_frames`: switch the patches back to shards of rows, and gather the token
        of all frames."""
        x, *rest = out
        shards = run.shards
        assert shards is not None, "sharded"
        if shards.group is None:
            return out
        clip = shards.whole(x[:, :1], _CLIP)
        return (torch.cat([clip, shards.switched(x[:, 1:], _PATCHES, "h")], dim=1), *rest)

    run.traceable = False  # hooks of its own switch
    run.on(body.embeddings, after=own_patches)
    for layer in body.encoder.layer:
        run.on(layer.attention, to_frames, to_rows)
    return run


_TRANSFORMER_2D_STAGES = (
    AxisStage(modules="layers.*.spatial", mixes="s", dims="b t s h", returns=False),
    AxisStage(modules="layers.*.temporal", mixes="t", dims="b t s h", returns=False),
)
_TRANSFORMER_2D_INPUTS = {"x": "b t s c", "timestep": "b", "frames": "t", "patches": "s"}


def adapt_transformer_2d(
    model: torch.nn.Module,
    *,
    groups: Groups | None = None,
    check: bool | FirstStep = True,
    compare: bool = True,
) -> AxisModel:
    """Adapt headrace's own Transformer-2D; frames are sharded when a forward begins."""
    return AxisModel(
        model,
        stages=_TRANSFORMER_2D_STAGES,
        inputs=_TRANSFORMER_2D_INPUTS,
        axis="t",
        batch="b",
        groups=groups,
        check=check,
        compare=compare,
    )


_WAN_ATTENTION = AxisStage(modules="blocks.*.attn1", mixes="t s", dims="b (t s) d")
_WAN_INPUTS = {
    "hidden_states": "b c t y x",
    "timestep": "b",
    "encoder_hidden_states": "b n e",
    "encoder_hidden_states_image": "b m f",
}
_ROTARY = Dims.parse("k (t s) j d")


def adapt_wan(
    model: Any,
    *,
    groups: Groups | None = None,
    check: bool | FirstStep = True,
    compare: bool = True,
) -> AxisModel:
    """Adapt a Wan; inputs must be given by name. There may be a timestep for each sample [b] or, as
    in TI2V, for each place [b, t s]. Raises ModelError for patches of several frames."""
    inner = getattr(model, "module", model)
    deep, high, wide = inner.config.patch_size
    if deep != 1:
        raise ModelError("patches of Wan", got=f"{deep} frames", wanted="one frame")

    def sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The number of patches of a frame, which no input shows."""
        return _patches(inputs, high, wide)

    run = AxisModel(
        model,
        stages=[_WAN_ATTENTION],
        inputs=_WAN_INPUTS,
        axis="t",
        batch="b",
        sizes=sizes,
        groups=groups,
        check=check,
        compare=compare,
        other_dims={"timestep": "b (t s)"},
    )

    run.on(inner.rope, _of_all_frames(run), _own_places(run, _ROTARY))
    return run


_LTX_ATTENTION = AxisStage(modules="transformer_blocks.*.attn1", mixes="s", dims="b s d")
_LTX_INPUTS = {
    "hidden_states": "b s c",
    "timestep": "b",
    "encoder_hidden_states": "b n e",
    "encoder_attention_mask": "b n",
}
_LTX_ROTARY = Dims.parse("k s d")


def adapt_ltx(
    model: Any,
    *,
    groups: Groups | None = None,
    check: bool | FirstStep = True,
    compare: bool = True,
) -> AxisModel:
    """Adapt an LTX-Video, whose input is a sequence of all patches of all frames (s); inputs must
    be given by name. Its ``num_frames``, ``height`` and ``width`` are those of the whole video,
    also in a call with a rank's part: positions are made for all of it, and then cut."""
    inner = getattr(model, "module", model)
    run = AxisModel(
        model,
        stages=[_LTX_ATTENTION],
        inputs=_LTX_INPUTS,
        axis="s",
        batch="b",
        groups=groups,
        check=check,
        compare=compare,
        other_dims={"timestep": "b s"},
    )

    run.on(inner.rope, after=_own_places(run, _LTX_ROTARY))
    return run


_COGVIDEOX_ATTENTION = AxisStage(
    modules="transformer_blocks.*.attn1", mixes="t s", dims="b (t s) d", attends="n (t s)"
)
_COGVIDEOX_INPUTS = {
    "hidden_states": "b t c y x",
    "timestep": "b",
    "encoder_hidden_states": "b n e",
}
# Rotary embeddings; and of CogVideoX the positions of the text, and of the places behind it.
_PLACES_ROTARY, _TEXT = Dims.parse("(t s) d"), Dims.parse("k n d")
_COGVIDEOX_PLACES = Dims.parse("k (t s) d")
_POSITIONS = "_get_positional_embeddings"
"""The method by which the embedding of CogVideoX makes positions of a video that is not of the size
for which it has them in a buffer."""


def adapt_cogvideox(
    model: Any,
    *,
    groups: Groups | None = None,
    check: bool | FirstStep = True,
    compare: bool = True,
) -> AxisModel:
    """Adapt a CogVideoX; inputs must be given by name, ``image_rotary_emb`` as that of the whole
    video. Attention runs over the text and the places behind it; each rank has a part of either.
    Raises ModelError for patches of several frames."""
    inner = getattr(model, "module", model)
    if inner.config.patch_size_t is not None:
        got = f"{inner.config.patch_size_t} frames"
        raise ModelError("patches of CogVideoX", got=got, wanted="one frame")
    side, patches = inner.config.patch_size, inner.patch_embed

    def sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The number of patches of a frame, which no input shows."""
        return _patches(inputs, side, side)

    run = AxisModel(
        model,
        stages=[_COGVIDEOX_ATTENTION],
        inputs=_COGVIDEOX_INPUTS,
        axis="t",
        batch="b",
        sizes=sizes,
        groups=groups,
        check=check,
        compare=compare,
    )

    def own_rotary(args: Any, named: dict[str, Any]) -> Any:
        """Cut the rotary embeddings (cos, sin), each [t s, d], to this rank's places."""
        assert run.shards is not None, "sharded"
        whole = named.get("image_rotary_emb")
        if whole is not None:
            parts = tuple(run.shards.local(x, _PLACES_ROTARY) for x in whole)
            named = {**named, "image_rotary_emb": parts}
        return args, named

    own_sample_frames = list[int]()  # the embedding's ``sample_frames``, while it runs

    def replace_positions(args: Any, named: dict[str, Any]) -> Any:
        """Replace the embedding's method that makes positions by one that makes those of this
        rank's text and places, and have the embedding call it, instead of taking positions from its
        buffer."""
        make, buffer_frames = getattr(patches, _POSITIONS), patches.sample_frames
        buffer_size = (patches.sample_height, patches.sample_width, buffer_frames)
        words = patches.max_text_seq_length

        def of_this_rank(height: int, width: int, _: int, device: Any = None) -> torch.Tensor:
            """Positions [1, words + places of this rank, d] for frames of ``height`` by ``width``
            points; the third argument, the number of this rank's frames, is not used."""
            assert run.shards is not None, "sharded"
            # The frames of the video on all ranks, before the VAE's compression over time, as the
            # method counts them.
            frames = (run.places_of("t") - 1) * patches.temporal_compression_ratio + 1
            in_buffer = (height, width, frames) == buffer_size
            whole = patches.pos_embedding if in_buffer else make(height, width, frames, device)
            text = run.shards.local(whole[:, :words], _TEXT)
            return torch.cat([text, run.shards.local(whole[:, words:], _COGVIDEOX_PLACES)], dim=1)

        own_sample_frames.append(buffer_frames)
        setattr(patches, _POSITIONS, of_this_rank)
        patches.sample_frames = -1  # equals no number of frames, so it never takes the buffer
        return args, named

    def restore_method(_: Any, out: Any) -> Any:
        """Undo :func:`replace_positions`, after a forward that raised, too."""
        delattr(patches, _POSITIONS)
        patches.sample_frames = own_sample_frames.pop()
        return out

    run.on(inner, own_rotary)
    if patches.use_positional_embeddings or patches.use_learned_positional_embeddings:
        run.on(patches, replace_positions, restore_method, always=True)
    return run


_HUNYUAN_STAGES = tuple(
    AxisStage(modules=f"{blocks}.*.attn", mixes="t s", dims="b (t s) d", attends="(t s) n")
    for blocks in ("transformer_blocks", "single_transformer_blocks")
)
_HUNYUAN_INPUTS = {
    "hidden_states": "b c t y x",
    "timestep": "b",
    "encoder_hidden_states": "b m e",
    "encoder_attention_mask": "b m",
    "pooled_projections": "b f",
    "guidance": "b",
}
_WORDS, _MASK = Dims.parse("b n d"), Dims.parse("b n")


def adapt_hunyuan(
    model: Any,
    *,
    groups: Groups | None = None,
    check: bool | FirstStep = True,
    compare: bool = True,
) -> AxisModel:
    """Adapt a HunyuanVideo; inputs must be given by name. The texts of a batch must have one
    length; the padding behind them, which attention would mask, is cut off. The text refiner, in
    which words see each other, runs on the whole text on every rank; its result is sharded by
    words. Raises ModelError for patches of several frames, and for a first frame that is
    conditioned in another way than the others (``token_replace``)."""
    inner = getattr(model, "module", model)
    config = inner.config
    if config.patch_size_t != 1 or config.image_condition_type == "token_replace":
        raise ModelError(
            "HunyuanVideo",
            got=f"patches of {config.patch_size_t} frames, images as {config.image_condition_type}",
            wanted="patches of one frame, all frames alike",
        )
    side = config.patch_size

    def sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The numbers of patches of a frame, and of words without padding."""
        return {**_patches(inputs, side, side), "n": _words(inputs)}

    run = AxisModel(
        model,
        stages=_HUNYUAN_STAGES,
        inputs=_HUNYUAN_INPUTS,
        axis="t",
        switched=["n"],  # it cuts the last words off, so each rank needs one
        batch="b",
        sizes=sizes,
        groups=groups,
        check=check,
        compare=compare,
    )

    def without_padding(args: Any, named: dict[str, Any]) -> Any:
        """Cut the padding off the model's texts and their mask. Raises InfeasiblePlan for fewer
        words than ranks."""
        assert run.shards is not None, "sharded"
        words, ranks = run.places_of("n"), run.shards.ranks
        if words < ranks:
            raise InfeasiblePlan(
                "text of HunyuanVideo",
                got=f"{words} words for {ranks} ranks",
                wanted="a word for each",
                hint="fewer ranks for each sample, or a longer text",
            )
        return args, _unpadded(named, words)

    def own_words(_: Any, out: torch.Tensor) -> torch.Tensor:
        """Cut embedded texts [b, n, d] to this rank's words."""
        assert run.shards is not None, "sharded"
        return run.shards.local(out, _WORDS)

    def unmasked(args: Any, named: dict[str, Any]) -> Any:
        """Take the mask off attention: without padding nothing is left that it would mask."""
        return args, {**named, "attention_mask": None}

    run.on(inner, without_padding)
    run.on(inner.rope, _of_all_frames(run), _own_places(run, _PLACES_ROTARY))
    run.on(inner.context_embedder, after=own_words)
    for block in (*inner.transformer_blocks, *inner.single_transformer_blocks):
        run.on(block.attn, unmasked)
    return run


_MOCHI_STAGE = AxisStage(
    modules="transformer_blocks.*.attn1", mixes="t s", dims="b (t s) d", attends="(t s) n"
)
_MOCHI_INPUTS = {
    "hidden_states": "b c t y x",
    "timestep": "b",
    "encoder_hidden_states": "b m e",
    "encoder_attention_mask": "b m",
}
_MOCHI_ROTARY = Dims.parse("(t s) j d")


def adapt_mochi(
    model: Any,
    *,
    groups: Groups | None = None,
    check: bool | FirstStep = True,
    compare: bool = True,
) -> AxisModel:
    """Adapt a Mochi; inputs must be given by name. The texts of a batch must have one length; the
    padding behind them, which attention would leave out, is cut off. The embedding of texts, in
    which words see each other, runs on the whole text on every rank; its result is sharded by
    words."""
    inner = getattr(model, "module", model)
    side = inner.config.patch_size

    def sizes(inputs: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The numbers of patches of a frame, and of words without padding."""
        return {**_patches(inputs, side, side), "n": _words(inputs)}

    run = AxisModel(
        model,
        stages=[_MOCHI_STAGE],
        inputs=_MOCHI_INPUTS,
        axis="t",
        batch="b",
        sizes=sizes,
        groups=groups,
        check=check,
        compare=compare,
    )

    def without_padding(args: Any, named: dict[str, Any]) -> Any:
        """Cut the padding off the model's texts and their mask."""
        return args, _unpadded(named, run.places_of("n"))

    def all_frames(args: Any, named: dict[str, Any]) -> Any:
        """Replace the second argument, this rank's number of frames, by that of all ranks, so that
        rotary positions are made for all frames."""
        frequencies, _, *rest = args
        return (frequencies, run.places_of("t"), *rest), named

    def own_words(_: Any, out: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """Cut the second result, the embedded texts [b, n, d], to this rank's words; the first, the
        embedded timestep, stays."""
        assert run.shards is not None, "sharded"
        step, text = out
        return step, run.shards.local(text, _WORDS)

    def own_mask(args: Any, named: dict[str, Any]) -> Any:
        """Cut the mask of the texts [b, n] to this rank's words."""
        assert run.shards is not None, "sharded"
        return args, {**named, "attention_mask": run.shards.local(named["attention_mask"], _MASK)}

    run.on(inner, without_padding)
    run.on(inner.rope, all_frames, _own_places(run, _MOCHI_ROTARY))
    run.on(inner.time_embed, after=own_words)
    for block in inner.transformer_blocks:
        run.on(block.attn1, own_mask)
    return run


def _unpadded(named: dict[str, Any], words: int) -> dict[str, Any]:
    """The arguments ``named`` of a model, with texts [b, m, e] and their mask [b, m] cut to the
    first ``words`` words; what is behind these is padding."""
    texts = ("encoder_hidden_states", "encoder_attention_mask")
    return {**named, **{name: named[name][:, :words] for name in texts}}


def _words(inputs: Mapping[str, torch.Tensor]) -> int:
    """The number of words of each text of a batch, from the mask [b, n]. Raises DataError for texts
    of several lengths, and for masks that hide other words than the last ones."""
    mask = inputs["encoder_attention_mask"] != 0
    counts = mask.sum(dim=1)
    words = int(counts[0])
    if not (bool((counts == words).all()) and bool(mask[:, :words].all())):
        raise DataError(
            "encoder_attention_mask",
            got=f"texts of {sorted(set(counts.tolist()))} words",
            wanted="one number of words in a batch, and padding behind them",
            hint="batches of texts of one length: give each without its padding",
        )
    return words


KNOWN: Mapping[str, Callable[..., AxisModel]] = {
    "CogVideoXTransformer3DModel": adapt_cogvideox,
    "HunyuanVideoTransformer3DModel": adapt_hunyuan,
    "LTXVideoTransformer3DModel": adapt_ltx,
    "LatteTransformer3DModel": adapt_latte,
    "TimesformerForVideoClassification": adapt_timesformer,
    "TimesformerModel": adapt_timesformer,
    "Transformer2D": adapt_transformer_2d,
    "MochiTransformer3DModel": adapt_mochi,
    "WanTransformer3DModel": adapt_wan,
}
"""Adapters by the class names of models."""


def adapt(
    model: torch.nn.Module,
    *,
    stages: Sequence[AxisStage] = (),
    inputs: Mapping[str, str] | None = None,
    axis: str | None = None,
    batch: str | None = None,
    sizes: Sizes = None,
    groups: Groups | None = None,
    counts: Mapping[str, str] | None = None,
    check: bool | FirstStep = True,
    compare: bool = True,
) -> AxisModel:
    """Run a multi-dimensional model on shards of its axes, unchanged (DSP).

    Args:
        model: diffusers' Latte, CogVideoX, HunyuanVideo, LTX-Video, Mochi or Wan, or transformers'
            TimeSformer, which need nothing else, or one whose stages are named; alone, under DDP or
            FSDP2.
        stages: The modules in which places of an axis see each other.
        inputs: The dims of the inputs with places of axes, by name: ``{"x": "b t s c"}``.
        axis: The axis that is in shards where no stage says otherwise.
        batch: The name of the samples, which are worked on apart where there are more ranks than
            places of the axis.
        sizes: Gives places of axes that the model makes of its inputs, by name.
        counts: The axes that whole numbers among the inputs count, by name of the input:
            ``{"num_frames": "t"}``.
        groups: The groups of this rank; those of the world when left out.
        check: Whether the first batch is tried on shards in one process, and the model refused
            where they give another result than the whole; ``"first step"`` compares gradients of
            all ranks with those of the plain model, too, where the memory of a rank suffices.
        compare: Whether ranks compare the inputs of each batch, by a hash of their bits that is
            made where they are.

    Returns:
        The spread model: call it with what its ``shard`` gives.

    Raises:
        ModelError: For models that are not known and have no stages, and for stages whose modules
            are not there.
        SpecError: For an ``axis`` that no input has, where no ``sizes`` are given.

    Example:
        >>> stage = hr.AxisStage(modules="blocks.*.temporal", mixes="t", dims="(b s) t c")
        >>> run = hr.adapt(model, stages=[stage], inputs={"x": "b t s c"}, axis="t")
        >>> out = run(**run.shard({"x": video}))
    """
    require_known_wrapper(model, static=True)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    known = KNOWN.get(type(inner).__name__.removeprefix("FSDP"))
    if known is not None and not stages:
        return known(model, groups=groups, check=check, compare=compare)
    if not stages or inputs is None or axis is None:
        raise ModelError(
            f"axes of {type(inner).__name__}",
            got="a model without an adapter",
            wanted=f"one of {', '.join(KNOWN)}, or stages, inputs and axis",
            hint='hr.adapt(model, stages=[hr.AxisStage(modules="blocks.*.temporal", mixes="t", '
            'dims="(b s) t c"), ...], inputs={"x": "b t s c"}, axis="t")',
        )
    return AxisModel(
        model,
        stages=stages,
        inputs=inputs,
        axis=axis,
        batch=batch,
        sizes=sizes,
        groups=groups,
        counts=counts,
        check=check,
        compare=compare,
    )
