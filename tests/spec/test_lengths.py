"""Lengths: text, JSON, sums and refusals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import SpecError
from headrace.spec import Lengths

batches = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 10**6)), min_size=1, max_size=30)


@given(batches)
def test_text_reads_back(tokens: list[int]) -> None:
    """Catches runs that are merged across others, which would change the order."""
    lengths = Lengths.of(tokens)
    assert Lengths.parse(str(lengths)) == lengths


@given(batches.flatmap(lambda t: st.tuples(st.just(t), st.permutations(range(len(t))))))
def test_json_reads_back(pair: tuple[list[int], list[int]]) -> None:
    """Catches ids that are lost on the way."""
    lengths = Lengths.of(*pair)
    assert Lengths.from_json(json.loads(json.dumps(lengths.to_json()))) == lengths


@given(batches)
def test_sums(tokens: list[int]) -> None:
    """Catches a loss over all tokens: the last of each sequence predicts nothing."""
    lengths = Lengths.of(tokens)
    assert (len(lengths), lengths.total, lengths.longest) == (len(tokens), sum(tokens), max(tokens))
    assert lengths.predicted == sum(n - 1 for n in tokens)
    assert lengths.ids == tuple(range(len(tokens)))


def test_a_text_by_hand() -> None:
    """Catches COUNTxLENGTH in place of LENGTHxCOUNT."""
    lengths = Lengths.parse(" 512x3\n1024 ")
    assert lengths.tokens == (512, 512, 512, 1024)
    assert str(lengths) == "512x3 1024"


def test_numpy_integers_become_plain_ones() -> None:
    """Catches values that JSON cannot write."""
    lengths = Lengths.of(np.array([3, 4], np.int32), np.array([7, 9], np.int64))
    assert json.dumps(lengths.to_json()) == '{"tokens": [3, 4], "ids": [7, 9]}'


def test_whole_numbers_of_any_kind_are_lengths() -> None:
    """Catches a refusal of elements of arrays and tensors, and of 2000.0."""
    torch = pytest.importorskip("torch")
    for tokens in ([2000.0, 7], np.array([2000.0, 7.0]), torch.tensor([2000, 7]), iter((2000, 7))):
        lengths = Lengths.of(tokens)
        assert lengths.tokens == (2000, 7)
        assert all(type(count) is int for count in lengths.tokens)


@pytest.mark.parametrize(
    "count",
    [1.9, np.float32(1.9), True, np.True_, "5", b"5", None, math.nan, math.inf, 2**70, 1e30, [5]],
)
def test_what_is_no_length_is_named(count: object) -> None:
    """Catches 1.9 tokens that are cut to 1, True and texts taken for numbers, and errors of int()
    or of a later array."""
    with pytest.raises(SpecError, match=r"length of sequence 1: got .*, wanted an int >= 1"):
        Lengths.of([4, count])  # type: ignore[list-item]


@pytest.mark.parametrize("tokens", [5, None, "4096", b"12", np.array(5), 1.5])
def test_what_is_no_list_is_refused(tokens: object) -> None:
    """Catches a text whose digits are taken for lengths, and a TypeError for one number."""
    with pytest.raises(SpecError, match=r"lengths of a batch: .*wanted a list of the tokens"):
        Lengths.of(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [(), (0,), (4, -1), (True,), (1.5,), ("4",), (None,)])
def test_lengths_that_are_none_are_refused(tokens: tuple) -> None:
    """Catches an empty batch, an empty sequence, and True taken as one token."""
    with pytest.raises(SpecError, match=r"at least one sequence|an int >= 1"):
        Lengths(tokens=tokens)


def test_the_faulty_sequence_is_named() -> None:
    """Catches a message that leaves one to search a batch of thousands."""
    with pytest.raises(SpecError, match="length of sequence 2: got 0"):
        Lengths(tokens=(5, 6, 0, 7))


def test_as_many_ids_as_lengths() -> None:
    """Catches ids of another batch."""
    with pytest.raises(SpecError, match="ids of a batch: got 1, wanted 2"):
        Lengths(tokens=(5, 6), ids=(1,))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x3",
        "a",
        "1.5",
        "-4",
        "5x-1",
        "5xx",
        "5x3x",
        "1,024",
        "0",
        "512x99999999999",
        pytest.param("9" * 5000, id="a number of 5000 digits"),
    ],
)
def test_malformed_texts_are_refused(text: str) -> None:
    """Catches a traceback of int() where a user mistyped."""
    with pytest.raises(SpecError):
        Lengths.parse(text)


@pytest.mark.parametrize("number", ["3", 3.0, None, True, 2**64])
def test_ids_are_numbers(number: object) -> None:
    """Catches an id that no array of ids holds."""
    with pytest.raises(SpecError, match="id of sequence 1: got"):
        Lengths(tokens=(5, 6), ids=(1, number))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["5x", "5x0 7"])
def test_counts_must_be_there_and_count(text: str) -> None:
    """Catches a mistyped count that silently changes the batch."""
    with pytest.raises(SpecError):
        Lengths.parse(text)
