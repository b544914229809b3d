"""Native models, written for one device."""

from headrace.models.initial import initial_rows
from headrace.models.transformer import Transformer

__all__ = ["Transformer", "initial_rows"]
