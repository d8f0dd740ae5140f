"""The running sums of one rank, on the device, and their packing into one vector for the one all-reduce.

Integers are counted in int64. They travel as float64 beside the sums, which is exact below 2**53; a slot that only one
rank fills (micro-batch loads, memory) becomes a gather for free. Rows are the model's layers, MTP layers last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.observe import tally
from megatron_ext.observe.topology import Topology

EXACT_LIMIT = 2**53


@dataclass(frozen=True)
class Shape:
    """The sizes of a run, equal on all ranks.

    Attributes:
        rows: Layers of the whole model, dense ones included, MTP layers last.
        experts: Routed experts of a layer; 0 for a dense model.
        micro_batches: Micro-batches of a step whose load is kept apart.
        sources: Number of data labels, 0 for none.
        probes: Number of probes, whose failures are counted.
    """

    rows: int
    experts: int
    micro_batches: int
    sources: int
    probes: int

    def ints(self, place: Topology) -> dict[str, tuple[int, ...]]:
        """Return the integer fields: name -> shape."""
        rows, experts = self.rows, self.experts
        return {
            "step_counts": (rows, experts),
            "window_counts": (rows, experts),
            "tokens": (rows,),
            "micro": (place.edp_size, place.ep_size, self.micro_batches, rows, 2),
            "source_counts": (rows, self.sources, experts),
            "failed": (self.probes,),
            "memory": (place.world,),
        }

    def floats(self) -> dict[str, tuple[int, ...]]:
        """Return the float64 fields: name -> shape."""
        rows, experts = self.rows, self.experts
        return {
            "logits": (rows, len(tally.LOGIT_FIELDS)),
            "flips": (rows, len(tally.FLIP_FIELDS)),
            "weights": (rows, len(tally.WEIGHT_FIELDS)),
            "gate": (rows, len(tally.WEIGHT_FIELDS)),
            "aux": (rows, len(tally.AUX_FIELDS)),
            "probabilities": (rows, experts),
            "widths": (rows, 3),
            "experts": (rows, 2, experts),
            "shared": (rows, 2),
            "routed": (rows, 2),
            "latent": (rows, 2),
            "bias": (rows, 3),
        }


class Store:
    """The sums. Fields are views of two flat buffers: `ints[...]` int64, `floats[...]` float64."""

    def __init__(self, shape: Shape, place: Topology) -> None:
        """Allocate on `place.device`, all zero."""
        self.shape = shape
        self.place = place
        self._flat_ints, self.ints = _fields(shape.ints(place), torch.int64, place.device)
        self._flat_floats, self.floats = _fields(shape.floats(), torch.float64, place.device)

    @property
    def micro(self) -> Tensor:
        """Return this rank's own slot, int64 [micro_batches, rows, 2]: largest expert's and summed assignments."""
        return self.ints["micro"][self.place.edp_rank, self.place.ep_rank]

    def packed(self) -> Tensor:
        """Return everything as one float64 vector, a copy."""
        return torch.cat([self._flat_ints.double(), self._flat_floats])

    def clear(self) -> None:
        """Begin a new window."""
        self._flat_ints.zero_()
        self._flat_floats.zero_()

    def unpack(self, packed: NDArray[np.float64]) -> dict[str, NDArray]:
        """Return the fields of a packed (and reduced) vector, integers as int64."""
        ints, floats = np.split(packed, [self._flat_ints.numel()])
        assert not ints.size or np.abs(ints).max() < EXACT_LIMIT, "a count has outgrown float64's integers"
        fields = _split(np.rint(ints).astype(np.int64), self.shape.ints(self.place))
        return fields | _split(floats, self.shape.floats())


def _fields(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    sizes = [math.prod(shape) for shape in shapes.values()]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
    parts = flat.split(sizes)
    return flat, {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _split(flat: NDArray, shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray]:
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = np.split(flat, ends[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
