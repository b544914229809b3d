"""The reference of the configuration: every key, its type, default and meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from headrace.config import Config

__all__ = ["config_markdown", "keys", "print_config"]


def keys() -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key, in order."""
    definitions = Config.model_json_schema()["$defs"]
    for section, field in Config.model_fields.items():
        name = getattr(field.annotation, "__name__", "")
        properties = definitions[name]["properties"]
        required = definitions[name].get("required", [])
        for key, schema in properties.items():
            default = "required" if key in required else json.dumps(schema.get("default"))
            yield f"{section}.{key}", _type(schema), default, schema.get("description", "")


def config_markdown() -> str:
    """The reference as Markdown, a table for each section."""
    lines: list[str] = []
    last = ""
    for key, kind, default, meaning in keys():
        section, _, name = key.partition(".")
        if section != last:
            about = (Config.model_fields[section].annotation.__doc__ or "").strip()
            lines += ["", f"## `[{section}]`", "", about, "", "| key | type | default | meaning |"]
            lines.append("|---|---|---|---|")
            last = section
        text = " ".join(meaning.split()).replace("|", "\\|").replace("``", "`")
        lines.append(f"| `{name}` | {kind} | `{default}` | {text} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def print_config(*, schema: bool) -> int:
    """Print the reference, or the JSON schema."""
    if schema:
        print(json.dumps(Config.model_json_schema(), indent=1))
        return 0
    out = Console(highlight=False)
    for key, kind, default, meaning in keys():
        text = f"{key} ({kind}, {default})\n    {' '.join(meaning.split())}"
        out.print(text, markup=False, soft_wrap=True)
    return 0


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    if schema.get("type") == "array":
        items = schema.get("items", {})
        return f"list of {_type(items)}"
    return str(schema.get("type", "value"))
