"""What each probe costs at one layer of a sampled step: host milliseconds, device milliseconds, operations.

    python benchmarks/observe_pieces.py --device cuda          # the overhead benchmark's layer, about 15 s
    python benchmarks/observe_pieces.py                        # a small one on the CPU, host time only

The probes' own functions run on made-up tensors of one router and expert call (32,768 tokens of 2,048, 64 experts,
top-8, 262,144 rows; tokens_per_expert on the host, as the all-to-all dispatcher leaves it), through Megatron's own
gating, top-k and aux scores, with the Triton kernels and with the torch path beside them. For the device's time the
host is let run ahead behind a sleeping kernel, so that gaps between launches don't count; a probe that waits for the
device shows that kernel's 20 ms as host time. `reduce` is the end of a sampled step, once for all layers. Megatron's
own router on the same input stands beside them as the measure of size. Times only: the claim is tested by
`observe_overhead.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
        output = route()
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
    shown = torch.empty(0)

    def reduce() -> None:
        nonlocal shown
        packed = run.store.packed()
        if packed.is_cuda:
            shown = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            shown.copy_(packed, non_blocking=True)
        run.store.clear()

    def loads() -> None:
        load.at_flush(())
        load._observe(*expert)

    return {
        "Megatron's router": route,
        "token counts": lambda: count._routed(*routed),
        "mixing weights": lambda: weights._observe(*routed),
        "router logits": lambda: logits._observe(*routed),
        "flip rate": lambda: flips._observe(*routed),
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
        hosts = []
        for _ in range(REPEATS):
            _ahead(device)
            begin = time.perf_counter()
            work()
            hosts.append(time.perf_counter() - begin)
        figures = {"host_ms": 1e3 * statistics.median(hosts), "operations": float(operations.seen.total())}
        if device == "cuda":
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            start.record()
            for _ in range(REPEATS):
                work()
            end.record()
            torch.cuda.synchronize()
            figures["device_ms"] = start.elapsed_time(end) / REPEATS
    return figures


def _ahead(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)


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
    os.environ.pop(tally.KERNELS_VARIABLE)
    print(f"{'a layer of a sampled step':<26}" + "".join(f"{path + ' host ms':>18}{'device ms':>11}" for path in paths))
    for name in work:
        cells = (table[path][name] for path in paths)
        print(
            f"{name:<26}"
            + "".join(f"{cell['host_ms']:>18.3f}{cell.get('device_ms', float('nan')):>11.3f}" for cell in cells)
        )
    for path in paths:
        ours = [cell for name, cell in table[path].items() if name not in ("Megatron's router", "shared or latent")]
        host, device = (sum(cell.get(clock, 0.0) for cell in ours) for clock in ("host_ms", "device_ms"))
        print(f"{path}: a layer {host:.2f} ms on the host, {device:.2f} ms on the device")
    result = {
        "benchmark": "observe_pieces", "device": options.device, "date": time.strftime("%Y-%m-%d"),
        "name": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "load": os.getloadavg(),
        "tokens, hidden, experts, topk": SIZES[options.device], "router_dtype": options.router_dtype or "bf16",
        "fusion": options.fusion, "paths": table,
    }  # fmt: skip
    (options.json or RESULTS / f"observe_pieces-{options.device}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
