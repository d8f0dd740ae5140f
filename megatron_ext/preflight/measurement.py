"""One all-to-all figure with everything that says what it may be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Column = Literal["out of place", "in place"]
# What NCCL, libfabric and the plugin read; kept with each figure because they decide it.
SETTING_PREFIXES = ("NCCL_", "FI_", "OFI_", "EFA_", "CUDA_DEVICE_MAX_CONNECTIONS")


@dataclass(frozen=True)
class Measurement:
    """A bandwidth and its provenance.

    Args:
        tool: "nccl-tests" or "torch-nccl" or "torch-gloo": figures of two tools are not compared.
        node_list: Node names in rank order, each once.
        ranks: How many ranks took part.
        size_bytes: Send buffer of one rank, as nccl-tests counts it.
        column: Which of nccl-tests' two results.
        busbw_gbps: Bus bandwidth in GB/s (10^9 bytes): buffer / time x (ranks - 1) / ranks.
        wrong: Elements that arrived wrong; None where that was not checked.
        iterations: Timed repetitions.
        versions: NCCL, driver, plugin and so on, as far as known.
        settings: The environment variables that decide the path.
        taken_at: UTC, ISO 8601.
    """

    tool: str
    node_list: tuple[str, ...]
    ranks: int
    size_bytes: int
    column: Column
    busbw_gbps: float
    wrong: int | None
    iterations: int
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    taken_at: str = ""

    @property
    def num_nodes(self) -> int:
        """How many nodes took part."""
        return len(self.node_list)

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "node_list": list(self.node_list)}


def measurement_from_plain(plain: Mapping[str, Any]) -> Measurement:
    """Undo `Measurement.to_plain`."""
    return Measurement(**{**plain, "node_list": tuple(plain["node_list"])})


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide the path, sorted by name."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(SETTING_PREFIXES)}
