"""``headrace export``: a run's weights in the Hugging Face naming."""

from __future__ import annotations

from pathlib import Path

from headrace.errors import CheckpointError
from headrace.models.hf_weights import save_pretrained
from headrace.runtime import checkpoint
from headrace.spec.architecture import Architecture
from headrace.spec.weights import weight_table

__all__ = ["export"]


def export(run: Path, *, out: Path) -> int:
    """Write model.safetensors and config.json of the run's last checkpoint; print the folder."""
    path = run if (run / "index.json").exists() else checkpoint.latest(run / "checkpoints")
    if path is None:
        raise CheckpointError(
            f"checkpoints of {run}", got="none", wanted="a run that has saved one"
        )
    architecture = Architecture.from_json(checkpoint.load(path, [])["architecture"])
    names = {weight.name for weight in weight_table(architecture)}
    weights = {name: w for name, w in checkpoint.read_all(path).items() if name in names}
    save_pretrained(out, weights, architecture)
    print(out)
    return 0
