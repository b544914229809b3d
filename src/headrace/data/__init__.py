"""Data: corpora as tokens, their lengths, random batches of them, and lengths without data.

Imports numpy only; tokenizers, pyarrow, pyfaidx and transformers are loaded when asked for.
"""
