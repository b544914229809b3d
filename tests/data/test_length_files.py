"""Files of lengths and of histograms, as other programs write them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from headrace.data.distributions import Bins, Counted, Distribution, Resampled
from headrace.data.drawn_lengths import parse_distribution
from headrace.errors import DataError


def read(folder: Path, content: str, name: str = "lengths.csv") -> Distribution:
    (folder / name).write_text(content)
    return parse_distribution(f"file:{folder / name}")


COUNTED = Counted(lengths=(512, 700, 90_000), counts=(30, 12, 1))
BINS = Bins(edges=(1, 512, 4096, 32_768), shares=(30, 12, 1))


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("length,count\n512,30\n700,12\n90000,1\n", COUNTED),
        ("length\tcount\n512\t30\n700\t12\n90000\t1", COUNTED),
        ('"Length"; "Count"\n512;30\n\n700;12\n90000;1\n', COUNTED),
        ('\ufefflength,count\n512,30\n700,10\n"90,000",1\n700,2\n', COUNTED),
        ("length\n512\n700\n512\n", Resampled(lengths=(512, 700, 512))),
        ("edge_low,edge_high,count\n0,512,30\n512,4096,12\n4096,32Ki,1\n", BINS),
        ("edge_low,edge_high,count\n0,511,30\n512,4095,12\n4096,32767,1\n", BINS),
        (
            "edge_low,edge_high,count\n1,512,30\n4096,8192,2\n",
            Bins(edges=(1, 512, 4096, 8192), shares=(30, 0, 2)),
        ),
        (
            "edge_low,edge_high,count\n0.0,0.5,0\n0.5,102.4,3\n102.4,204.8,1.5\n",
            Bins(edges=(1, 103, 205), shares=(3, 1.5)),
        ),
        (json.dumps({"lengths": [512, 700, 90_000], "counts": [30, 12, 1]}), COUNTED),
        (json.dumps({"512": 30, "700": 12, "90000": 1}), COUNTED),
        (json.dumps({"edges": [0, 512, 4096, 32_768], "counts": [30, 12, 1]}), BINS),
        (json.dumps([512, 700, 90_000]), Resampled(lengths=(512, 700, 90_000))),
    ],
)
def test_forms(content: str, wanted: Distribution, tmp_path: Path) -> None:
    """Catches a form that is not read, or in which columns, edges or separators are mistaken."""
    assert read(tmp_path, content) == wanted


def test_a_histogram_of_numpy_draws_its_lengths(tmp_path: Path) -> None:
    """Catches whole lengths that change their bin, as edges of numpy are no whole numbers."""
    lengths = np.random.default_rng(0).lognormal(6, 1, 20_000).astype(np.int64) + 1
    counts, edges = np.histogram(lengths, bins=np.geomspace(1, lengths.max() + 1, 25))
    value = {"edges": edges.tolist(), "counts": counts.tolist()}
    found = read(tmp_path, json.dumps(value), "histogram.json")
    drawn = found.draw(200_000, np.random.default_rng(1))
    again, _ = np.histogram(drawn, bins=edges)
    np.testing.assert_allclose(again / len(drawn), counts / len(lengths), atol=0.004)
    assert drawn.mean() == pytest.approx(lengths.mean(), rel=0.03)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("length,count\n512,30\n700\n", "line 3: got 1 cell, wanted 2: length,count"),
        ("length,count\n512,x\n", "line 2: got 'x', wanted a count >= 0"),
        ("length,count\n512,-1\n", "line 2: got '-1', wanted a count >= 0"),
        ("length,count\n512,nan\n", "line 2: got 'nan', wanted a count >= 0"),
        ("length,count\n512.5,1\n", "line 2: got '512.5', wanted a whole length >= 1"),
        ("length,count\n0,1\n", "line 2: got '0', wanted a whole length >= 1"),
        ("length,count\nlong,1\n", "line 2: got 'long', wanted a finite number of tokens"),
        ("length,count\n", "got names alone, wanted a line of numbers"),
        ("length,count\n5,0\n", "not all zero"),
        ("lengths,count\n512,3\n", "line 1: got lengths,count.*did you mean 'length'"),
        ("512,30\n700,12\n", "line 1: got 2 columns without names, wanted a line of names"),
        ("edge_low,edge_high,count\n0,512,1\n400,900,1\n", "line 3: got one from 400"),
        ("edge_low,edge_high,count\n512,512,1\n", "line 2: got 512 to 512"),
        ("edge_low,edge_high,count\n-5,512,1\n", "line 2: got -5 to 512"),
        ("edge_low,edge_high,count\n8192,inf,1\n", "line 2: got 'inf', wanted a finite number"),
        ("edge_low,edge_high,count\n5.1,5.9,2\n", "line 2: got 2 sequences of 5.1 to 5.9"),
        ("edge_low,edge_high,count\n1,9,0\n", "not all zero"),
        ('{"edges": [1, 2], "counts": [1, 2]}', "2 edges and 2 counts, wanted counts, and one"),
        ('{"edges": [1, true], "counts": [1]}', "edge 1: got True, wanted a finite number"),
        ('{"edges": [1, 9], "counts": [NaN]}', "count 0: got nan"),
        ('{"edges": 5, "counts": [1]}', "edges: got 5, wanted a list"),
        ('{"lengths": [1, 2], "counts": [1]}', "2 lengths and 1 counts"),
        ('{"bins": [1, 2]}', "an object with bins, wanted edges and counts"),
        ("{}", "an object with nothing"),
        ("[512.5]", "item 0: got 512.5, wanted a whole length"),
        ('{"5": 1', "no JSON"),
        pytest.param("[" * 200_000, "no JSON", id="nested too deep"),
        ("", "got an empty file, wanted lengths"),
        ("\n\n", "got an empty file, wanted lengths"),
        ("--5", "got --5, wanted a list of whole numbers"),
        pytest.param("9" * 5000, "wanted a list of whole numbers", id="5000 digits"),
        pytest.param("length\n" + "9" * 140_000, "line 2: got field larger", id="long cell"),
        pytest.param("length" * 30_000, "line 1: got field larger", id="long name"),
        ('{"edges": [0, 1e300], "counts": [1]}', "edges with a number of 997 bits"),
        pytest.param(
            f'{{"edges": [0, 1{"0" * 400}], "counts": [1]}}',
            "a number of 401 digits",
            id="edge beyond all floats",
        ),
        pytest.param(
            f'{{"edges": [0, 9], "counts": [1{"0" * 400}]}}',
            "a number of 401 digits",
            id="count beyond all floats",
        ),
        ('{"lengths": [1, 2], "counts": [1e308, 1e308]}', "counts whose sum is infinite"),
    ],
)
def test_malformed_files_say_where_and_what(content: str, told: str, tmp_path: Path) -> None:
    """Catches a file that is half read, or refused without its line."""
    with pytest.raises(DataError, match=told) as refused:
        read(tmp_path, content)
    assert str(refused.value).startswith(f"lengths of {tmp_path / 'lengths.csv'}")
    assert not re.search("Error", str(refused.value))


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b"])
def test_paths_that_cannot_be_are_refused(path: str) -> None:
    """Catches a traceback of the place where a path is looked up."""
    with pytest.raises(DataError, match="wanted a text file of lengths"):
        parse_distribution(f"file:{path}")


def test_lists_of_text_files_stay_lists(tmp_path: Path) -> None:
    """Catches numbers apart by commas that are taken for columns where nothing says so."""
    assert read(tmp_path, "512, 700\n90000, 1\n", "lengths.txt") == Resampled(
        lengths=(512, 700, 90_000, 1)
    )
