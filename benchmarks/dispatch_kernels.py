"""Claim: the dispatch's row kernels run at 70 % or more of this GPU's copy speed, and beat torch's own operations.

    python benchmarks/dispatch_kernels.py [--out FILE] [--tune [BLOCK_BYTES ...]]

Needs torch, triton and numpy only. Bytes are counted once a row read and once a row written, plus the slot table: what
the operation must move, whatever a kernel does. The copy it is compared with moves as many bytes (half read, half
written) in the same run. The cases are those of the handbook's layer: hidden 2,048 in bf16, top-8 of 64, 32k tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.dispatch import kernels, routing, rows
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.switch import KERNELS_VARIABLE
from megatron_ext.dispatch.wire import RowFormat

GOAL = 0.70


@dataclass(frozen=True)
class Row:
    """One measured operation: what it moves, its time and rate, the copy's, and torch's own time for the same."""

    operation: str
    gigabytes: float
    ms: float
    tb_per_s: float
    copy_tb_per_s: float
    share_of_copy: float
    torch_ms: float


@dataclass(frozen=True)
class Case:
    """An operation: its name, what it runs, the same in torch, and the bytes that it must move."""

    name: str
    run: Callable[[], object]
    in_torch: Callable[[], object]
    moved_bytes: int


def time_ms(run: Callable[[], object], repeats: int = 30) -> float:
    """Median of single runs with a cold L2: a buffer larger than it is rewritten between runs.

    The rewriting takes longer than Python needs to launch the run behind it, so that no launch is in the time.
    """
    flush = torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def make_ids(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """A uniform choice, ascending."""
    made = torch.Generator(device="cuda").manual_seed(0)
    scores = torch.rand(tokens, experts, device="cuda", generator=made)
    return scores.topk(top_k, dim=1).indices.sort(dim=1).values


def flat_pairs(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Source rows and slots of all copies, ordered by slot, for torch's operations."""
    source, column = torch.nonzero(slots >= 0, as_tuple=True)
    order = slots[source, column].argsort()
    return source[order], slots[source, column][order].long()


def spread_case(name: str, src: torch.Tensor, slots: torch.Tensor, tile: kernels.Tile) -> Case:
    """Writing rows to their slots, against `index_select`."""
    source, where = flat_pairs(slots)
    out = src.new_empty(len(where), src.shape[1])
    row_bytes = src.shape[1] * src.element_size()
    used = int((slots >= 0).any(dim=1).sum())
    return Case(
        name,
        lambda: kernels.spread_rows(src, slots, out, None, tile),
        lambda: torch.index_select(src, 0, source, out=out),
        (used + len(where)) * row_bytes + slots.numel() * 4,
    )


def sum_case(name: str, slots: torch.Tensor, hidden: int, tile: kernels.Tile) -> Case:
    """Summing copies in fp32, against `index_add_` (which adds in bf16, in no fixed order)."""
    source, where = flat_pairs(slots)
    rows = torch.randn(len(where), hidden, device="cuda").bfloat16()
    out = rows.new_empty(len(slots), hidden)
    row_bytes = hidden * rows.element_size()
    return Case(
        name,
        lambda: kernels.sum_rows(slots, rows, None, out, tile),
        lambda: out.zero_().index_add_(0, source, rows),
        (len(where) + len(slots)) * row_bytes + slots.numel() * 4,
    )


def cases(spread: kernels.Tile, total: kernels.Tile) -> list[Case]:
    """The hot operations of a layer at EP 2 and of the node hop at EP 16."""
    tokens, hidden, experts, top_k = 32768, 2048, 64, 8
    ids = make_ids(tokens, experts, top_k)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    ep2 = Layout(2, 0, 32, 1)
    form = RowFormat(hidden, top_k, x.dtype, torch.float32, experts)
    packed = torch.zeros(2 * tokens, form.row_bytes, dtype=torch.uint8, device="cuda")
    received = make_ids(2 * tokens, experts, top_k)
    hidden_rows = form.hidden_view(packed)
    to_experts = routing.expert_slots(received, ep2.num_local_experts).slots
    to_ranks = routing.assign_slots(ids, routing.all_ranks(ep2)).slots
    node = Layout(16, 0, 4, 8)
    in_node = routing.assign_slots(received, routing.node_ranks(node)).slots
    return [
        spread_case("spread: tokens to 2 ranks", x, to_ranks, spread),
        spread_case("spread: packed rows to experts", hidden_rows, to_experts, spread),
        spread_case("spread: packed rows in a node of 8", packed, in_node, spread),
        sum_case("sum: experts to rows", to_experts, hidden, total),
        sum_case("sum: 2 ranks to tokens", to_ranks, hidden, total),
        sum_case("sum: node of 8 to rows", in_node, hidden, total),
    ]


def copy_rate(moved_bytes: int) -> float:
    """TB/s of a plain copy that moves as many bytes."""
    src = torch.empty(moved_bytes // 2, dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    return 2 * src.numel() / time_ms(lambda: dst.copy_(src)) / 1e9


def measure(case: Case) -> Row:
    """Time one case, torch's way and a copy."""
    ms, copy = time_ms(case.run), copy_rate(case.moved_bytes)
    rate = case.moved_bytes / ms / 1e9
    return Row(case.name, case.moved_bytes / 1e9, ms, rate, copy, rate / copy, time_ms(case.in_torch))


def routing_ms() -> dict[str, float]:
    """The routing arithmetic of a layer, from the routing map to the experts' order: ms by kernels, and by torch."""
    layout = Layout(2, 0, 32, 1)
    tokens, experts, top_k = 32768, 64, 8
    ids, received = make_ids(tokens, experts, top_k), make_ids(2 * tokens, experts, top_k)
    chosen = torch.zeros(tokens, experts, dtype=torch.bool, device="cuda").scatter_(1, ids, True)
    probs = torch.rand(tokens, experts, device="cuda")
    weights = probs.gather(1, ids)
    twice = weights.repeat(2, 1)
    form = RowFormat(2048, top_k, torch.bfloat16, torch.float32, experts)
    packed = torch.zeros(2 * tokens, form.row_bytes, dtype=torch.uint8, device="cuda")
    slots = routing.expert_slots(received, 32).slots
    flat = torch.zeros(int((slots >= 0).sum()), device="cuda")
    steps: dict[str, Callable[[], object]] = {
        "choices": lambda: routing.choose(chosen, probs, top_k),
        "gradient of the choices": lambda: routing.choose_grad(ids, weights, experts),
        "count vector": lambda: routing.count_vector(ids, layout),
        "slots of ranks": lambda: routing.assign_slots(ids, routing.all_ranks(layout)),
        "fixed slots": lambda: routing.fixed_slots(ids, routing.all_ranks(layout), tokens),
        "pack": lambda: form.write_meta(weights, ids, form.meta_view(packed[:tokens])),
        "unpack": lambda: form.unpack_meta(packed, 32),
        "slots of experts": lambda: routing.expert_slots(received, 32),
        "weights to experts": lambda: rows.spread_weights(twice, slots, flat),
        "weights from experts": lambda: rows.gather_weights(flat, slots),
    }
    return {name: time_ms(step) for name, step in steps.items()} | {
        f"{name} (torch)": _by_torch(step) for name, step in steps.items()
    }


def _by_torch(step: Callable[[], object]) -> float:
    with mock.patch.dict(os.environ, {KERNELS_VARIABLE: "torch"}):
        return time_ms(step)


def tune(blocks: list[int]) -> tuple[list[dict[str, object]], kernels.Tile, kernels.Tile]:
    """Try tiles; return what each reached, and for each kernel the tile that is nearest to the best in every case."""
    rates: dict[kernels.Tile, dict[str, float]] = {}
    for block, warps, copies in itertools.product(blocks, (2, 4, 8), (8, 16)):
        tile = kernels.Tile(block, warps, copies)
        # The number of copies is for sums only.
        tried = [case for case in cases(tile, tile) if copies == 8 or case.name.startswith("sum")]
        rates[tile] = {case.name: case.moved_bytes / time_ms(case.run, 10) / 1e9 for case in tried}
    best = {name: max(rate.get(name, 0.0) for rate in rates.values()) for name in next(iter(rates.values()))}

    def nearest(kernel: str) -> kernels.Tile:
        names = [name for name in best if name.startswith(kernel)]
        return max(rates, key=lambda tile: min(rates[tile].get(name, 0.0) / best[name] for name in names))

    for name in best:
        order = sorted((tile for tile in rates if name in rates[tile]), key=lambda tile: -rates[tile][name])[:4]
        print(name, *(f"{t.block_bytes}/{t.num_warps}/{t.copies}: {rates[t][name]:.2f}" for t in order), sep="  ")
    found = [{**asdict(tile), "tb_per_s": rate} for tile, rate in rates.items()]
    return found, nearest("spread"), nearest("sum")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument(
        "--tune",
        type=int,
        nargs="*",
        metavar="BLOCK_BYTES",
        help="try tiles of these sizes first (1024 to 8192) and measure with the best",
    )
    args = parser.parse_args()
    record: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    spread, total = kernels.SPREAD_TILE, kernels.SUM_TILE
    if args.tune is not None:
        record["tune"], spread, total = tune(args.tune or [1024, 2048, 4096, 8192])
    record["tiles"] = {"spread": asdict(spread), "sum": asdict(total)}
    print("tiles:", spread, total)
    rows = [measure(case) for case in cases(spread, total)]
    print(f"{'operation':<36}{'GB':>7}{'ms':>8}{'TB/s':>7}{'copy':>7}{'share':>7}{'torch ms':>10}")
    for row in rows:
        print(
            f"{row.operation:<36}{row.gigabytes:>7.2f}{row.ms:>8.3f}{row.tb_per_s:>7.2f}{row.copy_tb_per_s:>7.2f}"
            f"{row.share_of_copy:>7.0%}{row.torch_ms:>10.3f}"
        )
    record["rows"] = [asdict(row) for row in rows]
    record["routing_ms"] = routing_ms()
    print("index arithmetic, ms:", {name: round(ms, 3) for name, ms in record["routing_ms"].items()})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    slow = [row.operation for row in rows if row.share_of_copy < GOAL]
    print("below the goal:", slow or "none")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
