"""The node as a dispatcher sees it: instance, network cards, providers, versions; and what is best on it.

Read from files and the environment, in milliseconds. Which network NCCL really chose is in its log:
`--moe-ext-transport` (the preflight room) watches that and stops the run before step 1.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SMALL_CLUSTER_NODES = 8


@dataclass(frozen=True)
class Node:
    """What was found.

    Args:
        instance: The machine's product name: the instance type on EC2, "" when unreadable.
        num_efa: EFA devices.
        num_infiniband: Other RDMA devices.
        plugin: `NCCL_NET_PLUGIN` and `NCCL_NET`, as set.
        provider: `FI_PROVIDER`, as set.
    """

    instance: str
    num_efa: int
    num_infiniband: int
    plugin: str
    provider: str

    def line(self) -> str:
        """One line of the start-up report."""
        cards = f"{self.num_efa} EFA and {self.num_infiniband} other RDMA devices"
        return (
            f"{self.instance or 'machine of unknown type'}, {cards}; NCCL_NET_PLUGIN/NCCL_NET "
            f"{self.plugin or 'unset'}, FI_PROVIDER {self.provider or 'unset'}"
        )


def look(root: Path = Path("/sys"), environ: Mapping[str, str] = os.environ) -> Node:
    """Look at this node.

    Args:
        root: Of sysfs; another folder in tests.
        environ: The environment.
    """
    devices = sorted((root / "class" / "infiniband").glob("*"))
    efa = [device for device in devices if _driver(device) == "efa" or device.name.startswith("efa")]
    plugin = "/".join(word for word in (environ.get("NCCL_NET_PLUGIN"), environ.get("NCCL_NET")) if word)
    product = _read(root / "class" / "dmi" / "id" / "product_name")
    return Node(product, len(efa), len(devices) - len(efa), plugin, environ.get("FI_PROVIDER", ""))


def _driver(device: Path) -> str:
    link = device / "device" / "driver"
    return link.resolve().name if link.exists() else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def recommend(node: Node, *, used: str, num_nodes: int, copies: float, copies_alltoall: float) -> str:
    """Say what to try on this node, and on what ground.

    Args:
        node: The node.
        used: The dispatcher in use.
        num_nodes: Nodes of the expert-parallel group.
        copies: Rows a token off the node (or rank) that the dispatcher in use needs.
        copies_alltoall: The same for `alltoall`.
    """
    if copies_alltoall <= 1.1 * copies:
        return "alltoall would send about as many rows: prefer it (few choices a token, nothing to save)"
    saving = f"{copies_alltoall / max(copies, 1e-9):.1f} times fewer rows than alltoall"
    if num_nodes == 1:
        return f"{saving} over NVLink; check with megatron-moe bench dispatch at your micro-batch"
    if used == "dedup":
        return f"{saving}; twohop sends fewer still between nodes"
    if node.num_efa and num_nodes <= SMALL_CLUSTER_NODES:
        return (
            f"{saving}. On EFA at up to {SMALL_CLUSTER_NODES} nodes published runs do best with NCCL's collectives, "
            "which this uses, not with DeepEP; measure against alltoall under forced balance"
        )
    return f"{saving}; measure against alltoall under forced balance, since an untrained router hides the transport"
