"""Find the MoE layers of a built model and say where each stands in the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class MoELayerRef:
    """One MoE layer of this rank.

    Attributes:
        row: Layer number from 0 over the whole model; MTP layers count on after the decoder's.
        module: Megatron's `MoELayer`.
    """

    row: int
    module: Any

    @property
    def router(self) -> Any:
        """Return the router: called with (hidden [s, b, h], padding mask [s, b] or None), returns (probs, map)."""
        return self.module.router

    @property
    def experts(self) -> Any:
        """Return the experts: called with (rows, tokens_per_expert, probs), returns (rows, None)."""
        return self.module.experts

    @property
    def config(self) -> Any:
        """Return Megatron's `TransformerConfig`."""
        return self.module.config


def total_layers(config: Any) -> int:
    """Return how many layers the whole model has, MTP layers included."""
    return int(config.num_layers) + int(getattr(config, "mtp_num_layers", None) or 0)


def find_moe_layers(model_chunks: Sequence[nn.Module]) -> tuple[MoELayerRef, ...]:
    """Return the MoE layers of this rank's chunks (virtual stages), in the order of the whole model."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    found = {id(m): m for chunk in model_chunks for m in chunk.modules() if isinstance(m, BaseMoELayer)}
    return tuple(sorted((_ref(module) for module in found.values()), key=lambda layer: layer.row))


def _ref(module: Any) -> MoELayerRef:
    router = module.router
    # Megatron numbers from 1, pipeline and virtual stages already added; MTP layers start over at 1.
    number = int(router.layer_number or module.layer_number)
    offset = int(module.config.num_layers) if getattr(router, "is_mtp_layer", False) else 0
    return MoELayerRef(offset + number - 1, module)


