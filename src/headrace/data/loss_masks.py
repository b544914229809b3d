"""Tokens without a loss: the prompts of fine-tuning, which a model reads and does not learn.

A mask is a bool for each token of a document, False where nobody predicts it. A corpus in which
every token is learned has none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from headrace.data.token_reading import BlockSums

__all__ = ["IGNORED", "MaskFile"]

IGNORED = -100
"""The label of a token without a loss."""

_FILL = 1 << 20  # ones that are written at once


@dataclass(slots=True)
class MaskFile:
    """Writes a byte for each token of a corpus: 1 where it has a loss. There is no file until a
    document has a mask."""

    path: Path
    blocks: BlockSums = field(default_factory=BlockSums)
    left_out: int = 0
    _tokens: int = 0
    _stream: IO[bytes] | None = None

    def add(self, tokens: int, mask: NDArray[np.bool_] | None) -> None:
        """Append the mask of a document of so many tokens, None when all have a loss. With the
        first mask the file is made, and the documents before it are written as ones."""
        if mask is not None and self._stream is None:
            self._stream = open(self.path, "wb")  # noqa: SIM115 (closed by ``close``)
            for start in range(0, self._tokens, _FILL):
                self._write(np.ones(min(_FILL, self._tokens - start), np.uint8))
        self._tokens += tokens
        if self._stream is not None:
            self._write(np.ones(tokens, np.uint8) if mask is None else mask.astype(np.uint8))

    def _write(self, part: NDArray[np.uint8]) -> None:
        """Append a piece of the mask, one byte for each token, and count the tokens without a
        loss."""
        assert self._stream is not None, "open"
        self.left_out += int(len(part) - part.sum())
        self.blocks.update(part.data)
        self._stream.write(part.data)

    def close(self) -> NDArray[np.uint32] | None:
        """Write the file down to the disk and close it. Returns the checksums of its blocks, None
        where no document had a mask."""
        if self._stream is None:
            return None
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._stream = None
        return self.blocks.array()

    @property
    def note(self) -> tuple[str, ...]:
        """What a person should be told of the tokens that are left out."""
        if not self.left_out:
            return ()
        return (f"{self.left_out:,} of {self._tokens:,} tokens have no loss: the rows' masks",)
