"""Multi-dimensional models that nobody here wrote, run on shards of their axes (DSP)."""
