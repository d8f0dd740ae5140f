"""Which node is slow: measure every pair of nodes, several pairs at a time, and look whose pairs are all slow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from megatron_ext.preflight.baselines import PASS_SHARE
from megatron_ext.preflight.findings import Finding

CHECK = "node pairs"
Pair = tuple[int, int]


def rounds_of_pairs(num_nodes: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs in which every pair of nodes meets once (the circle method).

    Pairs of one round can be measured at the same time without sharing a node. Nodes count from 0.
    """
    places: list[int | None] = list(range(num_nodes))
    if num_nodes % 2:
        places.append(None)
    half = len(places) // 2
    rounds = []
    for _ in range(len(places) - 1):
        met = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def judge_pairs(nodes: Sequence[str], busbw_gbps: Mapping[Pair, float], wrong: Mapping[Pair, int]) -> list[Finding]:
    """Name slow nodes and slow or wrong links.

    A node is slow when even its best pair stays below 90 % of the median of the pairs without it. A link is slow when
    its pair does although both nodes do well elsewhere. With fewer than three nodes nothing can be told apart.
    """
    if len(nodes) < 3:
        return [Finding(CHECK, ", ".join(nodes), "skipped", "needs three nodes to tell which one is slow")]
    slow = [node for node in range(len(nodes)) if _is_slow(node, busbw_gbps)]
    findings = [_node_finding(node, nodes, busbw_gbps) for node in slow]
    healthy = [gbps for pair, gbps in busbw_gbps.items() if not set(pair) & set(slow)]
    typical = statistics.median(healthy or busbw_gbps.values())
    for (a, b), gbps in sorted(busbw_gbps.items()):
        where = f"{nodes[a]} - {nodes[b]}"
        if wrong.get((a, b)):
            remedy = "do not train on these two; run DCGM level 2 on both"
            findings.append(Finding(CHECK, where, "bad", f"{wrong[a, b]} wrong elements", "none", remedy))
        elif not {a, b} & set(slow) and gbps < PASS_SHARE * typical:
            remedy = "both nodes do well elsewhere: ask the operator about the path between them, or leave one out"
            findings.append(Finding(CHECK, where, "bad", f"{gbps:.2f} GB/s", f"median {typical:.2f}", remedy))
    if not findings:
        low = min(busbw_gbps.values())
        findings = [
            Finding(CHECK, f"{len(nodes)} nodes", "good", f"slowest pair {low:.2f} GB/s", f"median {typical:.2f}")
        ]
    return findings


def _is_slow(node: int, busbw_gbps: Mapping[Pair, float]) -> bool:
    own = [gbps for pair, gbps in busbw_gbps.items() if node in pair]
    others = [gbps for pair, gbps in busbw_gbps.items() if node not in pair]
    return bool(own and others) and max(own) < PASS_SHARE * statistics.median(others)


def _node_finding(node: int, nodes: Sequence[str], busbw_gbps: Mapping[Pair, float]) -> Finding:
    best = max(gbps for pair, gbps in busbw_gbps.items() if node in pair)
    others = statistics.median(gbps for pair, gbps in busbw_gbps.items() if node not in pair)
    return Finding(
        CHECK, nodes[node], "bad", f"best pair {best:.2f} GB/s", f"median without it {others:.2f}",
        f"leave {nodes[node]} out (sbatch --exclude={nodes[node]}) and run its DCGM and link checks",
    )  # fmt: skip
