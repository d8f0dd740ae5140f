"""Claim: what the host does between the last gradient and the first kernel of the optimizer takes a third of the time.

    python benchmarks/optimizer_host.py [--experts 64] [--layers 8] [--out FILE]

The NaN check of the gradients waits for the GPU; then Megatron cuts every parameter's gradient out of its buffer and
asks which ones count in the norm, tensor by tensor, before it launches anything. Patches core/grad-views and
core/norm-members keep the answers. Megatron's distributed optimizer over as many tensors as the handbook's model has
(two an expert), each small, on the CPU, so that only the host's work is timed: with the answers kept, and with them
thrown away before each call, which is upstream's work. The two take turns; ms, median.
"""

# ruff: noqa: E402  (the CPU runtime comes before Megatron)
from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch

from megatron_ext.runtime import cpu

cpu.install()  # before Megatron

from gated_run import machine
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

GOAL = 3.0
TURNS = 30


class Weights(torch.nn.Module):
    """As many small tensors as the model has: two an expert, and about nine a layer besides."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.of_experts = torch.nn.ParameterList(torch.ones(8, 8).bfloat16() for _ in range(2 * layers * experts))
        self.others = torch.nn.ParameterList(torch.ones(8, 8).bfloat16() for _ in range(9 * layers + 3))
        for weight in self.of_experts:
            weight.allreduce = False  # type: ignore[attr-defined]


def make_optimizer(layers: int, experts: int) -> tuple[Any, int]:
    """Return Megatron's optimizer with gradients in place, and the number of its tensors."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=2)
    model = DistributedDataParallel(config, ddp, Weights(layers, experts))
    options = OptimizerConfig(
        optimizer="adam", lr=0.1, clip_grad=1.0, use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16
    )
    return get_megatron_optimizer(options, [model]), len(list(model.parameters()))


def host_ms(optimizer: Any, *, kept: bool) -> float:
    """Return the ms of one preparation and of the choice of gradients for the norm."""
    optimizer.zero_grad()
    if not kept:
        for part in optimizer.chained_optimizers:
            part.main_grad_views.clear()
            vars(part).get("norm_members", {}).clear()
    begin = time.perf_counter()
    optimizer.prepare_grads()
    for part in optimizer.chained_optimizers:
        part.get_grads_for_grad_norm()
    return (time.perf_counter() - begin) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        optimizer, tensors = make_optimizer(args.layers, args.experts)
        ways: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(TURNS + 2):
            for kept, samples in ways.items():
                # Twice where the answers are to be there: the other way has just thrown them away.
                took = [host_ms(optimizer, kept=kept) for _ in range(2 if kept else 1)][-1]
                samples.extend([took] if turn >= 2 else [])
        torch.distributed.destroy_process_group()
    with_ms, without_ms = statistics.median(ways[True]), statistics.median(ways[False])
    ratio = without_ms / with_ms
    print(f"{tensors} tensors: {without_ms:.2f} ms asked anew, {with_ms:.2f} ms kept: {ratio:.2f} times (goal {GOAL})")
    if args.out:
        record = {**machine("cpu"), "tensors": tensors, "anew_ms": without_ms, "kept_ms": with_ms, "ratio": ratio}
        args.out.write_text(json.dumps({**record, "turns": TURNS}, indent=1) + "\n")
    return 0 if ratio >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
