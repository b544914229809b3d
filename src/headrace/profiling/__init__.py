"""Profiling: what one layer costs, measured or rehearsed, of native models and of anyone's."""
