"""What the instruments cost: the same model trained with and without them, in blocks taking turns, in one process.

    python benchmarks/observe_overhead.py                 # a toy on the CPU, 150 s
    python benchmarks/observe_overhead.py --device cuda   # 8 layers of the handbook's model, one GPU, about 150 s

Claims, at the default sampling (every 10th step): less than 1 % of the step, and of a GPU's peak memory.

Real training through the plain entry point with a run directory. Blocks of one sampling interval with everything on
(hooks, the reduction, alarms, the run directory's writer, the process that feeds Trackio) stand beside blocks in which
the hooks return at once and nothing is written, in the order on, off, off, on, so that drift hits both. Each step is
timed with the device waited for at its end, which shows host time that training could hide. The ratio is the sum over
the places of a block of the median step there, over the same sum of the blocks without: one slow step of a crowded
machine moves neither. Its 95 % interval is that of the rounds (on, off, off, on) drawn again with replacement. Every
pair of neighbouring blocks gives a ratio of its own for the spread; the same in the process's CPU seconds. What a
sampled step takes longer is also said by itself: the last step of a block less the median of that block, with the
instruments and without.

Python's full garbage collection takes some 400 ms of one step in fifty here, with and without the instruments. So all
objects are frozen at the end of the warm-up, and a collection that isn't timed ends each block.

On the CPU, where a hook's work is done when the hook returns, the time inside the instruments' calls is also added up
and said as a share of the steps: that resolves what the pairs' spread cannot. Memory: the highest peak of a sampled
step over the highest of one without.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gated_run import be_the_only_rank
from gpu_step import MODEL_ARGS, MOE_ARGS, PRESET_ARGS

RESULTS = Path(__file__).with_name("results")
CPU = """
--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256
--micro-batch-size 2 --global-batch-size 4 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --vocab-size 32000
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
--moe-router-dtype fp32 --no-gradient-accumulation-fusion --use-cpu-initialization
"""
GPU = f"{' '.join([*MODEL_ARGS, *MOE_ARGS, *PRESET_ARGS])} --micro-batch-size 8 --global-batch-size 8 --vocab-size 1000"
BOTH = """
--mock-data --tokenizer-type NullTokenizer --split 100,0,0 --eval-iters 0 --eval-interval 100000 --train-iters 20000
--lr 1e-4 --min-lr 1e-4 --lr-decay-style constant --num-workers 0 --log-interval 1000 --use-distributed-optimizer
"""
LIMIT = 1.01
ORDER = (True, False, False, True)


class Enough(Exception):
    """The time for measuring is over."""


@dataclass
class Block:
    """One sampling interval: whether the instruments were on, and each step's seconds, CPU seconds and peak bytes."""

    on: bool
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


class Stopwatch:
    """Stands in for `hooks.step_end`: closes each step, turns the instruments on and off block by block.

    Args:
        hooks: The module `megatron_ext.runtime.hooks`; its own `step_end` is called in blocks that are on.
        interval: Steps of a block.
        seconds: How long to measure.
    """

    def __init__(self, hooks: Any, interval: int, seconds: float, warm_up: int) -> None:
        self._hooks, self._step_end = hooks, hooks.step_end
        self._interval, self._seconds, self._warm_up = interval, seconds, warm_up
        self.blocks: list[Block] = []
        self.off_probes: list[str] = []
        self._block = Block(on=True)
        self._mark: tuple[float, float] | None = None
        self.inside_s = self.around_s = 0.0
        self._depth = 0
        self._counting = False
        self._end = 0.0

    def step_end(self, iteration: int) -> None:
        """Close a step.

        Raises:
            Enough: The time is over.
        """
        import torch

        if self._block.on:
            self.timed(self._step_end)(iteration)
        torch.cuda.synchronize()
        now = time.perf_counter(), time.process_time()
        if self._mark is not None and iteration > self._warm_up:
            if self._block.on and self._counting:
                self.around_s += now[0] - self._mark[0]
            self._block.wall.append(now[0] - self._mark[0])
            self._block.cpu.append(now[1] - self._mark[1])
            self._block.peaks.append(int(torch.cuda.max_memory_allocated()))
        if iteration % self._interval == 0:
            self._next_block(iteration)
        torch.cuda.reset_peak_memory_stats()
        self._mark = time.perf_counter(), time.process_time()

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its seconds added up, those of a call inside it once."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth and self._mark is not None and self._counting:
                    self.inside_s += time.perf_counter() - begin

        return wrapped

    def _next_block(self, iteration: int) -> None:
        if iteration <= self._warm_up:
            probes = self._hooks._session.monitor._probes
            for probe in probes:
                probe.guarded = self.timed(probe.guarded)
            gc.collect()
            gc.freeze()
            self._end = time.monotonic() + self._seconds
        else:
            self.blocks.append(self._block)
            if time.monotonic() > self._end:
                raise Enough
        gc.collect()
        self._counting = True
        on = ORDER[len(self.blocks) % len(ORDER)]
        self._block = Block(on)
        monitor, writer = self._hooks._session.monitor, self._hooks._session.writer
        if monitor is None:
            raise RuntimeError("the monitor failed and is off: see the log above")
        for probe in monitor._probes:
            if probe.off and self._measured_all_on():
                self.off_probes.append(probe.name)
            probe.off = not on
        # What Megatron writes goes nowhere in a block that is off.
        for name in ("scalars", "samples"):
            setattr(writer, name, self.timed(getattr(type(writer), name).__get__(writer)) if on else lambda *_: None)

    def _measured_all_on(self) -> bool:
        return bool(self.blocks) and self.blocks[-1].on


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, help="how long to measure after the start (default: CPU 150, GPU 100)")
    parser.add_argument("--interval", type=int, default=10, help="sampling interval (default: the monitor's own)")
    parser.add_argument("--warm-up", type=int, help="steps before (default: one interval)")
    parser.add_argument("--flags", default="", help="more Megatron flags, put last")
    parser.add_argument("--json", type=Path, help="figures (default: results/observe_overhead-DEVICE.json)")
    options = parser.parse_args()
    seconds = options.seconds or (100.0 if options.device == "cuda" else 150.0)
    with tempfile.TemporaryDirectory() as folder:
        watch = train(options, seconds, Path(folder))
    result = figures(watch, options)
    show(result)
    target = options.json or RESULTS / f"observe_overhead-{options.device}.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if not name.startswith("places")}))
    return 0 if result["met"] else 1


def train(options: argparse.Namespace, seconds: float, folder: Path) -> Stopwatch:
    """Train until the time is over; return the stopwatch with its blocks."""
    from megatron_ext.runtime import hooks, pretrain

    be_the_only_rank()
    warm_up = options.warm_up or options.interval
    watch = Stopwatch(hooks, options.interval, seconds, warm_up)
    hooks.step_end = watch.step_end  # type: ignore[assignment]
    flags = f"{BOTH} {GPU if options.device == 'cuda' else CPU} --data-cache-path {folder / 'cache'} {options.flags}"
    flags += f" --moe-ext-run-dir {folder / 'run'} --moe-ext-observe-interval {options.interval}"
    with contextlib.suppress(Enough):
        pretrain.train(flags.split(), asked_device=options.device)
    return watch


def figures(watch: Stopwatch, options: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios, times in ms and memory in bytes."""
    on, off = ([block for block in watch.blocks if block.on is which] for which in (True, False))
    if not on or not off:
        raise SystemExit("too few blocks: give more --seconds")
    result: dict[str, Any] = {
        "benchmark": "observe_overhead", "device": options.device, "interval": options.interval,
        "blocks": [len(on), len(off)], "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg(),
    }  # fmt: skip
    rounds = [watch.blocks[at : at + len(ORDER)] for at in range(0, len(watch.blocks), len(ORDER))]
    whole = [blocks for blocks in rounds if len(blocks) == len(ORDER)]
    for clock in ("wall", "cpu"):
        places, without = by_place(on, clock), by_place(off, clock)
        pairs = [
            statistics.fmean(getattr(a, clock)) / statistics.fmean(getattr(b, clock))
            for a, b in (sorted(pair, key=lambda block: not block.on) for pair in pairwise(watch.blocks))
            if a.on is not b.on
        ]
        result[f"{clock}_off_ms"] = 1e3 * statistics.fmean(without)
        result[f"{clock}_on_ms"] = 1e3 * statistics.fmean(places)
        result[f"{clock}_ratio"] = sum(places) / sum(without)
        result[f"{clock}_ratio_95"] = interval_of(whole, clock)
        result[f"{clock}_pairs_quartiles"] = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs
        if clock == "wall":
            result["places_on_ms"] = [1e3 * place for place in places]
            result["places_off_ms"] = [1e3 * place for place in without]
    above = [
        statistics.median(block.wall[-1] - statistics.median(block.wall) for block in blocks) for blocks in (on, off)
    ]
    result["sampled_step_extra_ms"] = 1e3 * (above[0] - above[1])
    if options.device == "cpu":
        result["inside_share"] = watch.inside_s / watch.around_s
    # A block ends with its sampled step.
    peaks = max(block.peaks[-1] for block in on), max(max(block.peaks) for block in off)
    result |= {"peak_bytes_on": peaks[0], "peak_bytes_off": peaks[1], "peak_ratio": peaks[0] / max(peaks[1], 1)}
    result["turned_off"] = sorted(set(watch.off_probes))
    if options.device == "cuda":
        met = result["wall_ratio"] < LIMIT and result["peak_ratio"] < LIMIT
    else:
        met = 1 + result["inside_share"] < LIMIT
    result["met"] = met and not result["turned_off"]
    return result


def by_place(blocks: list[Block], clock: str) -> list[float]:
    """Return the median step at each place of these blocks."""
    return [statistics.median(steps) for steps in zip(*(getattr(block, clock) for block in blocks), strict=True)]


def interval_of(rounds: list[list[Block]], clock: str) -> list[float]:
    """Return the ratio's 2.5 % and 97.5 % points over draws of as many rounds; empty where there are too few rounds."""
    if len(rounds) < 3:
        return []
    draw = random.Random(1)
    ratios = []
    for _ in range(400):
        drawn = [block for one in draw.choices(rounds, k=len(rounds)) for block in one]
        on, off = ([block for block in drawn if block.on is which] for which in (True, False))
        ratios.append(sum(by_place(on, clock)) / sum(by_place(off, clock)))
    cuts = statistics.quantiles(ratios, n=40)
    return [cuts[0], cuts[-1]]


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{'a step':<14}{'off':>12}{'on':>12}{'ratio':>9}   95 % interval; quartiles of the pairs")
    for clock in ("wall", "cpu"):
        spread = "; ".join(
            ", ".join(f"{value:.4f}" for value in result[f"{clock}_{name}"]) for name in ("ratio_95", "pairs_quartiles")
        )
        off, on, ratio = (result[f"{clock}_{name}"] for name in ("off_ms", "on_ms", "ratio"))
        print(f"{clock + ' ms':<14}{off:>12.2f}{on:>12.2f}{ratio:>9.4f}   {spread}")
    print(f"a sampled step takes {result['sampled_step_extra_ms']:.2f} ms longer")
    if result["device"] == "cpu":
        print(f"inside the instruments' calls: {result['inside_share']:.2%} of the steps' time")
    else:
        off, on = result["peak_bytes_off"] / 1e6, result["peak_bytes_on"] / 1e6
        print(f"{'peak MB':<14}{off:>12.0f}{on:>12.0f}{result['peak_ratio']:>9.4f}")
    if result["turned_off"]:
        print(f"probes that turned themselves off: {', '.join(result['turned_off'])}")


if __name__ == "__main__":
    sys.exit(main())
