"""What a fixed layout takes on hardware that is not at hand: seconds, tokens a second, memory.

The parts of a step of L layers, for a micro-batch of T tokens in sequences of s on a group of
``g = tensor x context`` ranks (h hidden, e bytes of an element, u = T h e / g):

    products     FLOPs / g over what products attain
    attention    2 h T (s + block) / g FLOPs forward (causal; twice when not), 5/2 of it backward
    memory       bytes of memory-bound operators, passed over so often, over the memory's rate
    launches     kernels of a layer, one after the other
    tensor       2 (t - 1) u sent forward and 3 (t - 1) u backward by each branch, hidden by nothing
    context      2 (c - 1) k u forward, three times as much backward: what takes longer than the
                 attention beside it
    weights      a gather forward, a gather and a scatter backward for every micro-batch where
                 weights are spread, of which a share is hidden
    recompute    selective: first products of both branches again; full: the forward again
    stages       (m + (stages - 1) / virtual) / m times the slowest stage's micro-batches
    once         the optimizer's bytes, gradients of replicas

Memory is what the named implementation holds, as published by those who run it: 16 bytes a
parameter over the ranks that share its states, working weights where they are whole, two layers
gathered, activations by level, and the logits.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Literal, get_args

from headrace.costs.rates import Assumed, Rates
from headrace.costs.sources.formulas import (
    first_elements,
    inner_features,
    layer_elements,
    touched_units,
)
from headrace.costs.sources.roofline import speeds_of
from headrace.errors import CostError
from headrace.spec.architecture import Architecture, parameter_count
from headrace.spec.fixed_layout import FixedLayout
from headrace.spec.given import of_kind, whole
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import DEFAULT_IMPLEMENTATION, Implementation
from headrace.spec.known_methods import FACTS, SINGLE_RANK
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS
from headrace.units import bytes_text, counted, seconds_text

__all__ = ["Forecast", "LayoutMemory", "Recomputed", "forecast"]

Recomputed = Literal["none", "selective", "full"]
_STATE_BYTES = 16
"""Bytes of a parameter's master weight, gradient and two moments, each fp32."""

_SELECTIVE_UNITS = 7.0
"""Activations u that selective recompute of every other product keeps of a layer, its input and
attention's output among them: torchtitan's per-operator choice for Llama."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMemory:
    """Bytes of a device at the peak of a step, by what they are of.

    Attributes:
        states: Master weights, gradients and optimizer states.
        working: Weights that are worked with, and layers gathered in passing.
        activations: What layers keep from forward to backward.
        passing: What the layer at work, or the loss, holds on top at the peak.
    """

    states: int
    working: int
    activations: int
    passing: int

    @property
    def peak(self) -> int:
        """Bytes of all parts together."""
        return self.states + self.working + self.activations + self.passing


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a step of a fixed layout takes, and what the answer assumes.

    Attributes:
        rates: Tokens, seconds, utilisation, and what they assume.
        memory: Bytes of the fullest device.
        layout: How the model is spread.
    """

    rates: Rates
    memory: LayoutMemory
    layout: str

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.rates.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens that one device trains in a second."""
        return self.rates.tokens_per_s

    @property
    def fits(self) -> bool:
        """Whether the fullest device has that much memory."""
        return self.memory.peak <= self.rates.assumed.memory_bytes

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON.

        Returns:
            An object with seconds, rates, bytes and all that is assumed.
        """
        return self.rates.to_json() | {
            "step_s": self.step_s,
            "tokens": self.rates.tokens,
            "layout": self.layout,
            "memory_bytes": asdict(self.memory) | {"peak": self.memory.peak},
            "fits": self.fits,
        }

    def __str__(self) -> str:
        """Three lines: the seconds of a step, memory, and what was assumed."""
        memory, has = self.memory, self.rates.assumed.memory_bytes
        parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in asdict(memory).items())
        free = has - memory.peak
        room = f"{bytes_text(free)} free" if free >= 0 else f"{bytes_text(-free)} too much"
        step = f"{seconds_text(self.step_s)} for {self.rates.tokens:,} tokens, {self.rates}"
        return (
            f"step      {step}\n"
            f"memory    {bytes_text(memory.peak)} of {bytes_text(has)}, {room}: {parts}\n"
            f"assumed   {self.rates.assumed}, {self.layout}"
        )


def forecast(
    model: Architecture | str,
    hardware: Hardware | str,
    layout: FixedLayout | str,
    *,
    sequence_tokens: int,
    local_batch: int = 1,
    accumulation: int = 1,
    recompute: Recomputed = "none",
    implementation: Implementation | str = DEFAULT_IMPLEMENTATION,
    memory_bytes: int | None = None,
) -> Forecast:
    """Predict seconds and memory of a step of a fixed layout, by data sheets and formulas: on
    hardware that need not be at hand, in 16 bits under AdamW.

    Args:
        model: The model, or the name of a preset.
        hardware: ``DEVICE[+INSIDE][+ACROSS]``, or such hardware as a value.
        layout: Such as ``"FSDP 32 x TP 8"``, or a layout as a value.
        sequence_tokens: Tokens of each sequence.
        local_batch: Sequences of a micro-batch of one group of ``tensor x context`` ranks.
        accumulation: Micro-batches of a step for each group; with virtual stages a multiple of the
            stages.
        recompute: ``none``, ``selective`` (first products of both branches again, attention kept)
            or ``full`` (layers keep their inputs only).
        implementation: The kernels that run, or their name.
        memory_bytes: Bytes of a device that may be used; all when left out.

    Returns:
        The forecast.

    Raises:
        SpecError: For names that are not known, and for values of another class.
        CostError: For a layout or a sequence that the model cannot take, and for counts below one.

    Example:
        >>> model = hr.Architecture.preset("llama-8b")
        >>> step = hr.forecast(model, "h100", "FSDP 8", sequence_tokens=8192)
        >>> step.rates.tokens
        65536
    """
    model = Architecture.of(model)
    sequence_tokens = whole("sequence_tokens", sequence_tokens, least=1, error=CostError)
    local_batch = whole("local_batch", local_batch, least=1, error=CostError)
    accumulation = whole("accumulation", accumulation, least=1, error=CostError)
    if memory_bytes is not None:
        memory_bytes = whole("memory_bytes", memory_bytes, least=1, error=CostError)
    if model.longest is not None and sequence_tokens > model.longest:
        got, wanted = f"{sequence_tokens:,} tokens", f"at most {model.longest:,}, its positions"
        raise CostError("sequences of a model", got=got, wanted=wanted)
    if recompute not in get_args(Recomputed):
        wanted = " or ".join(get_args(Recomputed))
        raise CostError("recompute of a forecast", got=repr(recompute), wanted=wanted)
    known, implementation = Hardware.of(hardware), Implementation.of(implementation)
    spread = FixedLayout.parse(layout) if isinstance(layout, str) else layout
    of_kind("layout of a forecast", spread, FixedLayout)
    parts = spread.stages * spread.virtual_stages
    if model.layers % parts or model.kv_heads % spread.tensor or model.ffn % spread.tensor:
        got = f"{spread} for {counted(model.layers, 'layer')} of {model.kv_heads} key-value heads"
        raise CostError(
            "layout of a forecast", got=got, wanted="as many layers and heads in every part"
        )
    if spread.virtual_stages > 1 and accumulation % spread.stages:
        wanted = f"a multiple of {spread.stages}, the stages that take turns"
        raise CostError("accumulation of virtual stages", got=accumulation, wanted=wanted)
    step = _Step(
        model=model,
        hardware=known,
        layout=spread,
        implementation=implementation,
        sequence=sequence_tokens,
        batch=local_batch,
        accumulation=accumulation,
        recompute=recompute,
    )
    device = known.device
    assumed = Assumed(
        devices=spread.devices,
        hardware=str(known),
        implementation=str(implementation),
        precision="bfloat16",
        optimizer="AdamW",
        peak_flops_per_s=device.peak("bfloat16"),
        memory_bytes=device.memory_bytes if memory_bytes is None else memory_bytes,
        kept_free_bytes=0,
    )
    tokens = sequence_tokens * spread.data * accumulation * local_batch
    rates = Rates(
        tokens=tokens,
        seconds=step.seconds(),
        model_flops=tokens * model.flops_per_token(sequence_tokens),
        assumed=assumed,
    )
    return Forecast(
        rates=rates,
        memory=step.memory(),
        layout=str(spread),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One optimizer step of a fixed layout: each group runs ``accumulation`` micro-batches of
    ``batch`` sequences of ``sequence`` tokens. The module's docstring has the formulas."""

    model: Architecture
    hardware: Hardware
    layout: FixedLayout
    implementation: Implementation
    sequence: int
    batch: int
    accumulation: int
    recompute: Recomputed

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of a whole group."""
        return self.batch * self.sequence

    @property
    def unit_bytes(self) -> float:
        """u: bytes of one activation of a micro-batch on a rank, in 16 bits."""
        return self.tokens * self.model.hidden * 2 / self.layout.group

    @property
    def stage_layers(self) -> int:
        """Layers of one pipeline stage."""
        return self.model.layers // self.layout.stages

    def seconds(self) -> float:
        """Seconds of the step: micro-batches through the slowest stage, and what is paid once."""
        lay, device = self.layout, self.hardware.device
        forward_s, backward_s = self._layer()
        gather_s, scatter_s = self._weights()
        # ZeRO-2 gathers weights once for forward and backward, FSDP for each.
        gathers = 1 if lay.gradients > 1 else 2
        layers_s = self.stage_layers * (forward_s + backward_s + gathers * gather_s + scatter_s)
        micro_batch_s = layers_s + self._ends()
        # Micro-batches one after the other, and the bubble of the (interleaved) pipeline.
        turns = self.accumulation + (lay.stages - 1) / lay.virtual_stages
        elements = parameter_count(self.model) / (lay.tensor * lay.stages)  # of a rank's weights
        memory_bytes_per_s = device.memory_bytes_per_s * device.attained_memory
        # The optimizer reads and writes all states.
        update_s = 2 * _STATE_BYTES * elements / lay.state_shards / memory_bytes_per_s
        return turns * micro_batch_s + update_s + self._replicas(elements)

    def _layer(self) -> tuple[float, float]:
        """Seconds (forward, backward) of one layer over one micro-batch, recompute included; the
        module's docstring lists the parts. Names with ``again`` are of selective recompute."""
        a, lay = self.model, self.layout
        speeds = speeds_of(self.hardware, 2, self.implementation)
        tokens = self.tokens / lay.group  # a rank's even share
        products_s = 2 * tokens * layer_elements(a) / speeds.flops_per_s
        products_again_s = 2 * tokens * first_elements(a) / speeds.flops_per_s
        # Causal attention sees half of the keys, but computes blocks on the diagonal whole.
        keys_seen_twice = self.sequence + speeds.block_tokens if a.causal else 2 * self.sequence
        core_s = 2 * a.hidden * tokens * keys_seen_twice / speeds.core_flops_per_s
        unit_s = self.unit_bytes / speeds.touched_bytes_per_s
        memory_s, memory_back_s, memory_again_s = (units * unit_s for units in touched_units(a))
        tensor_s, tensor_back_s = self._tensor_s()
        ring_s, ring_back_s = self._context_s(core_s)
        # The last wave of a product's tiles does not fill all multiprocessors.
        launch_s, idle = speeds.launch_s, 2 * speeds.idle_outputs / speeds.flops_per_s
        idle_s, idle_back_s, idle_again_s = (idle * n for n in inner_features(a, lay.tensor))
        forward_s = products_s + idle_s + core_s + memory_s + launch_s + tensor_s + ring_s
        # Two products for each one of the forward, and five of attention's for two.
        backward_s = 2 * products_s + idle_back_s + 2.5 * core_s + memory_back_s + 2 * launch_s
        backward_s += tensor_back_s + ring_back_s
        if self.recompute == "selective":
            backward_s += products_again_s + idle_again_s + memory_again_s + launch_s / 2
        elif self.recompute == "full":
            backward_s += forward_s
        return forward_s, backward_s

    def _tensor_s(self) -> tuple[float, float]:
        """Seconds (forward, backward) in which tensor-parallel ranks send for one layer, hidden by
        nothing. Each branch has an all-gather and a reduce-scatter in the forward, and one more
        gather in the backward."""
        if self.layout.tensor == 1:
            return 0.0, 0.0
        inside = self.layout.tensor <= self.hardware.devices_per_node
        link = self.hardware.inside if inside else self.hardware.across
        # One collective of each of the two branches.
        sent_bytes = 2 * (self.layout.tensor - 1) * self.unit_bytes
        return link.seconds(2 * sent_bytes, 4), link.seconds(3 * sent_bytes, 6)

    def _context_s(self, core_s: float) -> tuple[float, float]:
        """Seconds (forward, backward) in which keys and values go round the ring of context ranks
        beyond the ``core_s`` of attention's forward beside it, which hides them."""
        lay, a = self.layout, self.model
        if lay.context == 1:
            return 0.0, 0.0
        inside = lay.group <= self.hardware.devices_per_node
        link = self.hardware.inside if inside else self.hardware.across
        k = a.kv_heads * a.head_features / a.hidden  # bytes of a token's keys over u
        hops = lay.context - 1
        sent_bytes = 2 * hops * k * self.unit_bytes
        # The backward sends keys and values again, and their gradients in fp32.
        forward_s = link.seconds(sent_bytes, hops)
        backward_s = link.seconds(3 * sent_bytes, 2 * hops)
        return max(0.0, forward_s - core_s), max(0.0, backward_s - 2.5 * core_s)

    def _weights(self) -> tuple[float, float]:
        """Seconds (all-gather of a layer's weights, reduce-scatter of its gradients) that are not
        hidden behind other work; both send as much."""
        lay = self.layout
        ranks = lay.gradient_shards
        if ranks == 1:
            return 0.0, 0.0
        exposed = self.implementation.on_device(self.hardware.device).exposed
        layer_bytes = 2 * layer_elements(self.model) / lay.tensor
        seconds = exposed * self._spread_s(ranks, lay.tensor, layer_bytes)
        return seconds, seconds

    def _spread_s(self, ranks: int, apart: int, whole_bytes: float) -> float:
        """Seconds of an all-gather of ``whole_bytes`` over ``ranks`` ranks whose numbers are
        ``apart`` from one to the next. Each byte crosses to a node once, over the links of all its
        members, and is passed on inside the node."""
        node_places = max(1, self.hardware.devices_per_node // apart)
        members = min(ranks, node_places)  # ranks of the group on each node
        nodes = -(-ranks // members)
        inside_s = self.hardware.inside.seconds(whole_bytes * (members - 1) / members)
        if nodes == 1:
            return inside_s
        return inside_s + self.hardware.across.seconds(whole_bytes * (nodes - 1) / nodes / members)

    def _ends(self) -> float:
        """Seconds of embedding, head and loss of a micro-batch, forward and backward."""
        a = self.model
        speeds = speeds_of(self.hardware, 2, self.implementation)
        tokens = self.tokens / self.layout.group
        # 6 FLOPs a weight: 2 in the forward, 4 in the backward.
        head_s = 6 * a.hidden * a.vocabulary * a.head_share * tokens / speeds.flops_per_s
        # Logits of 2 bytes are passed over three times.
        logits_s = 3 * 2 * a.vocabulary * a.head_share * tokens / speeds.touched_bytes_per_s
        features = a.hidden + a.vocabulary / self.layout.tensor
        idle_s = 2 * speeds.idle_outputs * features / speeds.flops_per_s
        return head_s + logits_s + 3 * speeds.launch_s + idle_s

    def _replicas(self, elements: float) -> float:
        """Seconds of the all-reduce of gradients over replicas, once a step, that are not hidden
        behind other work. A rank has gradients of ``elements`` weights before they are sharded."""
        lay = self.layout
        ranks = lay.data * lay.context // lay.gradient_shards
        if ranks == 1:
            return 0.0
        exposed = self.implementation.on_device(self.hardware.device).exposed
        apart = lay.tensor * lay.gradient_shards
        own_bytes = 2 * elements / lay.gradient_shards
        # An all-reduce is a reduce-scatter and an all-gather, which send as much each.
        return 2 * exposed * self._spread_s(ranks, apart, own_bytes)

    def memory(self) -> LayoutMemory:
        """Bytes of the fullest device at its peak, by what they are of."""
        a, lay = self.model, self.layout
        elements = parameter_count(a) / (lay.tensor * lay.stages)
        state_bytes, embedding_elements = _STATE_BYTES, a.vocabulary * a.hidden / lay.tensor
        # Where states are spread over ranks, each holds all its weights in 16 bits besides.
        working = 0.0 if lay.state_shards == 1 else 2 * elements
        if lay.weight_shards > 1:  # two layers, the embedding and the head are there whole
            working = 2 * (2 * layer_elements(self.model) / lay.tensor + 2 * embedding_elements)
        elif lay.states > 1:
            working, state_bytes = 4 * elements, _STATE_BYTES - 4  # weights, gradients in 16 bits
        all_units, kept_units = self._units_kept()
        in_flight = min(self.accumulation, lay.stages)  # micro-batches between forward and backward
        # The layer in its backward has what was not kept, and gradients of the same size.
        layer_bytes = 2 * (all_units - kept_units) * self.unit_bytes
        return LayoutMemory(
            states=ceil(state_bytes * elements / lay.state_shards),
            working=ceil(working),
            activations=ceil(kept_units * self.unit_bytes * self.stage_layers * in_flight),
            passing=ceil(max(self._logit_bytes(), layer_bytes)),
        )

    def _units_kept(self) -> tuple[float, float]:
        """Activations that a layer keeps for its backward, in units u of one: (without recompute,
        at this recompute level)."""
        a, facts = self.model, FACTS[SINGLE_RANK]
        k, wide = a.kv_heads * a.head_features / a.hidden, a.ffn / a.hidden
        # Implementations with bytes of logits keep what autograd does, the others what headrace's
        # own layers keep.
        if self.implementation.logit_bytes is not None:
            # 6 tensors of h features, 3 of the keys' features; of the feed-forward's features 4, or
            # 3 without a gate.
            every = 6 + 3 * k + ((3 if a.gated else 2) + 1) * wide
            kept = {"none": every, "selective": _SELECTIVE_UNITS, "full": 1.0}
            return every, kept[self.recompute]
        assert facts.attention_use is not None, "one rank's method has formulas"
        assert facts.feed_forward_use is not None, "one rank's method has formulas"
        # On one rank (p = 1), where an fp32 sum has the bytes of r = 2 elements in 16 bits.
        uses = facts.attention_use(a, 1, 2), facts.feed_forward_use(a, 1, 2)
        every = sum(use.kept for use in uses)
        selective = sum(use.kept_attention for use in uses)
        return every, {"none": every, "selective": selective, "full": 1.0}[self.recompute]

    def _logit_bytes(self) -> float:
        """Bytes that the loss holds at its peak: for the logits of all tokens of a rank, or, for a
        loss in chunks, for those of one chunk in fp32."""
        a, bytes_per_logit = self.model, self.implementation.logit_bytes
        logits = self.tokens / self.layout.group * a.vocabulary
        if bytes_per_logit is not None:
            return logits * bytes_per_logit
        return 4 * min(logits, HEAD_CHUNK_TOKENS * a.vocabulary / self.layout.tensor)
