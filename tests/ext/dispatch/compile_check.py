"""Compile every kernel of the dispatch for an H200 (sm_90) as its callers launch it, without a GPU.

    python compile_check.py [quick | rows]        (quick: three shapes; rows: one shape, other numbers of rows)

Prints each kernel with how many different ones its shapes make.

The callers run on CPU tensors under a driver that names an sm_90 GPU and launches nothing; Triton then specializes and
compiles as it would there, down to the machine code. What they compute is not looked at (`kernel_check.py` does).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from megatron_ext.dispatch import choice_kernels, kernels, routing, routing_kernels, weight_kernels, wire_kernels
from megatron_ext.dispatch.layout import Layout
from megatron_ext.dispatch.wire import RowFormat

SHAPES = ((1, 1, 1), (2, 1, 3), (8, 2, 8), (64, 2, 8), (48, 2, 6), (1024, 16, 8), (40_000, 8, 4))  # E, W, K
TOKENS = (1, 33, 4096)
QUICK = ((1, 1, 1), (64, 2, 8), (40_000, 8, 4))
ROWS = (33, 48, 1, 64)  # 1 and multiples of 16 are what Triton specializes on


class NoGpu(DriverBase):
    """Names the GPU to compile for."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


def main() -> None:
    """Call everything that launches a kernel, for each shape."""
    compiled: dict[str, set[str]] = {}
    run = JITFunction.run

    def only_compile(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        built = run(kernel, *args, **{**kwargs, "warmup": True})
        assert len(built.asm["cubin"]) > 0
        compiled.setdefault(kernel.fn.__name__, set()).add(built.hash)
        return built

    triton.runtime.driver.set_active(NoGpu())
    JITFunction.run = only_compile
    quick = sys.argv[1:] == ["quick"]
    if sys.argv[1:] == ["rows"]:
        for tokens in ROWS:
            _call(tokens, 64, 2, 8, torch.float32)
            print(_found(compiled))
        return
    for num_experts, world, top_k in QUICK if quick else SHAPES:
        for tokens in TOKENS[1:2] if quick or num_experts > 1000 else TOKENS:
            every = num_experts == 64 and not quick
            for dtype in (torch.float32, torch.bfloat16, torch.float64) if every else (torch.float32,):
                _call(tokens, num_experts, world, top_k, dtype)
    print(_found(compiled))


def _found(compiled: dict[str, set[str]]) -> str:
    return ", ".join(f"{name} {len(forms)}" for name, forms in sorted(compiled.items()))


def _call(tokens: int, num_experts: int, world: int, top_k: int, dtype: torch.dtype) -> None:
    layout = Layout(world, world - 1, num_experts // world, 1)
    probs = torch.zeros(tokens, num_experts, dtype=dtype)
    ids, weights = choice_kernels.choose(probs > 0, probs, top_k)
    choice_kernels.choose_grad(ids, weights, num_experts)
    routing_kernels.count(ids, layout, torch.zeros(routing.count_size(layout), dtype=torch.int32))
    for to in (routing.all_ranks(layout), routing.Destinations(0, layout.num_local_experts, 1)):
        routing_kernels.mark(ids, to, torch.zeros(to.number * tokens + 1, dtype=torch.int32))
        routing_kernels.look_up(ids, to, torch.zeros(to.number * tokens + 1, dtype=torch.int32))
    slots = routing_kernels.fixed_slots(ids, routing.all_ranks(layout), tokens)
    form = RowFormat(64, top_k, torch.bfloat16, dtype, num_experts)
    packed = torch.zeros(tokens, form.row_bytes, dtype=torch.uint8)
    wire_kernels.pack(weights, ids, form.meta_view(packed), form.id_dtype.itemsize // 2)
    wire_kernels.pack(weights, ids, form.meta_view(packed).contiguous(), form.id_dtype.itemsize // 2)
    wire_kernels.unpack(form.meta_view(packed), dtype, top_k, form.id_dtype.itemsize // 2, num_experts // 2)
    weight_kernels.spread_weights(weights, slots, weights.reshape(-1))
    weight_kernels.gather_weights(weights.reshape(-1), slots, weights)
    hidden = form.hidden_view(packed)
    kernels.spread_rows(torch.zeros(tokens, 64, dtype=torch.bfloat16), slots, hidden, hidden)
    kernels.sum_rows(slots, hidden, hidden, torch.zeros(tokens, 64, dtype=torch.bfloat16))


if __name__ == "__main__":
    main()
