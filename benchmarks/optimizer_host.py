"""Claim: what the host does between the last gradient and the Adam kernel takes a quarter of the time.

    python benchmarks/optimizer_host.py [--experts 64] [--layers 8] [--out FILE]

The NaN check of the gradients waits for the GPU; what the host does from there on, tensor by tensor, the GPU waits for.
Megatron's own `step` of the distributed optimizer with `--moe-ext-adam fused`, over as many tensors as the handbook's
model has (two an expert), each small: with what was kept of the step before, and with it thrown away before each step.
The two take turns; ms, median, by part:

- gradients: `prepare_grads`, from a step's start;
- norm: from there to the norm's kernel;
- clip: from there to the step of the optimizers;
- step: from there to the last Adam kernel (one a parameter group).

On the CPU, so that only the host's work is timed. Stand-ins that do nothing take the place of the two kernels and of
the choice of a device: the CPU runtime, which Megatron is built under here, watches every torch call and would take
longer than the work itself. torch's AdamW passes for Transformer Engine's, which a GPU has: that one counts its steps
once a group, not in a tensor a parameter. One optimizer has all parameters, as without expert parallelism.
"""

# ruff: noqa: E402  (the CPU runtime comes before Megatron)
from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

os.environ["TRITON_INTERPRET"] = "1"  # read when it is imported

import torch

from megatron_ext.runtime import cpu

cpu.install()  # before Megatron

from gated_run import machine
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, clip_grads, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.fused.adam_kernels import Addresses
from megatron_ext.runtime import adam, kept_grads

GOAL = 4.0
TURNS = 30
PARTS = ("gradients", "norm", "clip", "step")


class Weights(torch.nn.Module):
    """As many small tensors as the model has: two an expert, and about nine a layer besides."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self.of_experts = torch.nn.ParameterList(torch.ones(8, 8).bfloat16() for _ in range(2 * layers * experts))
        self.others = torch.nn.ParameterList(torch.ones(8, 8).bfloat16() for _ in range(9 * layers + 3))


def make_optimizer(layers: int, experts: int) -> tuple[Any, int]:
    """Return Megatron's optimizer with gradients in place, and the number of its tensors."""
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=2)
    model = DistributedDataParallel(config, ddp, Weights(layers, experts))
    options = OptimizerConfig(
        optimizer="adam", lr=0.1, clip_grad=1.0, use_distributed_optimizer=True, bf16=True, params_dtype=torch.bfloat16
    )
    return get_megatron_optimizer(options, [model]), len(list(model.parameters()))


class FusedAdam(torch.optim.AdamW):
    """Stands for Transformer Engine's, which needs a GPU; counts as that does and takes no step."""

    __module__ = "transformer_engine.stand_in"
    adam_w_mode = True

    @classmethod
    def take_place(cls, inner: torch.optim.Optimizer) -> None:
        """Become this optimizer, which has taken a step."""
        inner.__class__ = cls
        for group in inner.param_groups:
            group["step"] = 1
            for param in group["params"]:
                del inner.state[param]["step"]


class Marks:
    """Megatron's optimizer without its kernels, and the times at which its step passes from part to part."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.times: list[float] = []
        Addresses.adamw = lambda *_: self._pass()  # type: ignore[method-assign]
        optimizer.step()  # the fused step attaches itself; the clip is still upstream's
        zeros = torch.zeros
        torch.zeros = lambda *args, **options: zeros(*args, dtype=options["dtype"])  # type: ignore[assignment]
        clip_grads.l2_norm_impl = self._norm
        clip_grads.multi_tensor_scale_tensor_impl = self._unexpected  # there: the norm stays a tensor, as on a GPU
        for name, before in (("prepare_grads", False), ("step_with_ready_grads", True)):
            setattr(optimizer, name, self._passing(getattr(optimizer, name), before=before))

    def _pass(self) -> None:
        self.times.append(time.perf_counter())

    def _passing(self, function: Callable[[], Any], *, before: bool) -> Callable[[], Any]:
        def passing() -> Any:
            if before:
                self._pass()
            result = function()
            if not before:
                self._pass()
            return result

        return passing

    def _norm(self, *_: Any) -> tuple[torch.Tensor, None]:
        self._pass()
        return torch.ones(1), None

    def _unexpected(self, *_: Any) -> None:
        raise RuntimeError("the gradients were scaled: the step was not the fused one")

    def step(self, *, kept: bool) -> list[float]:
        """Take a step; return the ms of each part."""
        self.optimizer.zero_grad()
        if not kept:
            forget(self.optimizer)
        self.times.clear()
        with torch._C.DisableTorchFunction():
            self._pass()
            self.optimizer.step()
        assert len(self.times) > len(PARTS), "the step was not the fused one"
        times = [*self.times[: len(PARTS)], self.times[-1]]
        return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]


def forget(optimizer: Any) -> None:
    """Throw away what was kept of the step before."""
    for part in optimizer.chained_optimizers:
        kept_grads.forget(part)
        adam.forget_addresses(part)


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
        os.environ["MOE_EXT_ADAM"] = "megatron"
        optimizer.step()  # upstream's, which makes the state
        os.environ["MOE_EXT_ADAM"] = "fused"
        for part in optimizer.chained_optimizers:
            FusedAdam.take_place(part.optimizer)
        marks = Marks(optimizer)
        ways: dict[bool, list[list[float]]] = {True: [], False: []}
        for turn in range(TURNS + 2):
            for kept, samples in ways.items():
                # Twice where something is to be kept: the other way has just thrown it away.
                took = [marks.step(kept=kept) for _ in range(2 if kept else 1)][-1]
                samples.extend([took] if turn >= 2 else [])
        torch.distributed.destroy_process_group()
    anew, held = (medians(ways[kept]) for kept in (False, True))
    ratio = anew["all"] / held["all"]
    for name, ms in anew.items():
        print(f"{name:10} {ms:7.2f} ms anew {held[name]:7.2f} ms kept")
    print(f"{tensors} tensors: {ratio:.2f} times (goal {GOAL})")
    if args.out:
        record = {**machine("cpu"), "tensors": tensors, "anew_ms": anew, "kept_ms": held, "ratio": ratio}
        args.out.write_text(json.dumps({**record, "turns": TURNS}, indent=1) + "\n")
    return 0 if ratio >= GOAL else 1


def medians(steps: list[list[float]]) -> dict[str, float]:
    """Return the ms of each part, and of all together."""
    parts = {name: statistics.median(column) for name, column in zip(PARTS, zip(*steps, strict=True), strict=True)}
    return {**parts, "all": statistics.median(map(sum, steps))}


if __name__ == "__main__":
    sys.exit(main())
