"""Native models: their storage, the executor of plans, micro-batches, and files of checkpoints."""
