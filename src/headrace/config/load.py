"""Reading configurations: every mistake is named with its key, all at once, with a suggestion."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from headrace.errors import ConfigError, did_you_mean, shortened

__all__ = ["apply_overrides", "read_config", "read_toml"]

Model = TypeVar("Model", bound=BaseModel)


def read_config(model: type[Model], path: Path, overrides: Sequence[str] = ()) -> Model:
    """Read the TOML file ``path``, with ``a.b=c`` changes applied, as the pydantic class ``model``.

    Relative ``data.paths``, ``data.tokenizer`` and ``model.from`` are taken from the file's folder.
    Raises ConfigError that lists every wrong key or value.
    """
    value = read_toml(path, overrides)
    _resolve_paths(value, path.resolve().parent)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = _problems(model, [dict(e) for e in error.errors(include_url=False)])
        raise ConfigError(f"config {path}:" + "".join(f"\n  {line}" for line in problems))


def read_toml(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file with ``a.b=c`` changes applied. Raises ConfigError for a file that
    cannot be read or is no TOML."""
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config {path}", got=error.strerror or "an error", wanted="a TOML file")
    except (ValueError, RecursionError) as error:  # bad TOML or UTF-8, long numbers, deep nesting
        raise ConfigError(f"config {path}", got=f"no TOML ({error})")
    apply_overrides(value, overrides)
    return value


def apply_overrides(value: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply ``a.b=c`` changes to the tables ``value``, in place. ``c`` is read as TOML, or as a
    plain string where it is no TOML; ``a.b=`` removes the key, so that its default holds. Raises
    ConfigError for a malformed change."""
    for override in overrides:
        key, equals, text = override.partition("=")
        what = f"--set {shortened(override)}"
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise ConfigError(what, wanted="SECTION.KEY=VALUE")
        section = value
        for part in parts[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(what, got=f"{part} is no section")
        if text.strip():
            section[parts[-1]] = _read_value(text.strip(), what)
        else:
            section.pop(parts[-1], None)


def _read_value(text: str, what: str) -> Any:
    """The value of ``text``, such as ``[1, 2]``, as TOML reads it; the text itself where it is no
    TOML. ``what`` names it in errors."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:  # a number too long, nesting too deep
        raise ConfigError(what, got=error, wanted="a value")


def _resolve_paths(value: dict[str, Any], folder: Path) -> None:
    """Change relative paths of data, tokenizer and model in the tables ``value``, in place, to
    paths in ``folder``, that of the configuration's file. A tokenizer is changed only where such a
    file exists, as it may be a name instead."""
    data = value.get("data")
    if not isinstance(data, dict):
        return
    model = value.get("model")
    if isinstance(model, dict) and isinstance(model.get("from"), str):
        model["from"] = _resolve(model["from"], folder)
    paths = data.get("paths")
    if isinstance(paths, list):
        data["paths"] = [_resolve(p, folder) if isinstance(p, str) else p for p in paths]
    tokenizer = data.get("tokenizer")
    if isinstance(tokenizer, str) and os.path.exists(folder / tokenizer):
        data["tokenizer"] = str(folder / tokenizer)


def _resolve(path: str, folder: Path) -> str:
    """``path`` as a path in ``folder`` where it is relative. Names of Python's and of packages'
    sources, and paths in the home folder of an unknown user, stay as they are."""
    if path.startswith(("python:", "package:")):
        return path
    expanded = os.path.expanduser(path)
    return path if expanded.startswith("~") else str(folder / expanded)  # absolute ones stay


def _problems(model: type[BaseModel], errors: list[dict[str, Any]]) -> list[str]:
    """One line for each of pydantic's errors. An error that a list is too short is left out where
    one of its items is wrong: only that item made it so."""
    parents = {tuple(e["loc"][:-1]) for e in errors if len(e["loc"]) > 1}
    shown = [e for e in errors if e["type"] != "too_short" or tuple(e["loc"]) not in parents]
    return [_problem(model, e) for e in shown]


def _problem(model: type[BaseModel], error: dict[str, Any]) -> str:
    """One of pydantic's errors as a line of text that names the key, and for an unknown key a
    similar known one."""
    # The path of keys; pydantic adds names of validator functions to it.
    at = ".".join(str(part) for part in error["loc"] if not str(part).startswith("function-"))
    if error["type"] == "extra_forbidden":
        hint = did_you_mean(str(error["loc"][-1]), _keys(model, error["loc"][:-1]))
        return f"{at}: unknown key" + (f"; {hint}" if hint else "")
    if error["type"] == "missing":
        return f"{at}: missing"
    text = shortened(str(error["msg"]).removeprefix("Value error, "), 300)
    shown = "" if isinstance(error["input"], dict) else f" (got {shortened(repr(error['input']))})"
    said = f"{text[:1].lower()}{text[1:]}{shown}"
    return f"{at}: {said}" if at else said


def _keys(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    """The keys of the section at ``loc``, the path of keys from the root; empty where there is no
    section."""
    for part in loc:
        field = model.model_fields.get(str(part))
        annotation = field.annotation if field else None
        sections = [
            kind
            for kind in get_args(annotation) or (annotation,)  # the section in ``Section | None``
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not sections:
            return []
        model = sections[0]
    return [field.alias or name for name, field in model.model_fields.items()]
