"""The expert bias in a torch_dist checkpoint (SAVE/iter_N): how far the balancer has had to push."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_ext.errors import UserError
from megatron_ext.observe.dumps.table import DumpRow, DumpTable


def read_bias(path: Path) -> DumpTable:
    """Return spread and mean of the bias of each layer; nothing else is read.

    Raises:
        UserError: The checkpoint holds no expert bias.
    """
    reader = FileSystemReader(str(path))
    metadata = reader.read_metadata().state_dict_metadata
    wanted = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and key.endswith(("router.expert_bias", "router.qb_beta"))
    }
    if not wanted:
        raise UserError(
            "no expert bias in this checkpoint",
            where=str(path),
            remedy="train with --moe-router-enable-expert-bias, or name another iter_N folder",
        )
    load(wanted, storage_reader=reader, no_dist=True)
    step = int(found[1]) if (found := re.search(r"iter_(\d+)$", path.name)) else 0
    rows = []
    for key, values in sorted(wanted.items()):
        # One key a layer, or all layers stacked on the first axis; never mixed.
        number = re.search(r"layers\.(\d+)\.", key)
        for at, bias in enumerate(values.double().reshape(-1, values.shape[-1])):
            name = str(int(number[1]) + at) if number else str(at)
            name = f"mtp {name}" if key.startswith("mtp") else name
            spread = {"bias_spread": float(bias.max() - bias.min()), "bias_mean": float(bias.mean())}
            rows.append(DumpRow(step, name, spread))
    return DumpTable("expert bias", rows)
