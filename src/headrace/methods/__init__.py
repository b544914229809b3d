"""Methods: how one layer is spread over the ranks of a group."""

from headrace.methods.context import Context, Place
from headrace.methods.method import Method
from headrace.methods.registry import METHODS, branch
from headrace.methods.weights import Shard, State, Whole

__all__ = ["METHODS", "Context", "Method", "Place", "Shard", "State", "Whole", "branch"]
