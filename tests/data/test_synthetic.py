"""Lengths without data."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.distributions import Bins, Counted, Distribution, LogNormal, Mixture, Resampled
from headrace.data.drawn_lengths import PRESETS, draw_batches, parse_distribution
from headrace.data.length_summary import summarise_lengths
from headrace.data.sampler import Sampler, SamplerOptions
from headrace.errors import ConfigError, DataError


def drawn(distribution: Distribution, count: int = 200_000) -> np.ndarray:
    return distribution.draw(count, np.random.Generator(np.random.Philox(key=[1, 0])))


def test_lognormal_quantiles() -> None:
    """Catches sigma taken for a variance, or a mean for the median."""
    lengths = drawn(LogNormal(median=700, sigma=1.5, max=10**7))
    assert np.median(lengths) == pytest.approx(700, rel=0.02)
    assert np.quantile(lengths, 0.8413) == pytest.approx(700 * np.e**1.5, rel=0.03)


def test_limits_and_tail() -> None:
    """Catches lengths past the limits, and a tail of another weight or index."""
    cut = drawn(LogNormal(median=700, sigma=1.5, min=64, max=2048))
    assert (cut.min(), cut.max()) == (64, 2048)
    tail = drawn(LogNormal(median=700, sigma=1.0, max=10**12, tail=0.05, alpha=1.5))
    begin = 700 * np.exp(1.6449)
    assert np.mean(tail > begin) == pytest.approx(0.05, rel=0.05)
    assert np.mean(tail > 4 * begin) == pytest.approx(0.05 * 4**-1.5, rel=0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_shares(name: str) -> None:
    """Catches shares that slipped by one bin, and a maximum that is never or over-reached."""
    preset = PRESETS[name]
    lengths = drawn(preset)
    assert lengths.max() <= preset.longest
    assert lengths.min() >= 1
    if isinstance(preset, Bins):
        counts, _ = np.histogram(lengths, bins=[*preset.edges[:-1], preset.edges[-1] + 1])
        shares = np.array(preset.shares) / sum(preset.shares)
        np.testing.assert_allclose(counts / len(lengths), shares, atol=0.004)


def test_presets_against_facts_they_were_not_made_from() -> None:
    """Catches a preset whose inside is far from the corpus though its quantiles are right."""
    assert drawn(PRESETS["wikipedia"]).mean() == pytest.approx(1013.6, rel=0.1)
    assert drawn(PRESETS["pg19-books"]).mean() == pytest.approx(100_100, rel=0.05)
    assert drawn(PRESETS["rollouts"]).mean() == pytest.approx(1174, rel=0.05)
    assert max(PRESETS["rollouts"].draw(8192, np.random.default_rng(0))) > 18_000
    code = summarise_lengths(drawn(PRESETS["github-code"]), name="x")
    assert code.bin_documents[0] == pytest.approx(0.657, abs=0.005)
    assert code.longest > 250_000
    longest = [
        batch.longest for batch in draw_batches(PRESETS["commoncrawl-like"], 1_600_000, 30, 0)
    ]
    assert min(longest) > 10_000
    assert max(longest) == 32768


POSITIVE = st.floats(0.01, 10)


@pytest.mark.parametrize("text", ["list:1,2,3", "list:512,700", "list:512, 700/9", "fixed:1,2"])
def test_commas_part_no_lengths(text: str) -> None:
    """Catches two lengths that are read as one of many digits."""
    with pytest.raises(ConfigError, match="parted by '/'"):
        parse_distribution(text)


@given(
    st.one_of(
        st.builds(
            LogNormal,
            median=st.floats(1, 1e5),
            sigma=st.floats(0, 4),
            min=st.integers(1, 9),
            max=st.integers(9, 10**6),
            tail=st.sampled_from([0.0, 0.125, 1e-7]),
            alpha=st.just(1.25),
        ),
        st.builds(Resampled, lengths=st.lists(st.integers(1, 99), min_size=1).map(tuple)),
        st.builds(Counted, lengths=st.just((700, 16)), counts=st.tuples(POSITIVE, POSITIVE)),
        st.builds(Bins, edges=st.just((1, 70, 900)), shares=st.tuples(POSITIVE, POSITIVE)),
    ).flatmap(
        lambda one: st.one_of(
            st.just(one),
            st.builds(
                Mixture,
                weights=st.tuples(POSITIVE, POSITIVE),
                parts=st.just((one, LogNormal(median=5, sigma=1))),
            ),
        )
    )
)
def test_texts_read_back(distribution: Distribution) -> None:
    """Catches a digit or an option lost in the text."""
    again = parse_distribution(str(distribution))
    if isinstance(distribution, LogNormal) and not distribution.tail:
        assert str(again) == str(distribution)  # alpha means nothing without a tail
    elif isinstance(distribution, Mixture):
        assert str(again) == str(distribution)
    else:
        assert again == distribution


def test_texts() -> None:
    """Catches a unit that is not read, and a default that is not the documented one."""
    one = parse_distribution("lognormal:median=4k,sigma=1.5,max=32Ki")
    assert one == LogNormal(median=4000, sigma=1.5, min=1, max=32768)
    mixed = parse_distribution("0.25*fixed:10 + 0.75*list:20/30")
    lengths = drawn(mixed)
    assert set(lengths.tolist()) == {10, 20, 30}
    assert np.mean(lengths == 10) == pytest.approx(0.25, abs=0.01)
    assert mixed.longest == 30


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lognormale:median=1,sigma=1", "did you mean 'lognormal'"),
        ("github-cod", "did you mean 'github-code'"),
        ("lognormal:median=700", "sigma"),
        ("lognormal:median=700,sigm=1", "did you mean 'sigma'"),
        ("lognormal:median=x,sigma=1", "a count"),
        ("lognormal:median=700,sigma=x", "a number"),
        ("lognormal:median=700,sigma=1,min=9,max=5", "min <= max"),
        ("lognormal:median=700,sigma=1,tail=1.5", "tail < 1"),
        ("bins:edges=1/2,shares=1/2", "edges"),
        ("bins:edges=2/1,shares=1", "edges"),
        ("bins:edges=1/2,shares=0", "not all zero"),
        ("counted:lengths=1/2,counts=1", "a count for each length"),
        ("counted:lengths=1/2,counts=0/0", "not all zero"),
        ("counted:lengths=0/2,counts=1/1", "length >= 1"),
        ("fixed:0", ">= 1"),
        ("fixed:10 + fixed:20", "WEIGHT"),
        ("0.5*fixed:10 + fixed:20", "weight before each"),
        ("0*fixed:10 + 1*fixed:20", "weight > 0"),
        ("", "known are"),
        ("lognormal:median=700,sigma=1,sigma=2", "got sigma twice, wanted each option once"),
        ("lognormal:median=100,sigma=1e308", "sigma <= 1000"),
        ("lognormal:median=100,sigma=1,tail=0.1,alpha=1e-9", "alpha >= 0.001"),
        ("bins:edges=1/99999999999999999999999,shares=1", "edges with 99999"),
        ("bins:edges=1/2/3,shares=1e308/1e308", "shares whose sum is infinite"),
    ],
)
def test_malformed_texts(text: str, told: str) -> None:
    """Catches a text that is half read."""
    with pytest.raises(ConfigError, match=told):
        parse_distribution(text)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_numbers_of_distributions_are_finite(wrong: float) -> None:
    """Catches comparisons that do not hold for NaN, and so refuse nothing."""
    whole: Any = wrong  # also in the place of ints
    for name in ("median", "sigma", "min", "max", "tail", "alpha"):
        with pytest.raises(ConfigError, match=f"lognormal: got {name} with {wrong}|min <= max"):
            LogNormal(**{"median": 700, "sigma": 1.0, name: whole})
    for make in (
        lambda: Bins(edges=(1, 2, whole), shares=(1.0, 1.0)),
        lambda: Bins(edges=(1, 2, 3), shares=(1.0, wrong)),
        lambda: Counted(lengths=(1, 2), counts=(1.0, wrong)),
        lambda: Counted(lengths=(1, whole), counts=(1.0, 1.0)),
        lambda: Resampled(lengths=(5, whole)),
        lambda: Mixture(weights=(1.0, wrong), parts=(Resampled(lengths=(5,)),) * 2),
    ):
        with pytest.raises(ConfigError, match=f"with {wrong}, wanted finite numbers"):
            make()


def test_lengths_of_a_file(tmp_path: Path) -> None:
    """Catches one of the two forms not read, and a traceback for any other."""
    for content in ("512\n700, 90000\n", json.dumps([512, 700, 90000])):
        (tmp_path / "lengths").write_text(content)
        found = parse_distribution(f"file:{tmp_path}/lengths")
        assert found == Resampled(lengths=(512, 700, 90000))
    for content in ("", "one two", "[[1]]", "[1.5x]"):
        (tmp_path / "lengths").write_text(content)
        with pytest.raises((DataError, ConfigError)):
            parse_distribution(f"file:{tmp_path}/lengths")
    with pytest.raises(DataError, match="No such file"):
        parse_distribution(f"file:{tmp_path}/none")


@given(st.integers(1, 5000), st.integers(1, 5), st.integers(0, 2**64 - 1))
def test_batches(budget: int, count: int, seed: int) -> None:
    """Catches a budget that is overrun, batches that repeat, a seed that is ignored."""
    preset = LogNormal(median=300, sigma=1.5, max=4096)
    batches = draw_batches(preset, budget, count, seed)
    assert len(batches) == count
    for batch in batches:
        assert len(batch) == 1 or batch.total <= budget
    ids = [i for batch in batches for i in batch.ids]
    assert ids == list(range(len(ids)))
    assert draw_batches(preset, budget, count, seed) == batches
    assert draw_batches(preset, 10**5, 1, seed) != draw_batches(preset, 10**5, 1, seed ^ 1)


def test_bad_batches() -> None:
    """Catches a loop without an end."""
    for budget, count, seed in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(ConfigError):
            draw_batches(PRESETS["wikipedia"], budget, count, seed)


@pytest.mark.parametrize(("budget", "count"), [(2**63 - 1, 1), (10_000, 2**63 - 1), (10**9, 10**3)])
def test_a_digit_too_many_is_refused_soon(budget: int, count: int) -> None:
    """Catches a draw that goes on until memory ends."""
    with pytest.raises(ConfigError, match="got more than 2,000,000 sequences, wanted fewer"):
        draw_batches(parse_distribution("fixed:100"), budget, count)


def test_counted_lengths_have_their_shares() -> None:
    """Catches counts that slip by one length, and lengths of count zero that are drawn."""
    lengths = drawn(Counted(lengths=(900, 16, 5, 70_000), counts=(3, 6, 1, 0)))
    found, counts = np.unique(lengths, return_counts=True)
    assert found.tolist() == [5, 16, 900]
    np.testing.assert_allclose(counts / len(lengths), [0.1, 0.6, 0.3], atol=0.005)
    assert Counted(lengths=(900, 70_000), counts=(1, 0)).longest == 900


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**64 - 1))
def test_batches_of_sequences(sequences: int, count: int, seed: int) -> None:
    """Catches a batch with a sequence too few, or lengths that are left out between batches."""
    law = LogNormal(median=300, sigma=1.5, max=4096)
    batches = draw_batches(law, None, count, seed, batch_sequences=sequences)
    assert [len(batch) for batch in batches] == [sequences] * count
    ids = [i for batch in batches for i in batch.ids]
    assert ids == list(range(len(ids)))
    [whole] = draw_batches(law, None, 1, seed, batch_sequences=sequences * count)
    assert whole.tokens == tuple(n for batch in batches for n in batch.tokens)


@pytest.mark.parametrize(("tokens", "sequences"), [(None, None), (64, 4), (None, 0)])
def test_a_batch_has_one_size(tokens: int | None, sequences: int | None) -> None:
    """Catches a size that is taken silently where two or none are given."""
    with pytest.raises(ConfigError):
        draw_batches(parse_distribution("fixed:10"), tokens, 1, batch_sequences=sequences)


@pytest.mark.parametrize(("tokens", "sequences"), [(200_000, None), (None, 500)])
def test_a_curriculum_draws_as_the_sampler_does(tokens: int | None, sequences: int | None) -> None:
    """Catches steps whose lengths grow sooner or later than those of a sampler with a large corpus,
    and steps after the curriculum that are still short."""
    law, steps = LogNormal(median=300, sigma=1.2, max=8192), 4
    corpus = SimpleNamespace(name="drawn", fingerprint="0", lengths=drawn(law, 100_000))
    options = SamplerOptions(
        batch_tokens=tokens,
        batch_sequences=sequences,
        curriculum="short-to-long",
        curriculum_steps=steps,
        min_tokens=1,
    )
    trained = [batch.lengths for batch in Sampler(corpus, options).peek(steps + 2)]
    batches = draw_batches(
        law, tokens, steps + 2, batch_sequences=sequences, curriculum_steps=steps
    )
    for step, (ours, theirs) in enumerate(zip(batches, trained, strict=True)):
        shortest = np.quantile(corpus.lengths, min(1.0, (step + 1) / steps))
        if step < steps - 1:
            assert max(ours.longest, theirs.longest) <= 1.05 * shortest
        assert np.median(ours.tokens) == pytest.approx(np.median(theirs.tokens), rel=0.2)
    ids = [i for batch in batches for i in batch.ids]
    assert ids == list(range(len(ids)))
    after = draw_batches(law, tokens, 1, batch_sequences=sequences)[0]
    begins = batches[steps].tokens[:9]  # the first one may be left over from the step before
    assert after.tokens[:8] in (begins[:8], begins[1:])
