"""What stages hold, beside the simulator's walk of their programs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.costs import synthetic_costs
from headrace.planning.priced import LayerTable, StageCosts, shares_of
from headrace.simulator import peak_bytes
from headrace.spec import LayerOption, LayerPlan, Lengths, MicroBatch, Pipeline, Plan, Scheme

GIB = 2**30


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 6),
    count=st.integers(1, 9),
    memory=st.sampled_from([0.8, 1.0, 1.5, 3.0]),
)
def test_what_fits_is_what_the_simulator_says_fits(
    seed: int, depth: int, count: int, memory: float
) -> None:
    """Catches a moment of a pipeline that is not looked at: backwards behind the last forward hold
    fewer micro-batches, but what one of them needs in passing may be more than all before."""
    rng, layers = np.random.default_rng(seed), 12
    costs = synthetic_costs(depth, layers, memory_bytes=int(memory * GIB))
    scheme = Scheme(pipeline=depth)
    plans = [LayerPlan.uniform(LayerOption.parse(name), layers) for name in costs.options[1]]
    table = LayerTable.of(costs, scheme, "replicated", plans)
    shares = next(iter(shares_of(layers, depth)))
    stages = StageCosts(
        costs=costs, scheme=scheme, shares=shares, working="replicated", table=table
    )
    each = rng.uniform(0.05, 1.0, count).tolist()
    chosen = rng.integers(len(plans), size=count).tolist()

    def packs(longest: int) -> list[tuple[int, int]]:
        tokens = [max(1, int(part * longest)) for part in each]
        return list(zip(tokens, chosen, strict=True))

    def over_bytes(longest: int) -> int:
        """Bytes beyond the memory where it is exceeded most."""
        some = packs(longest)
        plan = Plan(
            lengths=Lengths(tokens=tuple(tokens for tokens, _ in some)),
            devices=depth,
            pipelines=(Pipeline(scheme=scheme, ranks=tuple(range(depth)), shares=shares),),
            micro_batches=tuple(
                MicroBatch(pipeline=0, sequences=(i,), layers=plans[row])
                for i, (_, row) in enumerate(some)
            ),
            predicted_s=0.0,
            lower_bound_s=0.0,
        )
        return max(peak_bytes(plan, costs)) - costs.capacity_bytes

    most, none = 1, 2_000_000
    while none - most > 1:
        middle = (most + none) // 2
        most, none = (middle, none) if stages.fits(packs(middle)) else (most, middle)
    if stages.fits(packs(most)):
        assert over_bytes(most) <= 0
    assert over_bytes(none) > 0
