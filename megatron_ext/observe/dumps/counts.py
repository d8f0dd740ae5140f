"""`--save-tokens-per-expert-interval`: SAVE/tokens_per_expert/rank<r>.jsonl, the experts of each rank."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from megatron_ext.errors import UserError
from megatron_ext.observe import formulas
from megatron_ext.observe.dumps.table import DumpRow, DumpTable


def read_counts(path: Path, expert_parallel: int) -> DumpTable:
    """Return load metrics of each dumped step and layer.

    Each line holds one rank's [micro-batches, local experts]. Megatron forms an expert-parallel group of consecutive
    ranks, so rank r holds the experts of place r % `expert_parallel`.

    Raises:
        UserError: Ranks of a group are missing, or don't have the same micro-batches.
    """
    found: dict[tuple[int, str], dict[int, np.ndarray]] = defaultdict(dict)
    for file in sorted(path.glob("rank*.jsonl")):
        rank = int(re.fullmatch(r"rank(\d+)\.jsonl", file.name)[1])  # type: ignore[index]
        for line in file.read_text().splitlines():
            record = json.loads(line)
            layer = f"mtp {record['mtp_idx']}.{record['layer']}" if "mtp_idx" in record else str(record["layer"])
            found[record["iter"], layer][rank] = np.array(record["tpe"], np.int64)
    rows = [
        DumpRow(step, layer, _measures(by_rank, expert_parallel, f"{path}: step {step}, layer {layer}"))
        for (step, layer), by_rank in sorted(found.items(), key=lambda item: (item[0][0], len(item[0][1]), item[0][1]))
    ]
    return DumpTable("tokens per expert", rows, ["Counts are of dispatched rows: padding, if any, is in them."])


def _measures(by_rank: dict[int, np.ndarray], expert_parallel: int, where: str) -> dict[str, float]:
    ranks = sorted(by_rank)
    groups = [ranks[at : at + expert_parallel] for at in range(0, len(ranks), expert_parallel)]
    shapes = {by_rank[rank].shape for rank in ranks}
    whole_groups = all([rank % expert_parallel for rank in group] == list(range(expert_parallel)) for group in groups)
    if len(shapes) != 1 or not whole_groups:
        raise UserError(
            "the ranks' files don't make whole expert-parallel groups",
            where=f"{where}: ranks {ranks}, [micro-batches, experts] {sorted(shapes)}",
            remedy="give --expert-parallel as the run had it, and the files of all its ranks",
        )
    # [groups, EP ranks, micro-batches, local experts]
    counts = np.stack([np.stack([by_rank[rank] for rank in group]) for group in groups])
    local = counts.transpose(0, 2, 1, 3)
    whole = local.reshape(*local.shape[:2], -1)
    total = whole.sum((0, 1))
    vio, rank_vio = formulas.max_vio(whole), formulas.max_vio(local.sum(-1))
    return {
        "max_vio": float(formulas.max_vio(total)),
        "max_vio_micro": float(np.nanmean(vio)),
        "max_vio_micro_worst": float(np.nanmax(vio)),
        "rank_max_vio": float(np.nanmean(rank_vio)),
        "rank_max_vio_worst": float(np.nanmax(rank_vio)),
        "load_cv": float(formulas.load_cv(total)),
        "load_entropy": float(formulas.normalized_entropy(total)),
        "dead_share": float(formulas.dead_share(total)),
    }
