"""What a training test may do to the model: dump tensors for a check by hand, or break something on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch


def moe_layers(model: list[Any]) -> dict[int, Any]:
    """Return global layer number -> MoELayer."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    found = [module for chunk in model for module in chunk.modules() if isinstance(module, MoELayer)]
    return {module.layer_number - 1: module for module in found}


class Plugin:
    """Does nothing."""

    def __init__(self, spec: dict[str, Any], sink: Any) -> None:
        self.spec = spec
        self.folder = Path(spec["folder"])
        self.layers: dict[int, Any] = {}
        self.iteration = 0

    def model_built(self, model: list[Any], args: Any) -> None:
        self.layers = moe_layers(model)
        self.args = args
        self.setup()

    def setup(self) -> None:
        pass

    def step_end(self, iteration: int) -> None:
        self.iteration = iteration


class Dump(Plugin):
    """Saves every router and expert call with gradients on, by hooks of its own, for a NumPy computation."""

    def setup(self) -> None:
        self.calls = 0
        for number, layer in self.layers.items():
            layer.router.register_forward_hook(self._hook("router", number, self._router))
            layer.experts.register_forward_hook(self._hook("experts", number, self._experts))
            layer.register_forward_hook(self._hook("layer", number, self._layer))
            if layer.shared_experts is not None:
                layer.shared_experts.register_forward_hook(self._hook("shared", number, self._tensor))

    def _hook(self, kind, number, arrays):
        def save(module, inputs, output):
            if not torch.is_grad_enabled() or not module.training:
                return
            self.calls += 1
            name = f"{kind}-{torch.distributed.get_rank()}-{self.iteration + 1:04d}-{number}-{self.calls:06d}.npz"
            found = {key: value.detach().float().numpy() for key, value in arrays(module, inputs, output).items()}
            np.savez(self.folder / name, layer=number, step=self.iteration + 1, **found)

        return save

    def _router(self, router, inputs, output):
        return {"hidden": inputs[0], "weight": router.weight, "probs": output[0], "map": output[1]}

    def _experts(self, experts, inputs, output):
        return {"rows": output[0], "counts": inputs[1], "probs": inputs[2]}

    def _layer(self, module, inputs, output):
        return {"output": output[0]}

    def _tensor(self, module, inputs, output):
        return {"output": output}
