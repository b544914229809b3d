"""Where a corpus comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from headrace.errors import ConfigError, did_you_mean

__all__ = ["PATTERNS", "Kind", "Source"]

Kind = Literal["text", "jsonl", "parquet", "memmap", "fasta"]

PATTERNS: dict[str, tuple[str, ...]] = {
    "text": ("*",),
    "jsonl": ("*.jsonl", "*.jsonl.gz", "*.ndjson", "*.ndjson.gz"),
    "parquet": ("*.parquet",),
    "memmap": ("*.bin",),
    "fasta": ("*.fa", "*.fasta", "*.fna"),
}
"""The files of a folder that a kind takes when the source does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where documents come from.

    ``paths`` are files, folders and globs (``data/**/*.txt``), or ``python:stdlib``, the .py files
    of the running interpreter's standard library, or ``package:NAME``, those of an installed
    package, which is not imported. ``patterns`` choose among the files of a folder, by name (with
    a slash: by the path inside it); left out, a kind has its own. Hidden folders are passed over.

    The kind ``text`` has a document per file (UTF-8, or .gz of it), ``jsonl`` one per line and
    ``parquet`` one per row: ``field`` names the text or the list of ids (left out: ``text``, else
    ``input_ids``), and fields that are not read are noted unless ``ignore`` names them. ``fasta``
    has one per record. ``memmap`` is ready tokens: Megatron's .bin with its .idx, or a flat .bin of
    ``dtype`` whose documents end in ``end_id`` (left out: the tokenizer's). Raises ConfigError when
    malformed.
    """

    kind: Kind
    paths: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    field: str | None = None
    end_id: int | None = None
    dtype: Literal["uint16", "uint32"] = "uint16"
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown kind or type of ids, and for no paths."""
        kinds = get_args(Kind)
        if self.kind not in kinds:
            hint = did_you_mean(str(self.kind), kinds)
            wanted = f"one of {', '.join(kinds)}"
            raise ConfigError("data.kind", got=repr(self.kind), wanted=wanted, hint=hint)
        if not self.paths or isinstance(self.paths, str) or not all(self.paths):
            raise ConfigError("data.paths", got=repr(self.paths), wanted="at least one path")
        if self.dtype not in ("uint16", "uint32"):
            raise ConfigError("data.dtype", got=repr(self.dtype), wanted="'uint16' or 'uint32'")

    @property
    def name(self) -> str:
        """The paths as one text for people."""
        return " + ".join(self.paths)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "kind": self.kind,
            "paths": list(self.paths),
            "patterns": list(self.patterns),
            "field": self.field,
            "end_id": self.end_id,
            "dtype": self.dtype,
            **({"ignore": list(self.ignore)} if self.kind in ("jsonl", "parquet") else {}),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Source:
        """Read the source that :meth:`to_json` gave."""
        lists = ("paths", "patterns", "ignore")
        rest = {name: item for name, item in value.items() if name not in lists}
        given: dict[str, Any] = {name: tuple(value.get(name, ())) for name in lists}
        return cls(**rest, **given)
