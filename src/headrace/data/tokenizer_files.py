"""The tokenizer of an exported model: files that ``AutoTokenizer`` of transformers reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from headrace.data.hf_tokens import HfTokenizer, load_cached
from headrace.data.tokens import WANTED, Bytes, Tokenizer, make_tokenizer
from headrace.errors import DataError

__all__ = ["save_tokenizer"]

_FILE, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_BESIDE = (
    _CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
)
_END = "<|end|>"


def save_tokenizer(spec: str, folder: Path) -> dict[str, int | None]:
    """Write the files of the tokenizer that ``spec`` names into ``folder``; returns the ids that a
    model's configuration has of it, ``bos_token_id`` and ``eos_token_id``.

    ``kmer:K`` and ``ids:V`` have no files, as transformers knows no such tokenizer. Raises
    DataError when the tokenizer is no longer where it was or cannot be written.
    """
    tokenizer = make_tokenizer(spec)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.end_id}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = _write(tokenizer, spec, folder)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenizer in {folder} was not written", got=error)
    if isinstance(tokenizer, HfTokenizer):
        ids["bos_token_id"] = tokenizer.library.token_to_id(_text(config.get("bos_token")))
    return ids


def _write(tokenizer: Tokenizer, spec: str, folder: Path) -> dict[str, Any]:
    """Write the files of a tokenizer into ``folder``. Returns the content of tokenizer_config.json,
    an empty dict for a tokenizer that has no files."""
    if isinstance(tokenizer, Bytes):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END}
        (folder / _FILE).write_text(json.dumps(_bytes(tokenizer)), encoding="utf-8")
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return config
    if not isinstance(tokenizer, HfTokenizer):
        return {}
    path = Path(spec).expanduser()
    path = path / _FILE if path.is_dir() else path
    if path.is_file():
        _copy(path, folder, tokenizer)
    else:
        load_cached(spec, wanted=WANTED)
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(spec, local_files_only=True).save_pretrained(folder)
    written: dict[str, Any] = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    return written


def _copy(path: Path, folder: Path, tokenizer: HfTokenizer) -> None:
    """Copy a tokenizer's file and those beside it into a folder, with a configuration for
    transformers where it has none."""
    shutil.copyfile(path, folder / _FILE)
    for name in _BESIDE:
        if path.with_name(name).is_file():
            shutil.copyfile(path.with_name(name), folder / name)
    if not (folder / _CONFIG).exists():
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if tokenizer.end_id is not None:
            config["eos_token"] = tokenizer.library.id_to_token(tokenizer.end_id)
        (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _text(token: Any) -> str:
    """The text of a special token of tokenizer_config.json, which is a text or an object with its
    ``content``; empty for anything else."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _bytes(tokenizer: Bytes) -> dict[str, Any]:
    """The tokenizer.json of :class:`Bytes`: byte-level BPE of the library ``tokenizers`` without a
    merge, so that every byte is a token. The library writes bytes as letters, like GPT-2: a
    printable byte as itself, any other as one of the letters from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "added_tokens": [
            {
                "id": tokenizer.end_id,
                "content": _END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "pre_tokenizer": level | {"use_regex": False},
        "post_processor": None,
        "decoder": level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "merges": [],
            "vocab": {letters[byte]: byte for byte in range(256)},
        },
    }
