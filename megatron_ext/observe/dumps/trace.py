"""`--moe-routing-trace-path`: which experts each token chose, and its logits where they were captured (in bf16)."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.errors import UserError
from megatron_ext.observe import formulas
from megatron_ext.observe.dumps.table import DumpRow, DumpTable


def read_trace(path: Path, num_experts: int, micro_batch_size: int) -> DumpTable:
    """Return load metrics of each traced step and layer, by sequence too, and logit metrics where logits are there.

    Args:
        path: The trace's folder.
        num_experts: E; 0 takes it from the logits' shape.
        micro_batch_size: Sequences of a micro-batch; tokens are [sequence, batch] flattened, so token t belongs to
            sequence t % size. 0: no metrics by sequence.

    Raises:
        UserError: The number of experts isn't known, or a token chose one beyond it.
    """
    groups: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(path.glob("router_trace_rank*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            layer = f"mtp {record['mtp_idx']}.{record['layer']}" if "mtp_idx" in record else str(record["layer"])
            groups[record["step"], layer].append(record)
    rows = []
    for (step, layer), records in sorted(groups.items(), key=lambda item: (item[0][0], len(item[0][1]), item[0][1])):
        experts = num_experts or _experts_of(records, path)
        rows.append(DumpRow(step, layer, _measures(records, path, experts, micro_batch_size)))
    notes = [] if micro_batch_size else ["Give --micro-batch-size for max_vio by sequence."]
    return DumpTable("routing trace", rows, notes)


def _experts_of(records: list[dict[str, Any]], path: Path) -> int:
    for record in records:
        if "logit_shape" in record:
            return int(record["logit_shape"][-1])
    raise UserError("how many experts are there?", where=str(path), remedy="give --num-experts", exit_code=64)


def _measures(records: list[dict[str, Any]], path: Path, experts: int, batch: int) -> dict[str, float]:
    total = np.zeros(experts, np.int64)
    per_call, per_sequence, logits = [], [], []
    for record in records:
        chosen = np.array(record["top_indices"], np.int64)
        if chosen.size and chosen.max() >= experts:
            raise UserError(
                "a token chose an expert that isn't there",
                where=f"{path}: expert {chosen.max()} of {experts}",
                remedy="give the run's own --num-experts",
            )
        counts = np.bincount(chosen.ravel(), minlength=experts)
        total += counts
        per_call.append(formulas.max_vio(counts))
        for sequence in range(batch):
            per_sequence.append(formulas.max_vio(np.bincount(chosen[sequence::batch].ravel(), minlength=experts)))
        if "logit_offset" in record:
            logits.append(_logits(record, path))
    values = {
        "max_vio": float(formulas.max_vio(total)),
        "max_vio_micro": float(np.mean(per_call)),
        "load_cv": float(formulas.load_cv(total)),
        "load_entropy": float(formulas.normalized_entropy(total)),
        "dead_share": float(formulas.dead_share(total)),
    }
    if per_sequence:
        values["max_vio_sequence"] = float(np.mean(per_sequence))
    if logits:
        z = np.concatenate(logits)
        values |= {"z_rms": formulas.z_rms(z), "router_entropy": formulas.router_entropy(z)}
    return values


def _logits(record: dict[str, Any], path: Path) -> np.ndarray:
    """Return [T, E] float64 of a record's bf16 bytes: the upper half of a float32."""
    with open(path / f"logits_rank{record['rank']}.bin", "rb") as stream:
        stream.seek(record["logit_offset"])
        raw = np.frombuffer(stream.read(record["logit_bytes"]), np.uint16)
    return (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64).reshape(-1, record["logit_shape"][-1])
