"""Reading ahead."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from headrace.data.corpus import StoredCorpus, corpus_of
from headrace.data.reader import Reader
from headrace.data.sampler import Sampler, SamplerOptions
from headrace.errors import DataError

DOCUMENTS = [[(7 * i + j) % 50 for j in range(2 + i)] for i in range(30)]
OPTIONS = SamplerOptions(batch_tokens=40, context=12, too_long="split", seed=2)


def readers() -> int:
    return sum(thread.name == "read ahead" for thread in threading.enumerate())


def parts(vocabulary: int = 50) -> tuple[StoredCorpus, Sampler]:
    corpus = corpus_of(DOCUMENTS, vocabulary=50)
    if vocabulary != 50:
        corpus = StoredCorpus(
            name=corpus.name,
            fingerprint=corpus.fingerprint,
            vocabulary=vocabulary,
            arrays=corpus.arrays,
            table=corpus.table,
            lengths=corpus.lengths,
        )
    return corpus, Sampler(corpus, OPTIONS)


def test_batches_with_their_tokens() -> None:
    """Catches tokens of another sample, batches out of order, a sampler that is moved."""
    corpus, sampler = parts()
    expected = sampler.peek(40)
    with Reader(corpus, sampler, ahead=3) as reader:
        for wanted, batch in zip(expected, reader, strict=False):
            assert batch == wanted
            assert reader.state == batch.state_after
            assert [len(tokens) for tokens in batch.tokens] == list(batch.lengths.tokens)
            for sample, tokens in zip(batch.samples, batch.tokens, strict=True):
                assert tokens.dtype == np.int32
                end = sample.start + sample.length
                assert tokens.tolist() == DOCUMENTS[sample.document][sample.start : end]
    assert sampler.state()["step"] == 0


def test_continues_from_its_state() -> None:
    """Catches a state that counts batches read ahead as trained."""
    corpus, sampler = parts()
    with Reader(corpus, sampler, ahead=8) as reader:
        for _ in range(5):
            next(reader)
        state = reader.state
        following = next(reader)
    fresh = Sampler(corpus, OPTIONS)
    fresh.restore(state)
    with Reader(corpus, fresh) as reader:
        assert next(reader) == following


def test_reads_no_further_than_asked() -> None:
    """Catches a reader that fills the memory."""
    corpus, sampler = parts()
    drawn: list[int] = []

    class Slow(Sampler):
        def next_batch(self):  # type: ignore[no-untyped-def]
            drawn.append(1)
            return super().next_batch()

    with Reader(corpus, Slow(corpus, OPTIONS), ahead=2) as reader:
        time.sleep(0.3)
        assert len(drawn) <= 3
        next(reader)
        assert reader.waited_s >= 0
    assert sampler.state()["step"] == 0


def test_errors_surface_and_stay() -> None:
    """Catches a trainer that waits for ever for a thread that died."""
    corpus, sampler = parts(vocabulary=20)
    with Reader(corpus, sampler) as reader:
        for _ in range(2):
            with pytest.raises(DataError, match="token id"):
                list(reader)
    assert readers() == 0


def test_closing() -> None:
    """Catches a thread left behind, a second close that fails, a next that hangs after it."""
    corpus, sampler = parts()
    reader = Reader(corpus, sampler, ahead=1)
    next(reader)
    reader.close()
    reader.close()
    assert readers() == 0
    with pytest.raises(StopIteration):
        next(reader)
