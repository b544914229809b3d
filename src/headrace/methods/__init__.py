"""Methods: how one layer is spread over the ranks of a group."""

from headrace.methods.context import Context, Method, Shard, State, Whole
from headrace.methods.registry import METHODS, method

__all__ = ["METHODS", "Context", "Method", "Shard", "State", "Whole", "method"]
