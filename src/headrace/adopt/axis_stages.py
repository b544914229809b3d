"""Stages of a model, as a user declares them: modules, the axes they mix, and their dims."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from headrace.adopt.axis_shards import Dims
from headrace.errors import ModelError, SpecError

__all__ = ["AxisStage", "modules_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisStage:
    """Modules in which places of an axis see each other.

    Attributes:
        modules: Their names, ``*`` for a part of any name: ``blocks.*.temporal``.
        mixes: The axes whose places see each other in them: ``t``, or several, ``t s``.
        dims: The dims of their first argument and first result: ``(b s) t c``.
        sides: The dims of other arguments that have places of axes, by number or name: what is
            whole there is cut to this rank's places.
        counts: The axes whose places whole numbers among the arguments count, by number or name:
            ``{"num_frames": "t"}``; they are given the places that this rank has in the stage.
        attends: The sequences that its attention sees one after the other, in their order, where
            there are others beside the places of the axes: ``n (t s)`` for a text and the places
            behind it. Their names are sharded over the same ranks, wherever inputs have them.
        returns: Whether the axis that was in shards before is so again afterwards, for models whose
            code between stages asks for it; else it stays as it is until a stage mixes it.

    Raises:
        SpecError: For malformed dims, for a mixed axis that the dims lack, and for ``attends``
            without the mixed axes in the order of the dims.
    """

    modules: str
    mixes: str
    dims: str
    sides: Mapping[int | str, str] = field(default_factory=dict)
    counts: Mapping[int | str, str] = field(default_factory=dict)
    attends: str = ""
    returns: bool = True

    def __post_init__(self) -> None:
        """Refuse mixed axes that are not in the dims, dims of side arguments that cannot be parsed,
        and sequences of ``attends`` other than the mixed axes in order and single names."""
        layout = self.layout
        for name in self.mixed:
            if name not in layout:
                raise SpecError(
                    f"stage {self.modules}", got=f"mixes {name}", wanted=f"an axis of {self.dims}"
                )
        for text in self.sides.values():
            Dims.parse(text)
        sequences = self.sequences.names
        others = [names for names in sequences if names != self.places]
        if self.places not in sequences or any(len(names) > 1 for names in others):
            raise SpecError(
                f"attention of stage {self.modules}",
                got=f"sequences {self.attends}",
                wanted=f"{Dims((self.places,))}, and a name for each of the others",
            )

    @property
    def mixed(self) -> tuple[str, ...]:
        """The axes that the stage mixes."""
        return tuple(self.mixes.split())

    @property
    def layout(self) -> Dims:
        """The dims of its modules' first argument, parsed."""
        return Dims.parse(self.dims)

    @property
    def places(self) -> tuple[str, ...]:
        """The axes that the stage mixes, in the order of the dims of its first argument."""
        return tuple(name for name in self.layout.flat if name in self.mixed)

    @property
    def sequences(self) -> Dims:
        """The sequences that its attention sees one after the other, as dims: for each sequence
        the names that it flattens."""
        return Dims.parse(self.attends) if self.attends else Dims((self.places,))

    @property
    def beside(self) -> tuple[str, ...]:
        """The names of other sequences that its attention sees, such as a text, beside the places
        of the mixed axes."""
        return tuple(name for name in self.sequences.flat if name not in self.places)


def modules_of(
    model: torch.nn.Module, stages: tuple[AxisStage, ...]
) -> dict[torch.nn.Module, AxisStage]:
    """Map each module of the model that a stage names to that stage. Raises ModelError for names
    that no module has, and for modules of two stages."""
    found: dict[torch.nn.Module, AxisStage] = {}
    for stage in stages:
        # ``*`` stands for one part of a name, between two dots.
        pattern = re.compile(re.escape(stage.modules).replace(r"\*", r"[^.]+"))
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not modules:
            raise ModelError(
                f"stage {stage.modules}",
                got="no module of that name",
                wanted=f"some of {', '.join(name for name, _ in model.named_children())}",
            )
        for module in modules:
            if module in found:
                raise ModelError(f"module {type(module).__name__}", got="two stages", wanted="one")
            found[module] = stage
    return found
