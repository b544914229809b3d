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
    """Modules in which places of an axis see each other, as in attention over time.

    Axes are written as names, and the dims of a tensor as the names of their axes: ``(b s) t c`` is
    a tensor of three dims, the first of which has axes b and s flattened.

    Attributes:
        modules: Their names, ``*`` for a part of any name: ``blocks.*.temporal``.
        mixes: The axes whose places see each other in them: ``t``, or several, ``t s``.
        dims: The dims of their first argument and first result: ``(b s) t c``.
        sides: The dims of other arguments that have places of axes, by the argument's position or
            name: one that has the places of all ranks is cut to those of this rank.
        counts: For arguments that are whole numbers of places, by position or name, the axis whose
            places they count: ``{"num_frames": "t"}``; the stage is given this rank's number.
        attends: The sequences over which its attention runs, concatenated, in their order, where
            there are others beside the places of the axes: ``n (t s)`` for a text and the places
            behind it. Their names are sharded over the same ranks, wherever inputs have them.
        returns: Whether the axis that was sharded before the stage is sharded again after it, for
            models whose code between stages needs that; else the stage's own axis stays sharded
            until another stage mixes it.

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
        """Raise SpecError for mixed axes that are not in the dims, for dims of ``sides`` that
        cannot be parsed, and for ``attends`` that is not made of one sequence of all mixed axes, in
        the order of the dims, and others of one name each."""
        layout = self.layout
        for name in self.mixed:
            if name not in layout:
                raise SpecError(
                    f"stage {self.modules}", got=f"mixes {name}", wanted=f"an axis of {self.dims}"
                )
        for text in self.sides.values():
            Dims.parse(text)  # raises
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
        """The sequences over which its attention runs, concatenated in this order, as dims: for
        each sequence the names that it flattens; without ``attends`` only the mixed axes."""
        return Dims.parse(self.attends) if self.attends else Dims((self.places,))

    @property
    def beside(self) -> tuple[str, ...]:
        """The names of the sequences, such as a text, over which its attention runs besides the
        places of the mixed axes."""
        return tuple(name for name in self.sequences.flat if name not in self.places)


def modules_of(
    model: torch.nn.Module, stages: tuple[AxisStage, ...]
) -> dict[torch.nn.Module, AxisStage]:
    """Map each module of the model whose name matches ``stage.modules`` to that stage. Raises
    ModelError for a stage that matches no module, and for a module of two stages."""
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
