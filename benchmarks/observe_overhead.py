"""What the monitor costs: the same model trained with and without it, step pairs in turn, in one process.

    python benchmarks/observe_overhead.py                 # a toy on the CPU
    python benchmarks/observe_overhead.py --device cuda   # 8 layers of the handbook's model, TE grouped GEMM, bf16

Trains real Megatron twice as long as `--steps`: blocks of one sampling interval with the monitor's hooks on alternate
with blocks in which they return at once, so that drift of the machine hits both sides. Prints a table and one line of
JSON: the median block time of each side, their ratio, the spread of the pairs' ratios, and the peak memory that one
sampled step adds (its own peak over that of the step before it).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from typing import Any

CPU = """
--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
--micro-batch-size 2 --global-batch-size 4 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128
"""
GPU = """
--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 4
--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 8 --num-experts 64
--moe-router-topk 8 --moe-ffn-hidden-size 1024 --bf16 --moe-grouped-gemm --moe-permute-fusion
--transformer-impl transformer_engine --recompute-granularity selective --recompute-modules layernorm moe_act
"""
BOTH = """
--mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --split 100,0,0 --eval-iters 0 --eval-interval 1000000
--lr 1e-4 --min-lr 1e-4 --lr-decay-style constant --swiglu --disable-bias-linear --normalization RMSNorm
--position-embedding-type rope --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss
--moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32 --no-gradient-accumulation-fusion --num-workers 0 --log-interval 1000
--use-cpu-initialization
"""
WARM_UP_BLOCKS = 2


class Sink:
    """Takes everything and keeps nothing, so that only the measuring is measured."""

    def scalars(self, step: int, values: Any) -> None:
        """Keep the last values."""
        self.last = dict(values)

    def routing(self, step: int, layers: Any, tokens_per_expert: Any, extra: Any = None) -> None:
        """Drop them."""

    def alarm(self, record: Any) -> None:
        """Drop it."""

    def save_state(self, state: Any) -> None:
        """Drop it."""

    def load_state(self) -> None:
        """Return nothing."""
        return

    def recent(self) -> dict[str, float]:
        """Return nothing."""
        return {}


class Stopwatch:
    """Called at the end of each step: times blocks of `interval` steps, the monitor on in every other one."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.monitor: Any = None
        self.on: list[float] = []
        self.off: list[float] = []
        self.peaks: dict[bool, int] = {True: 0, False: 0}
        self._began = 0.0
        self._measuring = True

    def step_end(self, iteration: int) -> None:
        """Close a step; at the end of a block turn the monitor off or on."""
        import torch

        self._note_peak(torch)
        if self._measuring:
            self.monitor.step_end(iteration)
        if iteration % self.interval:
            return
        torch.cuda.synchronize()
        now = time.perf_counter()
        if self._began and iteration > WARM_UP_BLOCKS * self.interval:
            (self.on if self._measuring else self.off).append(now - self._began)
        self._measuring = not self._measuring
        for probe in self.monitor._probes:
            probe.off = not self._measuring
        # A block ends with its sampled step, as the monitor itself counts.
        self._began = time.perf_counter()

    def _note_peak(self, torch: Any) -> None:
        sampled = self._measuring and self.monitor._run.sampling
        self.peaks[sampled] = max(self.peaks[sampled], int(torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=200, help="steps of each side (default: 200)")
    parser.add_argument("--interval", type=int, default=10, help="sampling interval (default: the monitor's own)")
    parser.add_argument("--flags", default="", help="more Megatron flags, put last")
    parser.add_argument("--json", help="also write the JSON here")
    options = parser.parse_args()
    watch = Stopwatch(options.interval)
    _train(options, watch)
    result = report(watch, options)
    print(json.dumps(result))
    if options.json:
        with open(options.json, "w") as out:
            json.dump(result, out)
    return 0


def _train(options: argparse.Namespace, watch: Stopwatch) -> None:
    from megatron_ext.runtime import hooks, pretrain

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    for name, value in place.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")

    def model_built(model: list[Any], args: Any) -> None:
        from megatron_ext.observe import Monitor

        hooks._session.model_built = True
        watch.monitor = Monitor.from_args(args, Sink())
        watch.monitor.attach(model)

    hooks.model_built = model_built
    hooks.step_end = watch.step_end
    blocks = 2 * (options.steps // options.interval) + WARM_UP_BLOCKS
    flags = f"{BOTH} {GPU if options.device == 'cuda' else CPU} --train-iters {blocks * options.interval}"
    flags += f" --moe-ext-observe-interval {options.interval} {options.flags}"
    words = [word for word in flags.split() if not (options.device == "cuda" and word == "--use-cpu-initialization")]
    pretrain.train(words, asked_device=options.device)


def report(watch: Stopwatch, options: argparse.Namespace) -> dict[str, Any]:
    """Print the table and return the figures; times in ms a step, memory in bytes."""
    pairs = [on / off for on, off in zip(watch.on, watch.off, strict=False)]
    per_step = 1e3 / options.interval
    result = {
        "benchmark": "observe_overhead",
        "device": options.device,
        "interval": options.interval,
        "pairs": len(pairs),
        "off_ms": statistics.median(watch.off) * per_step,
        "on_ms": statistics.median(watch.on) * per_step,
        "ratio_median": statistics.median(pairs),
        "ratio_quartiles": statistics.quantiles(pairs, n=4),
        "peak_bytes_off": watch.peaks[False],
        "peak_bytes_sampled": watch.peaks[True],
    }
    print(f"{'':16}{'off':>12}{'on':>12}{'ratio':>9}   quartiles of the pairs", file=sys.stderr)
    quartiles = ", ".join(f"{value:.4f}" for value in result["ratio_quartiles"])
    row = f"{'ms a step':16}{result['off_ms']:12.2f}{result['on_ms']:12.2f}{result['ratio_median']:9.4f}   {quartiles}"
    print(row, file=sys.stderr)
    ratio = watch.peaks[True] / max(watch.peaks[False], 1)
    print(f"{'peak MB':16}{watch.peaks[False] / 1e6:12.0f}{watch.peaks[True] / 1e6:12.0f}{ratio:9.4f}", file=sys.stderr)
    return result


if __name__ == "__main__":
    sys.exit(main())
