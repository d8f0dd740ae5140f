"""Simulate a dispatch: draw routings, count the rows that each dispatcher moves, and time them on given links.

The rows are counted on drawn tokens, so skew and group-limited routing are covered; for a uniform choice they agree
with `dispatch.formula`. The time is a bound: bytes of the busiest link over its speed, plus a latency a message. It
leaves out kernels, so it compares dispatchers; `megatron-moe bench dispatch` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.errors import UserError

Ints = npt.NDArray[np.int64]
SAMPLES = 4096  # tokens drawn; the mean of a row count is then good to about 1 %
NAMES = ("alltoall", "dedup", "twohop", "twohop-static")


@dataclass(frozen=True)
class Cluster:
    """The machine.

    Args:
        ep: Ranks of the expert-parallel group.
        ranks_per_node: GPUs of the group on a node.
        nic_gb_per_s: Network speed of one GPU, one direction, in GB/s (P5: 50, about 45 reached).
        nvlink_gb_per_s: NVLink speed of one GPU, one direction, as collectives reach it, in GB/s.
        latency_us: Of one message between nodes; a rank sends its messages one after the other.
    """

    ep: int
    ranks_per_node: int
    nic_gb_per_s: float = 45.0
    nvlink_gb_per_s: float = 300.0
    latency_us: float = 0.0

    @property
    def num_nodes(self) -> int:
        """Nodes of the group."""
        return self.ep // self.ranks_per_node


@dataclass(frozen=True)
class Layer:
    """The MoE layer and its routing.

    Args:
        num_experts: E.
        top_k: k.
        hidden: H.
        tokens: On each rank.
        value_bytes: Bytes of a hidden value.
        groups: Groups of experts that group-limited routing chooses from (0: none).
        group_top_k: Groups that a token may use.
        skew: Standard deviation over the experts of the logits' bias, in units of the logits' noise (0: uniform).
    """

    num_experts: int
    top_k: int
    hidden: int
    tokens: int
    value_bytes: int = 2
    groups: int = 0
    group_top_k: int = 0
    skew: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """One dispatcher.

    Args:
        name: Of NAMES.
        rows_off_node: Rows a token that leave the node, one direction.
        rows_off_rank: Rows a token that leave a rank, both hops.
        nic_mib: Sent off the node by one rank, on average, in MiB.
        nic_busiest: Busiest rank's receive over the mean (1 without skew; beyond some 256 ranks the drawn tokens
            are too few and it reads high).
        dispatch_ms: One direction, hops in sequence.
        pipelined_ms: One direction when the hops overlap fully.
    """

    name: str
    rows_off_node: float
    rows_off_rank: float
    nic_mib: float
    nic_busiest: float
    dispatch_ms: float
    pipelined_ms: float


def check(layer: Layer, cluster: Cluster) -> None:
    """Raise `UserError` for shapes that cannot be."""
    faults = (
        (cluster.ep % cluster.ranks_per_node, f"--ep {cluster.ep}, --ranks-per-node {cluster.ranks_per_node}",
         "the ranks do not fill whole nodes"),
        (layer.num_experts % cluster.ep, f"--experts {layer.num_experts}, --ep {cluster.ep}",
         "the experts do not divide over the ranks"),
        (not 0 < layer.top_k <= layer.num_experts, f"--top-k {layer.top_k}, --experts {layer.num_experts}",
         "a token cannot choose that many experts"),
        (layer.groups and layer.num_experts % layer.groups, f"--groups {layer.groups}",
         "the experts do not divide into the groups"),
        (layer.groups and not 0 < layer.group_top_k <= layer.groups, f"--group-top-k {layer.group_top_k}",
         "a token must use between one and all groups"),
        (layer.groups and layer.group_top_k * (layer.num_experts // max(layer.groups, 1)) < layer.top_k,
         f"--group-top-k {layer.group_top_k}, --top-k {layer.top_k}", "the groups chosen hold too few experts"),
    )  # fmt: skip
    for bad, where, what in faults:
        if bad:
            raise UserError(what, where=where, remedy="change one of the two numbers", exit_code=64)


def draw_choices(layer: Layer, tokens: int, seed: int) -> Ints:
    """Draw the chosen experts of `tokens` tokens: [tokens, k], ascending.

    Logits are Gumbel noise plus a bias for each expert. Groups are ranked by the sum of their two best logits, as
    DeepSeek-V3's gate does (its report, section 2.1.2).
    """
    made = np.random.default_rng(seed)
    bias = made.normal(size=layer.num_experts) * layer.skew
    logits = made.gumbel(size=(tokens, layer.num_experts)) + bias
    if layer.groups:
        by_group = logits.reshape(tokens, layer.groups, -1)
        best = np.sort(by_group, axis=2)[:, :, -2:].sum(axis=2)
        dropped = np.argsort(best, axis=1)[:, : layer.groups - layer.group_top_k]
        np.put_along_axis(by_group, dropped[:, :, None], -np.inf, axis=1)
        logits = by_group.reshape(tokens, -1)
    chosen = np.argpartition(-logits, layer.top_k - 1, axis=1)[:, : layer.top_k]
    return np.sort(chosen, axis=1)


@dataclass(frozen=True)
class Loads:
    """Rows a source token brings to each rank and node, on average, and its choices: what the estimates need.

    Args:
        to_rank: [W], chance that a token has a choice on rank r.
        to_node: [N].
        choices_to_rank: [W], mean choices on rank r.
    """

    to_rank: npt.NDArray[np.float64]
    to_node: npt.NDArray[np.float64]
    choices_to_rank: npt.NDArray[np.float64]


def loads(layer: Layer, cluster: Cluster, *, samples: int = SAMPLES, seed: int = 0) -> Loads:
    """Draw tokens and average. Tokens of all ranks are drawn alike."""
    chosen = draw_choices(layer, samples, seed)
    ranks = chosen // (layer.num_experts // cluster.ep)
    nodes = ranks // cluster.ranks_per_node

    def share(places: Ints, number: int) -> npt.NDArray[np.float64]:
        fresh = np.ones_like(places, dtype=bool)
        fresh[:, 1:] = places[:, 1:] != places[:, :-1]
        return np.bincount(places[fresh], minlength=number) / samples

    choices = np.bincount(ranks.ravel(), minlength=cluster.ep) / samples
    return Loads(share(ranks, cluster.ep), share(nodes, cluster.num_nodes), choices)


def simulate(layer: Layer, cluster: Cluster, *, samples: int = SAMPLES, seed: int = 0) -> list[Estimate]:
    """Estimate every dispatcher for one direction of one layer."""
    check(layer, cluster)
    drawn = loads(layer, cluster, samples=samples, seed=seed)
    away = (cluster.num_nodes - 1) / cluster.num_nodes
    off_rank = (cluster.ep - 1) / cluster.ep
    local = (cluster.ranks_per_node - 1) / cluster.ranks_per_node
    found = []
    for name, to_rank in (("alltoall", drawn.choices_to_rank), ("dedup", drawn.to_rank)):
        busy = _busiest(to_rank, layer)
        nic, total = float(to_rank.sum()) * away, float(to_rank.sum()) * off_rank
        # Both links work at once; the network is nearly always the longer.
        parts = _parts(layer, cluster, nic * busy, (total - nic) * busy, cluster.ep - cluster.ranks_per_node)
        found.append(_estimate(name, layer, nic, total, busy, max(parts), max(parts)))
    # In the node every row of the rail goes to the ranks of the node that need it: as many as dedup's, node by node.
    in_node = drawn.to_rank.sum() * local
    for name, nic, busy in (
        ("twohop", float(drawn.to_node.sum()) * away, _busiest(drawn.to_node, layer)),
        ("twohop-static", cluster.num_nodes - 1.0, 1.0),
    ):
        parts = _parts(layer, cluster, nic * busy, in_node * _busiest(drawn.to_rank, layer), cluster.num_nodes - 1)
        found.append(_estimate(name, layer, nic, nic + in_node, busy, sum(parts), max(parts)))
    return found


def _busiest(share: npt.NDArray[np.float64], layer: Layer) -> float:
    # An even choice is even: the drawn one is not quite, and its largest share only measures the sample's size.
    return float(share.max() / share.mean()) if layer.skew and share.sum() else 1.0


def _parts(layer: Layer, cluster: Cluster, nic: float, nvlink: float, messages: int) -> tuple[float, float]:
    """Milliseconds on the network and on NVLink for so many rows a token."""
    row = layer.tokens * layer.hidden * layer.value_bytes
    return (
        nic * row / cluster.nic_gb_per_s / 1e6 + messages * cluster.latency_us / 1e3,
        nvlink * row / cluster.nvlink_gb_per_s / 1e6,
    )


def _estimate(
    name: str, layer: Layer, nic: float, total: float, busy: float, sequence_ms: float, pipelined_ms: float
) -> Estimate:
    mib = nic * layer.tokens * layer.hidden * layer.value_bytes / 2**20
    return Estimate(name, float(nic), float(total), float(mib), busy, float(sequence_ms), float(pipelined_ms))
