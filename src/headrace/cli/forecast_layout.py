"""``headrace forecast``: what a fixed layout takes on hardware that is not at hand."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.cli.flags import ForecastFlags, overrides
from headrace.config import Config
from headrace.costs.forecast import forecast as forecast_layout
from headrace.engine.setup import architecture_of
from headrace.errors import ConfigError
from headrace.spec.architecture import Architecture
from headrace.units import parse_count

__all__ = ["forecast"]


def forecast(what: str, flags: ForecastFlags) -> int:
    """Print the seconds, rates and memory of one layout, or JSON."""
    hardware, implementation, memory = flags.hardware, flags.implementation, None
    if what.endswith(".toml"):
        keys = {"devices.hardware": hardware, "devices.implementation": implementation}
        config = Config.load(Path(what), *overrides(flags.changes, keys))
        model = architecture_of(config)
        hardware, implementation = config.devices.hardware, config.devices.implementation
        memory = config.devices.memory_bytes
        length = flags.length or str(config.data.context)
    else:
        if flags.changes:
            raise ConfigError("--set", got=flags.changes[0], wanted="a configuration, CONFIG.toml")
        model = Architecture.preset(what)
        length = flags.length or "8Ki"
    if hardware is None:
        wanted, hint = "DEVICE[+INSIDE][+ACROSS]", "add --hardware h100"
        raise ConfigError("--hardware", got="none", wanted=wanted, hint=hint)
    found = forecast_layout(
        model,
        hardware,
        flags.layout,
        sequence_tokens=parse_count(length),
        local_batch=flags.local_batch,
        accumulation=flags.accumulation,
        recompute=flags.recompute,
        implementation=implementation or "headrace",
        memory_bytes=memory,
    )
    print(json.dumps(found.to_json()) if flags.json else found)
    return 0
