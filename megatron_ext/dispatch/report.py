"""The start-up report: which dispatcher, transport and node shape was asked for, and which is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.dispatch import probe
from megatron_ext.dispatch.engine import Engine
from megatron_ext.dispatch.formula import copies_off_set, copies_per_expert
from megatron_ext.dispatch.placement import Placement


@dataclass(frozen=True)
class Used:
    """What a layer's dispatcher turned out to be.

    Args:
        asked: The backend's name on the command line.
        used: What runs.
        transport: The collectives.
        shape: Ranks and nodes.
        reasons: Why it differs from what was asked, or what to know.
    """

    asked: str
    used: str
    transport: str
    shape: str
    reasons: tuple[str, ...]

    def lines(self) -> list[str]:
        """The report, line by line."""
        head = f"dispatch: asked for {self.asked}, using {self.used} over {self.transport}; {self.shape}"
        return [head, *(f"dispatch: {reason}" for reason in self.reasons)]


_noted: list[Used] = []
_lines: list[str] = []


def note_line(line: str) -> None:
    """Remember a line of the report, once."""
    if line not in _lines:
        _lines.append(line)


def describe(asked: str, engine: Engine, placement: Placement, num_experts: int, top_k: int, backend: str) -> Used:
    """Say what runs, from the engine as built.

    Args:
        asked: `dedup` or `twohop`.
        engine: The layer's.
        placement: Of its group.
        num_experts: E of the model.
        top_k: k of the model.
        backend: Of the process group: nccl, gloo.
    """
    layout, static = engine.layout, engine.is_static(top_k)
    used = "twohop" if engine.two_hops else "dedup"
    reasons = []
    if asked == "twohop" and not engine.two_hops:
        if not placement.contiguous:
            reasons.append(f"ranks do not fill nodes in blocks ({', '.join(placement.hosts)}): one row a rank instead")
        else:
            reasons.append("one node, or one rank a node: both hops are the same, one row a rank")
    if placement.emulated:
        reasons.append(f"nodes of {placement.ranks_per_node} ranks are emulated on {len(set(placement.hosts))} host(s)")
    form = "static sizes" if static else "all-to-all-v"
    transport = f"{backend} ({'rail hop' if engine.two_hops else 'exchange'}: {form})"
    shape = f"{layout.world} ranks on {layout.num_nodes} node(s) of {layout.ranks_per_node}"
    sets = layout.num_nodes if layout.num_nodes > 1 else layout.world
    if sets > 1 and layout.num_experts % sets == 0:
        place = "node" if layout.num_nodes > 1 else "rank"
        rows, naive = copies_off_set(num_experts, top_k, sets), copies_per_expert(top_k, sets)
        reasons.append(f"rows a token off the {place}, even routing: {rows:.3f} at best, {naive:.3f} with alltoall")
        node = probe.look()
        reasons.append(probe.recommend(node, used=used, num_nodes=layout.num_nodes, copies=rows, copies_alltoall=naive))
    return Used(asked, used, transport, shape, tuple(reasons))


def note(asked: str, engine: Engine, placement: Placement, num_experts: int, top_k: int) -> None:
    """Remember one layer's; equal ones are shown once."""
    backend = str(dist.get_backend(engine.groups.world))
    used = describe(asked, engine, placement, num_experts, top_k, backend)
    if used not in _noted:
        _noted.append(used)


def show() -> None:
    """Print what was noted, once, on the first rank of the run."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        lines = [line for used in _noted for line in used.lines()]
        lines += [f"dispatch: {line}" for line in _lines]
        if lines:
            lines.append(f"dispatch: {probe.look().line()}; torch {torch.__version__}, NCCL {_nccl()}")
        for line in lines:
            print(f"[moe] {line}", flush=True)
    _noted.clear()
    _lines.clear()


def _nccl() -> str:
    if torch.version.cuda is None or "nccl" not in str(dist.get_backend()):
        return "not used"
    return ".".join(map(str, torch.cuda.nccl.version()))
