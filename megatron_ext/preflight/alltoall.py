"""All-to-all over torch.distributed, where nccl-tests is not at hand: NCCL on GPUs, gloo on the CPU.

Every rank runs `measure` under torchrun (or srun with torchrun's variables). Each element tells which rank it comes
from, which rank it is for and its place, so a wrong one is counted, not averaged away. Nodes are also measured pair by
pair, and their clocks compared.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.data.files import write_json
from megatron_ext.errors import UserError
from megatron_ext.preflight.measurement import Measurement, settings_of
from megatron_ext.preflight.node import node_name
from megatron_ext.preflight.pairs import Pair, rounds_of_pairs

WARMUP = 5
CLOCK_ROUNDS = 8
TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class AllToAllOptions:
    """What to measure.

    Args:
        out: Directory for `alltoall.json` and the NCCL logs.
        size_bytes: Send buffer of one rank; 0 for 8 GiB on GPUs, as the baselines have it, and 16 MiB on the CPU.
        iterations: Timed repetitions (default 20, as nccl-tests).
        device: "cuda", "cpu" or "auto".
        pairs: Measure the nodes pair by pair as well.
    """

    out: Path
    size_bytes: int = 0
    iterations: int = 20
    device: str = "auto"
    pairs: bool = False


def measure(options: AllToAllOptions) -> None:
    """Measure with all ranks; rank 0 writes `alltoall.json`.

    Raises:
        UserError: Not started by a launcher, or a GPU was asked for where there is none.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UserError(
            "the all-to-all needs a launcher", where="RANK and WORLD_SIZE are not set", exit_code=64,
            remedy="torchrun --nproc-per-node 8 --no-python megatron-moe preflight alltoall --out DIR",
        )  # fmt: skip
    device = _device(options.device)
    log = options.out / "nccl" / f"rank-{int(os.environ['RANK']):05d}.log"
    if device.type == "cuda":
        log.parent.mkdir(parents=True, exist_ok=True)
        os.environ.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)})
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        nodes = _gather(node_name())
        size = options.size_bytes or (8 << 30 if device.type == "cuda" else 16 << 20)
        found = _measure_all(nodes, size, options.iterations, device)
        pairs = _measure_pairs(nodes, size, options.iterations, device) if options.pairs else []
        clocks = _clock_offsets(nodes)
        if dist.get_rank() == 0:
            plain = {"measurement": found.to_plain(), "ranks": nodes, "pairs": pairs, "clock_offsets_s": clocks}
            write_json(options.out / "alltoall.json", plain)
    finally:
        dist.destroy_process_group()


def wrong_elements(received: torch.Tensor, senders: Sequence[int], me: int) -> int:
    """Count elements of `received` (int32, one equal chunk a sender) that are not what the sender meant for `me`."""
    chunk = received.numel() // len(senders)
    wrong = 0
    for place, sender in enumerate(senders):
        expected = _pattern(sender, me, chunk, received.device)
        wrong += int((received[place * chunk : (place + 1) * chunk] != expected).sum())
    return wrong


def _pattern(sender: int, receiver: int, length: int, device: torch.device) -> torch.Tensor:
    start = (sender * 7919 + receiver * 104729) % 1_000_003
    return torch.arange(start, start + length, dtype=torch.int32, device=device)


def _device(asked: str) -> torch.device:
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("no GPU is visible", where="--device cuda", remedy="check --gres, or use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _measure_all(nodes: list[str], size: int, iterations: int, device: torch.device) -> Measurement:
    ranks = list(range(dist.get_world_size()))
    gbps, wrong, used = _exchange(ranks, None, size, iterations, device)
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        versions["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        versions["gpu"] = torch.cuda.get_device_name(device)
    return Measurement(
        tool="torch-nccl" if device.type == "cuda" else "torch-gloo",
        node_list=tuple(dict.fromkeys(nodes)),
        ranks=len(ranks),
        size_bytes=used,
        column="out of place",
        busbw_gbps=gbps,
        wrong=wrong,
        iterations=iterations,
        versions=versions,
        settings=settings_of(os.environ),
        taken_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _exchange(ranks: list[int], group: Any, size: int, iterations: int, device: torch.device) -> tuple[float, int, int]:
    """Return bus bandwidth in GB/s (slowest rank), wrong elements (all ranks), and bytes of one rank's buffer."""
    me, count = dist.get_rank(), len(ranks)
    chunk = max(size // 4 // count, 1)
    sent = torch.cat([_pattern(me, receiver, chunk, device) for receiver in ranks])
    received = torch.zeros_like(sent)
    for _ in range(WARMUP):
        dist.all_to_all_single(received, sent, group=group)
    received.zero_()
    _settle(device, group)
    start = time.monotonic()
    for _ in range(iterations):
        dist.all_to_all_single(received, sent, group=group)
    _wait(device)
    seconds = (time.monotonic() - start) / iterations
    totals = torch.tensor([seconds, float(wrong_elements(received, ranks, me))], dtype=torch.float64, device=device)
    dist.all_reduce(totals[:1], op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(totals[1:], op=dist.ReduceOp.SUM, group=group)
    used = sent.numel() * 4
    # nccl-tests' PERFORMANCE.md: bus bandwidth of all-to-all is buffer / time x (n - 1) / n.
    return used / float(totals[0]) / 1e9 * (count - 1) / count, int(totals[1]), used


def _measure_pairs(nodes: list[str], size: int, iterations: int, device: torch.device) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(nodes))
    ranks_of = [[rank for rank, node in enumerate(nodes) if node == name] for name in names]
    mine: dict[Pair, tuple[float, int]] = {}
    for round_of_pairs in rounds_of_pairs(len(names)):
        # Every rank takes part in making every group; then only a pair's own ranks exchange.
        for a, b in round_of_pairs:
            ranks = ranks_of[a] + ranks_of[b]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                gbps, wrong, _ = _exchange(ranks, group, size, iterations, device)
                mine[a, b] = (gbps, wrong)
        dist.barrier()
    merged: dict[Pair, tuple[float, int]] = {}
    for part in _gather(mine):
        merged.update(part)
    return [{"nodes": [a, b], "busbw_gbps": gbps, "wrong": wrong} for (a, b), (gbps, wrong) in sorted(merged.items())]


def _clock_offsets(nodes: list[str]) -> dict[str, float]:
    """Return each node's clock minus rank 0's, in seconds: the round trip with the least delay counts (as NTP's)."""
    first = {name: nodes.index(name) for name in dict.fromkeys(nodes)}
    offsets: dict[str, float] = {nodes[0]: 0.0}
    for name, rank in first.items():
        if rank == 0:
            continue
        if dist.get_rank() == 0:
            offsets[name] = min(_ask_clock(rank) for _ in range(CLOCK_ROUNDS))[1]
        elif dist.get_rank() == rank:
            for _ in range(CLOCK_ROUNDS):
                _tell_clock()
        dist.barrier()
    return offsets


def _ask_clock(rank: int) -> tuple[float, float]:
    sent, answer = time.time(), torch.zeros(1, dtype=torch.float64)
    dist.send(torch.zeros(1, dtype=torch.float64), rank)
    dist.recv(answer, rank)
    received = time.time()
    return received - sent, float(answer) - (sent + received) / 2


def _tell_clock() -> None:
    question = torch.zeros(1, dtype=torch.float64)
    dist.recv(question, 0)
    dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)


def _gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _settle(device: torch.device, group: Any) -> None:
    _wait(device)
    dist.barrier(group=group)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
