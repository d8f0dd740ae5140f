"""Where a step's time goes on one GPU: time by kind, the idle rest, and the host calls that wait for the GPU.

    python benchmarks/gpu_profile.py --data MANIFEST [--micro-batch 8] [--flags "--moe-ext-preset hopper"] [--json FILE]

Trains the slice of `gpu_step.py` in this process, profiles one step after the warm-up with torch's profiler and reads
the trace with `megatron_ext.trace`. Idle is the time of the step that no kernel and no copy covers; the profiler itself
lengthens it a little, so compare profiles with each other, and steps with `gpu_step.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gated_run import be_the_only_rank, machine
from gpu_step import MODEL_ARGS, MOE_ARGS, PRESET_ARGS, TRAIN_ARGS


class Enough(Exception):
    """The step has been profiled."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="manifest.json of `megatron-moe tokenize`")
    parser.add_argument("--flags", default=" ".join([*MOE_ARGS, *PRESET_ARGS]), help="of the model and the preset")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--step", type=int, default=5, help="the step to profile")
    parser.add_argument("--top", type=int, default=24, help="kernels to print")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="keep the trace, for `megatron-moe trace FILE`")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = profile(args, Path(folder))
    result = {**machine("cuda"), "micro_batch": args.micro_batch, "flags": args.flags, **figures}
    show(result, args.top)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def profile(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train up to the step, profile it, return the figures."""
    import torch
    from torch.profiler import ProfilerActivity

    from megatron_ext.runtime import hooks, pretrain

    be_the_only_rank()
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    stock = hooks.step_end

    def step_end(iteration: int) -> None:
        stock(iteration)
        if iteration == args.step - 1:
            torch.cuda.synchronize()
            profiler.start()
        elif iteration == args.step:
            torch.cuda.synchronize()
            profiler.stop()
            raise Enough

    hooks.step_end = step_end
    data = args.data.parent
    with contextlib.suppress(Enough):
        pretrain.train(
            [
                *MODEL_ARGS, *TRAIN_ARGS, *args.flags.split(),
                "--micro-batch-size", str(args.micro_batch), "--global-batch-size", str(args.global_batch),
                "--train-iters", str(args.step + 1),
                "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data / "tokenizer"),
                "--per-split-data-args-path", str(data / "blend.json"), "--data-cache-path", str(folder / "cache"),
            ],
            asked_device="cuda",
        )  # fmt: skip
    path = args.trace or folder / "rank-0.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return figures_of(path)


def figures_of(path: Path) -> dict[str, Any]:
    """Return kernel time by kind and by name, and idle time, all in ms; waits of the host by call and place."""
    from megatron_ext.trace import read_trace, summarize, work_of

    trace = read_trace(path)
    found = summarize(trace, work_of(trace))
    pairs = {f"{pair.before} -> {pair.after}": [pair.total_ns / 1e6, pair.count] for pair in found.pairs[:40]}
    waits = {f"{w.call} in {w.place}": [w.total_ns / 1e6, w.count] for w in found.waits}
    kernels = {kernel.name: [kernel.total_ns / 1e6, kernel.count] for kernel in found.names}
    return {
        "span_ms": found.span_ns / 1e6,
        "idle_ms": found.idle_ns / 1e6,
        "idle_after_wait_ms": found.idle_after_wait_ns / 1e6,
        "gaps_ms": pairs,
        "kernels": sum(kernel.count for kernel in found.names),
        "kinds_ms": {row.kind: row.span_ns / 1e6 for row in sorted(found.rows, key=lambda row: -row.span_ns)},
        "kernels_ms": kernels,
        "host_waits_ms": waits,
    }


def show(result: dict[str, Any], top: int) -> None:
    """Print the table."""
    span = result["span_ms"]
    print(f"step {span:.0f} ms, {result['kernels']} kernels, idle {result['idle_ms']:.1f} ms "
          f"({result['idle_ms'] / span:.1%})")  # fmt: skip
    for name, (took, count) in list(result["gaps_ms"].items())[:14]:
        print(f"  idle {took:>7.1f} ms {count:>5} x {name}")
    for kind, took in result["kinds_ms"].items():
        print(f"  {kind:<16}{took:>9.1f} ms {took / span:>7.1%}")
    for name, (took, count) in list(result["kernels_ms"].items())[:top]:
        print(f"  {took:>9.1f} ms {count:>6} x {name[:110]}")
    for name, (took, count) in result["host_waits_ms"].items():
        print(f"  host in {name}: {took:.1f} ms, {count} times")


if __name__ == "__main__":
    sys.exit(main())
