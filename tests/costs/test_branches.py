"""Layers from branches."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from headrace.costs import CostModel, Linear, OptionCost, Quadratic
from headrace.costs.sources.measured import composed, costs_from_profile, recomputed, reconciled
from headrace.errors import CostError
from headrace.spec import Architecture, Cluster, LayerOption
from headrace.spec.profile import ENDS, Profile, ProfilePoint

TINY = Architecture.preset("llama-tiny")
PACKS = ((64,), (256,), (1024,), (4096,), (64,) * 16, (1024, 256, 64))


def cost(seconds: float, kept: float, passing: float, **changes) -> OptionCost:
    return OptionCost(
        forward=Quadratic(a=1e-9 * seconds, b=1e-6 * seconds, c=1e-4 * seconds),
        backward=Quadratic(a=2e-9 * seconds, b=3e-6 * seconds, c=4e-4 * seconds),
        kept=Linear(slope=kept, constant=10 * kept),
        transient=Linear(slope=passing, constant=100 - passing),
        **changes,
    )


RING, SPREAD = cost(1, 50, 20, order="zigzag"), cost(2, 70, 10)
RING_THRIFTY = cost(3, 30, 40, order="zigzag")
SHARED, TENSOR = cost(4, 11, 30), cost(8, 13, 5, fetched=0.0)
OWNERS = {"ring": "spread"}


def by_hand() -> dict[str, OptionCost]:
    branches = {
        "attention": {"ring": RING, "spread": SPREAD, "ring+attention": RING_THRIFTY},
        "feed_forward": {"spread": SHARED, "tensor": TENSOR, "tensor+attention": TENSOR},
    }
    return composed(branches, OWNERS, TINY.shape, 2, 4)  # type: ignore[arg-type]


def test_every_pair_of_one_level_is_an_option_with_one_name() -> None:
    """Catches a pair that is left out, levels that are mixed, and a shared feed-forward under a
    name that no plan uses."""
    names = {"ring", "ring/tensor", "spread", "spread/tensor"}
    full = {f"{name}+full" for name in names}
    assert set(by_hand()) == names | full | {"ring/tensor+attention"}


def test_seconds_and_kept_bytes_add_and_passing_ones_do_not() -> None:
    """Catches a sum where branches run one after the other, and a larger one where both stay."""
    made = by_hand()["ring/tensor"]
    pack = (300, 40)
    assert made.forward(pack) == pytest.approx(RING.forward(pack) + TENSOR.forward(pack))
    assert made.backward(pack) == pytest.approx(RING.backward(pack) + TENSOR.backward(pack))
    assert made.kept(340) == pytest.approx(RING.kept(340) + TENSOR.kept(340))
    assert made.transient == Linear(slope=20, constant=95), "the larger of each coefficient"
    assert by_hand()["ring/tensor+attention"].kept(1) == RING_THRIFTY.kept(1) + TENSOR.kept(1)


def test_order_and_fetches_come_from_the_branches() -> None:
    """Catches rings whose tokens lie in natural order, and weights fetched by the wrong share."""
    made = by_hand()
    assert made["ring/tensor+full"].order == made["ring"].order == "zigzag"
    assert made["spread"].order == made["spread/tensor"].order == "natural"
    assert made["ring/tensor"].fetched == pytest.approx(TINY.attention_share)
    assert made["ring"].fetched == 1


def test_full_keeps_the_input_and_runs_the_layer_again() -> None:
    """Catches a level that forgets what it holds while it computes again: in the backward all
    that ``none`` keeps is there once more, beside the input."""
    none = by_hand()["spread"]
    full = by_hand()["spread+full"]
    assert full == recomputed(none, TINY.hidden, 2, 4)
    pack, tokens = (500, 30), 530
    assert full.forward == none.forward
    assert full.backward(pack) == pytest.approx(none.backward(pack) + none.forward(pack))
    assert full.kept(tokens) == pytest.approx((tokens / 2 + 1) * TINY.hidden * 4)
    alone = recomputed(none, TINY.hidden, 1, 4)
    assert alone.kept(tokens) == tokens * TINY.hidden * 4
    big = replace(none, kept=Linear(slope=10_000, constant=5000))
    again = recomputed(big, TINY.hidden, 2, 4)
    both = again.kept(tokens) + again.transient(tokens)
    assert both == pytest.approx(big.kept(tokens) + big.transient(tokens))


@pytest.mark.parametrize(
    ("branches", "text"),
    [
        ({"attention": {"ring": RING}}, "got no feed_forward"),
        ({"feed_forward": {"ring": RING}}, "got no attention"),
        ({"attention": {"ring+full": RING}, "feed_forward": {"ring": RING}}, "got ring.full"),
        ({"attention": {"ring": RING}, "feed_forward": {"a/b": RING}}, "got a/b"),
    ],
)
def test_branches_that_make_no_layer(branches, text: str) -> None:
    """Catches options that silently lack what was not measured."""
    with pytest.raises(CostError, match=text):
        composed(branches, {}, TINY.shape, 2, 4)


LADDERS = {
    (1, ENDS): cost(1, 2, 3),
    (1, "attention:local"): SPREAD,
    (1, "feed_forward:local"): SHARED,
    (2, ENDS): cost(1, 2, 3),
    (2, "attention:spread"): SPREAD,
    (2, "attention:ring"): RING,
    (2, "attention:ring+attention"): RING_THRIFTY,
    (2, "feed_forward:spread"): SHARED,
    (2, "feed_forward:tensor"): TENSOR,
    (2, "feed_forward:tensor+attention"): TENSOR,
    (2, "spread"): cost(5, 100, 100),
}


def points() -> list[ProfilePoint]:
    return [
        ProfilePoint(
            p=p,
            option=option,
            lengths=pack,
            forward_s=true.forward(pack),
            backward_s=true.backward(pack),
            kept_bytes=round(true.kept(sum(pack))),
            transient_bytes=round(true.transient(sum(pack))),
            order=true.order,
            fetched=true.fetched,
        )
        for pack, ((p, option), true) in product(PACKS, LADDERS.items())
    ]


def profile(found: list[ProfilePoint]) -> Profile:
    return Profile(
        fingerprint="",
        shape=TINY.shape,
        cluster=Cluster(devices=2, memory_bytes=10**9),
        points=tuple(found),
        exchange_s={"pull_s": 0.1, "push_s": 0.2, "update_s": 0.3},
        state_bytes=1,
        working_bytes={p: {"replicated": 9, "sharded": 9} for p in (1, 2)},
        element_bytes=2,
        feed_forwards=OWNERS,
    )


def test_a_profile_of_branches_becomes_costs_of_layers() -> None:
    """Catches branches listed as layers, ladders of two branches mixed up, and a pair put together
    where the whole was measured."""
    measured = profile(points())
    costs = costs_from_profile(Profile.from_json(json.loads(json.dumps(measured.to_json()))))
    assert set(costs.options[1]) == {"local", "local+full"}
    assert set(costs.options[2]) == set(by_hand())
    made, true = costs.options[2]["ring/tensor"], by_hand()["ring/tensor"]
    assert made.forward((900, 50)) == pytest.approx(true.forward((900, 50)), rel=1e-5)
    assert made.kept(9000) == pytest.approx(true.kept(9000), rel=1e-2)
    assert (made.order, made.fetched) == (true.order, pytest.approx(true.fetched))
    whole = costs.options[2]["spread"].backward((900,))
    assert whole == pytest.approx(LADDERS[2, "spread"].backward((900,)), rel=1e-5)
    kept = costs.options[2]["ring+full"].kept
    assert kept(1000) == pytest.approx((1000 / 2 + 1) * TINY.hidden * 2)
    assert costs.named(LayerOption.parse("ring/spread")) == LayerOption.of("ring")
    assert CostModel.from_json(json.loads(json.dumps(costs.to_json()))) == costs


def test_a_ladder_has_one_order() -> None:
    """Catches a curve through points of two token orders, which is right for neither."""
    mixed = [
        replace(x, order="natural") if x.option == "attention:ring" and x.lengths == (64,) else x
        for x in points()
    ]
    with pytest.raises(CostError, match="order of attention:ring on cp2: got natural, zigzag"):
        costs_from_profile(profile(mixed))


def test_levels_of_a_branch_agree_on_their_forward() -> None:
    """Catches noise that makes the thriftier level of a branch look faster, and branches of
    several methods that are taken for levels of one."""

    def point(option: str, forward_s: float, backward_s: float) -> ProfilePoint:
        return ProfilePoint(
            p=2, option=option, lengths=(64,), forward_s=forward_s, backward_s=backward_s
        )

    found = reconciled(
        [
            point("attention:ring", 1.5, 2.0),
            point("attention:ring+attention", 1.0, 1.5),
            point("attention:spread", 0.5, 1.0),
            point("feed_forward:ring", 0.2, 0.4),
        ]
    )
    assert [(x.forward_s, x.backward_s) for x in found] == [
        (1.0, 2.0),
        (1.0, 2.0),
        (0.5, 1.0),
        (0.2, 0.4),
    ]
