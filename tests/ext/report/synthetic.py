"""Made-up run directories in the real file form, so that the report can be tested without training.

The numbers are drawn to look like runs; what is in them by design (the dead expert, the rogue one, the gap) is what the
tests ask the report to find.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.observe.names import ALARMS, aggregate_key, layer_key, step_key
from megatron_ext.tracking.lines import alarm_line, metric_line, routing_line, write_json

DEAD = (1, 3)  # layer, expert
ROGUE = (0, 5)


def make_run(
    folder: Path,
    *,
    steps: int = 300,
    first: int = 1,
    layers: int = 0,
    experts: int = 8,
    ranks: int = 2,
    floor: float = 2.0,
    frames: int = 30,
    faults: bool = False,
    seed: int = 0,
    samples_before: int = 0,
) -> Path:
    """Write one run; `layers` = 0 makes a dense one. `floor` is the loss that it tends to."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    config = {
        "seq_length": 128,
        "global_batch_size": 8,
        "num_experts": experts if layers else None,
        "moe_router_topk": 2,
        "num_layers": max(layers, 2),
        "expert_model_parallel_size": ranks,
    }
    write_json(
        folder / "run.json",
        {
            "schema": 1,
            "id": f"{seed:032x}",
            "name": folder.name,
            "group": "moe" if layers else "dense",
            "project": "demo",
            "command": ["megatron-moe", "train"],
            "config": config,
            "pins": {"base": "release", "series_digest": "ab12"},
            "world_size": ranks,
            "starts": [{"time": 1.0, "iteration": first - 1}],
        },
    )
    _metrics(folder, rng, steps, first, layers, ranks, floor, faults, samples_before)
    if layers:
        _routing(folder, rng, steps, first, layers, experts, frames, faults)
    if faults:
        _alarms(folder, first + steps // 3)
    return folder


def _metrics(
    folder: Path,
    rng: Any,
    steps: int,
    first: int,
    layers: int,
    ranks: int,
    floor: float,
    faults: bool,
    samples_before: int,
) -> None:
    lines = []
    for index in range(steps):
        step = first + index
        loss = floor + 3.5 * np.exp(-3.0 * index / steps) + rng.normal(0, 0.03)
        values = {
            "lm loss": loss,
            "grad-norm": 1.0 + rng.random(),
            "learning-rate": 1e-3,
            "batch-size": 8.0,
            "iteration-time": 0.15 + 0.01 * rng.random(),
            "forward-backward-time": 0.11,
            "optimizer-time": 0.02,
            "forward-compute-time": 0.04,
            "backward-compute-time": 0.06,
            "all-grads-sync-time": 0.01,
        }
        if index % max(steps // 10, 1) == 0 or index == steps - 1:
            values["lm loss validation"] = loss + 0.05
        for rank in range(ranks):
            values[step_key("peak_memory", f"rank_{rank}")] = 2e9 * (1 + 0.3 * rank) + 1e7 * rng.random()
        if layers:
            vio = 0.4 + 0.6 * np.exp(-4.0 * index / steps) + 0.02 * rng.random(layers)
            values |= {
                aggregate_key("max_vio", "max"): vio.max(),
                aggregate_key("max_vio", "mean"): vio.mean(),
                aggregate_key("max_vio", "max_layer"): float(vio.argmax()),
                aggregate_key("rank_max_vio", "max"): 0.2 + 0.1 * rng.random(),
                layer_key("z_rms", 0): 2.0 + 0.001 * index,
                aggregate_key("z_rms", "max"): 2.0 + 0.001 * index,
                aggregate_key("source_information", "mean"): 0.3 * index / steps,
                aggregate_key("flip_rate_bf16", "max"): 0.02,
            }
            growth = 40.0 ** (index / steps) if faults else 1.2
            values[aggregate_key("expert_norm_max_over_median", "max")] = growth
        lines.append(metric_line(step, 1, samples_before + (index + 1) * 8, values))
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def _routing(
    folder: Path, rng: Any, steps: int, first: int, layers: int, experts: int, frames: int, faults: bool
) -> None:
    lines = []
    for index in np.unique(np.linspace(0, steps - 1, min(frames, steps)).astype(int)):
        skew = 1.0 + 4.0 * np.exp(-4.0 * index / steps)
        share = rng.dirichlet(np.full(experts, 8.0 / skew), size=layers)
        rms = rng.lognormal(0.0, 0.1, (layers, experts))
        if faults:
            share[DEAD[0], DEAD[1]] = 0.0
            rms[ROGUE[0], ROGUE[1]] *= 40.0 ** (index / steps)
        counts = np.floor(share * 2 * 1024).astype(np.int64)
        code = np.floor(counts * np.linspace(0.05, 0.95, experts)).astype(np.int64)
        rows = [
            [None if n == 0 else round(float(r), 4) for n, r in zip(*pair, strict=True)]
            for pair in zip(counts, rms, strict=True)
        ]
        extra = {
            "expert_rms": rows,
            "sources": ["code", "prose"],
            "tokens_per_source": np.stack([code, counts - code], axis=1).tolist(),
        }
        lines.append(routing_line(1, first + int(index), list(range(layers)), counts, extra))
    (folder / "routing.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def _alarms(folder: Path, step: int) -> None:
    records = []
    for name, state, at, place in (
        ("dead_expert", "raised", step, DEAD),
        ("rogue_expert", "raised", step + 20, ROGUE),
        ("loss_spike", "raised", step + 5, (None, None)),
        ("loss_spike", "cleared", step + 25, (None, None)),
    ):
        words = ALARMS[name]
        records.append(
            {
                "name": name,
                "state": state,
                "step": at,
                "since_step": step + 5 if name == "loss_spike" else at,
                "layer": place[0],
                "expert": place[1],
                "rank": None,
                "metric": words.metric,
                "value": 12.5,
                "limit": 10.0,
                "why": words.why,
                "remedy": words.remedy,
                "link": words.link,
            }
        )
    (folder / "alarms.jsonl").write_bytes(b"".join(alarm_line(1, record) + b"\n" for record in records))


def make_quickstart(folder: Path) -> list[Path]:
    """Write the quickstart's three runs: dense, the MoE upcycled from it, the dense one continued."""
    return [
        make_run(folder / "dense", steps=150, floor=3.2, seed=1),
        make_run(folder / "moe", steps=150, layers=4, floor=2.6, seed=2, samples_before=150 * 8, faults=True),
        make_run(folder / "dense-continued", steps=150, first=151, floor=2.9, seed=3, samples_before=150 * 8),
    ]
