"""The checkpoints of a run: which there are, whether they are whole, their weights for others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.data.tokenizer_files import save_tokenizer
from headrace.errors import CheckpointError
from headrace.models.hf_weights import save_pretrained
from headrace.runtime import checkpoint
from headrace.spec.architecture import Architecture
from headrace.spec.weights import weight_table
from headrace.training.saved_state import SavedState

__all__ = ["Checkpoint", "Checkpoints"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Weights, optimizer and state of a run after some step, in a folder."""

    path: Path

    @property
    def state(self) -> dict[str, Any]:
        """What it holds besides tensors: step, order of the data, planner, architecture, config."""
        return checkpoint.load(self.path, [])

    @property
    def step(self) -> int:
        """Steps that were done."""
        return SavedState.read(self.path).step

    def verify(self) -> int:
        """Read every file, compare checksums, and look for all weights of the model; returns the
        number of tensors. Raises CheckpointError for the first that is missing or damaged."""
        checkpoint.verify(self.path)
        self._weights()
        return len(checkpoint.names(self.path))

    def _weights(self) -> tuple[Architecture, list[str]]:
        """The model and the names of its weights, which are all there."""
        architecture, held = SavedState.read(self.path).architecture, checkpoint.names(self.path)
        for weight in weight_table(architecture):
            found = held.get(weight.name, (None, None))[0]
            if found != tuple(weight.shape):
                what = f"{self.path}: {weight.name}"
                raise CheckpointError(what, got=found or "nothing", wanted=tuple(weight.shape))
        return architecture, [weight.name for weight in weight_table(architecture)]

    def export(self, out: str | Path) -> Path:
        """Write ``model.safetensors``, ``config.json`` and the files of the tokenizer, as the
        Hugging Face has them, into the folder ``out``; returns it.

        The longest context that a Llama was trained for is the larger of the run's and of what it
        began with. Raises CheckpointError and DataError when weights or tokenizer cannot be read
        or written.
        """
        architecture, names = self._weights()
        data, out = SavedState.read(self.path).config["data"], Path(out)
        if not architecture.learned_positions:
            longest = max(architecture.positions, data["context"])
            architecture = replace(architecture, positions=longest)
        held = checkpoint.read_all(self.path)
        weights = {name: held[name] for name in names}
        save_pretrained(out, weights, architecture, ids=save_tokenizer(data["tokenizer"], out))
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """The checkpoints in a folder, or of a run's folder."""

    folder: Path

    def latest(self) -> Checkpoint:
        """The newest that is whole; the folder itself where it is a checkpoint. Raises
        CheckpointError when there is none."""
        folder = self.folder
        if (folder / "index.json").exists():
            return Checkpoint(path=folder)
        inside = folder / "checkpoints"
        path = checkpoint.latest(inside if inside.is_dir() else folder)
        if path is None:
            raise CheckpointError(
                f"checkpoints in {folder}", got="none", wanted="at least one, saved by a run"
            )
        return Checkpoint(path=path)
