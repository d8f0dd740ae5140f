"""Megatron's own dumps, read offline: the same metrics, by the same formulas."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.observe.dumps.table import DumpTable


def read_dump(path: Path, num_experts: int, expert_parallel: int, micro_batch_size: int) -> DumpTable:
    """Return the metrics of a dump; what it is, is told from its files.

    Raises:
        UserError: None of the four kinds.
    """
    if list(path.glob("router_trace_rank*.jsonl")):
        from megatron_ext.observe.dumps.trace import read_trace

        return read_trace(path, num_experts, micro_batch_size)
    if list(path.glob("rank*.jsonl")):
        from megatron_ext.observe.dumps.counts import read_counts

        return read_counts(path, expert_parallel)
    if list(path.glob("mp_rank_*.pth")):
        from megatron_ext.observe.dumps.activations import read_activations

        return read_activations(path)
    if (path / ".metadata").is_file():
        from megatron_ext.observe.dumps.bias import read_bias

        return read_bias(path)
    raise UserError(
        "nothing here that health can read",
        where=str(path),
        why="looked for router_trace_rank*.jsonl, rank*.jsonl, mp_rank_*.pth and .metadata"
        if path.exists()
        else "it does not exist",
        remedy="name the folder itself: SAVE/tokens_per_expert, the trace's, SAVE/activations/iter_N, or SAVE/iter_N",
    )


__all__ = ["DumpTable", "read_dump"]
