"""Reading ahead: the tokens of the next batches are fetched while the current one trains."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Self

from headrace.data.corpus import Corpus
from headrace.data.sampler import Batch, BatchSampler

__all__ = ["Reader"]

POLL_S = 0.1


class Reader:
    """Hands out the sampler's batches in order, with their tokens, from a thread.

    The thread works on a copy of ``sampler``, which itself stays where it is, and is at most
    ``ahead`` batches in front. Make a reader after a process has forked: threads do not survive
    that. What goes wrong in the thread is raised by ``next``, and again by each later call; after
    :meth:`close` the iteration ends. Use as a context manager, or call ``close``.
    """

    def __init__(self, corpus: Corpus, sampler: BatchSampler, *, ahead: int = 2) -> None:
        """Start a thread that reads up to ``ahead`` batches before they are asked for, from the
        sampler's position on."""
        self._corpus, self._sampler = corpus, sampler.copy()
        self._ready: queue.Queue[Batch | Exception] = queue.Queue(maxsize=max(1, ahead))
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._state = sampler.state()
        self.waited_s = 0.0
        """Seconds that ``next`` has waited for the disk so far."""
        self._thread = threading.Thread(target=self._work, name="read ahead", daemon=True)
        self._thread.start()

    @property
    def state(self) -> dict[str, Any]:
        """The sampler's state after the last batch that was handed out."""
        return self._state

    def _read(self, batch: Batch) -> Batch:
        """The batch with the ids of each sample, and with its masks of tokens to learn where the
        corpus has some."""
        tokens = tuple(
            self._corpus.tokens(sample.document, sample.start, sample.start + sample.length)
            for sample in batch.samples
        )
        if not self._corpus.masked:
            return replace(batch, tokens=tokens)
        masks = tuple(
            self._corpus.learned(sample.document, sample.start, sample.start + sample.length)
            for sample in batch.samples
        )
        return replace(batch, tokens=tokens, masks=masks)

    def _work(self) -> None:
        """The thread: reads one batch after the other into the queue until it is stopped; an error
        goes into the queue and ends it."""
        item: Batch | Exception
        while not self._stop.is_set():
            try:
                item = self._read(self._sampler.next_batch())
            except Exception as error:  # whatever it is, the trainer must hear of it
                item = error
            # A full queue is tried again and again, so that ``close`` ends the thread.
            while not self._stop.is_set():
                try:
                    self._ready.put(item, timeout=POLL_S)
                    break
                except queue.Full:
                    continue
            if isinstance(item, Exception):
                return

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; raises what reading it raised, and keeps raising it."""
        if self._failure is not None:
            raise self._failure
        if self._stop.is_set():
            raise StopIteration
        began = time.perf_counter()
        item = self._ready.get()
        self.waited_s += time.perf_counter() - began
        if isinstance(item, Exception):
            self._failure = item
            raise item
        self._state = item.state_after
        return item

    def close(self) -> None:
        """Stop reading and wait for the thread; may be called twice."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
