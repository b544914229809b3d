"""The error tree and its texts."""

from __future__ import annotations

import re

import pytest

from headrace import errors
from headrace.errors import HeadraceError, MissingExtra, SpecError, did_you_mean, shortened

CLASSES = [name for name in errors.__all__ if name not in ("did_you_mean", "shortened")]

TEXTS = [
    ({}, "size"),
    ({"got": 3}, "size: got 3"),
    ({"wanted": "4"}, "size: wanted 4"),
    ({"got": 3, "wanted": 4}, "size: got 3, wanted 4"),
    ({"hint": "try less"}, "size; try less"),
    ({"got": 0, "wanted": ">= 1", "hint": "more"}, "size: got 0, wanted >= 1; more"),
    ({"got": "", "hint": None}, "size: got "),
]


@pytest.mark.parametrize(("parts", "text"), TEXTS)
def test_the_text_says_what_got_wanted_and_hint(parts: dict, text: str) -> None:
    """Catches a falsy ``got`` (zero, an empty text) that is dropped, and stray punctuation."""
    error = HeadraceError("size", **parts)
    assert str(error) == text
    assert error.what == "size"
    assert (error.got, error.wanted, error.hint) == tuple(
        parts.get(name) for name in ("got", "wanted", "hint")
    )


def test_a_long_value_is_shortened_in_the_text_alone() -> None:
    """Catches a screen full of digits or of names to choose from, and an error that no longer holds
    what was got."""
    long = "a" * 900 + "b" * 900
    error = SpecError("size", got=long, wanted="less")
    assert error.got == long
    assert 500 < len(str(error)) < 600
    assert re.fullmatch(r"size: got a+ \.\.\.1,300 characters\.\.\. b+, wanted less", str(error))
    many = SpecError("size", got="c", wanted=f"one of {', '.join(map(str, range(900)))}")
    assert 500 < len(str(many)) < 600
    assert re.fullmatch(r"size: got c, wanted one of 0, 1.*characters\.\.\..*, 899", str(many))
    assert shortened("x" * 80) == "x" * 80


def test_the_drawn_tree_is_the_tree() -> None:
    """Catches an error that is exported but not drawn, or does not descend from the base."""
    drawn = re.findall(
        r"^[ |]+(?:\|-- |`-- )?([A-Z]\w+) {2,}|^ +(HeadraceError)$",
        errors.__doc__ or "",
        re.MULTILINE,
    )
    assert sorted(one or other for one, other in drawn) == sorted(CLASSES)
    for name in CLASSES:
        assert issubclass(getattr(errors, name), HeadraceError)
        assert getattr(errors, name).__doc__


def test_an_absent_package_says_what_to_install() -> None:
    """Catches a hint that names the package in place of the extra."""
    error = MissingExtra("altair", extra="report", needed_for="a report")
    assert str(error) == "a report needs the package altair; pip install 'headrace[report]'"


def test_every_error_is_caught_as_the_base() -> None:
    """Catches an error that the command line would show as a traceback."""
    with pytest.raises(HeadraceError, match="value: got 1"):
        raise SpecError("value", got=1)


@pytest.mark.parametrize(
    ("word", "hint"),
    [("stepz", "did you mean 'steps'?"), ("steps", "did you mean 'steps'?"), ("qqq", None)],
)
def test_did_you_mean(word: str, hint: str | None) -> None:
    """Catches a suggestion that is not close, and options that can be read only once."""
    assert did_you_mean(word, (option for option in ("seed", "steps", "out"))) == hint


def test_did_you_mean_of_nothing() -> None:
    """Catches a failure where there is nothing to choose from."""
    assert did_you_mean("steps", []) is None
