"""Operators: forward and true adjoint, each in a file of its own."""

from headrace.ops.activation import swiglu
from headrace.ops.attention import attend
from headrace.ops.linear import Source, embed, linear, linear_inputs
from headrace.ops.loss import head_loss
from headrace.ops.norm import layer_norm, rms_norm
from headrace.ops.random import DropoutKey, dropout
from headrace.ops.recompute import region
from headrace.ops.rotary import rotary_tables, rotate_and_sort
from headrace.ops.switch import Columns, switch, switch_back

__all__ = [
    "Columns",
    "DropoutKey",
    "Source",
    "attend",
    "dropout",
    "embed",
    "head_loss",
    "layer_norm",
    "linear",
    "linear_inputs",
    "region",
    "rms_norm",
    "rotary_tables",
    "rotate_and_sort",
    "swiglu",
    "switch",
    "switch_back",
]
