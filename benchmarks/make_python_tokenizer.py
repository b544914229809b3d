"""Train the tokenizer in examples/tokenizers/python-4096.json.

A byte-level BPE of 4096 entries on the .py files of the running interpreter's standard library,
in sorted order, so that the same Python makes the same file. Usage:

    python benchmarks/make_python_tokenizer.py [FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.data.documents import Skips
from headrace.data.files import find_files
from headrace.data.readers import Reading, read_documents
from headrace.data.source import Source

ENTRIES = 4096
END = "<|end|>"
TARGET = Path(__file__).parents[1] / "examples" / "tokenizers" / f"python-{ENTRIES}.json"


def texts() -> Iterator[str]:
    source = Source(kind="text", paths=("python:stdlib",))
    reading = Reading(source, Skips(), Path())
    for document in read_documents(find_files(source).files, reading):
        yield str(document.content)


def main(target: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    content = json.loads(tokenizer.to_str())
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    target.write_text(text + "\n", encoding="ascii")
    entries = tokenizer.get_vocab_size()
    print(f"{target}: {entries} entries, {target.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET)
