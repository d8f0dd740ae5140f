"""The load-balancing bias of each router, read at the end of a sampled step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ext.observe.layers import MoELayerRef
from megatron_ext.observe.probes.base import Probe
from megatron_ext.observe.topology import Topology


class BiasProbe(Probe):
    """Adds spread and mean of the bias; every rank that holds the router adds the same values."""

    name = "expert bias"
    measures = ("bias_spread", "bias_mean")

    @classmethod
    def refusal(cls, config: Any, place: Topology) -> str:
        """Return "": a router without a bias has nothing to read and that is no fault."""
        return ""

    def install(self, layer: MoELayerRef) -> None:
        """Need no hook."""

    def at_flush(self, layers: tuple[MoELayerRef, ...]) -> None:
        """Read the biases."""
        for layer in layers:
            bias = bias_of(layer.router)
            if bias is not None and not self.off:
                self.guarded(lambda layer=layer, bias=bias: self._add(layer, bias))  # type: ignore[misc]

    def _add(self, layer: MoELayerRef, bias: Tensor) -> None:
        values = bias.double()
        one = torch.ones_like(values[0])
        sums = torch.stack([one, values.max() - values.min(), values.mean()])
        self.run.store.floats["bias"][layer.row] += sums


def bias_of(router: Any) -> Tensor | None:
    """Return [E], the expert bias or the quantile balancer's offset, None where there is none."""
    bias = getattr(router, "expert_bias", None)
    return bias if bias is not None else getattr(router, "qb_beta", None)
