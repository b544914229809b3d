"""Stages that mix all axes at once: attention meets the other ranks' places."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as f
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import headrace as hr
from headrace.adopt.axis_examples import cogvideox, hunyuan, mochi
from headrace.adopt.axis_model import AxisModel
from headrace.errors import DataError, InfeasiblePlan, ModelError, SpecError
from ranks import run_ranks
from running.adopt.axial import Axial
from spread import whole

FEATURES = 8


class Everything(nn.Module):
    """Attention over all places [b, t s, c], in ``heads``; wrong in ``manner``."""

    def __init__(self, heads: int, manner: str = "right") -> None:
        super().__init__()
        self.heads, self.manner = heads, manner
        self.keys = heads // 2 if manner == "grouped" else heads
        each = FEATURES // heads
        self.qkv = nn.Linear(FEATURES, (heads + 2 * self.keys) * each)
        self.out = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x + places).unflatten(-1, (self.heads + 2 * self.keys, -1))
        q, k, v = parts.transpose(1, 2).split([self.heads, self.keys, self.keys], dim=1)
        if self.manner == "text":
            k, v = k[:, :, :3], v[:, :, :3]
        if self.manner == "by hand":
            y = (q @ k.mT).softmax(-1) @ v
        else:
            mask = torch.zeros(q.shape[2], k.shape[2]) if self.manner == "mask" else None
            y = f.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=self.manner == "causal",
                enable_gqa=self.keys != self.heads,
                scale=0.3 if self.manner == "grouped" else None,
            )
        return x + self.out(y.transpose(1, 2).flatten(-2))


class Mixed(nn.Module):
    """Space, everything, time, in turn."""

    def __init__(self, heads: int, manner: str = "right", checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"space": Axial(2), "all": Everything(heads, manner), "time": Axial(1)})
            for _ in range(2)
        )
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        shape: Any = None
        for layer in self.layers:
            parts: Any = layer
            x = parts["space"](x)
            shape, flat = x.shape, x.flatten(1, 2)
            if self.checkpointed:
                flat = checkpoint(parts["all"], flat, places, use_reentrant=False)
            else:
                flat = parts["all"](flat, places)
            x = parts["time"](flat.view(shape))
        return x


def adapted(model: nn.Module, returns: bool = True) -> AxisModel:
    dims = "b t s c"
    return hr.adapt(
        model,
        inputs={"x": dims},
        axis="t",
        batch="b",
        stages=[
            hr.AxisStage(modules="layers.*.space", mixes="s", dims=dims, returns=returns),
            hr.AxisStage(
                modules="layers.*.all",
                mixes="t s",
                dims="b (t s) c",
                returns=returns,
                sides={1: "(t s) c"},
            ),
            hr.AxisStage(modules="layers.*.time", mixes="t", dims=dims, returns=returns),
        ],
    )


def errors(
    heads: int, returns: bool, checkpointed: bool, manner: str = "right"
) -> list[tuple[float, float]]:
    """Of two batches of other sizes, one after the other: the second one is planned."""
    torch.manual_seed(0)
    alone = Mixed(heads, manner, checkpointed=checkpointed).double()
    model, found = copy.deepcopy(alone), []
    for t, s in ((5, 6), (4, 7)):
        alone.zero_grad()
        model.zero_grad()
        example = hr.AxisExample(
            model=model,
            results=lambda out: [(out, "b t s c")],
            inputs={
                "x": torch.randn(2, t, s, FEATURES, dtype=torch.float64),
                "places": torch.randn(t * s, FEATURES, dtype=torch.float64),
            },
            adapted=lambda model: adapted(model, returns),
        )
        found.append(example.errors(alone))
    return found


@pytest.mark.parametrize(
    ("ranks", "returns", "checkpointed"),
    [
        (1, True, False),
        (2, False, True),
        (3, True, False),
        (4, False, True),
        whole(1, False, True),
        whole(2, True, False),
        whole(3, False, True),
        whole(4, True, False),
    ],
)
def test_attention_over_all_places_equals_one_process(
    ranks: int, returns: bool, checkpointed: bool
) -> None:
    """Catches places lost at borders, heads that do not divide, rings where there are too few, and
    a recompute that meets another axis."""
    for heads in (4, 2, 1):
        for found in run_ranks(ranks, errors, heads, returns, checkpointed, timeout_s=60):
            assert max(max(pair) for pair in found) < 1e-12


@pytest.mark.parametrize("ranks", [2, 3])
def test_grouped_heads_with_a_scale(ranks: int) -> None:
    """Catches key-value heads that are taken for query heads, and a scale that is dropped."""
    for found in run_ranks(ranks, errors, 4, False, False, "grouped", timeout_s=60):
        assert max(max(pair) for pair in found) < 1e-12


class Spoken(nn.Module):
    """Attention over a text and the places of a video together, both of which go on; the text in
    front or ``behind``. Wrong in ``manner``."""

    def __init__(self, heads: int, *, behind: bool = False, manner: str = "right") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Together(heads, behind, manner) for _ in range(2))
        self.ends = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, x = x.shape, x.flatten(1, 2)
        for layer in self.layers:
            x, text = layer(x, text)
        return self.ends[0](x).view(shape), self.ends[1](text)


class Together(nn.Module):
    """One layer of :class:`Spoken`."""

    def __init__(self, heads: int, behind: bool, manner: str) -> None:
        super().__init__()
        self.heads, self.behind, self.manner = heads, behind, manner
        self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own, parts = text.shape[1], [x, text] if self.behind else [text, x]
        y = torch.cat(parts, dim=1)
        if self.manner == "mean":
            y = y + text.mean(1, keepdim=True)
        qkv = self.qkv(y).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        y = y + self.out(f.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        first, second = y.split(
            [y.shape[1] - own, own] if self.behind else [own, len(y[0]) - own], 1
        )
        return (first, second) if self.behind else (second, first)


def spoken(model: nn.Module, attends: str = "n (t s)") -> AxisModel:
    return hr.adapt(
        model,
        inputs={"x": "b t s c", "text": "b n c"},
        axis="t",
        batch="b",
        stages=[hr.AxisStage(modules="layers.*", mixes="t s", dims="b (t s) c", attends=attends)],
    )


def spoken_errors(heads: int, behind: bool) -> list[tuple[float, float]]:
    """Of batches with texts of several lengths, one shorter than there are ranks; the probe passes
    them, too."""
    torch.manual_seed(0)
    alone = Spoken(heads, behind=behind).double()
    model, found = copy.deepcopy(alone), []
    for t, s, words in ((5, 3, 7), (4, 2, 1), (6, 1, 2)):
        alone.zero_grad()
        model.zero_grad()
        attends = "(t s) n" if behind else "n (t s)"
        inputs = {
            "x": torch.randn(2, t, s, FEATURES, dtype=torch.float64),
            "text": torch.randn(2, words, FEATURES, dtype=torch.float64),
        }
        run = spoken(model, attends)
        part = run.shard(inputs)
        assert part.tokens == part["x"].shape[:3].numel()
        run.detach()
        example = hr.AxisExample(
            model=model,
            results=lambda out: [(out[0], "b t s c"), (out[1], "b n c")],
            inputs=inputs,
            adapted=lambda model, attends=attends: spoken(model, attends),
        )
        found.append(example.errors(alone))
    return found


@pytest.mark.parametrize(
    ("ranks", "behind"),
    [(2, True), (3, False), whole(1, True), whole(2, False), whole(4, False), whole(4, True)],
)
def test_a_text_beside_the_places_equals_one_process(ranks: int, behind: bool) -> None:
    """Catches a text that counts for every rank, words that are lost or stand elsewhere, and ranks
    without a word."""
    for heads in (4, 1):
        for found in run_ranks(ranks, spoken_errors, heads, behind, timeout_s=60):
            assert max(max(pair) for pair in found) < 1e-12


@pytest.mark.parametrize(
    ("manner", "attends", "words"),
    [
        ("right", "(t s)", "name the module of the attention over places alone"),
        ("right", "(t s) n", "on shards of axis t"),
        ("mean", "n (t s)", "given, by code in front of it"),
    ],
)
def test_a_text_that_is_not_as_declared_is_refused(manner: str, attends: str, words: str) -> None:
    """Catches a text that is taken for places, another order, and a mean over a rank's words."""
    run = spoken(Spoken(2, manner=manner).double(), attends)
    given = {"x": torch.randn(2, 5, 3, FEATURES), "text": torch.randn(2, 7, FEATURES)}
    with pytest.raises(ModelError, match=re.escape(words)):
        run.shard({name: x.double() for name, x in given.items()})


def short_text() -> str:
    """What is said of a text of one word on two ranks, by a model that must have one on each."""
    example = hunyuan(samples=1)
    mask = torch.zeros_like(example.inputs["encoder_attention_mask"])
    mask[:, 0] = 1
    run = hr.adapt(example.model)
    try:
        run(**run.shard({**example.inputs, "encoder_attention_mask": mask}))
    except InfeasiblePlan as error:
        return str(error)
    return ""


def test_a_text_shorter_than_the_ranks_is_told() -> None:
    """Catches ranks without a word in a model that cuts the last words off, 0 of them being all."""
    pytest.importorskip("diffusers")
    for said in run_ranks(2, short_text, timeout_s=60):
        assert "1 samples of 1 places" in said


@pytest.mark.parametrize("make", [hunyuan, mochi])
@pytest.mark.parametrize("mask", [[[1, 1, 1, 1], [1, 1, 1, 0]], [[1, 0, 1, 0]] * 2])
def test_texts_that_need_a_mask_are_refused(make: Any, mask: list[list[int]]) -> None:
    """Catches words of padding that others see, as their mask is taken away."""
    pytest.importorskip("diffusers")
    example = make()
    text = example.inputs["encoder_hidden_states"][:, :4]
    given = {"encoder_hidden_states": text, "encoder_attention_mask": torch.tensor(mask)}
    run = hr.adapt(example.model)
    with pytest.raises(DataError, match="encoder_attention_mask: got texts of"):
        run.shard({**example.inputs, **given})


@pytest.mark.parametrize("make", [cogvideox, hunyuan, mochi])
def test_models_with_texts_pass_the_probe(make: Any) -> None:
    """Catches an adapter that is right on real ranks and refused before, and a wrong one that is
    not: the plain model is the judge, padding and all."""
    pytest.importorskip("diffusers")
    example = make()
    run = hr.adapt(example.model)
    assert run.check
    run.shard(example.inputs)
    assert not run.check


@pytest.mark.parametrize("attends", ["n t s", "n", "(s t) n", "(n m) (t s)"])
def test_sequences_that_cannot_be(attends: str) -> None:
    """Catches attention whose places are not told, or lie in another order than the argument's."""
    with pytest.raises(SpecError, match="attention of stage layers"):
        hr.AxisStage(modules="layers.*", mixes="t s", dims="b (t s) c", attends=attends)


def test_a_text_that_one_axis_sees_is_refused() -> None:
    """Catches attention along one axis alone, within a rank, that sees this rank's words only."""
    one = hr.AxisStage(modules="layers.*", mixes="s", dims="b t s c", attends="n s")
    every = hr.AxisStage(modules="ends.0", mixes="t s", dims="b (t s) c")
    with pytest.raises(SpecError, match="mixes s, wanted all axes, s t"):
        hr.adapt(
            Spoken(2),
            inputs={"x": "b t s c", "text": "b n c"},
            axis="t",
            batch="b",
            stages=[one, every],
            check=False,
        )


def planned() -> tuple[list[str], list[str]]:
    """Axes and methods that a second forward of one adapted model takes."""
    torch.manual_seed(0)
    run = adapted(Mixed(2).double(), returns=False)
    given = run.shard(
        {
            "x": torch.randn(1, 6, 6, FEATURES, dtype=torch.float64),
            "places": torch.randn(36, FEATURES, dtype=torch.float64),
        }
    )
    for _ in range(2):
        run(**given)
    chosen = run.shards.chosen  # type: ignore[union-attr]
    return [c.axis for c in chosen.values()], [c.method for c in chosen.values()]


def test_the_planner_chooses_heads_or_a_ring() -> None:
    for axes, methods in run_ranks(2, planned):
        assert axes == ["t", "s", "t", "t", "s"]  # all, time, space, all, time
        assert methods.count("ulysses") == 2
    for _, methods in run_ranks(4, planned):
        assert methods.count("ring") == 2


def refused(manner: str) -> str:
    torch.manual_seed(0)
    run = adapted(Mixed(2, manner).double())
    given = {
        "x": torch.randn(1, 4, 4, FEATURES, dtype=torch.float64),
        "places": torch.randn(16, FEATURES, dtype=torch.float64),
    }
    try:
        run(**run.shard(given))
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        ("mask", "got a mask"),
        ("causal", "got causal"),
        ("text", "queries and 3 keys"),
        ("by hand", "no call of scaled_dot_product_attention"),
    ],
)
def test_attention_that_cannot_be_spread_is_told(manner: str, words: str) -> None:
    """Catches places that are lost without a word."""
    for said in run_ranks(2, refused, manner):
        assert words in said


def penalised() -> str:
    """What is said of a gradient of a gradient."""
    torch.manual_seed(0)
    run = adapted(Mixed(2).double())
    part = run.shard(
        {
            "x": torch.randn(1, 4, 4, FEATURES, dtype=torch.float64),
            "places": torch.randn(16, FEATURES, dtype=torch.float64),
        }
    )
    part["x"].requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        out = run(**part)
        (slope,) = torch.autograd.grad(out.sin().sum(), part["x"], create_graph=True)
    try:
        run.backward(slope.square().sum())
    except ModelError as error:
        return str(error)
    return "nothing"


def test_gradients_of_gradients_are_refused() -> None:
    """Catches a second order that is lost at what meets other ranks."""
    for said in run_ranks(2, penalised):
        assert "create_graph=True" in said
