"""Dropout: what the mask depends on, what it must not depend on, and how often it keeps."""

from __future__ import annotations

import pytest
import torch

from headrace.ops.random import DropoutKey, dropout, keep_mask

FEATURES = 64


def _key(samples, positions, seed: int = 1, step: int = 2) -> DropoutKey:
    samples, positions = torch.broadcast_tensors(
        torch.as_tensor(samples), torch.as_tensor(positions)
    )
    return DropoutKey(seed=seed, step=step, samples=samples, positions=positions)


def _agreement(one: torch.Tensor, other: torch.Tensor) -> float:
    """The part of equal elements: a half for independent masks of rate one half."""
    return float((one == other).double().mean())


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_each_element_is_kept_with_its_probability(rate: float) -> None:
    """Would catch a threshold on signed numbers taken for unsigned ones: 0.1 as 0.6."""
    samples, positions = torch.arange(50).repeat_interleave(40), torch.arange(40).repeat(50)
    mask = keep_mask(FEATURES, rate, _key(samples, positions), site=3)
    count = mask.numel()
    deviation = (rate * (1 - rate) / count) ** 0.5
    assert float(mask.double().mean()) == pytest.approx(1 - rate, abs=5 * deviation)
    for dim, others in ((0, FEATURES), (1, 2000)):  # no token and no feature stands out
        means = mask.double().mean(1 - dim)
        assert float(means.std()) == pytest.approx((rate * (1 - rate) / others) ** 0.5, rel=0.4)


def test_rates_at_the_ends() -> None:
    """Would catch an overflow of the threshold where almost everything is dropped."""
    key = _key(torch.arange(100), 0)
    assert keep_mask(FEATURES, 1e-12, key, 0).all()
    assert keep_mask(FEATURES, 1 - 1e-12, key, 0).sum() <= 1
    x = torch.randn(100, FEATURES)
    assert dropout(x, 0.0, key, 0) is x


@pytest.mark.parametrize("changed", ["seed", "step", "site", "sample", "position", "feature"])
def test_everything_in_the_key_changes_the_mask(changed: str) -> None:
    """Would catch a part of the key that is left out: every layer or step would drop alike."""
    samples, positions = torch.arange(1, 33).repeat(32), torch.arange(1, 33).repeat_interleave(32)
    mask = keep_mask(FEATURES, 0.5, _key(samples, positions), site=4)
    other = {
        "seed": lambda: keep_mask(FEATURES, 0.5, _key(samples, positions, seed=2), site=4),
        "step": lambda: keep_mask(FEATURES, 0.5, _key(samples, positions, step=3), site=4),
        "site": lambda: keep_mask(FEATURES, 0.5, _key(samples, positions), site=5),
        "sample": lambda: keep_mask(FEATURES, 0.5, _key(samples + 1, positions), site=4),
        "position": lambda: keep_mask(FEATURES, 0.5, _key(samples, positions + 1), site=4),
        "feature": lambda: mask.roll(1, dims=1),
    }[changed]()
    assert _agreement(mask, other) == pytest.approx(0.5, abs=5 * 0.5 / mask.numel() ** 0.5)


def test_sample_and_position_are_not_interchangeable() -> None:
    """Would catch a key that adds or xors the two: token 3 of sample 5 as token 5 of sample 3."""
    samples, positions = torch.triu_indices(40, 40, offset=1)
    mask = keep_mask(FEATURES, 0.5, _key(samples, positions), 0)
    other = keep_mask(FEATURES, 0.5, _key(positions, samples), 0)
    assert _agreement(mask, other) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    "moved", [{"seed": 2}, {"seed": 0}, {"step": 3}, {"step": 1}, {"site": 5}, {"site": 3}], ids=str
)
def test_no_sample_has_the_mask_of_another_under_another_seed_step_or_site(
    moved: dict[str, int],
) -> None:
    """Would catch a key that adds seed, step, site and sample times a factor each: the mask of
    sample 4 under seed 1 would be that of sample 5 under seed 0."""

    def masks(seed: int = 1, step: int = 2, site: int = 4) -> torch.Tensor:
        key = _key(torch.arange(400), 3, seed=seed, step=step)
        return keep_mask(FEATURES, 0.5, key, site)

    agreement = (masks()[:, None] == masks(**moved)[None]).double().mean(2)
    assert float(agreement.max()) < 0.95


def test_samples_beyond_32_bits_have_masks_of_their_own() -> None:
    """Would catch an id that is cut to 32 bits."""
    key = _key(torch.arange(100), 0)
    mask = keep_mask(FEATURES, 0.5, key, 0)
    other = keep_mask(FEATURES, 0.5, _key(torch.arange(100) + 2**32, 0), 0)
    assert _agreement(mask, other) == pytest.approx(0.5, abs=0.05)


def test_the_first_token_of_the_first_sample_is_not_always_dropped_alike() -> None:
    """Would catch sample 0, position 0 with one mask for every seed, step and layer."""
    masks = [
        keep_mask(256, 0.5, _key([0], [0], seed=seed, step=step), site)
        for seed, step, site in ((0, 0, 0), (1, 0, 0), (0, 7, 0), (0, 0, 3))
    ]
    for other in masks[1:]:
        assert _agreement(masks[0], other) == pytest.approx(0.5, abs=0.2)


def test_the_mask_is_a_token_s_own() -> None:
    """Would catch randomness drawn per pack: the mask would change with rank, pack and order."""
    samples, positions = torch.randint(10**12, (50,)), torch.randint(4000, (50,))
    whole = keep_mask(FEATURES, 0.3, _key(samples, positions), 9)
    order = torch.randperm(50)
    assert torch.equal(
        keep_mask(FEATURES, 0.3, _key(samples[order], positions[order]), 9), whole[order]
    )
    for part in (slice(0, 1), slice(20, 20), slice(31, 50)):
        key = _key(samples[part], positions[part])
        assert torch.equal(keep_mask(FEATURES, 0.3, key, 9), whole[part])
    assert torch.equal(keep_mask(16, 0.3, _key(samples, positions), 9), whole[:, :16])


def test_backward_drops_what_the_forward_dropped() -> None:
    """Would catch a mask drawn anew in the backward, or a gradient without its scale."""
    key = _key(torch.arange(5), torch.arange(5))
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.4, key, 1)
    mask = keep_mask(8, 0.4, key, 1)
    torch.testing.assert_close(y, torch.where(mask, x / 0.6, 0.0))
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, key, 1), x)


def test_half_precision_keeps_its_type_and_mean() -> None:
    """Would catch a mask in fp32 that widens the activations."""
    x = torch.ones(400, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    y = dropout(x, 0.25, _key(torch.arange(400), 1), 0)
    y.backward(torch.ones_like(y))
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert float(y.detach().double().mean()) == pytest.approx(1.0, abs=0.03)
