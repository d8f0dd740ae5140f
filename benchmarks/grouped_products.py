"""The experts' grouped matrix products on one GPU: Transformer Engine's three ways and torch's, side by side.

    python benchmarks/grouped_products.py [--rows 262144] [--experts 64] [--hidden 2048] [--ffn 1024] [--json FILE]

Each way computes both layers of a SwiGLU expert (hidden to 2 ffn, ffn to hidden) for all experts, forward and backward
(input gradients, and weight gradients added to an fp32 buffer), with uneven rows an expert. Ways: `streams` (one cuBLAS
call an expert on four streams), `cutlass` (NVTE_USE_CUTLASS_GROUPED_GEMM=1: forward and input gradients in one launch),
`native` (cuBLASLt's own grouped product, counts on the GPU; needs cuBLASLt 13.4 on Hopper), `torch`
(`megatron_ext.experts`). Printed: ms on the GPU by events, median, TFLOP/s, and the host's ms to launch it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
REPEATS = 12
HEADS = ("forward ms", "TFLOP/s", "host ms", "backward ms", "TFLOP/s", "host ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=262144, help="tokens times top-k")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=1024)
    parser.add_argument("--ways", default="streams,cutlass,native,torch")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    import torch
    import transformer_engine.pytorch  # noqa: F401  (puts the next one within reach)
    import transformer_engine_torch as tex
    from gated_run import machine

    result: dict[str, Any] = {**machine("cuda"), "cublaslt": tex.get_cublasLt_version(), "ways": {}}
    print(f"cuBLASLt {result['cublaslt']}, {torch.cuda.get_device_name()}", flush=True)
    print(f"{'way':<9}{'layer':<6}" + (2 * "{:>13}{:>9}{:>9}").format(*HEADS))
    for way in args.ways.split(","):
        try:
            result["ways"][way] = measure(args, way)
        except Exception as error:
            print(f"{way:<9}not to be had: {type(error).__name__}: {str(error)[:300]}", flush=True)
            result["ways"][way] = f"{type(error).__name__}: {error}"
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(args: argparse.Namespace, way: str) -> dict[str, Any]:
    """Return each layer's times; print them."""
    import torch

    os.environ["NVTE_USE_CUTLASS_GROUPED_GEMM"] = str(int(way == "cutlass"))
    os.environ["NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"] = str(int(way == "native"))
    found = {}
    for layer, inputs, outputs in (("fc1", args.hidden, 2 * args.ffn), ("fc2", args.ffn, args.hidden)):
        torch.manual_seed(1)
        counts = torch.randint(1, 100, (args.experts,), device="cuda").double()
        counts = (counts / counts.sum() * 0.5 + 0.5 / args.experts) * args.rows
        counts = counts.long()
        counts[-1] += args.rows - counts.sum()
        call = product(way, args.experts, inputs, outputs, counts)
        rows = torch.randn(args.rows, inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(args.rows, outputs, device="cuda", dtype=torch.bfloat16)
        flops = 2 * args.rows * inputs * outputs
        times = timed(lambda: call(rows), lambda out: out.backward(grad))  # noqa: B023  (called before the next turn)
        found[layer] = times
        (ahead, ahead_host), (back, back_host) = times["forward"], times["backward"]
        print(f"{way:<9}{layer:<6}{ahead:>13.3f}{flops / ahead / 1e9:>9.0f}{ahead_host:>9.2f}{back:>13.3f}"
              f"{2 * flops / back / 1e9:>9.0f}{back_host:>9.2f}", flush=True)  # fmt: skip
    return found


def product(way: str, experts: int, inputs: int, outputs: int, counts: Any) -> Callable[[Any], Any]:
    """Return the call of one layer of all experts: rows [R, inputs] to [R, outputs]."""
    import torch

    if way == "torch":
        from megatron_ext.experts.grouped import grouped_linear

        buffer = torch.randn(experts, outputs, inputs, device="cuda").bfloat16()
        sums = torch.zeros(experts, outputs, inputs, device="cuda")
        weights = [torch.nn.Parameter(buffer[number]) for number in range(experts)]
        for number, weight in enumerate(weights):
            weight.main_grad = sums[number]  # type: ignore[attr-defined]
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        ends = counts.cumsum(0, dtype=torch.int32)
        return lambda rows: grouped_linear(rows, ends, weights, add_to_main_grad=True)
    import transformer_engine.pytorch as te

    layer = te.GroupedLinear(
        experts, inputs, outputs, bias=False, params_dtype=torch.bfloat16, device="cuda", fuse_wgrad_accumulation=True
    )
    for weight in layer.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    splits = counts if way == "native" else counts.tolist()
    return lambda rows: layer(rows, splits, is_first_microbatch=None)


def timed(ahead: Callable[[], Any], back: Callable[[Any], None]) -> dict[str, tuple[float, float]]:
    """Return the median (GPU ms, host ms) of forward and backward, after three warm-ups."""
    import torch

    found: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}
    for turn in range(REPEATS + 3):
        out = None
        for name in found:
            torch.cuda.synchronize()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(20_000_000)  # the launches are queued behind it: the GPU's time, not the host's
            first.record()
            begin = time.perf_counter()
            if name == "forward":
                out = ahead()
            else:
                back(out)
            host = 1e3 * (time.perf_counter() - begin)
            last.record()
            torch.cuda.synchronize()
            if turn >= 3:
                found[name].append((first.elapsed_time(last), host))
    return {
        name: (statistics.median(a for a, _ in values), statistics.median(b for _, b in values))
        for name, values in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
