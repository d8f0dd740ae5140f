"""DeepEP, whichever is installed, behind one small interface; and whether it can work here, said before it is imported.

Two generations share the import name `deep_ep`: V1 has `Buffer` (NVSHMEM between nodes), V2 `ElasticBuffer` (NCCL's
device API). Which one is there is read from the files, because importing it may raise anything: a missing symbol of
NCCL, an assertion about nvcc. Nothing here is imported by a run that doesn't ask for DeepEP.

Sources: the interfaces of DeepEP 2.1.0 as packed in sgl-deep-ep 0.1.2.post1 (`buffers/legacy.py`,
`buffers/elastic.py`); version limits from DeepEP's README of V2 and V2.5.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ext.dispatch.errors import DispatchError

V2_NCCL = (2, 30, 4)
V25_NCCL = (2, 32, 3)
GPU_INITIATED_EFA = ("p5en", "p6")
FLAG = "--moe-flex-dispatcher-backend deepep_any"


@dataclass(frozen=True)
class Facts:
    """What decides whether DeepEP can work.

    Args:
        distribution: Name of the package that brings `deep_ep`; "" when none is installed.
        version: Of the distribution.
        api: "v1", "v2", or "" when none.
        torch_needed: The package's own requirement on torch, such as "==2.14.1"; "" when it has none.
        torch_version: Installed.
        nccl: Version that torch loads; () without CUDA.
        has_nvcc: Whether a compiler for V2's kernels is at hand.
        num_nodes: Nodes of the group.
        instance: Instance type, "" when unknown.
        has_efa: Whether the node's network is EFA.
    """

    distribution: str
    version: str
    api: str
    torch_needed: str
    torch_version: str
    nccl: tuple[int, ...]
    has_nvcc: bool
    num_nodes: int
    instance: str
    has_efa: bool


@dataclass(frozen=True)
class Problem:
    """One reason why it cannot work: what was found, why that matters, and what to do."""

    what: str
    why: str
    remedy: str


def problems(facts: Facts) -> list[Problem]:
    """Find every reason against DeepEP; empty when it may be tried."""
    if not facts.api:
        return [
            Problem(
                "no deep_ep package is installed",
                "DeepEP is not part of this distribution",
                "build DeepEP on the node against its torch and NCCL, or use twohop, which needs nothing",
            )
        ]
    found = []
    if facts.torch_needed and not _satisfies(facts.torch_version, facts.torch_needed):
        found.append(
            Problem(
                f"{facts.distribution} {facts.version} wants torch{facts.torch_needed}, found {facts.torch_version}",
                "its compiled part is bound to that torch",
                f"install that torch, or build DeepEP from source against {facts.torch_version}",
            )
        )
    if not facts.nccl:
        found.append(Problem("torch has no NCCL", "DeepEP moves rows with GPU kernels", "run on a GPU, or use twohop"))
    elif facts.api == "v2":
        found += _nccl_problems(facts)
    if facts.api == "v2" and not facts.has_nvcc:
        found.append(
            Problem("no nvcc", "V2 compiles its kernels at run time", "install the CUDA toolkit and set CUDA_HOME")
        )
    if facts.num_nodes > 1 and facts.has_efa:
        found += _efa_problems(facts)
    return found


def _nccl_problems(facts: Facts) -> list[Problem]:
    needed = V25_NCCL if _numbers(facts.version) >= (2, 5) else V2_NCCL
    if facts.nccl >= needed:
        return []
    return [
        Problem(
            f"NCCL {_dotted(facts.nccl)}, DeepEP's V2 interface wants {_dotted(needed)} or later",
            "it loads symbols of NCCL's device API that older ones lack (ncclCommQueryProperties)",
            f"pip install 'nvidia-nccl-cu13>={_dotted(needed)}' and put its libnccl.so.2 first on LD_LIBRARY_PATH",
        )
    ]


def _efa_problems(facts: Facts) -> list[Problem]:
    if facts.api == "v1":
        return [
            Problem(
                "V1 between nodes over EFA",
                "its RDMA kernels drive InfiniBand queues from the GPU (IBGDA), which EFA does not have",
                "use twohop, or keep the expert-parallel group inside a node",
            )
        ]
    if facts.instance and not facts.instance.startswith(GPU_INITIATED_EFA):
        return [
            Problem(
                f"V2 between nodes over EFA on {facts.instance}",
                "GPU-initiated transfers over EFA exist on P5en and P6 only; elsewhere a CPU proxy makes it slow",
                "use twohop; measure both with megatron-moe bench dispatch before choosing DeepEP",
            )
        ]
    return []


def gather_facts(*, num_nodes: int, instance: str, has_efa: bool) -> Facts:
    """Read the facts of this process without importing DeepEP."""
    distribution = next(iter(importlib.metadata.packages_distributions().get("deep_ep", [])), "")
    version = importlib.metadata.version(distribution) if distribution else ""
    has_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return Facts(
        distribution=distribution,
        version=version,
        api=_api(),
        torch_needed=_torch_needed(distribution),
        torch_version=torch.__version__.split("+")[0],
        nccl=tuple(torch.cuda.nccl.version()) if has_cuda else (),
        has_nvcc=bool(shutil.which("nvcc")) or Path(home, "bin", "nvcc").exists(),
        num_nodes=num_nodes,
        instance=instance,
        has_efa=has_efa,
    )


def _api() -> str:
    spec = importlib.util.find_spec("deep_ep")
    if spec is None or spec.origin is None:
        return ""
    return "v2" if (Path(spec.origin).parent / "buffers" / "elastic.py").exists() else "v1"


def _torch_needed(distribution: str) -> str:
    lines = importlib.metadata.requires(distribution) or [] if distribution else []
    found = (re.fullmatch(r"torch\s*([=<>!~][^;]*)(;.*)?", line) for line in lines)
    return next((match[1].strip() for match in found if match), "")


def _satisfies(version: str, needed: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(needed).contains(version, prereleases=True)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def require(facts: Facts) -> None:
    """Raise `DispatchError` with all problems, or return."""
    found = problems(facts)
    if found:
        raise DispatchError(
            "DeepEP cannot run here",
            where=f"{FLAG}: {'; '.join(p.what for p in found)}",
            why="; ".join(p.why for p in found),
            remedy="; ".join(p.remedy for p in found),
        )


@dataclass(frozen=True)
class Received:
    """What a dispatch brought.

    Args:
        rows: [M, H].
        ids: [M, K] int64, local experts from 0, -1 for others'.
        weights: [M, K] fp32.
        tokens_per_expert: Rows of each local expert.
        handle: DeepEP's own.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    tokens_per_expert: list[int]
    handle: Any


class Transfer(Protocol):
    """What the manager needs of either generation."""

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Received:
        """Send tokens [T, H] with ids [T, K] int64 and weights [T, K] fp32."""

    def again(self, x: Tensor, handle: Any) -> Tensor:
        """Send [T, H] the same way once more: [M, H]."""

    def combine(self, rows: Tensor, handle: Any, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Sum rows [M, H] (and weights [M, K]) at their tokens."""


class TransferV1:
    """`Buffer` of DeepEP V1. Grows its buffers with the hidden size.

    Args:
        library: The `deep_ep` module.
        group: Process group.
        num_experts: E.
    """

    def __init__(self, library: Any, group: Any, num_experts: int) -> None:
        """Keep the settings; buffers are made with the first rows."""
        self._library, self._group, self._num_experts = library, group, num_experts
        self._buffer: Any = None
        self._hidden_bytes = 0

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Received:
        """See `Transfer`."""
        buffer = self._ready(x)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, self._num_experts)
        rows, row_ids, row_weights, counts, handle, _ = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        return Received(rows, row_ids.long(), row_weights, list(counts), handle)

    def again(self, x: Tensor, handle: Any) -> Tensor:
        """See `Transfer`."""
        rows: Tensor = self._ready(x).dispatch(x, handle=handle)[0]
        return rows

    def combine(self, rows: Tensor, handle: Any, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `Transfer`."""
        out, out_weights, _ = self._ready(rows).combine(rows, handle, topk_weights=weights)
        return out, out_weights

    def _ready(self, x: Tensor) -> Any:
        hidden_bytes = x.shape[1] * max(x.element_size(), 2)
        if self._buffer is None or hidden_bytes > self._hidden_bytes:
            kind, size = self._library.Buffer, self._group.size()
            configs = (kind.get_dispatch_config(size), kind.get_combine_config(size))
            nvlink = max(c.get_nvl_buffer_size_hint(hidden_bytes, size) for c in configs)
            network = max(c.get_rdma_buffer_size_hint(hidden_bytes, size) for c in configs)
            self._buffer, self._hidden_bytes = kind(self._group, nvlink, network), hidden_bytes
        return self._buffer


class TransferV2:
    """`ElasticBuffer` of DeepEP V2.

    Args:
        library: The `deep_ep` module.
        group: Process group.
        num_experts: E.
        max_tokens: Most tokens of a rank, the same on all ranks: it sizes the buffers.
    """

    def __init__(self, library: Any, group: Any, num_experts: int, max_tokens: int) -> None:
        """Keep the settings; buffers are made with the first rows."""
        self._library, self._group = library, group
        self._num_experts, self._max_tokens = num_experts, max_tokens
        self._buffer: Any = None

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> Received:
        """See `Transfer`."""
        if self._buffer is None:
            self._buffer = self._library.ElasticBuffer(
                self._group,
                num_max_tokens_per_rank=self._max_tokens,
                hidden=x.shape[1],
                num_topk=ids.shape[1],
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
        rows, row_ids, row_weights, handle, _ = self._buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._max_tokens,
        )
        return Received(rows, row_ids.long(), row_weights, list(handle.num_recv_tokens_per_expert_list), handle)

    def again(self, x: Tensor, handle: Any) -> Tensor:
        """See `Transfer`. The number of experts is given again: 2.1.0 reads it before it looks at the handle."""
        rows: Tensor = self._buffer.dispatch(x, handle=handle, num_experts=self._num_experts)[0]
        return rows

    def combine(self, rows: Tensor, handle: Any, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `Transfer`."""
        out, out_weights, _ = self._buffer.combine(rows, handle, topk_weights=weights)
        return out, out_weights


def make_transfer(facts: Facts, group: Any, num_experts: int, max_tokens: int | None) -> Transfer:
    """Import DeepEP and build the adapter for what is installed.

    Raises:
        DispatchError: it cannot be imported, or V2 was not told how many tokens a rank can have.
    """
    library = import_deepep()
    if facts.api == "v1":
        return TransferV1(library, group, num_experts)
    if max_tokens is None:
        raise DispatchError(
            "DeepEP V2 needs the most tokens a rank can have: it sizes its buffers",
            where=FLAG,
            remedy="pass --moe-ext-dispatch-max-tokens N",
            exit_code=64,
        )
    return TransferV2(library, group, num_experts, max_tokens)


def import_deepep() -> Any:
    """Import `deep_ep`; whatever it raises becomes a `DispatchError`."""
    try:
        return importlib.import_module("deep_ep")
    except Exception as error:
        raise DispatchError(
            "DeepEP is installed but cannot be imported",
            where=FLAG,
            why=f"{type(error).__name__}: {error}",
            remedy="mend what the message names, or use twohop",
        ) from error
