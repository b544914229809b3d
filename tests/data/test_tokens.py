"""Tokenizers by name."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data.hf_tokens import load_file
from headrace.data.opening import open_corpus
from headrace.data.source import Source
from headrace.data.tokens import make_tokenizer, tokenizer_sizes
from headrace.errors import DataError, MissingExtra

PYTHON = Path(__file__).parents[2] / "examples" / "tokenizers" / "python-4096.json"


@given(st.text(min_size=1))
def test_bytes_read_back(text: str) -> None:
    """Catches a lost byte, a sign, or a missing end."""
    tokenizer = make_tokenizer("bytes")
    (ids,) = tokenizer.encode_batch([text])
    assert ids.dtype == np.int32
    assert ids[-1] == tokenizer.end_id == 256
    assert tokenizer.mask_id is None
    assert bytes(ids[:-1].astype(np.uint8)).decode() == text


@given(st.text(alphabet="ACGTacgtN", max_size=40), st.integers(1, 4))
def test_kmers_are_base_four_numbers(text: str, k: int) -> None:
    """Catches a wrong stride, case, digit order or treatment of the rest and of other letters."""
    tokenizer = make_tokenizer(f"kmer:{k}")
    (ids,) = tokenizer.encode_batch([text])
    expected = []
    for start in range(0, len(text) - k + 1, k):
        word = text[start : start + k].upper()
        known = "N" not in word
        expected.append(int("".join(str("ACGT".index(x)) for x in word), 4) if known else 4**k)
    assert ids.tolist() == [*expected, 4**k + 1]
    assert tokenizer.vocabulary == 4**k + 2


def test_kmers_take_any_unicode() -> None:
    """Catches letters outside ASCII shifting the k-mers behind them."""
    (ids,) = make_tokenizer("kmer:2").encode_batch(["\u00c4CGT"])
    assert ids.tolist() == [16, 11, 17]


@pytest.mark.parametrize("spec", ["kmer:", "kmer:0", "kmer:9", "kmer:x", "ids:", "ids:10:10"])
@pytest.mark.parametrize("more", ["", "-"])
def test_malformed_specs(spec: str, more: str) -> None:
    """Catches a spec that is half read."""
    with pytest.raises(DataError, match="tokenizer"):
        make_tokenizer(spec + more)


def test_ready_ids() -> None:
    """Catches ready tokens being asked to read text."""
    tokenizer = make_tokenizer("ids:50257:50256")
    assert (tokenizer.vocabulary, tokenizer.end_id) == (50257, 50256)
    assert make_tokenizer("ids:10").end_id is None
    assert make_tokenizer("ids:10").mask_id is make_tokenizer("kmer:2").mask_id is None
    with pytest.raises(DataError, match="documents of token ids"):
        tokenizer.encode_batch(["text"])


def test_missing_file_is_told() -> None:
    """Catches a mistyped path being looked for on the hub."""
    for spec in ("", "./no/tokenizer.json", "no.json"):
        with pytest.raises(DataError, match="no such file"):
            make_tokenizer(spec)


def test_the_python_tokenizer() -> None:
    """Catches a damaged or re-trained example file, text that does not read back, no end id."""
    pytest.importorskip("tokenizers")
    tokenizer = make_tokenizer(str(PYTHON))
    text = "def f(x):\r\n\treturn 'gr\u00fc\u00df \U0001f600' + x  # <|end|> is text\n"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.vocabulary == 4096
    assert tokenizer.end_id == 0
    assert ids[-1] == 0
    assert 0 not in ids[:-1]
    assert tokenizer.library.decode(ids[:-1].tolist(), skip_special_tokens=False) == text
    code = "import os\n\nfor name in os.listdir(path):\n    print(self.name, file=sys.stderr)\n"
    assert len(tokenizer.encode_batch([code])[0]) < len(code) / 2.5


def test_folder_with_config_and_truncation(tmp_path: Path) -> None:
    """Catches truncation left on, and an end token that is not the one the config names."""
    pytest.importorskip("tokenizers")
    content = json.loads(PYTHON.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    word = "for"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": word}}))
    plain, folder = make_tokenizer(str(PYTHON)), make_tokenizer(str(tmp_path))
    (ids,) = folder.encode_batch(["a = 1\n" * 20])
    assert len(ids) > 20
    assert ids[-1] == folder.end_id == folder.library.token_to_id(word)
    assert folder.fingerprint != plain.fingerprint


def test_a_mask_token(tmp_path: Path) -> None:
    """Catches a mask that is not found, or that is taken for the end of a document."""
    pytest.importorskip("tokenizers")
    plain = make_tokenizer(str(PYTHON))
    assert plain.mask_id is None
    for word in ("[MASK]", "<mask>"):
        library = plain.library.from_str(plain.library.to_str())
        library.add_special_tokens([word])
        library.save(str(tmp_path / "tokenizer.json"))
        masked = make_tokenizer(str(tmp_path))
        assert masked.mask_id == plain.vocabulary == masked.vocabulary - 1
        assert masked.end_id == plain.end_id


def test_damaged_file(tmp_path: Path) -> None:
    """Catches the library's bare Exception reaching the user."""
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        make_tokenizer(str(tmp_path))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an ImportError instead of a line that says what to install."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"headrace\[train\]"):
        make_tokenizer(str(PYTHON))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"headrace\[hf\]"):
        make_tokenizer("some/model")


def test_a_model_of_the_local_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a download, and a model's own end token being ignored."""
    tokenizers = pytest.importorskip("tokenizers")

    def from_pretrained(name: str, *, local_files_only: bool) -> SimpleNamespace:
        assert local_files_only
        if name != "some/model":
            raise OSError("not there\nlong story")
        library = tokenizers.Tokenizer.from_file(str(PYTHON))
        return SimpleNamespace(backend_tokenizer=library, eos_token="for")

    fake = ModuleType("transformers")
    fake.AutoTokenizer = SimpleNamespace(from_pretrained=from_pretrained)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", fake)
    tokenizer = make_tokenizer("some/model")
    assert tokenizer.encode_batch(["x"])[0][-1] == tokenizer.end_id != 0
    with pytest.raises(DataError, match="not there") as caught:
        make_tokenizer("other/model")
    assert "long story" not in str(caught.value)


def test_sizes_need_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a plan of lengths alone that asks for a package, or is made for another model."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert tokenizer_sizes(str(PYTHON)) == (4096, None)
    assert tokenizer_sizes("ids:70:9") == (70, None)
    path = tmp_path / "tokenizer.json"
    added = [{"id": 9, "content": "[MASK]"}]
    for vocab in ({"a": 0, "b": 1}, [["a", -1.0], ["b", -2.0]]):
        path.write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
        assert tokenizer_sizes(str(tmp_path)) == (10, 9)
    for text in ("{}", "[]", '{"model": {"vocab": 3}}', "[" * 99999):
        path.write_text(text)
        with pytest.raises(DataError, match=r"wanted a tokenizer\.json"):
            tokenizer_sizes(str(path))


def test_sizes_are_those_of_the_library(tmp_path: Path) -> None:
    """Catches a vocabulary that is counted otherwise than the tokenizer's."""
    tokenizers = pytest.importorskip("tokenizers")
    names = {"a": 0, "[MASK]": 1}
    models = [
        tokenizers.models.WordLevel(names, unk_token="a"),
        tokenizers.models.BPE(names, []),
        tokenizers.models.Unigram([("a", -1.0), ("[MASK]", -2.0)], unk_id=0),
    ]
    for model in models:
        library = tokenizers.Tokenizer(model)
        library.add_special_tokens(["<mask>", "</s>"])
        library.save(str(tmp_path / "tokenizer.json"))
        whole = make_tokenizer(str(tmp_path))
        assert tokenizer_sizes(str(tmp_path)) == (whole.vocabulary, whole.mask_id)
    whole = make_tokenizer(str(PYTHON))
    assert tokenizer_sizes(str(PYTHON)) == (whole.vocabulary, whole.mask_id)


PIECES = [*"ab1.,;(_", "ab", " a", "\n", "\na", " ", "  ", "\r", "\t", "\u00e9", "\U0001f600"]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=300, max_size=1500).map("".join)


def metaspace() -> object:
    """A tokenizer that puts a blank before every text, as SentencePiece does."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = [(letter, -1.0) for letter in "\u2581ab1.,;(_\n\r\t\u00e9\U0001f600"]
    words = [("\u2581a", -1.5), ("ab", -1.5), ("\na", -1.2)]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram([*letters, *words], unk_id=0))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    return library


@settings(max_examples=60)
@given(TEXTS, st.integers(40, 200), st.booleans())
def test_pieces_have_the_ids_of_the_whole(text: str, piece: int, spaced: bool) -> None:
    """Catches a border inside a run of blanks, a word, or where a piece would gain a blank."""
    pytest.importorskip("tokenizers")
    whole = load_file(PYTHON)
    if spaced:
        whole = replace(whole, library=metaspace())
    (wanted,) = whole.encode_batch([text])
    first, again, last = replace(whole, piece=piece).encode_batch(["a b", text, ""])
    assert again.tolist() == wanted.tolist()
    assert [ids.tolist() for ids in (first, last)] == [
        ids.tolist() for ids in whole.encode_batch(["a b", ""])
    ]


def test_a_large_text_is_cut() -> None:
    """Catches a file of which the library makes 120 times its size."""
    pytest.importorskip("tokenizers")
    whole = load_file(PYTHON)
    given_at_once: list[int] = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], **options: bool) -> list[object]:
            given_at_once.append(sum(map(len, texts)))
            return whole.library.encode_batch_fast(texts, **options)

    lines = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(4000))
    for text in (lines, lines.replace("\n", " ")):
        given_at_once.clear()
        counted = replace(whole, library=Counting(), piece=5000)
        assert counted.encode_batch([text])[0].tolist() == whole.encode_batch([text])[0].tolist()
        assert max(given_at_once) <= 5000
        assert len(given_at_once) > 20


def test_memory_that_runs_out_is_told_of_a_file(tmp_path: Path) -> None:
    """Catches a MemoryError that does not say which of ten thousand files it was."""

    class Full:
        name, fingerprint, vocabulary, end_id, mask_id = "full", "full", 9, None, None

        def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
            raise MemoryError

    (tmp_path / "a.txt").write_text("some text")
    source = Source(kind="text", paths=(str(tmp_path / "a.txt"),))
    with pytest.raises(DataError, match=r"a\.txt: got more than the memory holds"):
        open_corpus(source, Full(), cache=tmp_path / "cache")
