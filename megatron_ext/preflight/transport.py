"""Which network NCCL chose, read from each rank's log, and why where it is the wrong one.

NCCL falls back to TCP sockets without an error when its plugin cannot be used; a run then takes about 25 times as long
(training handbook, section 2.2). The line `NCCL INFO Using network NAME` says what was chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.preflight.findings import Finding

CHECK = "transport"
# What `--moe-ext-transport` and `--transport` take; "any" only asks for a line that is not Socket.
FABRICS = ("auto", "any", "Libfabric", "IB", "Socket", "off")
_USING = re.compile(r"NCCL INFO Using network (.+?)\s*$", re.MULTILINE)
_VERSION = re.compile(r"version [`'](EFA_[\d.]+|FABRIC_[\d.]+)' not found")
_NOT_FOUND = re.compile(r"network (\S+) not found")
_PLUGIN = re.compile(
    r"(?:Could not find|dlerror=|No plugin found|Failed to (?:find|load|open)).*?(\S*lib\S*nccl-net\S*)"
)
_NICS = re.compile(r"Selected [Pp]rovider is (\w+)(?:, fabric is \S+)?(?: \(found (\d+) nics\))?")


@dataclass(frozen=True)
class Transport:
    """What one rank's log says: the network chosen ("" if none), the provider and its NICs, and the trouble met."""

    network: str
    provider: str
    num_nics: int | None
    trouble: str
    remedy: str


def read_transport(log: str) -> Transport:
    """Read one rank's NCCL log. The last choice counts: a later communicator may choose otherwise."""
    chosen = _USING.findall(log)
    # One communicator on sockets is enough to make the run slow.
    network = next((name for name in chosen if "Socket" in name), chosen[-1] if chosen else "")
    provider = _NICS.search(log)
    trouble, remedy = _trouble(log)
    return Transport(
        network=network.strip(),
        provider=provider[1] if provider else "",
        num_nics=int(provider[2]) if provider and provider[2] else None,
        trouble=trouble,
        remedy=remedy,
    )


def expected_fabric(asked: str, environ: Mapping[str, str], num_nodes: int) -> str:
    """Resolve "auto": Libfabric where the environment asks for EFA, anything but sockets between nodes, else off."""
    if asked != "auto":
        return asked
    plugin, network = environ.get("NCCL_NET_PLUGIN", ""), environ.get("NCCL_NET", "")
    if environ.get("FI_PROVIDER") == "efa" or "ofi" in plugin or "Libfabric" in network:
        return "Libfabric"
    return "any" if num_nodes > 1 else "off"


def is_expected(network: str, fabric: str) -> bool:
    """Say whether the chosen network is the one asked for ("AWS Libfabric" of old plugins is Libfabric)."""
    if fabric == "off":
        return True
    if fabric == "any":
        return network not in ("", "Socket")
    return fabric.lower() in network.lower()


def judge_transport(ranks: Mapping[str, Transport], fabric: str) -> list[Finding]:
    """Judge every rank (name -> what its log says); ranks with the same fault share one row."""
    if fabric == "off":
        return [Finding(CHECK, f"{len(ranks)} ranks", "skipped", _networks(ranks), "one node, no fabric asked for")]
    wrong: dict[tuple[str, str, str], list[str]] = {}
    for rank, seen in ranks.items():
        if not is_expected(seen.network, fabric):
            said = f"uses {seen.network}" if seen.network else "no `Using network` line"
            key = (said + (f": {seen.trouble}" if seen.trouble else ""), seen.network, seen.remedy)
            wrong.setdefault(key, []).append(rank)
    wanted = "a fabric, not sockets" if fabric == "any" else fabric
    if not wrong and ranks:
        return [Finding(CHECK, f"{len(ranks)} ranks", "good", _networks(ranks), wanted)]
    return [
        Finding(CHECK, _some(who), "bad", said, wanted, remedy or _default_remedy(network))
        for (said, network, remedy), who in wrong.items()
    ]


def judge_environment(where: str, environ: Mapping[str, str], fabric: str) -> list[Finding]:
    """Find settings that would make NCCL choose another network than asked for, before anything starts."""
    plugin, findings = environ.get("NCCL_NET_PLUGIN", ""), []
    if "/" in plugin or plugin.endswith(".so"):
        findings.append(Finding(
            "NCCL_NET_PLUGIN", where, "bad", plugin, "a name, not a path",
            "export NCCL_NET_PLUGIN=ofi: NCCL builds the file name from it",
        ))  # fmt: skip
    if fabric != "Libfabric":
        return findings
    if "/" not in plugin and plugin not in ("ofi", "aws-ofi"):
        findings.append(Finding(
            "NCCL_NET_PLUGIN", where, "bad", plugin or "not set", "ofi",
            "export NCCL_NET_PLUGIN=ofi (the NGC image sets spcx, which uses sockets on EFA)",
        ))  # fmt: skip
    if environ.get("FI_PROVIDER", "efa") != "efa":
        value = environ["FI_PROVIDER"]
        findings.append(Finding("FI_PROVIDER", where, "bad", value, "efa", "export FI_PROVIDER=efa"))
    if not environ.get("NCCL_NET"):
        findings.append(Finding(
            "NCCL_NET", where, "warning", "not set", "Libfabric",
            "export NCCL_NET=Libfabric: a missing plugin then is an error instead of a slow run",
        ))  # fmt: skip
    return findings


def _trouble(log: str) -> tuple[str, str]:
    if found := _VERSION.search(log):
        return (
            f"library version {found[1]} missing",
            "the plugin was built against a newer libfabric than the one loaded: put /opt/amazon/efa/lib first in "
            "LD_LIBRARY_PATH, or rebuild the image (docker/)",
        )
    if found := _NOT_FOUND.search(log):
        return f"no plugin offers network {found[1]}", (
            "NCCL_NET names a network whose plugin was not loaded: check NCCL_NET_PLUGIN=ofi and that "
            "/opt/amazon/ofi-nccl/lib is in LD_LIBRARY_PATH"
        )
    if found := _PLUGIN.search(log):
        return f"plugin not loaded: {found[1]}", (
            "NCCL_NET_PLUGIN must be a name whose libnccl-net-NAME.so lies in LD_LIBRARY_PATH: for EFA "
            "NCCL_NET_PLUGIN=ofi and /opt/amazon/ofi-nccl/lib"
        )
    return "", ""


def _default_remedy(network: str) -> str:
    if "Socket" in network:
        return (
            "read the NET/Plugin lines above it in that rank's log; if this cluster has no fabric, --transport Socket"
        )
    return "set NCCL_DEBUG=INFO; a rank without the line did not start NCCL or lost its log"


def _networks(ranks: Mapping[str, Transport]) -> str:
    return ", ".join(sorted({seen.network or "none" for seen in ranks.values()})) or "no log"


def _some(ranks: Sequence[str]) -> str:
    return ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
