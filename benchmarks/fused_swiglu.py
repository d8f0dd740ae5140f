"""Claim: the SwiGLU kernels run at 85 % or more of this GPU's copy speed, and beat upstream's compiled function.

    python benchmarks/fused_swiglu.py [--out FILE] [--tune]

Needs a GPU and Megatron on the path. Bytes are counted once a value read and once a value written: what the operation
must move. The copy moves as many bytes (half read, half written) in the same run. The cases are the handbook's layer at
micro-batch 8 of 4,096 tokens in bf16: the experts' rows (top-8, width 1,024, with weights) and the dense FFN (8,192).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from dispatch_kernels import copy_rate, time_ms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.core.fusions import fused_bias_swiglu as upstream

from megatron_ext.fused import swiglu_kernels
from megatron_ext.fused.swiglu_kernels import Tile

GOAL = 0.85


@dataclass(frozen=True)
class Case:
    """An operation: its name, ours with a tile, upstream's, and the bytes that it must move."""

    name: str
    run: Callable[[Tile], object]
    in_upstream: Callable[[], object]
    moved_bytes: int


@dataclass(frozen=True)
class Row:
    """One measured operation; `upstream_ratio` is upstream's time over ours."""

    operation: str
    gigabytes: float
    ms: float
    tb_per_s: float
    copy_tb_per_s: float
    share_of_copy: float
    upstream_ms: float
    upstream_ratio: float


def pair(name: str, rows: int, columns: int, *, weighted: bool) -> list[Case]:
    """Forward and backward of one shape."""
    y = torch.randn(rows, 2 * columns, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(rows, 1, device="cuda") if weighted else None
    item = y.element_size() * rows * columns
    weight_bytes = 0 if weights is None else 4 * rows
    return [
        Case(
            f"{name}, forward",
            lambda tile: swiglu_kernels.forward(y, weights, tile),
            lambda: upstream.swiglu(y) if weights is None else upstream.weighted_swiglu(y, weights),
            3 * item + weight_bytes,
        ),
        Case(
            f"{name}, backward",
            lambda tile: swiglu_kernels.backward(grad, y, weights, tile),
            lambda: (
                upstream.swiglu_back(grad, y) if weights is None else upstream.weighted_swiglu_back(grad, y, weights)
            ),
            5 * item + 2 * weight_bytes,
        ),
    ]


def measure(case: Case, tile: Tile) -> Row:
    """Time one case, upstream's way and a copy."""
    ms, copy, theirs = time_ms(partial(case.run, tile)), copy_rate(case.moved_bytes), time_ms(case.in_upstream)
    rate = case.moved_bytes / ms / 1e9
    return Row(case.name, case.moved_bytes / 1e9, ms, rate, copy, rate / copy, theirs, theirs / ms)


def tune(cases: list[Case]) -> tuple[list[dict[str, object]], Tile]:
    """Try tiles; return what each reached, and the tile that is nearest to the best in every case."""
    rates: dict[Tile, dict[str, float]] = {}
    for block, rows, warps in itertools.product((1024, 2048, 4096), (1, 2, 4), (2, 4, 8)):
        tile = Tile(block, rows, warps)
        if not 16 <= block * rows / (32 * warps) <= 32:
            continue  # fewer or more than one or two loads of 16 bytes a thread and operand
        rates[tile] = {case.name: case.moved_bytes / time_ms(partial(case.run, tile), 10) / 1e9 for case in cases}
    best = {case.name: max(rate[case.name] for rate in rates.values()) for case in cases}
    for name in best:
        order = sorted(rates, key=lambda tile: -rates[tile][name])[:4]
        print(name, *(f"{t.block_bytes}/{t.rows}/{t.num_warps}: {rates[t][name]:.2f}" for t in order), sep="  ")
    found = [{**asdict(tile), "tb_per_s": rate} for tile, rate in rates.items()]
    return found, max(rates, key=lambda tile: min(rates[tile][name] / best[name] for name in best))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--tune", action="store_true", help="try tiles first and measure with the best (a minute)")
    args = parser.parse_args()
    record: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    cases = [
        *pair("experts 262,144 x 1,024", 262_144, 1024, weighted=True),
        *pair("dense 32,768 x 8,192", 32_768, 8192, weighted=False),
    ]
    kinds = {"forward": swiglu_kernels.FORWARD_TILE, "backward": swiglu_kernels.BACKWARD_TILE}
    if args.tune:
        for kind in kinds:
            record[f"tune_{kind}"], kinds[kind] = tune([case for case in cases if case.name.endswith(f" {kind}")])
    record["tiles"] = {kind: asdict(tile) for kind, tile in kinds.items()}
    print("tiles:", kinds)
    rows = [measure(case, kinds[case.name.rsplit(" ", 1)[1]]) for case in cases]
    print(f"{'operation':<36}{'GB':>7}{'ms':>8}{'TB/s':>7}{'copy':>7}{'share':>7}{'upstream ms':>13}{'ratio':>7}")
    for row in rows:
        print(
            f"{row.operation:<36}{row.gigabytes:>7.2f}{row.ms:>8.3f}{row.tb_per_s:>7.2f}{row.copy_tb_per_s:>7.2f}"
            f"{row.share_of_copy:>7.0%}{row.upstream_ms:>13.3f}{row.upstream_ratio:>7.2f}"
        )
    record["rows"] = [asdict(row) for row in rows]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    slow = [row.operation for row in rows if row.share_of_copy < GOAL or row.upstream_ratio < 1]
    print("below the goal:", slow or "none")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
