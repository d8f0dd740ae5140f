"""Claim: a layer's experts in torch's grouped products are faster than Megatron's local experts, one after the other.

    python benchmarks/torch_experts.py [--device cpu|cuda] [--rounds 7] [--out FILE]

Forward and backward of the experts alone (SwiGLU, no biases), the same weights, rows and uneven counts, both kinds
alternating in one process; medians over the rounds, and the quartiles of the ratios. On a GPU the shapes are the
handbook's slice (64 experts of 1,024, hidden 2,048, bf16) at two numbers of rows, weights in one buffer as under the
distributed optimizer, counts on the device; on a CPU small models as one trains there, one
thread. Takes under a minute.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "build" / "megatron")]


@dataclass(frozen=True)
class Shape:
    """Experts, hidden size, their intermediate size, rows, dtype."""

    experts: int
    hidden: int
    ffn: int
    rows: int
    dtype: str


SHAPES = {
    "cuda": (Shape(64, 2048, 1024, 262_144, "bfloat16"), Shape(64, 2048, 1024, 16_384, "bfloat16")),
    "cpu": (
        Shape(8, 64, 128, 512, "float32"),
        Shape(16, 64, 64, 1024, "float32"),
        Shape(8, 128, 256, 1024, "bfloat16"),
        Shape(4, 128, 384, 2048, "float32"),  # examples/moe/quickstart.sh, a rank of two
        Shape(8, 256, 512, 2048, "float32"),
    ),
}


@dataclass(frozen=True)
class Result:
    """Milliseconds of a forward and backward pass, one by one and grouped, and how often the second fits the first."""

    shape: Shape
    one_by_one_ms: float
    grouped_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]


def build(shape: Shape, kind: Any) -> Any:
    """Return the experts on the device."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = getattr(torch, shape.dtype)
    config = TransformerConfig(
        num_layers=1, hidden_size=shape.hidden, ffn_hidden_size=4 * shape.ffn, moe_ffn_hidden_size=shape.ffn,
        num_attention_heads=1, num_moe_experts=shape.experts, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, bias_activation_fusion=True, params_dtype=dtype,
        bf16=dtype == torch.bfloat16, gradient_accumulation_fusion=False,
    )  # fmt: skip
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = kind(shape.experts, config, linears, pg_collection=get_default_pg_collection()).cuda()
    for part in ("linear_fc1", "linear_fc2"):
        weights = [getattr(expert, part).weight for expert in experts.local_experts]
        buffer = torch.stack([weight.detach() for weight in weights])
        for weight, place in zip(weights, buffer.unbind(), strict=True):
            weight.data = place
    return experts


def measure(shape: Shape, rounds: int, device: str) -> Result:
    """Time both kinds in turn."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from megatron_ext.experts.module import TorchGroupedMLP

    kinds = {"one by one": build(shape, SequentialMLP), "grouped": build(shape, TorchGroupedMLP)}
    kinds["grouped"].load_state_dict(kinds["one by one"].state_dict())
    torch.manual_seed(2)
    chance = torch.rand(shape.experts) + 0.2
    counts = torch.multinomial(chance, shape.rows, replacement=True).bincount(minlength=shape.experts).to(device)
    rows = torch.randn(shape.rows, shape.hidden, device=device).to(getattr(torch, shape.dtype)).requires_grad_()
    probs = torch.rand(shape.rows, device=device).requires_grad_()
    back = torch.randn_like(rows)

    def once(experts: Any) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            experts.zero_grad()
            rows.grad = probs.grad = None
            experts(rows, counts, probs)[0].backward(back)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / 3 * 1e3

    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 2):  # the first two load and compile kernels
        for name, experts in kinds.items():
            taken = once(experts)
            if turn >= 2:
                times[name].append(taken)
    ratios = [a / b for a, b in zip(times["one by one"], times["grouped"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    first, second = (statistics.median(values) for values in times.values())
    return Result(shape, first, second, middle, (low, high))


def start(device: str) -> None:
    """One rank with Megatron's groups."""
    if device == "cpu":
        from megatron_ext.runtime import cpu

        cpu.install()
        torch.set_num_threads(1)
    from megatron.core import parallel_state, tensor_parallel

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name = platform.processor() or platform.machine()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"1 thread of {name}"
    start(args.device)
    results = []
    for shape in SHAPES[args.device]:
        result = measure(shape, args.rounds, args.device)
        results.append(result)
        print(f"{shape.experts} experts of {shape.ffn:,}, hidden {shape.hidden:,}, {shape.rows:,} rows, {shape.dtype}: "
              f"one by one {result.one_by_one_ms:.2f} ms, grouped {result.grouped_ms:.2f} ms, ratio {result.ratio:.2f} "
              f"({result.ratio_quartiles[0]:.2f} to {result.ratio_quartiles[1]:.2f})", flush=True)  # fmt: skip
    if args.out:
        record = {"machine": machine, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        args.out.write_text(json.dumps({**record, "results": [asdict(r) for r in results]}, indent=1) + "\n")
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
