"""Plans whose ranks are cut into pipelines of different shapes, side by side: tensor, context and
pipeline parallel."""

from headrace.planning.strategies.plan import plan_strategy
from headrace.planning.strategies.propose import propose_strategies
from headrace.planning.strategies.schemes import Schemes
from headrace.planning.strategies.strategist import Strategist

__all__ = ["Schemes", "Strategist", "plan_strategy", "propose_strategies"]
