"""How many kernels a layer launches: what must not get worse, counted without a device."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import launches
import pytest
import torch

TOKENS, RANKS = 65_536, 8
THIRD = TOKENS // 3
PACK = (THIRD, THIRD, TOKENS - 2 * THIRD)
MOST = {  # kernels, MB read and written a token: (reached when written, with a little room)
    "local": (36, 0.5),
    "ulysses_z": (45, 0.61),
    "megatron_cz_gather": (98, 0.795),
    "megatron_cz": (190, 0.775),
    "megatron_ts": (165, 0.785),
}


@cache
def counted(method: str) -> tuple[launches.Counts, dict[str, Any]]:
    counts = launches.counted(launches.llama(), method, RANKS, PACK)
    return counts, launches.row(method, counts, TOKENS if method == "local" else TOKENS // RANKS)


@pytest.mark.parametrize("method", MOST)
def test_kernels_of_a_layer(method: str) -> None:
    """Catches operators that are not fused any more, and copies from the host in every layer."""
    counts, found = counted(method)
    kernels, moved_mb = MOST[method]
    assert found["kernels"] <= kernels, counts.kernels
    assert found["stops"] == 0, counts.stops
    assert found["elementwise_mb_per_token"] <= moved_mb
    assert counts.kernels["_flash_attention_forward"] >= 1


def test_the_head_reads_its_logits_as_they_are() -> None:
    """Catches logits that are widened, or read or written by more operators than needed: 128,256
    words are read twice and written once, in half types."""
    counts = launches.counted_head(4096, 8192)
    assert counts.elementwise_bytes / 8192 <= 1.05e6
    assert counts.kernels.total() / 4 <= 16  # a chunk
    assert not counts.stops


def test_what_is_counted() -> None:
    """Catches views and allocations counted, copies from the host and reads by it that are not."""
    counting = launches.Launches()
    here, there = torch.arange(4), torch.empty(4, 4, device="meta")
    with counting, launches.Made(counting):
        counting.on = True
        there.view(16)[2:].add_(1.0)
        there.new_empty(3)
        here.to("meta", non_blocking=True)
        here.to("meta")
        torch.tensor([1, 2], device="meta")
        torch.mm(there, there)
        counting.on = False
        there.mul_(2)
    assert counting.counts.kernels == {"add_": 1, "mm": 1}
    assert counting.counts.stops == {"_to_copy": 1, "tensor": 1}
    assert counting.counts.elementwise_bytes == counting.counts.moved["add_"] == 2 * 14 * 4


def test_bytes_of_what_is_written_in_part() -> None:
    """Catches a whole tensor counted where some of its rows are written, what is read and written
    counted once, and what is only written counted as read."""
    counting, out = launches.Launches(), torch.empty(8, 4, device="meta")
    rows, index = torch.empty(2, 4, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    with counting:
        counting.on = True
        out.index_copy_(0, index, rows)
        torch.sum(out.view(2, 4, 4), 0, out=out[:4])
        torch.ops.headrace.add_up_(out[:2], [rows, rows])
        torch.ops.headrace.add_to_(out[:2], [rows, rows])
    row = 4 * 4
    assert counting.counts.moved == {
        "index_copy_": 4 * row + 2 * 8,
        "sum": 12 * row,
        "add_up_": 6 * row,
        "add_to_": 8 * row,
    }


def test_the_table(tmp_path: Path, capsys: Any) -> None:
    """Catches methods left out, and numbers of another one."""
    path = tmp_path / "out" / "launches.json"
    command = [
        "--ranks",
        "2",
        "--tokens",
        "64",
        "--hidden",
        "256",
        "--json",
        str(path),
        "--methods",
        "local",
        "megatron_cz",
        "--list",
    ]
    assert launches.main(command) == 0
    out = capsys.readouterr().out
    assert "_flash_attention_forward" in out
    rows = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() == {"local", "megatron_cz", "head and loss"}
    assert rows["local"]["kernels"] < rows["megatron_cz"]["kernels"]
    assert (rows["local"]["collectives"], rows["megatron_cz"]["collectives"] > 0) == (0, True)
    with pytest.raises(SystemExit):
        launches.main(["--hidden", "64"])


def test_the_table_of_the_guide() -> None:
    """Catches numbers in the documentation that are not those of the code."""
    lines = (Path(__file__).parents[2] / "docs/guides/gpus.md").read_text().splitlines()
    told = {
        cells[1].strip("` "): [float(cell.replace(",", "")) for cell in cells[2:6]]
        for line in lines
        if len(cells := line.split("|")) == 7 and cells[2].strip()[0].isdigit()
    }
    assert told.keys() == set(launches.METHODS)
    for method in set(launches.METHODS) - {"metp"}:
        found = list(counted(method)[1].values())[1:]
        assert told[method] == pytest.approx(found, abs=0.006)
