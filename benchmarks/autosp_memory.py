"""Memory of long sequences, without running them: what a model keeps, needs and computes again.

Models are traced with fake tensors, so lengths cost nothing. Two tables:

``recompute``: a Llama of 512 features on one device. Bytes kept from forward to backward, the peak
of the backward, and FLOPs beyond those without recompute, of

    none                  nothing computed again
    torch                 the partition that torch.compile makes by itself
    torch, budget B       the same with an activation memory budget
    DeepSpeed SAC         its long-context pass over the same graph, where deepspeed can be imported
    block checkpoint      torch's checkpoint around each block
    selective checkpoint  the same, with the result of attention kept by torch's own policy
    headrace              hr.compile on one rank: each block keeps its input and its attention; and
                          its blocks (hr.recomputed) in a graph of torch.compile

Eager contenders are run with fake tensors; of graphs, the nodes are walked in order, and what is
alive is added up, unfused. The ratios are to the peak and to the FLOPs of DeepSpeed's pass, or of
torch's partition where that is not there.

``longest``: the most tokens of one sequence that 8 ranks of 80 GiB can train of Llamas of 1 to 13
billion parameters in bf16, with weights, gradients and AdamW sharded over all ranks (16 bytes a
parameter) and two layers gathered at a time. Bytes of one and two layers at two lengths give those
of any (they are linear in both); buffers of exchanges come on top for all but ZeRO-3.

examples:
    python benchmarks/autosp_memory.py
    python benchmarks/autosp_memory.py --tokens 2048 32768 --json autosp_memory.json
    PYTHONPATH=FOLDER_WITH_DEEPSPEED python benchmarks/autosp_memory.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from plain_llama import PlainLlama
from rich.console import Console
from rich.table import Table
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop
from transformers import LlamaConfig, LlamaForCausalLM

import headrace as hr
import headrace.adopt.operators  # registers attend
from headrace.cli.display import tell
from headrace.comm.fake_world import fake_world
from headrace.native.counted import ByteCounter, tensors_in
from headrace.native.machine import machine_facts
from headrace.units import GIB, MIB

Row = dict[str, Any]

ATEN = torch.ops.aten
_CPU = ATEN._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_CPU_BACKWARD = ATEN._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
_KNOWN = ATEN._scaled_dot_product_efficient_attention  # noqa: SLF001


def _attends(q: Any, k: Any, v: Any, *rest: Any, out_val: Any = None, **named: Any) -> int:
    return sdpa_flop(_shape(q), _shape(k), _shape(v))


def _attends_back(grad: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> int:
    return 5 * sdpa_flop(_shape(q), _shape(k), _shape(v)) // 2


def _shape(x: Any) -> Any:
    return x.shape if isinstance(x, torch.Tensor) else x


def _ours(q: Any, k: Any, *rest: Any, **named: Any) -> int:
    """One sequence: q [t, N, D], k [t, G, D]; whole squares, as torch counts them."""
    return 4 * q.numel() * len(k)


def _ours_back(grad: Any, *rest: Any, **named: Any) -> int:
    return 10 * grad.numel() * len(grad)


FLOPS: dict[Any, Callable[..., int]] = {
    _CPU: _attends,
    _CPU_BACKWARD: _attends_back,
    torch.ops.headrace.attend: _ours,
    torch.ops.headrace.attend_backward: _ours_back,
}
for known in FLOPS.values():
    known._get_raw = True  # type: ignore[attr-defined]  # noqa: SLF001  as torch's own formulas are told


def llama(layers: int, hidden: int, ffn: int, heads: int, keys: int, vocabulary: int) -> Any:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        head_dim=hidden // heads,
        use_cache=False,
        max_position_embeddings=1 << 24,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).train()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes kept between forward and backward, the most that are alive in the backward, FLOPs."""

    kept: int
    peak: int
    flops: int


def selectively(block: torch.nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """torch's own selective checkpoint."""
    kept = partial(create_selective_checkpoint_contexts, [_CPU.default])
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=kept)  # type: ignore[no-any-return]


LEVELS: dict[str, Callable[..., torch.Tensor]] = {
    "none": lambda block, *inputs: block(*inputs),
    "block checkpoint": partial(hr.recomputed, level="full"),
    "selective checkpoint": selectively,
    "headrace": partial(hr.recomputed, level="attention"),
}


def small(layers: int, level: str) -> PlainLlama:
    """Layers of 512 features, whose blocks compute ``level`` again."""
    model = PlainLlama(layers=layers, hidden=512, ffn=1408, heads=8, keys=2, vocabulary=2048)
    model.run_block = LEVELS[level]
    return model


Step = Callable[[], torch.Tensor]


def plain_step(model: PlainLlama, ids: torch.Tensor) -> tuple[Step, Callable[..., None]]:
    """Forward and backward of a model as it is."""
    return lambda: model(ids, ids)[1], torch.Tensor.backward


def spread_step(model: PlainLlama, ids: torch.Tensor) -> tuple[Step, Callable[..., None]]:
    """The same through hr.compile, on a group of one rank."""
    run = hr.compile(model)
    run.probe({"ids": torch.zeros(1, 64, dtype=torch.int64)})
    shard = run.place({"ids": ids, "labels": ids}, (0,), targets=ids.numel())
    return lambda: run(**shard.inputs)[1], run.backward


def without_values(model: torch.nn.Module, fake: FakeTensorMode) -> None:
    """Replace all parameters by fake ones."""
    for module in model.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(fake.from_tensor(value)))


def run_alone(layers: int, tokens: int, level: str) -> Cost:
    """Of an eager step, once for its bytes and once for its FLOPs: who counts these keeps tensors
    that a checkpoint makes again."""
    model, ids = small(layers, level), torch.zeros(1, tokens, dtype=torch.int64)
    step = spread_step if level == "headrace" else plain_step
    forward, backward = step(model, ids)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    without_values(model, fake)
    with fake:
        with ByteCounter() as counter:
            loss = forward()
            kept = counter.look()[0]
            backward(loss)
            peak = counter.look()[1]
        del loss
        model.zero_grad()
        with FlopCounterMode(display=False, custom_mapping=FLOPS) as flops:
            backward(forward())
        return Cost(kept=kept, peak=peak, flops=flops.get_total_flops())


class Partitioned(Exception):
    """The graphs of a step."""


def compile_only(
    layers: int, tokens: int, partition: Callable[..., Any], level: str = "none"
) -> Cost:
    """Of a compiled step, whose graphs are made and not run."""
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return partitioned(small(layers, level), (ids, ids), partition)


def partitioned(
    model: Callable[..., Any], inputs: Sequence[torch.Tensor], partition: Callable[..., Any]
) -> Cost:
    """Of a compiled call, whose graphs are made and not run; what is kept is without inputs."""
    found: list[tuple[GraphModule, GraphModule]] = []

    def cut(*args: Any, **kwargs: Any) -> Any:
        found.append(partition(*args, **kwargs))
        raise Partitioned

    torch._dynamo.reset()  # noqa: SLF001
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=cut)
    with contextlib.suppress(Exception):  # the compiler wraps it
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    if not found:
        sys.exit("torch.compile made no graph of the model")
    forward, backward = found[0]
    known = {node.name for node in forward.graph.find_nodes(op="placeholder")}
    saved = [n for n in backward.graph.find_nodes(op="placeholder") if n.name not in known]
    return Cost(
        kept=sum(size_of(n) for n in saved if "tangent" not in n.name),
        peak=peak_of(backward, {n.name for n in saved}),
        flops=flops_of(forward) + flops_of(backward),
    )


def size_of(node: Node) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_in(node.meta.get("val")))


def peak_of(graph: GraphModule, held: set[str]) -> int:
    """The most bytes alive while nodes run in order: each until its last use, views with what they
    are of, and results to the end."""
    base: dict[Node, Node] = {}
    last: dict[Node, int] = {}
    nodes = list(graph.graph.nodes)
    for at, node in enumerate(nodes):
        of = node.all_input_nodes[0] if node.all_input_nodes and is_view(node) else node
        base[node] = base.get(of, of)
        for used in (node, *node.all_input_nodes):
            last[base[used]] = at
    alive = sum(size_of(n) for n in nodes if n.name in held)
    most, ends = alive, dict[int, list[Node]]()
    for node, at in last.items():
        ends.setdefault(at, []).append(node)
    for at, node in enumerate(nodes):
        if node.op == "call_function" and base[node] is node:
            alive += size_of(node)
            most = max(most, alive)
        for gone in ends.get(at, []):
            if gone.name in held or gone.op == "call_function":
                alive -= size_of(gone)
    return most


def is_view(node: Node) -> bool:
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def flops_of(graph: GraphModule) -> int:
    total = 0
    for node in graph.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        formula = FLOPS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            total += formula(*values[0], **values[1], out_val=node.meta["val"])
    return total


@contextlib.contextmanager
def deepspeeds_rule() -> Iterator[None]:
    """torch's partitioner with DeepSpeed's rule in it, while this lasts: it changes it for good."""
    module = importlib.import_module("deepspeed.compile.passes.long_context_checkpointing")
    own = {name: getattr(partitioners, name) for name in vars(partitioners)}
    module.register_long_context_checkpointing()
    try:
        yield
    finally:
        vars(partitioners).update(own)


def by_deepspeed(joint: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Its partition, with attention under a name that it knows, as on a GPU."""
    rename(joint, _CPU.default, _KNOWN.default)
    with deepspeeds_rule():
        parts = partitioners.min_cut_rematerialization_partition(joint, *args, **kwargs)
    for part in parts:
        rename(part, _KNOWN.default, _CPU.default)
    return parts


def rename(graph: GraphModule, before: Any, after: Any) -> None:
    for node in graph.graph.find_nodes(op="call_function", target=before):
        node.target = after


def recompute_rows(layers: int, lengths: Sequence[int], budgets: Sequence[float]) -> list[Row]:
    found: list[Row] = []
    cut = partitioners.min_cut_rematerialization_partition
    for tokens in lengths:
        tell(f"{tokens:,} tokens")
        eager = partial(run_alone, layers, tokens)
        compiled = partial(compile_only, layers, tokens)
        costs = {"none": eager("none"), "torch": compiled(cut)}
        for budget in budgets:
            with functorch_config.patch(activation_memory_budget=budget):
                costs[f"torch, budget {budget:g}"] = compiled(cut)
        if importlib.util.find_spec("deepspeed"):
            costs["DeepSpeed SAC"] = compiled(by_deepspeed)
        costs |= {name: eager(name) for name in LEVELS if name != "none"}
        costs["headrace, compiled"] = compiled(cut, "headrace")
        base = costs.get("DeepSpeed SAC", costs["torch"])
        least = costs["none"].flops
        found += [
            {
                "tokens": tokens,
                "contender": name,
                "kept_bytes": c.kept,
                "peak_bytes": c.peak,
                "more_flops": c.flops / least - 1,
                "peak_ratio": c.peak / base.peak,
                "flops_ratio": c.flops / base.flops,
            }
            for name, c in costs.items()
        ]
    return found


MODELS = {  # layers, hidden, ffn, heads, keys, vocabulary
    "Llama 1B": (16, 2048, 8192, 32, 8, 128256),
    "Llama 3B": (28, 3072, 8192, 24, 8, 128256),
    "Llama 8B": (32, 4096, 14336, 32, 8, 128256),
    "Llama 13B": (40, 5120, 13824, 40, 40, 32000),
}
WAYS: dict[str, tuple[int, str, str | None, bool]] = {  # ranks, exchange, recompute, logits
    "ZeRO-3": (1, "ulysses", None, True),
    "ZeRO-3, block checkpoint": (1, "ulysses", "full", True),
    "Ulysses": (8, "ulysses", None, True),
    "ring": (8, "ring", None, True),
    "headrace, recompute": (8, "ulysses", "attention", True),
    "headrace, recompute, no logits": (8, "ulysses", "attention", False),
    "headrace, full, no logits": (8, "ulysses", "full", False),
}


def peak_bytes(shape: Sequence[int], layers: int, tokens: int, way: str) -> int:
    """The most bytes of a step with so many layers and local tokens; gradients and weights aside
    where they do not grow with tokens."""
    ranks, exchange, recompute, logits = WAYS[way]
    ids = torch.zeros(1, tokens * ranks, dtype=torch.int64)
    with fake_world(0, ranks) as groups, FakeTensorMode(allow_non_fake_inputs=True):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = llama(layers, *shape)
        torch.set_default_dtype(before)
        run = hr.compile(model, recompute=recompute, exchange=exchange, logits=logits)  # type: ignore[arg-type]
        run.probe({"input_ids": ids})
        groups.prepare([tuple(range(ranks))])
        batch = {"input_ids": ids, "labels": ids}
        shard = run.place(batch, tuple(range(ranks)), targets=ids.numel(), groups=groups)
        with ByteCounter() as counter:
            run(**shard.inputs).loss.backward()
            return counter.look()[1]


def longest_rows(names: Sequence[str], memory: int, ranks: int = 8) -> list[Row]:
    found: list[Row] = []
    few, many = 1 << 16, 1 << 17
    for name in names:
        layers, *shape = MODELS[name]
        hidden, ffn, heads, keys, vocabulary = shape
        one = hidden * (2 * hidden + 2 * hidden // heads * keys + 3 * ffn)
        count = layers * one + 2 * vocabulary * hidden
        state = 16 * count // ranks + 2 * 2 * one + 2 * 2 * vocabulary * hidden
        for way, (p, *_) in WAYS.items():
            tell(f"{name}: {way}")
            at = {(n, t): peak_bytes(shape, n, t, way) for n in (1, 2) for t in (few, many)}
            slope = {n: (at[n, many] - at[n, few]) / (many - few) for n in (1, 2)}
            layer = slope[2] - slope[1]
            token = slope[1] + (layers - 1) * layer
            found.append(
                {
                    "model": name,
                    "parameters": count,
                    "way": way,
                    "layer_bytes": layer,
                    "token_bytes": token,
                    "longest": max(0, int((memory - state) / token)) * p,
                }
            )
    return found


def show_recompute(rows: Sequence[Row]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in (
        "tokens",
        "contender",
        "kept",
        "peak",
        "more FLOPs",
        "peak of reference",
        "FLOPs of reference",
    ):
        table.add_column(title, justify="left" if title == "contender" else "right")
    for row in rows:
        table.add_row(
            f"{row['tokens']:,}",
            row["contender"],
            f"{row['kept_bytes'] / MIB:,.0f} MiB",
            f"{row['peak_bytes'] / MIB:,.0f} MiB",
            f"{row['more_flops']:.1%}",
            f"{row['peak_ratio']:.2f}",
            f"{row['flops_ratio']:.3f}",
        )
    Console(highlight=False, width=110).print(table)


def show_longest(rows: Sequence[Row]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("model", "way", "a token", "a layer", "longest", "of Ulysses"):
        table.add_column(title, justify="left" if title in ("model", "way") else "right")
    for row in rows:
        usual = next(r for r in rows if r["model"] == row["model"] and r["way"] == "Ulysses")
        table.add_row(
            row["model"],
            row["way"],
            f"{row['token_bytes'] / 1e6:.2f} MB",
            f"{row['layer_bytes'] / 1e3:.1f} kB",
            f"{row['longest']:,}",
            f"{row['longest'] / usual['longest']:.2f}x" if usual["longest"] else "",
        )
    Console(highlight=False, width=110).print(table)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 4095, 4096, 8192, 32768])
    parser.add_argument("--layers", type=int, default=16, help="of the first table's model")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.5, 0.25, 0.1])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--memory-gib", type=float, default=80.0, help="of a rank, in GiB")
    parser.add_argument("--json", type=Path, help="write the rows there")
    o = parser.parse_args(arguments)
    recompute = recompute_rows(o.layers, o.tokens, o.budgets)
    if recompute:
        show_recompute(recompute)
    longest = longest_rows(o.models, int(o.memory_gib * GIB))
    if longest:
        show_longest(longest)
    if o.json:
        facts: Row = {"machine": machine_facts("cpu"), "recompute": recompute, "longest": longest}
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts["deepspeed"] = importlib.metadata.version("deepspeed")
        o.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
