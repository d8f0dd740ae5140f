"""What each probe costs at one layer of a sampled step: host milliseconds, device milliseconds, operations.

    python benchmarks/observe_pieces.py --device cuda          # the overhead benchmark's layer, about 15 s
    python benchmarks/observe_pieces.py                        # a small one on the CPU, host time only

The probes' own functions run on made-up tensors of one router and expert call (32,768 tokens of 2,048, 64 experts,
top-8, 262,144 rows; tokens_per_expert on the host, as the all-to-all dispatcher leaves it), through Megatron's own
gating, top-k and aux scores, with the Triton kernels and with the torch path beside them. For the device's time the
host is let run ahead behind a sleeping kernel, so that gaps between launches don't count; a probe that waits for the
device shows that kernel's 20 ms, over the calls behind it, as host time. Each figure is the least of several windows of
ten calls: another process on the same GPU only adds. `reduce` is the end of a sampled step, once for all layers.
Megatron's own router on the same input stands beside them as the measure of size. The longest kernels of one layer
follow. Times only: the claim is tested by `observe_overhead.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.observe import tally
from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.probes import CountProbe, FlipProbe, LoadProbe, LogitProbe, NormProbe, Run, WeightProbe
from megatron_ext.observe.store import Shape, Store
from megatron_ext.observe.topology import Topology

RESULTS = Path(__file__).with_name("results")
LAYERS = 8
SIZES = {"cuda": (32768, 2048, 64, 8), "cpu": (512, 128, 8, 2)}
REPEATS = 10
WINDOWS = 7
KERNELS_SHOWN = 14
# Not part of a layer's sum: the measure of size, what the overhead benchmark's model hasn't got, and the step's end.
BESIDE = ("Megatron's router", "shared or latent", "reduce")
# About 20 ms of a GPU's clock.
SLEEP_CYCLES = 35_000_000


class Operations(TorchDispatchMode):
    """Counts torch operations; a Triton launch isn't one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operation's name."""
        self.seen[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def pieces(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return what is measured by name."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear, topk_routing_with_score_function
    from megatron.core.transformer.transformer_config import TransformerConfig

    device = torch.device(options.device)
    tokens, hidden_size, experts, topk = SIZES[options.device]
    made = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device=device)

    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=hidden_size, num_attention_heads=8, num_moe_experts=experts,
        moe_router_topk=topk, moe_router_dtype=options.router_dtype, bf16=True, params_dtype=torch.bfloat16,
        moe_ffn_hidden_size=hidden_size // 2, moe_router_fusion=options.fusion, add_bias_linear=False,
    )  # fmt: skip
    hidden = random(tokens // 8, 8, hidden_size).bfloat16()
    weight = (0.02 * random(experts, hidden_size)).bfloat16()
    dtype = torch.float32 if options.router_dtype == "fp32" else torch.bfloat16
    router = SimpleNamespace(
        config=config, topk=topk, weight=weight, bias=None, score_function="softmax", expert_bias=None,
        gating=lambda hidden: router_gating_linear(hidden, weight, None, dtype),
    )  # fmt: skip

    def route() -> Any:
        logits = router.gating(hidden).reshape(-1, experts)
        return topk_routing_with_score_function(logits, topk, fused=options.fusion)

    with torch.no_grad():
        native, output = router.gating(hidden).reshape(-1, experts), route()
    chosen = output[1]
    rows = random(tokens * topk, hidden_size).bfloat16()
    probs = output[0].t()[chosen.t()].float()
    counts = chosen.sum(0).cpu()
    # Any number of layers of one made-up module: only its own row of the store is written.
    layer = MoELayerRef(0, SimpleNamespace(router=router, config=config))
    place = Topology(device)
    run = Run(place, Store(Shape(LAYERS, experts, 8, 0, 9), place))
    run.sampling = True
    run.native = {}
    count, weights, logits, flips, norms, load = (
        kind(run) for kind in (CountProbe, WeightProbe, LogitProbe, FlipProbe, NormProbe, LoadProbe)
    )
    routed = (layer, (hidden,), {}, output)
    expert = (layer, (rows, counts, probs), {}, (rows, None))
    on_host = torch.empty(run.store.packed().shape, dtype=torch.float64, pin_memory=options.device == "cuda")

    def reduce() -> None:
        packed = run.store.packed()
        if packed.is_cuda:
            on_host.copy_(packed, non_blocking=True)
        run.store.clear()

    def loads() -> None:
        load.at_flush(())
        load._observe(*expert)

    def flip() -> None:
        # The logit probe leaves them to this one.
        run.native = {0: native}
        flips._observe(*routed)

    return {
        "Megatron's router": route,
        "token counts": lambda: count._routed(*routed),
        "mixing weights": lambda: weights._observe(*routed),
        "router logits": lambda: logits._observe(*routed),
        "flip rate": flip,
        "expert norms": lambda: norms._observe(*expert),
        "rank loads": loads,
        "shared or latent": lambda: tally.square_sums(hidden),
        "reduce": reduce,
    }


def measure(work: Callable[[], Any], device: str) -> dict[str, float]:
    """Return the host's and the device's milliseconds of one call, and how many torch operations it makes."""
    with torch.no_grad():
        for _ in range(3):
            work()
        with Operations() as operations:
            work()
        hosts, devices = [], []
        for _ in range(WINDOWS):
            start, end = _ahead(device)
            begin = time.perf_counter()
            for _ in range(REPEATS):
                work()
            hosts.append(1e3 * (time.perf_counter() - begin) / REPEATS)
            if start is not None and end is not None:
                end.record()
                torch.cuda.synchronize()
                devices.append(start.elapsed_time(end) / REPEATS)
    figures = {"host_ms": min(hosts), "operations": float(operations.seen.total())}
    return figures | ({"device_ms": min(devices)} if devices else {})


def _ahead(device: str) -> tuple[torch.cuda.Event | None, torch.cuda.Event | None]:
    """Put a sleeping kernel on the device; return the events of what follows, the first one recorded."""
    if device != "cuda":
        return None, None
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    return start, end


def kernels_of(work: dict[str, Callable[[], Any]]) -> list[tuple[str, int, float]]:
    """Return (name, launches, device ms) of one call of each piece, longest first."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as trace:
        for name, call in work.items():
            if name not in BESIDE:
                call()
        torch.cuda.synchronize()
    found = [(event.key, event.count, event.self_device_time_total / 1e3) for event in trace.key_averages()]
    return sorted(found, key=lambda kernel: -kernel[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--router-dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--fusion",
        action=argparse.BooleanOptionalAction,
        help="TE's fused top-k, as the preset has it (default on cuda)",
    )
    parser.add_argument("--json", type=Path, help="figures (default: results/observe_pieces-DEVICE.json)")
    options = parser.parse_args()
    options.fusion = options.device == "cuda" if options.fusion is None else options.fusion
    options.router_dtype = None if options.router_dtype == "bf16" else options.router_dtype
    work = pieces(options)
    paths = ("triton", "torch") if options.device == "cuda" else ("torch",)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for path in paths:
        os.environ[tally.KERNELS_VARIABLE] = path
        table[path] = {name: measure(call, options.device) for name, call in work.items()}
    print(f"{'a layer of a sampled step':<26}" + "".join(f"{path + ' host ms':>18}{'device ms':>11}" for path in paths))
    for name in work:
        cells = (table[path][name] for path in paths)
        print(
            f"{name:<26}"
            + "".join(f"{cell['host_ms']:>18.3f}{cell.get('device_ms', float('nan')):>11.3f}" for cell in cells)
        )
    for path in paths:
        ours = [cell for name, cell in table[path].items() if name not in BESIDE]
        host, device = (sum(cell.get(clock, 0.0) for cell in ours) for clock in ("host_ms", "device_ms"))
        print(f"{path}: a layer {host:.2f} ms on the host, {device:.2f} ms on the device")
    os.environ[tally.KERNELS_VARIABLE] = "triton"
    kernels = kernels_of(work) if options.device == "cuda" else []
    for name, launches, device_ms in kernels[:KERNELS_SHOWN]:
        print(f"{device_ms:8.3f} ms {launches:4d} x {name[:95]}")
    result = {
        "benchmark": "observe_pieces", "device": options.device, "date": time.strftime("%Y-%m-%d"),
        "name": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "load": os.getloadavg(),
        "tokens, hidden, experts, topk": SIZES[options.device], "router_dtype": options.router_dtype or "bf16",
        "fusion": options.fusion, "paths": table, "kernels": kernels,
    }  # fmt: skip
    (options.json or RESULTS / f"observe_pieces-{options.device}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
