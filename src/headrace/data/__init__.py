"""Data: corpora as tokens, their lengths, random batches of them, and lengths without data.

Imports numpy only; tokenizers, pyarrow, pyfaidx and transformers are loaded when asked for.
"""

from headrace.data.corpus import Corpus, Skipped, StoredCorpus, corpus_of
from headrace.data.distributions import Bins, Distribution, LogNormal, Mixture, Resampled
from headrace.data.drawn_lengths import PRESETS, draw_batches, parse_distribution
from headrace.data.length_summary import BIN_NAMES, LONG, Summary, summarise, summarise_lengths
from headrace.data.opening import Progress, open_corpus
from headrace.data.reader import Reader
from headrace.data.sampler import Batch, Curriculum, Sample, Sampler, SamplerOptions, TooLong
from headrace.data.source import Kind, Source
from headrace.data.tokens import Tokenizer, make_tokenizer

__all__ = [
    "BIN_NAMES",
    "LONG",
    "PRESETS",
    "Batch",
    "Bins",
    "Corpus",
    "Curriculum",
    "Distribution",
    "Kind",
    "LogNormal",
    "Mixture",
    "Progress",
    "Reader",
    "Resampled",
    "Sample",
    "Sampler",
    "SamplerOptions",
    "Skipped",
    "Source",
    "StoredCorpus",
    "Summary",
    "Tokenizer",
    "TooLong",
    "corpus_of",
    "draw_batches",
    "make_tokenizer",
    "open_corpus",
    "parse_distribution",
    "summarise",
    "summarise_lengths",
]
