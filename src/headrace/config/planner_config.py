"""The planner's keys of a configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from headrace.config.section import Positive, Section, number
from headrace.spec.strategy import Strategy

__all__ = ["PlannerConfig"]


def _strategy(value: Any) -> Any:
    """The text of a strategy in its usual form, largest scheme first; values that are no text are
    returned unchanged, for pydantic to refuse. Raises ValueError for a malformed text."""
    return str(number(Strategy.parse)(value)) if isinstance(value, str) else value


MethodText = Annotated[str, Field(pattern=r"^[a-z_]+(/[a-z_]+)?(\+[a-z]+)?$")]
"""``METHOD``, ``ATTENTION/FEED_FORWARD``, either with ``+LEVEL``."""

StrategyText = Annotated[str, BeforeValidator(_strategy)]
"""A strategy as text: ``COUNT*SCHEME + ...``."""


class PlannerConfig(Section):
    """Who plans a run, and between what it may choose: a configuration's section ``planner``."""

    name: Literal[
        "adaptive",
        "static",
        "strategies",
        "bucket",
        "packed",
        "dcp",
        "flexsp",
        "hydraulis",
        "hydraulis-tuned",
        "paradyse",
        "karmarkar-karp",
        "dp-balanced",
        "hybrid-cp",
        "max-length",
        "token-balance",
    ] = "adaptive"
    """``adaptive`` decides for each batch, whatever fits; ``static`` uses groups of ``static_size``
    always; ``strategies`` has pipelines side by side only, of any shapes that fit, tensor, context
    and pipeline parallel. To compare with: ``bucket`` and ``packed`` have the one group size that
    is best, and batches of like lengths or packs, with their best sizes; ``dcp`` chooses a size
    and a batch for each bucket of lengths, and accumulation steps to end together;
    ``flexsp`` chooses the sizes of groups alone, with one option for all layers; ``paradyse`` the
    layers alone, by its Algorithm 1, on groups of one size; ``hydraulis`` strategies by its dynamic
    program, as its authors' code does, and ``hydraulis-tuned`` without what that gives away.
    ``karmarkar-karp``, ``dp-balanced``, ``hybrid-cp``, ``max-length`` and
    ``token-balance`` do as verl and Megatron do."""

    strategies: tuple[StrategyText, ...] = ()
    """The strategies to choose among for each batch, such as ``"1*tp2 + 2*cp1"`` or
    ``"1*tp2-pp2"``; whatever fits when empty."""

    rotate: bool = False
    """Take the ``strategies`` in turn, one each step, instead of choosing; needs a list."""

    static_size: Positive | None = None
    """Group size of the static planner."""

    group_sizes: tuple[Positive, ...] = ()
    """Group sizes to consider; all from one to the number of ranks when empty. Larger ones than
    there are ranks are left out, and told."""

    methods: Literal["auto"] | MethodText | tuple[MethodText, ...] = "auto"
    """How layers are spread over the ranks of a group: ``auto`` chooses for each layer of each
    micro-batch; one method (``"megatron_ts"``, or ``"ATTENTION/FEED_FORWARD"``) serves all layers;
    a list gives one for each layer. ``+none``, ``+attention`` or ``+full`` fixes the recompute
    level too. Groups that some layer's method cannot run on are not used."""

    candidates: tuple[MethodText, ...] = ()
    """Methods that ``auto`` measures and chooses among; when empty all but ``colossal_z``
    and the composites ``ulysses_ring`` and ``tensor_ring``."""

    costs: Literal["quadratic", "hybrid"] = "quadratic"
    """What a measured profile is fitted by: ``quadratic`` fits what was measured; ``hybrid`` fits
    ParaDySe's random forest within the profiled lengths and its polynomial beyond them, up to the
    context. Packs are priced by quadratics in both. ``hybrid`` needs scikit-learn and a measured
    profile; costs from elsewhere are refused with it."""

    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of a micro-batch's time that may be lost to keep the layer options of the step before;
    0 always takes the quickest."""

    recompute: tuple[Literal["none", "attention", "full"], ...] = ("none", "attention", "full")
    """Recompute levels to consider."""

    working: Literal["auto", "replicated", "sharded"] = "auto"
    """How groups hold weights: ``replicated`` on every rank, ``sharded`` over the group, or
    whatever fits."""

    ahead: Annotated[int, Field(ge=0)] = 2
    """Batches planned ahead by a process of their own while the current one trains; 0 plans each
    when it comes. A step that waits for its plan, as on thousands of devices, starts one more
    process, up to as many as batches. Where plans are smoothed each waits for the one before."""

    compare: bool = True
    """Make the best plan with one group size for each batch too, for the report of the run. No step
    waits for it: it is made after the plan, by the process that plans ahead, and a step that is
    over before goes without; where none plans ahead, by the first rank between two steps. Plans do
    not depend on it."""

    memory_margin: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Part of a rank's memory that plans leave free; left out, what earlier runs with the same
    costs learnt. The first begins with 0.3 on a CPU, whose allocator holds up to that much more
    than what is alive, and 0.1 on a device; a peak too near to the limit raises it."""

    @model_validator(mode="after")
    def _check_keys_together(self) -> PlannerConfig:
        """Refuse keys of the planner that the chosen planner does not read, and empty lists."""
        if (self.name == "static") != (self.static_size is not None):
            raise ValueError("planner 'static' and static_size go together")
        if self.strategies and self.name != "strategies":
            raise ValueError("strategies are chosen among by planner 'strategies'")
        if self.rotate and not self.strategies:
            raise ValueError("rotate takes turns among strategies, and none are given")
        if self.smoothing and self.name == "strategies":
            raise ValueError("planner 'strategies' does not smooth")
        if self.candidates and self.methods != "auto":
            raise ValueError("candidates are chosen from when methods is 'auto'")
        if self.methods == ():
            raise ValueError("methods needs one entry for each layer")
        if not self.recompute:
            raise ValueError("recompute needs at least one level")
        return self
