"""headrace trains Transformers on sequences of wildly different lengths: for every batch it looks
at the lengths and decides which devices work on which sequences, and how."""

from headrace.spec import Architecture, Cluster, Lengths, Plan, Strategy

__all__ = ["Architecture", "Cluster", "Lengths", "Plan", "Strategy", "__version__"]

__version__ = "0.1.0"
