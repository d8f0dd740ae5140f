"""Where a step's time goes on one GPU: kernel time by kind, the idle rest, and the host calls that wait for the GPU.

    python benchmarks/gpu_profile.py --data MANIFEST [--micro-batch 8] [--flags "--moe-ext-preset hopper"] [--json FILE]

Trains the slice of `gpu_step.py` in this process and profiles one step after the warm-up with torch's profiler. Idle is
the time of the step that no kernel and no copy covers; the profiler itself lengthens it a little, so compare profiles
with each other, and steps with `gpu_step.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from gated_run import be_the_only_rank, machine
from gpu_step import MODEL_ARGS, MOE_ARGS, PRESET_ARGS, TRAIN_ARGS

# The first pattern that a kernel's name matches gives its kind.
KINDS = (
    ("grouped GEMM", r"[Gg]roup(ed|Problem)|GroupGEMM|grouped_mm"),
    ("GEMM", r"nvjet|gemm|cutlass|gemv|xmma|cublas"),
    ("attention", r"fmha|flash|attention|cudnn"),
    ("optimizer", r"multi_tensor|adam|l2norm|MultiTensor"),
    ("loss", r"cross_entropy|log_softmax|nll"),
    ("activation", r"silu|swiglu|sigmoid"),
    ("permute", r"permute|sort_chunks|row_id_map"),
    ("router", r"topk|router|fused_score|aux_loss|moe_"),
    ("norm, rope", r"rmsnorm|layernorm|rope|norm_"),
    ("copy, fill", r"Memcpy|Memset|copy|fill|Fill|Copy|cast"),
)


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
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True)
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
    return summarize(profiler.events())


def summarize(events: Any) -> dict[str, Any]:
    """Return kernel time by kind and by name, and idle time, all in ms; waits of the host by call."""
    from torch.autograd import DeviceType

    device = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in device)
    busy, reached, last = 0.0, spans[0][0], ""
    gaps: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for start, end, name in spans:
        if start > reached:
            gap = gaps[f"{_short(last)} -> {_short(name)}"]
            gap[0] += (start - reached) / 1e3
            gap[1] += 1
        busy += max(0.0, end - max(start, reached))
        if end > reached:
            reached, last = end, name
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in device:
        took = event.time_range.elapsed_us() / 1e3
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, event.name)), "other")
        kinds[kind] += took
        kernels[event.name][0] += took
        kernels[event.name][1] += 1
    waits: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        if event.device_type == DeviceType.CPU and "Synchronize" in event.name:
            waits[event.name][0] += event.time_range.elapsed_us() / 1e3
            waits[event.name][1] += 1
    span = reached - spans[0][0]
    return {
        "span_ms": span / 1e3,
        "idle_ms": (span - busy) / 1e3,
        "gaps_ms": dict(sorted(gaps.items(), key=lambda item: -item[1][0])[:40]),
        "kernels": len(device),
        "kinds_ms": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "kernels_ms": dict(sorted(((name, value) for name, value in kernels.items()), key=lambda item: -item[1][0])),
        "host_waits_ms": dict(waits),
    }


def _short(name: str) -> str:
    """Return what tells a kernel from the others in at most 44 characters."""
    words = re.findall(r"[A-Za-z_]\w{5,}", re.sub(r"\b(void|at|native|anonymous namespace|std|array)\b", "", name))
    return " ".join(words)[:44] or name[:44]


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
