"""DeepEP's two interfaces on the CPU over gloo, for tests: DeepEP itself needs GPUs and kernels built for them.

Slow and plain on purpose: everything is gathered everywhere. It shares no code with our dispatchers. It is strict where
DeepEP is: bf16 rows, fp32 weights, no ids with a kept handle, and V2's default of the number of experts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def _everyone(value: Any, group: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(out, value, group=group)
    return out


def _receive(x: Tensor, ids: Tensor, weights: Tensor, num_experts: int, group: Any) -> tuple[Any, ...]:
    """Rows, local ids, weights, counts, and for each row its (source, token)."""
    assert x.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    local = num_experts // world
    rows, row_ids, row_weights, origin = [], [], [], []
    for source, (sx, sids, sweights) in enumerate(_everyone((x, ids, weights), group)):
        mine = (sids >= rank * local) & (sids < (rank + 1) * local)
        for token in torch.nonzero(mine.any(dim=1)).flatten().tolist():
            rows.append(sx[token])
            row_ids.append(torch.where(mine[token], sids[token] - rank * local, -1))
            row_weights.append(torch.where(mine[token], sweights[token], 0.0))
            origin.append((source, token))
    shape = (len(rows), ids.shape[1])
    made = torch.stack(rows) if rows else x.new_empty(0, x.shape[1])
    all_ids = torch.stack(row_ids) if rows else ids.new_empty(shape)
    counts = [(all_ids == expert).sum().item() for expert in range(local)]
    return made, all_ids, torch.stack(row_weights) if rows else weights.new_empty(shape), counts, origin


def _again(x: Tensor, origin: list[tuple[int, int]], group: Any) -> Tensor:
    everyone = _everyone(x, group)
    rows = [everyone[source][token] for source, token in origin]
    return torch.stack(rows) if rows else x.new_empty(0, x.shape[1])


def _sum_home(rows: Tensor, origin: list[tuple[int, int]], tokens: int, group: Any) -> Tensor:
    rank = dist.get_rank(group)
    total = torch.zeros(tokens, rows.shape[1])
    for part, places in _everyone((rows, origin), group):
        for row, (source, token) in zip(part, places, strict=True):
            if source == rank:
                total[token] += row.float()
    return total.to(rows.dtype)


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class Buffer:
    """V1's interface, the part that is used."""

    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: _Config())

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes = group, num_nvl_bytes

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        return torch.zeros(1), None, torch.zeros(num_experts), torch.zeros(1, dtype=torch.bool), None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
    ) -> tuple[Any, ...]:
        if handle is not None:
            assert topk_idx is None
            return _again(x, handle[0], self.group), None, None, None, None, None
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        rows, ids, weights, counts, origin = _receive(x, topk_idx, topk_weights, len(num_tokens_per_expert), self.group)
        return rows, ids, weights, counts, (origin, len(x)), None

    def combine(self, x: Tensor, handle: Any, topk_weights: Any = None) -> tuple[Any, ...]:
        origin, tokens = handle
        weights = None if topk_weights is None else _sum_home(topk_weights, origin, tokens, self.group)
        return _sum_home(x, origin, tokens, self.group), weights, None


class ElasticBuffer:
    """V2's interface, the part that is used."""

    def __init__(
        self, group: Any, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int, deterministic: bool
    ) -> None:
        self.group, self.num_max_tokens, self.hidden = group, num_max_tokens_per_rank, hidden

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        handle: Any = None,
    ) -> tuple[Any, ...]:
        assert num_experts is not None, "2.1.0 reads it before the handle"
        assert len(x) <= self.num_max_tokens
        if handle is not None:
            assert topk_idx is None
            return _again(x, handle.origin, self.group), None, None, handle, None
        rows, ids, weights, counts, origin = _receive(x, topk_idx, topk_weights, num_experts, self.group)
        made = SimpleNamespace(num_recv_tokens_per_expert_list=counts, origin=origin, tokens=len(x))
        return rows, ids, weights, made, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Any = None) -> tuple[Any, ...]:
        weights = None
        if topk_weights is not None:
            weights = _sum_home(topk_weights, handle.origin, handle.tokens, self.group)
        return _sum_home(x, handle.origin, handle.tokens, self.group), weights, None
