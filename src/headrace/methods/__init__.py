"""Methods: how one layer is spread over the ranks of a group."""

from headrace.methods.context import Context, Place
from headrace.methods.method import BRANCHES, Branch, Method
from headrace.methods.registry import METHODS, branch, method, methods_for, subgroups
from headrace.methods.weights import Shard, State, Whole

__all__ = [
    "BRANCHES",
    "METHODS",
    "Branch",
    "Context",
    "Method",
    "Place",
    "Shard",
    "State",
    "Whole",
    "branch",
    "method",
    "methods_for",
    "subgroups",
]
