"""Runs over clips: synthetic video, and Transformer-2D trained on it."""
