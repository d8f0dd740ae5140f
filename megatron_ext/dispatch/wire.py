"""The format of a travelling row: hidden values, weights and expert numbers in one stretch of bytes. Pure
arithmetic.

[ hidden: H values | pad | weights: K values | ids: K int16 or int32 | pad to 16 bytes ]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.dispatch.switch import use_kernels

ALIGN_BYTES = 16  # one GPU load of a thread


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple.

    Examples:
        >>> round_up(33, 16)
        48
    """
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class RowFormat:
    """Where each part of a packed row lies.

    Args:
        hidden: H.
        top_k: K.
        dtype: Of the hidden values.
        weight_dtype: Of the weights.
        num_experts: E; more than 32,767 need four bytes a number.
    """

    hidden: int
    top_k: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    num_experts: int

    @property
    def id_dtype(self) -> torch.dtype:
        """Of the expert numbers."""
        return torch.int16 if self.num_experts <= torch.iinfo(torch.int16).max else torch.int32

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden values alone."""
        return self.hidden * self.dtype.itemsize

    @property
    def meta_offset(self) -> int:
        """Where the weights start; aligned so that they can be read in place."""
        return round_up(self.hidden_bytes, 8)

    @property
    def meta_bytes(self) -> int:
        """Bytes of weights, ids and the padding behind them."""
        used = self.top_k * (self.weight_dtype.itemsize + self.id_dtype.itemsize)
        return self.row_bytes - self.meta_offset if used else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a packed row."""
        used = self.top_k * (self.weight_dtype.itemsize + self.id_dtype.itemsize)
        return round_up(self.meta_offset + used, ALIGN_BYTES)

    def hidden_view(self, rows: Tensor) -> Tensor:
        """The hidden values of packed rows, [M, H], sharing their memory."""
        return rows[:, : self.hidden_bytes].view(self.dtype)

    def meta_view(self, rows: Tensor) -> Tensor:
        """The bytes behind the hidden values, [M, meta_bytes] uint8, sharing memory."""
        return rows[:, self.meta_offset :]

    def pack_meta(self, weights: Tensor, ids: Tensor) -> Tensor:
        """Weights [T, K] and ids [T, K] as bytes, [T, meta_bytes] uint8."""
        meta = torch.empty(len(weights), self.meta_bytes, dtype=torch.uint8, device=weights.device)
        self.write_meta(weights, ids, meta)
        return meta

    def write_meta(self, weights: Tensor, ids: Tensor, meta: Tensor) -> None:
        """Write weights [T, K] and ids [T, K] int64 as bytes; rows behind the T-th become empty choices of weight 0.

        Args:
            weights: [T, K] of the weights' dtype.
            ids: [T, K] int64.
            meta: [M, meta_bytes] uint8, M >= T, such as `meta_view` of packed rows.
        """
        if use_kernels(meta):
            from megatron_ext.dispatch import wire_kernels

            wire_kernels.pack(weights, ids, meta, self.id_dtype.itemsize // 2)
            return
        empty = len(meta) - len(weights)
        if empty:
            pad = torch.nn.functional.pad
            weights, ids = pad(weights, (0, 0, 0, empty)), pad(ids, (0, 0, 0, empty), value=-1)
        parts = [
            weights.contiguous().view(torch.uint8),
            ids.to(self.id_dtype).contiguous().view(torch.uint8),
        ]
        used = sum(part.shape[1] for part in parts)
        parts.append(parts[0].new_zeros(len(weights), self.meta_bytes - used))
        meta.copy_(torch.cat(parts, dim=1))

    def unpack_meta(self, rows: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Weights [M, K] and ids [M, K] int64 of packed rows, copied out: overlap frees the rows before the ids.

        Args:
            rows: [M, row_bytes] uint8.
            first: The expert that becomes number 0; those before it, and empty choices, become negative.
        """
        meta = self.meta_view(rows)
        if use_kernels(rows):
            from megatron_ext.dispatch import wire_kernels

            return wire_kernels.unpack(meta, self.weight_dtype, self.top_k, self.id_dtype.itemsize // 2, first)
        split = self.top_k * self.weight_dtype.itemsize
        end = split + self.top_k * self.id_dtype.itemsize
        # Not contiguous(): a single row is contiguous already, and would be shared.
        weights = meta[:, :split].clone(memory_format=torch.contiguous_format).view(self.weight_dtype)
        ids = meta[:, split:end].clone(memory_format=torch.contiguous_format).view(self.id_dtype)
        return weights.view(-1, self.top_k), ids.view(-1, self.top_k).long() - first
