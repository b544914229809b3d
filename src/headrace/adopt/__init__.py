"""Users' models, spread over ranks by their tokens (AutoSP) or their axes (DSP)."""
