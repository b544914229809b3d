"""Sequence parallelism for models that know nothing of it."""
