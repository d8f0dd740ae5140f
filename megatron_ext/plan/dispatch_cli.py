"""`megatron-moe plan dispatch`: the simulator's table."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megatron_ext.plan.dispatch import Cluster, Estimate, Layer, simulate
from megatron_ext.usage import real, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the subject."""
    parser.add_argument("--experts", type=whole(), default=64, help="experts (default 64)")
    parser.add_argument("--top-k", type=whole(), default=8, help="choices a token (default 8)")
    parser.add_argument("--ep", type=whole(), default=16, help="ranks of the expert-parallel group (default 16)")
    parser.add_argument("--ranks-per-node", type=whole(), default=8, help="GPUs a node (default 8)")
    parser.add_argument("--hidden", type=whole(), default=2048, help="hidden size (default 2048)")
    parser.add_argument("--tokens", type=whole(), default=8192, help="tokens a rank and micro-batch (default 8192)")
    parser.add_argument("--value-bytes", type=whole(), default=2, help="bytes of a hidden value (default 2: bf16)")
    parser.add_argument("--nic-gbps", type=real(above=0), default=45.0, help="network GB/s a GPU, one way (default 45)")
    parser.add_argument("--nvlink-gbps", type=real(above=0), default=300.0, help="NVLink GB/s a GPU (default 300)")
    parser.add_argument("--latency-us", type=real(low=0), default=0.0, help="of a message between nodes (default 0)")
    parser.add_argument("--groups", type=whole(0), default=0, help="groups of group-limited routing (default none)")
    parser.add_argument("--group-top-k", type=whole(0), default=0, help="groups that a token may use")
    parser.add_argument("--skew", type=real(low=0), default=0.0, help="spread of experts' popularity (default 0: even)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the drawn tokens")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate and print."""
    layer = Layer(
        args.experts, args.top_k, args.hidden, args.tokens, args.value_bytes, args.groups, args.group_top_k, args.skew
    )
    cluster = Cluster(args.ep, args.ranks_per_node, args.nic_gbps, args.nvlink_gbps, args.latency_us)
    found = simulate(layer, cluster, seed=args.seed)
    if args.json:
        print(json.dumps({"layer": asdict(layer), "cluster": asdict(cluster), "rows": [asdict(e) for e in found]}))
        return 0
    _table(layer, cluster, found)
    return 0


def _table(layer: Layer, cluster: Cluster, found: list[Estimate]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"one direction, top-{layer.top_k} of {layer.num_experts}, EP {cluster.ep} on {cluster.num_nodes} node(s), "
        f"{layer.tokens} tokens a rank"
    )
    table = Table(
        "dispatcher", "rows off node", "rows off rank", "MiB off node", "busiest", "ms", "ms pipelined", "speed-up",
        title=title,
    )  # fmt: skip
    base = found[0].dispatch_ms or 1.0
    for one in found:
        table.add_row(
            one.name,
            f"{one.rows_off_node:.3f}",
            f"{one.rows_off_rank:.3f}",
            f"{one.nic_mib:.1f}",
            f"{one.nic_busiest:.2f}",
            f"{one.dispatch_ms:.3f}",
            f"{one.pipelined_ms:.3f}",
            f"{base / one.dispatch_ms:.2f} to {base / one.pipelined_ms:.2f}" if one.dispatch_ms else "-",
        )
    Console(width=120).print(table)
    print("Bytes of the busiest link over its speed; kernels are left out. Rows are a token; combine moves the same.")
