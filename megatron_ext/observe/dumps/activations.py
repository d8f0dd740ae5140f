"""`--save-activations-interval`: SAVE/activations/iter_N/mp_rank_*.pth, inputs and outputs of every linear layer.

Each file holds the last micro-batch of one rank. Expert outputs there are already multiplied by the mixing weights;
with one expert-parallel rank the router's weights stand in the same file and are divided out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.observe import formulas
from megatron_ext.observe.dumps.table import DumpRow, DumpTable

_SEQUENTIAL = re.compile(r"(.*layers\.(\d+)\.mlp)\.experts\.local_experts\.(\d+)\.linear_fc2/output0")
_GROUPED = re.compile(r"(.*layers\.(\d+)\.mlp)\.experts\.linear_fc2/output0")
_LATENT = re.compile(r".*layers\.(\d+)\.mlp\.fc2_latent_proj/output0")


def read_activations(path: Path) -> DumpTable:
    """Return expert norm ratios and the latent output's norm of each layer."""
    files = sorted(path.glob("mp_rank_*.pth"))
    # The weights belong to this rank's own tokens; with several ranks the rows come from all of them.
    alone = not any(re.search(r"_\d{3}\.pth$", file.name) for file in files)
    step = int(found[1]) if (found := re.search(r"iter_(\d+)$", path.name)) else 0
    rms: dict[str, list[float]] = {}
    latent: dict[str, float] = {}
    for file in files:
        for tensors in torch.load(file, map_location="cpu", weights_only=True).values():
            for layer, values in _expert_rms(tensors, alone).items():
                rms.setdefault(layer, []).extend(values)
            for key, output in tensors.items():
                if match := _LATENT.fullmatch(key):
                    latent[match[1]] = float(output.double().square().mean().sqrt())
    rows = []
    for layer in sorted({*rms, *latent}, key=int):
        ratios = formulas.norm_ratios(np.array([rms.get(layer, [np.nan])]))
        measures = {
            "expert_norm_max_over_median": float(ratios.max_over_median[0]),
            "expert_norm_min_over_median": float(ratios.min_over_median[0]),
            "expert_norm_median": float(ratios.median[0]),
        }
        if layer in latent:
            measures["latent_out_norm"] = latent[layer]
        rows.append(DumpRow(step, layer, measures))
    kind = "before" if alone else "after"
    return DumpTable("activations", rows, [f"Norms are {kind} the mixing weights. Last micro-batch only."])


def _expert_rms(tensors: dict[str, Any], alone: bool) -> dict[str, list[float]]:
    """Return layer -> RMS by local expert, NaN without tokens."""
    found: dict[str, dict[int, float]] = {}
    for key, output in tensors.items():
        if match := _SEQUENTIAL.fullmatch(key):
            weights = _weights(tensors, match[1], int(match[3])) if alone else None
            found.setdefault(match[2], {})[int(match[3])] = _rms(output, weights)
        elif match := _GROUPED.fullmatch(key):
            counts = [int(count) for count in tensors[f"{match[1]}.experts.linear_fc2/input1"]]
            for expert, rows in enumerate(output.reshape(-1, output.shape[-1])[: sum(counts)].split(counts)):
                weights = _weights(tensors, match[1], expert) if alone else None
                found.setdefault(match[2], {})[expert] = _rms(rows, weights)
    return {layer: [by_expert[expert] for expert in sorted(by_expert)] for layer, by_expert in found.items()}


def _weights(tensors: dict[str, Any], mlp: str, expert: int) -> torch.Tensor:
    """Return the weights of an expert's rows: the router's column, in the order of the tokens."""
    column, chosen = tensors[f"{mlp}.router/output0"][:, expert], tensors[f"{mlp}.router/output1"][:, expert]
    return column[chosen.bool()].double()


def _rms(rows: torch.Tensor, weights: torch.Tensor | None) -> float:
    squares = rows.double().square().mean(-1)
    if weights is not None:
        squares = squares[weights != 0] / weights[weights != 0].square()
    return float(squares.mean().sqrt()) if squares.numel() else float("nan")
