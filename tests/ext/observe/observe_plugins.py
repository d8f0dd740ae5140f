"""What a training test may do to the model: dump tensors for a check by hand, or break something on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch


def moe_layers(model: list[Any]) -> dict[int, Any]:
    """Return global layer number -> MoELayer; MTP layers, which Megatron numbers from 1 again, count on."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    found = [one for chunk in model for one in chunk.named_modules() if isinstance(one[1], MoELayer)]
    return {
        module.layer_number - 1 + (module.config.num_layers if "mtp." in name else 0): module for name, module in found
    }


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
            if layer.config.moe_latent_size:
                layer.fc2_latent_proj.register_forward_hook(self._hook("latent", number, self._first))

    def _hook(self, kind, number, arrays):
        from megatron.core import parallel_state

        def save(module, inputs, output):
            if not torch.is_grad_enabled() or not module.training:
                return
            self.calls += 1
            name = f"{kind}-{torch.distributed.get_rank()}-{self.iteration + 1:04d}-{number}-{self.calls:06d}.npz"
            found = {key: value.detach().float().numpy() for key, value in arrays(module, inputs, output).items()}
            place = {"ep_rank": parallel_state.get_expert_model_parallel_rank()}
            place |= {"edp_rank": parallel_state.get_expert_data_parallel_rank()}
            np.savez(self.folder / name, layer=number, step=self.iteration + 1, **place, **found)

        return save

    def _router(self, router, inputs, output):
        found = {"hidden": inputs[0], "weight": router.weight, "probs": output[0], "map": output[1]}
        return found if router.expert_bias is None else {**found, "bias": router.expert_bias}

    def _experts(self, experts, inputs, output):
        return {"rows": output[0], "counts": inputs[1], "probs": inputs[2]}

    def _layer(self, module, inputs, output):
        return {"output": output[0]}

    def _tensor(self, module, inputs, output):
        return {"output": output}

    def _first(self, module, inputs, output):
        return {"output": output[0]}


def router_bias(router: Any) -> torch.Tensor:
    """Give a router a bias that nobody trains, all 0; Megatron's gating adds it."""
    if router.bias is None:
        router.bias = torch.nn.Parameter(torch.zeros_like(router.weight[:, 0]), requires_grad=False)
    return router.bias.data


class Sources(Dump):
    """Saves the data set of each sample too, as the data loader gave it."""

    def setup(self) -> None:
        super().setup()
        from megatron_ext.runtime import hooks

        stock = hooks.batch_read

        def read(sample):
            self.calls += 1
            name = f"batch-{torch.distributed.get_rank()}-{self.iteration + 1:04d}-{self.calls:06d}.npz"
            np.savez(self.folder / name, step=self.iteration + 1, ids=sample["dataset_id"].numpy())
            stock(sample)

        hooks.batch_read = read


class Late(Plugin):
    """Spoils the model after every step from START on."""

    START = 10

    def step_end(self, iteration: int) -> None:
        super().step_end(iteration)
        if iteration >= self.START:
            self.spoil(iteration)

    def spoil(self, iteration: int) -> None:
        raise NotImplementedError


class Broken(Late):
    """From step 10 on, one failure a layer: collapse, dead expert, rogue expert, flat gate; layer 4 stays well."""

    def spoil(self, iteration: int) -> None:
        if iteration == self.START:
            router_bias(self.layers[0].router)[[3, 5]] = torch.tensor([0.9, 0.8])
        self.layers[1].experts.local_experts[5].linear_fc2.weight.data.zero_()
        self.layers[2].experts.local_experts[2].linear_fc2.weight.data.mul_(1.25)
        self.layers[3].router.weight.data.mul_(0.5)


class Skewed(Late):
    """Two ranks, bf16: layer 0's logits grow by 15 % a step from step 10, layer 1's rank 1 gets most tokens."""

    def spoil(self, iteration: int) -> None:
        if iteration == self.START:
            router_bias(self.layers[1].router)[4:] = 0.3
        # The optimizer writes the model's copy anew each step: set it from a copy of our own.
        weight = self.layers[0].router.weight
        if iteration == self.START:
            self.first = weight.data.float().clone()
        weight.data.copy_(self.first * 1.15 ** (iteration - self.START))


class Extreme(Late):
    """From step 10 on: a saturated gate at layer 0, an expert without tokens at layer 1, a blind loss at layer 2."""

    def spoil(self, iteration: int) -> None:
        if iteration == self.START:
            router_bias(self.layers[1].router)[5] = -1e9
            router_bias(self.layers[2].router)[[3, 5]] = 1e-3
            self.first = self.layers[0].router.weight.data.clone()
        # So large that the second weight of nearly every token is exactly 0.
        self.layers[0].router.weight.data.copy_(self.first * 1e5)
        self.layers[2].router.weight.data.zero_()


class Shaken(Plugin):
    """After step 45 each token has the output weights of another: the loss jumps, the routing is as it was."""

    def model_built(self, model: list[Any], args: Any) -> None:
        self.model = model
        super().model_built(model, args)

    def step_end(self, iteration: int) -> None:
        super().step_end(iteration)
        if iteration == 45:
            named = self.model[0].named_parameters()
            (weight,) = [value for name, value in named if name.endswith("output_layer.weight")]
            weight.data.copy_(weight.data.roll(1, 0))


class Exploding(Plugin):
    """After step 25 one weight is NaN; Megatron is told not to look."""

    def step_end(self, iteration: int) -> None:
        super().step_end(iteration)
        if iteration == 25:
            self.layers[0].experts.local_experts[0].linear_fc2.weight.data[0, 0] = float("nan")
