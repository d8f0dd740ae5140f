"""Stop a run before step 1 when any rank's NCCL chose another network than asked for.

`prepare_transport_log` runs before the first communicator is made, `transport_watchdog` on every rank once Megatron has
made one (after the model is built). Both do nothing where `--moe-ext-transport off` says so.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.preflight.findings import Finding
from megatron_ext.preflight.node import node_name
from megatron_ext.preflight.transport import (
    FABRICS,
    Transport,
    expected_fabric,
    judge_environment,
    judge_transport,
    read_transport,
)

# NCCL's own levels that print the line; WARN and VERSION don't.
_TELLING_LEVELS = ("INFO", "TRACE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--moe-ext-transport` to Megatron's parser."""
    group = parser.add_argument_group(title="moe-ext preflight")
    group.add_argument(
        "--moe-ext-transport",
        choices=FABRICS,
        default="auto",
        help="network that NCCL must use on every rank, or the run stops before step 1; auto (default): Libfabric "
        "where the environment asks for EFA, not sockets between nodes, nothing on one node; off: don't look",
    )


def refuse_environment(*, asked: str = "auto", environ: Mapping[str, str] = os.environ) -> str:
    """Refuse settings with which NCCL would choose another network than asked for; writes nothing.

    Args:
        asked: `args.moe_ext_transport`.
        environ: Where NCCL reads its settings.

    Returns:
        The network that every rank must use: one of `FABRICS`, "auto" resolved.

    Raises:
        UserError: NCCL_NET_PLUGIN or FI_PROVIDER is wrong for it.
    """
    fabric = expected_fabric(asked, environ, _num_nodes(environ))
    bad = [row for row in judge_environment(node_name(environ), environ, fabric) if row.status == "bad"]
    if bad and fabric != "off":
        raise _refusal(bad)
    return fabric


def prepare_transport_log(
    directory: Path, *, asked: str = "auto", environ: MutableMapping[str, str] = os.environ
) -> Path | None:
    """Make NCCL write this rank's log under `directory`, and refuse settings that cannot work.

    Args:
        directory: A folder of the run, e.g. RUN_DIR/nccl.
        asked: `args.moe_ext_transport`.
        environ: Where NCCL reads its settings; changed in place. Call before the first communicator.

    Returns:
        The log's path; None where nothing is to be watched.

    Raises:
        UserError: NCCL_NET_PLUGIN or FI_PROVIDER would make NCCL choose another network.
    """
    if refuse_environment(asked=asked, environ=environ) == "off":
        return None
    rank = int(environ.get("RANK", "0"))
    log = directory / f"rank-{rank:05d}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # A resumed run must not read what its predecessor wrote.
    log.unlink(missing_ok=True)
    if environ.get("NCCL_DEBUG", "").upper() not in _TELLING_LEVELS:
        environ["NCCL_DEBUG"] = "INFO"
    # The default subsystems hold the line; a narrower choice of the user's may not.
    if "NCCL_DEBUG_SUBSYS" in environ and not {"INIT", "ALL"} & set(environ["NCCL_DEBUG_SUBSYS"].upper().split(",")):
        environ["NCCL_DEBUG_SUBSYS"] += ",INIT,NET"
    environ["NCCL_DEBUG_FILE"] = str(log)
    return log


def transport_watchdog(
    log: Path | None, *, asked: str = "auto", environ: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Look at every rank's log and stop all ranks if one is on the wrong network. A collective: call it on every rank.

    Args:
        log: What `prepare_transport_log` returned; None on every rank that watches nothing.
        asked: `args.moe_ext_transport`.
        environ: The launcher's variables.

    Returns:
        The findings, all good.

    Raises:
        UserError: On every rank, naming the ranks that are wrong, what they use and the remedy.
    """
    fabric = expected_fabric(asked, environ, _num_nodes(environ))
    if fabric == "off" or log is None:
        return []
    _start_network()
    findings = judge_transport(_gathered(_read(log), environ), fabric)
    bad = [finding for finding in findings if finding.status == "bad"]
    if bad:
        raise _refusal(bad)
    return findings


def _start_network() -> None:
    # NCCL chooses when its first communicator is made, which is at the first collective at the latest.
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def _read(log: Path) -> Transport:
    try:
        return read_transport(log.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return Transport("", "", None, f"no log: {error.strerror}", "check that the run's directory can be written")


def _gathered(mine: Transport, environ: Mapping[str, str]) -> dict[str, Transport]:
    import torch.distributed as dist

    name = f"rank {environ.get('RANK', '0')} ({node_name(environ)})"
    if not (dist.is_available() and dist.is_initialized()):
        return {name: mine}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (name, mine))
    return dict(everyone)


def _num_nodes(environ: Mapping[str, str]) -> int:
    world, local = int(environ.get("WORLD_SIZE", "1")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(world // max(local, 1), 1)


def _refusal(bad: list[Finding]) -> UserError:
    return UserError(
        "the run would not use the network that was asked for",
        where="; ".join(f"{finding.where}: {finding.value}" for finding in bad),
        why=f"wanted: {bad[0].why}; over sockets a step takes about 25 times as long",
        remedy=bad[0].remedy,
    )
