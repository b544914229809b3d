"""The reference of the configuration: every key, its type, default and meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from headrace.cli.app import Output
from headrace.config import Config
from headrace.config.clips_config import ClipsConfig

__all__ = ["config_markdown", "keys", "print_config"]

_CLIPS_SECTIONS = ("data", "model")
"""Sections that runs over clips have of their own."""


def keys(kind: type[BaseModel] = Config) -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key, in order."""
    definitions = kind.model_json_schema()["$defs"]
    for section, field in kind.model_fields.items():
        name = getattr(field.annotation, "__name__", "")
        yield from _keys_of(section, name, definitions)


def _keys_of(
    section: str, name: str, definitions: dict[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
    """The rows of :func:`keys` for one section and the tables within it: ``definitions[name]`` is
    the section's JSON schema, ``definitions`` has those of the tables too."""
    required = definitions[name].get("required", [])
    for key, schema in definitions[name]["properties"].items():
        default = "required" if key in required else json.dumps(schema.get("default"))
        yield f"{section}.{key}", _type(schema), default, schema.get("description", "")
        for part in schema.get("anyOf", ()):
            if "$ref" in part:
                inner = part["$ref"].rpartition("/")[2]
                yield from _keys_of(f"{section}.{key}", inner, definitions)


def config_markdown() -> str:
    """The reference as Markdown, a table for each section; those of clips last."""
    return "\n".join([*_tables(Config, ""), *_tables(ClipsConfig, ", of clips")]).lstrip() + "\n"


def _tables(config_type: type[BaseModel], heading_end: str) -> Iterator[str]:
    """Lines of Markdown: a table of keys for each section of a configuration. ``heading_end``
    follows the section's name in its heading; where it is not empty, only the sections that runs
    over clips have of their own are included."""
    last_section = ""
    for key, kind, default, meaning in keys(config_type):
        section, _, name = key.partition(".")
        if heading_end and section not in _CLIPS_SECTIONS:
            continue
        if section != last_section:
            about = (config_type.model_fields[section].annotation.__doc__ or "").strip()
            yield from ("", f"## `[{section}]`{heading_end}", "", about, "")
            yield from ("| key | type | default | meaning |", "|---|---|---|---|")
            last_section = section
        text = " ".join(meaning.split()).replace("|", "\\|").replace("``", "`")
        yield f"| `{name}` | {kind} | `{default}` | {text} |"


def print_config(*, schema: bool) -> int:
    """Print the reference, or the JSON schema for ``schema``; returns the exit code."""
    if schema:
        print(json.dumps(Config.model_json_schema(), indent=1))
        return 0
    out = Output(highlight=False)
    of_clips = [
        (key, f"of clips; {kind}", default, meaning)
        for key, kind, default, meaning in keys(ClipsConfig)
        if key.partition(".")[0] in _CLIPS_SECTIONS
    ]
    for key, kind, default, meaning in [*keys(), *of_clips]:
        text = f"{key} ({kind}, {default})\n    {' '.join(meaning.split())}"
        out.print(text, markup=False, soft_wrap=True)
    return 0


def _type(schema: dict[str, Any]) -> str:
    """The type of a key in words, from its JSON schema."""
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    if "$ref" in schema:
        return "table"
    if schema.get("type") == "array":
        items = schema.get("items", {})
        return f"list of {_type(items)}"
    return str(schema.get("type", "value"))
