"""Layouts of weights as row intervals, and the links between them."""

from headrace.layouts.partition import (
    Partition,
    Rows,
    Slice,
    group_shards,
    link,
    received_rows,
    sent_rows,
    split_rows,
    split_sizes,
    storage_partition,
    working_partition,
    works_whole,
)
from headrace.layouts.transfer import BucketLink, Pending

__all__ = [
    "BucketLink",
    "Partition",
    "Pending",
    "Rows",
    "Slice",
    "group_shards",
    "link",
    "received_rows",
    "sent_rows",
    "split_rows",
    "split_sizes",
    "storage_partition",
    "working_partition",
    "works_whole",
]
