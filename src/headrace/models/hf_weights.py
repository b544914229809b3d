"""Weights and folders in the naming of the Hugging Face: Llama, GPT-2 and BERT.

    folder/config.json, model.safetensors
    folder/config.json, model.safetensors.index.json, model-00001-of-00002.safetensors ...

Weights are held in full by one process; pickled files are neither read nor written.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError, did_you_mean
from headrace.models.hf_rules import EMBEDDING, HEAD, HEAD_BIASES, PREFIX, rules_of
from headrace.spec.architecture import Architecture, weight_table
from headrace.spec.hf_config import (
    CONFIG,
    architecture_of,
    config_of,
    read_architecture,
    read_object,
)

__all__ = [
    "architecture_of",
    "config_of",
    "from_hugging_face",
    "load_pretrained",
    "read_pretrained",
    "save_pretrained",
    "to_hugging_face",
]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_OURS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?")
# Buffers that old files hold beside the weights; what BERT learned for pairs of sentences.
_SKIPPED = re.compile(
    r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq|embeddings\.position_ids)"
    r"|(bert\.)?pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"
)
# How the first BERTs name the weights of their norms.
_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def to_hugging_face(
    weights: Mapping[str, torch.Tensor], architecture: Architecture
) -> dict[str, torch.Tensor]:
    """Our whole weights under the names of Hugging Face, contiguous; some share memory with
    ``weights``.

    Raises CheckpointError when ``weights`` are not those of the architecture.
    """
    shapes = {weight.name: weight.shape for weight in weight_table(architecture)}
    _check("weights", weights, shapes)
    named: dict[str, torch.Tensor] = {}
    for rule in rules_of(architecture):
        parts = rule.split(weights[rule.ours])
        named |= {n: part.contiguous() for n, part in zip(rule.theirs, parts, strict=True)}
    return named


def from_hugging_face(
    weights: Mapping[str, torch.Tensor], architecture: Architecture
) -> dict[str, torch.Tensor]:
    """Their weights under our names: the inverse of :func:`to_hugging_face`.

    Buffers of old files are skipped, so are BERT's weights for the next sentence; names without
    the model's prefix are taken. Raises CheckpointError that lists what is unknown, missing or of
    another shape.
    """
    return dict(_join_weights(weights, architecture))


def _join_weights(
    weights: Mapping[str, torch.Tensor], architecture: Architecture
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (our name, our whole weight) for each of our weights, made only when it is asked for
    from the ``weights`` of Hugging Face; raises CheckpointError where these do not fit the
    architecture."""
    shapes = {weight.name: weight.shape for weight in weight_table(architecture)}
    rules = rules_of(architecture)
    # The shapes of theirs follow from ours, on a device without memory.
    expected: dict[str, tuple[int, ...]] = {}
    for rule in rules:
        parts = rule.split(torch.empty(shapes[rule.ours], device="meta"))
        expected |= {n: tuple(part.shape) for n, part in zip(rule.theirs, parts, strict=True)}
    named = _named_weights(weights, architecture)
    _check("pretrained weights", named, expected)
    for rule in rules:
        yield rule.ours, rule.join([named[name] for name in rule.theirs]).contiguous()


def _named_weights(
    weights: Mapping[str, torch.Tensor], architecture: Architecture
) -> dict[str, torch.Tensor]:
    """The weights of a file under the names that transformers uses today. The model's prefix is
    added where all names lack it, as in files of a model without its head; weights that are not
    used and second names of tied ones are left out."""
    kind = architecture.kind
    prefix = PREFIX[kind]
    bare = not any(name.startswith(prefix) for name in weights)
    named: dict[str, torch.Tensor] = {}
    for name, weight in _with_new_names(weights).items():
        if _SKIPPED.fullmatch(name):
            continue
        in_head = name.startswith(("lm_head.", "cls."))
        named[prefix + name if bare and not in_head else name] = weight
    if architecture.tied:
        _drop_double(named, HEAD[kind], EMBEDDING[kind], "another matrix than the embedding")
        _drop_double(named, HEAD_BIASES[1], HEAD_BIASES[0], "another bias than the head's")
    elif kind == "bert" and HEAD_BIASES[0] in named:
        named.setdefault(HEAD_BIASES[1], named[HEAD_BIASES[0]])  # old files hold one of them
    return named


def _with_new_names(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with the old names of norms (gamma, beta) replaced by those of today."""
    renamed: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        old_ending = next((ending for ending in _OLD_NORMS if name.endswith(ending)), "")
        renamed[name.removesuffix(old_ending) + _OLD_NORMS.get(old_ending, "")] = weight
    return renamed


def _drop_double(named: dict[str, torch.Tensor], double: str, name: str, got: str) -> None:
    """Remove from ``named`` the second name ``double`` of the tied weight ``name``, where both are
    there. Raises CheckpointError, which says ``got``, when the two are different weights."""
    if double not in named or name not in named:
        return
    first, second = named[name], named.pop(double)
    if first.dtype != second.dtype or not torch.equal(first, second):
        raise CheckpointError(
            double,
            got=got,
            wanted="the same, as they are tied",
            hint="tie_word_embeddings of config.json is wrong",
        )


def _check(
    what: str, weights: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise CheckpointError unless ``weights`` have just the names and shapes of ``shapes``;
    ``what`` begins the message."""
    if unknown := [name for name in weights if name not in shapes]:
        hint = did_you_mean(unknown[0], shapes)
        raise CheckpointError(f"{what}: unknown {_names_text(unknown)}", hint=hint)
    if missing := [name for name in shapes if name not in weights]:
        raise CheckpointError(f"{what}: no {_names_text(missing)}")
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(f"{what}: {name}", got=tuple(weights[name].shape), wanted=shape)


def _names_text(names: list[str]) -> str:
    """The first eight names, and how many more there are."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def save_pretrained(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    architecture: Architecture,
    *,
    ids: Mapping[str, int | None] | None = None,
    max_file_bytes: int = 5 * 10**9,
) -> None:
    """Write our whole ``weights`` as a folder that ``from_pretrained`` of transformers takes.

    Weights of an earlier save into the folder are replaced. Tied weights are written once. A
    file holds at most ``max_file_bytes`` of weights, or one weight. ``ids`` are those of special
    tokens, fields of the configuration. Raises CheckpointError when
    the weights are not those of the architecture or the disk refuses, SpecError when the
    architecture has no counterpart.
    """
    config = config_of(architecture) | dict(ids or {})
    named = to_hugging_face(weights, architecture)
    config["torch_dtype"] = str(weights["embed.weight"].dtype).removeprefix("torch.")
    files = _split_files(named, max_file_bytes)
    json_files = {CONFIG: config}
    if len(files) > 1:
        file_of_weight = {name: file for file, names in files.items() for name in names}
        size = sum(weight.nbytes for weight in named.values())
        json_files[_INDEX] = {"metadata": {"total_size": size}, "weight_map": file_of_weight}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, value in json_files.items():
            text = json.dumps(value, indent=2, sort_keys=True) + "\n"
            (folder / f"{file}.part").write_text(text, encoding="utf-8")
        for file, names in files.items():
            tensors = {name: named[name].detach().cpu() for name in names}
            save_file(tensors, folder / f"{file}.part", metadata={"format": "pt"})
            # The package lets nobody else read what it writes.
            shutil.copymode(folder / f"{CONFIG}.part", folder / f"{file}.part")
        # Renamed, not overwritten: weights loaded from this folder still read the files before.
        for file in [*files, *json_files]:
            (folder / f"{file}.part").replace(folder / file)
        # What stays of an earlier save would be read in place of what was written now.
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in {*files, *json_files}:
                path.unlink()
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{folder} was not written", got=error)
    finally:
        with suppress(OSError):  # where the folder itself could not be made
            for file in [*files, *json_files]:
                (folder / f"{file}.part").unlink(missing_ok=True)


def _split_files(named: Mapping[str, torch.Tensor], max_file_bytes: int) -> dict[str, list[str]]:
    """The names of the weights in each file, in order: at most ``max_file_bytes`` of weights, or
    one weight."""
    groups: list[list[str]] = [[]]
    group_bytes = 0
    for name, weight in named.items():
        if groups[-1] and group_bytes + weight.nbytes > max_file_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += weight.nbytes
    if len(groups) == 1:
        return {_SINGLE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, 1)
    }


def load_pretrained(folder: Path) -> tuple[dict[str, torch.Tensor], Architecture]:
    """Our whole weights, on the CPU in the type of the file, and their architecture.

    Raises CheckpointError for files that are missing, damaged or of other weights, SpecError for
    a model that is not ours (see :func:`architecture_of`).
    """
    folder = Path(folder)
    architecture = read_architecture(folder)
    return dict(read_pretrained(folder, architecture)), architecture


def read_pretrained(folder: Path, architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """The name and the whole tensor of each of our weights, one after the other: no more than one
    of them is made at a time. Raises CheckpointError as :func:`load_pretrained` does."""
    if (folder / _SINGLE).exists() or not (folder / _INDEX).exists():
        files = [_SINGLE]
    else:
        files = _files_of_index(folder)
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= _read_weights(folder / file)
    try:
        yield from _join_weights(weights, architecture)
    except CheckpointError as error:
        what, hint = f"{folder}: {error.what}", error.hint
        raise CheckpointError(what, got=error.got, wanted=error.wanted, hint=hint)


def _files_of_index(folder: Path) -> list[str]:
    """The names of the files that an index of weights lists; raises CheckpointError for a name
    outside of the folder."""
    file_of_weight = read_object(folder / _INDEX).get("weight_map")
    names = list(file_of_weight.values()) if isinstance(file_of_weight, dict) else [None]
    for name in names:
        # Only files of the folder itself are opened, whatever the index says.
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise CheckpointError(
                f"weight_map of {folder / _INDEX}", got=repr(name), wanted="names of files"
            )
    return sorted(set(names))


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; raises CheckpointError for a missing or damaged one."""
    try:
        return load_file(path)
    except FileNotFoundError:
        pickled = any(path.parent.glob("*.bin"))
        hint = "pickled files are not read: save the model as safetensors" if pickled else None
        raise CheckpointError(f"{path}: missing", hint=hint)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), got=error, wanted="weights", hint="the file is damaged")
