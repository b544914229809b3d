"""Damaged caches: found and built anew, never trained on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attacks.attack import Attack, Case, Outcome, refusal_of
from attacks.damage import damage_file, replaced
from headrace.config import Config
from headrace.costs import CostModel, synthetic_costs
from headrace.costs.calibration import Calibration
from headrace.costs.saving import save_whole, sealed
from headrace.data.corpus import Corpus
from headrace.data.opening import open_corpus
from headrace.data.source import Source
from headrace.data.tokens import make_tokenizer
from headrace.engine.agreement import read_profile
from headrace.engine.cost_cache import calibration_path, newest_costs, profile_path, remember_costs
from headrace.engine.setup import architecture_of
from headrace.errors import HeadraceError
from profiles import made_up

__all__ = ["CACHES"]

_FINGERPRINT = "a machine and a model"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A cache as it was built, in ``pristine``; ``use(folder)`` reads its copy and tells whether
    what it has read is what was kept (``right``), or nothing was (``rebuilt``)."""

    pristine: Path
    use: Callable[[Path], str]


@contextmanager
def _begin(folder: Path) -> Iterator[Case]:
    kept = [
        _text_corpus(folder),
        _flat_corpus(folder),
        _costs(folder),
        _profile(folder),
        _calibration(folder),
    ]
    yield lambda rng: _case(rng, kept, folder / "copy")


def _case(rng: np.random.Generator, kept: list[_Kept], copy: Path) -> Outcome:
    one = kept[int(rng.integers(len(kept)))]
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(one.pristine, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.suffix != ".lock")
    path = files[int(rng.integers(len(files)))]
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    word = damage_file(path, rng) if rng.random() < 0.85 else replaced(path, rng, waits=False)
    if path.is_file() and not path.is_symlink():
        os.utime(path, ns=times)  # as a disk would
    what = f"{path.name} {word}"
    try:
        verdict = one.use(copy)
    except AssertionError as error:
        return Outcome(verdict="wrong data", survived=False, words=f"{what}: {error}")
    except HeadraceError as error:
        return refusal_of(error)
    except Exception as error:
        words = f"{what}: {type(error).__name__}: {error}"
        return Outcome(verdict="traceback", survived=False, words=words)
    return Outcome(verdict=verdict, words=what)


def _ids(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens(i).tolist() for i in range(len(corpus))]


def _of_corpus(pristine: Path, source: Source, tokenizer: str) -> _Kept:
    made = make_tokenizer(tokenizer)
    right = _ids(open_corpus(source, made, cache=pristine))

    def use(folder: Path) -> str:
        corpus = open_corpus(source, made, cache=folder)
        assert _ids(corpus) == right, "other tokens"
        return "rebuilt" if any("built again" in note for note in corpus.notes) else "right"

    return _Kept(pristine=pristine, use=use)


def _text_corpus(folder: Path) -> _Kept:
    texts = folder / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"the water of mill {number} " * 7 * (number + 1))
    return _of_corpus(folder / "of texts", Source(kind="text", paths=(str(texts),)), "bytes")


def _flat_corpus(folder: Path) -> _Kept:
    ids = np.random.default_rng(0).integers(0, 90, size=4000).astype("<u2")
    (folder / "flat.bin").write_bytes(ids.tobytes())
    source = Source(kind="memmap", paths=(str(folder / "flat.bin"),))
    return _of_corpus(folder / "of ids", source, "ids:100:9")


def _config(cache: Path) -> Config:
    text = '[data]\npaths = ["."]\nbatch_tokens = 1000\n[model]\npreset = "llama-tiny"\n'
    path = cache.with_suffix(".toml")
    path.write_text(text)
    return Config.load(path, f"data.cache={cache}", "devices.memory=1GiB")


def _costs(folder: Path) -> _Kept:
    pristine = folder / "of costs"
    config = _config(pristine)
    architecture = architecture_of(config)
    costs = synthetic_costs(2, architecture.layers).replace(shape=architecture.shape)
    remember_costs(config, costs)
    right = newest_costs(config, architecture, 2)
    assert right is not None

    def use(copy: Path) -> str:
        found = newest_costs(_config(copy), architecture, 2)
        assert found is None or _same(found, right), "other costs"
        return "rebuilt" if found is None else "right"

    return _Kept(pristine=pristine, use=use)


def _same(one: CostModel, other: CostModel) -> bool:
    return json.dumps(one.to_json()) == json.dumps(other.to_json())


def _profile(folder: Path) -> _Kept:
    pristine, profile = folder / "of profiles", made_up()
    path = profile_path(_config(pristine), profile.fingerprint)
    save_whole(path, sealed(profile.to_json()), "profile")

    def use(copy: Path) -> str:
        told: list[object] = []
        path = profile_path(_config(copy), profile.fingerprint)
        found = read_profile(path, profile.fingerprint, told.append)
        assert found is None or found == profile, "another profile"
        return "rebuilt" if found is None else "right"

    return _Kept(pristine=pristine, use=use)


def _calibration(folder: Path) -> _Kept:
    pristine = folder / "of calibrations"
    calibration = Calibration(fingerprint=_FINGERPRINT)
    calibration.save(calibration_path(_config(pristine), _FINGERPRINT))
    right = json.dumps(calibration.to_json())

    def use(copy: Path) -> str:
        path = calibration_path(_config(copy), _FINGERPRINT)
        found = Calibration.load(path, fingerprint=_FINGERPRINT)
        assert json.dumps(found.to_json()) == right, "another calibration"
        return "right"

    return _Kept(pristine=pristine, use=use)


CACHES = Attack(
    name="caches",
    about="damaged caches of tokens and costs are found and built anew",
    begin=_begin,
    limit_s=30,
    few=60,
)
