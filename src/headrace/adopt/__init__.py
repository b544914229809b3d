"""Models that nobody here wrote, spread over ranks by their tokens (AutoSP) or their axes (DSP)."""
