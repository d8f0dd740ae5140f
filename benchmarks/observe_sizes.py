"""How large a long run's record gets, and how fast it opens: 10,000 steps, 64 MoE layers, 512 experts.

Usage: .venv/bin/python benchmarks/observe_sizes.py [--per-layer] [--json FILE] [--keep DIR]
Targets: Trackio's folder under 200 MB, the report under 3 MB and drawn within 3 s, `health` within 2 s.

No training: made-up sums of such a model, as 64 ranks would reduce them, go through the real publisher (metrics,
alarms, thinning), the real RunWriter and its process that feeds Trackio; Megatron's own scalars come beside them on
every step. Then the real commands run, and a real Chromium opens the page. With `--per-layer` Megatron logs its losses
by layer as well (`--moe-per-layer-logging`), which is most of the file then. Times are wall seconds of whole processes.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ext" / "report")]

TARGETS = {
    "Trackio's folder, MB": 200.0,
    "report file, MB": 3.0,
    "report opens, s": 3.0,
    "health answers, s": 2.0,
}
INTERVAL = 10
TOPK, TOKENS, EP, EDP, MICRO_BATCHES = 8, 2**21, 8, 8, 8
# What Megatron writes a step beside the losses by layer: its tags with --log-timers-to-tensorboard and memory.
TAGS = (
    "lm loss", "load_balancing_loss", "z_loss", "grad-norm", "num-zeros", "params-norm", "learning-rate", "batch-size",
    "loss-scale", "world-size", "iteration-time", "throughput", "forward-backward-time", "forward-compute-time",
    "backward-compute-time", "all-grads-sync-time", "params-all-gather-time", "optimizer-time",
    "optimizer-inner-step-time", "optimizer-clip-main-grad-time", "batch-generator-time", "mem-reserved-bytes",
    "mem-allocated-bytes", "mem-max-allocated-bytes", "mem-allocated-count",
)  # fmt: skip


class Sums:
    """Made-up sums of one sampled step after another; one layer's router slowly collapses, the rest is even."""

    def __init__(self, layers: int, experts: int) -> None:
        import torch

        from megatron_ext.observe.probes import PROBES
        from megatron_ext.observe.store import Shape, Store
        from megatron_ext.observe.topology import Topology

        place = Topology(torch.device("cpu"), world=EP * EDP, ep_size=EP, edp_size=EDP)
        self.store = Store(Shape(layers, experts, MICRO_BATCHES, 2, len(PROBES)), place)
        self._rng = np.random.default_rng(5)
        self._layers, self._experts = layers, experts

    def at(self, share_of_run: float) -> np.ndarray:
        """Return the packed vector of a step, float64."""
        store, rng, layers = self.store, self._rng, self._layers
        store.clear()
        ints = {name: field.numpy() for name, field in store.ints.items()}
        floats = {name: field.numpy() for name, field in store.floats.items()}
        p = np.clip(1.0 + 0.2 * rng.standard_normal((layers, self._experts)), 0.02, None)
        p[layers // 3, :8] += 60.0 * share_of_run
        p /= p.sum(-1, keepdims=True)
        counts = (p * TOPK * TOKENS).astype(np.int64)
        counts[:, 0] += TOPK * TOKENS - counts.sum(-1)
        ints["step_counts"][:] = counts
        ints["window_counts"][:] = 9 * counts
        ints["tokens"][:] = TOKENS
        ints["source_counts"][:, 0] = counts // 3
        ints["source_counts"][:, 1] = counts - counts // 3
        load = counts.reshape(layers, EP, -1)
        pair = np.stack([load.max(-1), load.sum(-1)], -1).swapaxes(0, 1)
        ints["micro"][:] = pair[None, :, None] // (EDP * MICRO_BATCHES)
        ints["memory"][:] = 70 * 2**30 + rng.integers(0, 2**30, EP * EDP)
        noise = 1.0 + 0.01 * rng.standard_normal(layers)
        entropy = 0.9 * noise
        floats["logits"][:] = np.stack([np.ones(layers), 40.0 * noise, entropy], -1) * TOKENS
        floats["flips"][:] = np.stack([np.ones(layers), 0 * noise, 0 * noise, 0.02 * noise, 0 * noise], -1) * TOKENS
        floats["weights"][:] = np.stack([np.ones(layers), entropy, 0.3 * noise, np.ones(layers), 1.4 * noise,
                                         0.4 * noise, 0.17 * noise], -1) * TOKENS  # fmt: skip
        floats["probabilities"][:] = p * TOKENS
        floats["experts"][:, 0] = counts
        floats["experts"][:, 1] = counts * np.square(1.0 + 0.1 * rng.standard_normal(counts.shape))
        for name, size in (("shared", 1.0), ("routed", 0.8)):
            floats[name][:] = np.stack([np.ones(layers), size * noise], -1) * TOKENS
        return np.asarray(store.packed().numpy())


def write_run(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Write the run directory and Trackio's database; return what that took in seconds."""
    from megatron_ext.observe.options import AlarmOptions, ObserveOptions
    from megatron_ext.observe.publish import Publisher
    from megatron_ext.observe.sample import Facts
    from megatron_ext.tracking import RunWriter

    args = argparse.Namespace(
        moe_ext_run_dir=str(folder / "large"), rank=0, world_size=1, iteration=0, seq_length=4096,
        global_batch_size=512, num_experts=options.experts, moe_router_topk=TOPK, num_layers=options.layers,
    )  # fmt: skip
    writer = RunWriter.from_args(args, {})
    assert writer is not None
    sums = Sums(options.layers, options.experts)
    publisher = Publisher(
        options=ObserveOptions(interval=INTERVAL), alarms=AlarmOptions(), sink=writer,
        layers=tuple(range(options.layers)), facts=Facts(TOPK, sources=("prose", "code")), store=sums.store,
    )  # fmt: skip
    rng = np.random.default_rng(7)
    begin, publishing = time.perf_counter(), 0.0
    for step in range(1, options.steps + 1):
        loss = 2.0 + 8.0 * np.exp(-5.0 * step / options.steps) + 0.01 * rng.standard_normal()
        values = dict(zip(TAGS, [loss, *(1.0 + 0.1 * rng.random(len(TAGS) - 1))], strict=True))
        if options.per_layer:
            for name in ("load_balancing_loss", "z_loss"):
                each = enumerate(rng.random(options.layers).tolist())
                values |= {f"moe/{name}_layer_{layer}": value for layer, value in each}
        writer.scalars(step, values)
        writer.samples(step, 512 * step)
        publisher.note_loss(step)
        if step % INTERVAL == 0:
            packed = sums.at(step / options.steps)
            before = time.perf_counter()
            publisher.take(step, packed, {"step/step_time": 1.0, "step/tokens_per_s": float(TOKENS)})
            publishing += time.perf_counter() - before
        while writer._queue.qsize() > 500:
            # A real step takes longer than writing its row; here the writer has to be waited for.
            time.sleep(0.005)
    written = time.perf_counter()
    writer.close()
    return {
        "writing_s": written - begin,
        "publish_ms_a_sample": 1e3 * publishing / (options.steps // INTERVAL),
        "close_s": time.perf_counter() - written,
    }


def size_mb(path: Path) -> float:
    """Return a file's or a folder's size in MB."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def timed(*words: str, codes: tuple[int, ...] = (0,)) -> float:
    """Run `megatron-moe` as a process; return its wall seconds."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "megatron_ext.cli", *words], cwd=ROOT, capture_output=True, text=True)
    took = time.perf_counter() - begin
    assert done.returncode in codes, done.stdout[-2000:] + done.stderr[-2000:]
    return took


def opening(page: Path, profile: Path, repeat: int) -> list[float] | None:
    """Return seconds from the address to the first drawn chart, each in a fresh Chromium; None where there is none."""
    from browser import Browser, find_chromium

    if find_chromium() is None:
        return None
    times = []
    for number in range(repeat):
        with Browser(profile / str(number)) as browser:
            browser.look(1280, 900)
            begin = time.perf_counter()
            browser.open(page)
            browser.wait("document.querySelector('#loss .chart').childElementCount > 0")
            times.append(time.perf_counter() - begin)
            browser.draw_all()
            assert browser.errors == [], browser.errors
    return times


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the run, then measure; return the figures."""
    from megatron_ext.tracking.rundir import read_run

    wrote = write_run(folder, options)
    run, page = folder / "large", folder / "report.html"
    database = folder / "trackio" / "megatron-moe.db"
    with sqlite3.connect(database) as connection:
        (rows,) = connection.execute("SELECT count(DISTINCT step) FROM metrics").fetchone()
    health = [timed("health", str(run), codes=(0, 1)) for _ in range(options.repeat)]
    making = [timed("report", str(run), "-o", str(page)) for _ in range(options.repeat)]
    opens = opening(page, folder / "profile", options.repeat)
    figures = {
        "Trackio's folder, MB": size_mb(folder / "trackio"),
        "report file, MB": size_mb(page),
        "report opens, s": statistics.median(opens) if opens else None,
        "health answers, s": statistics.median(health),
        "report is made, s": statistics.median(making),
    }
    return {
        "benchmark": "observe_sizes",
        "steps": options.steps, "layers": options.layers, "experts": options.experts, "per_layer": options.per_layer,
        "figures": figures, "targets": TARGETS,
        "met": all(figures[name] is not None and figures[name] <= limit for name, limit in TARGETS.items()),
        "rows": len(read_run(run, routing=False).rows), "trackio_steps": rows,
        "spread": {"health_s": health, "report_s": making, "opens_s": opens},
        "files_mb": {file.name: size_mb(file) for file in sorted(run.glob("*.json*"))},
        "wrote": wrote, "cpu_count": os.cpu_count(), "load": os.getloadavg(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--per-layer", action="store_true", help="as with Megatron's --moe-per-layer-logging")
    parser.add_argument("--repeat", type=int, default=3, help="times that each command and the page are timed")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the run here and keep it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(options.keep or Path(temporary), options)
    print(f"{'what':<26}{'value':>9}{'target':>9}")
    for name, value in result["figures"].items():
        shown = "-" if value is None else f"{value:.2f}"
        print(f"{name:<26}{shown:>9}{TARGETS.get(name, '-'):>9}")
    print(", ".join(f"{name} {size:.1f} MB" for name, size in result["files_mb"].items()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
