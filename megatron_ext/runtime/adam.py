"""The step of Megatron's distributed optimizer in one pass: gradient clip, AdamW, and the 16-bit copy of the weights.

Upstream does three things one after the other: it scales every gradient by the clip coefficient, calls Transformer
Engine's (or torch's) Adam, and copies each fp32 main parameter into its model parameter, tensor by tensor. Here the
coefficient is kept, as the tensor on the GPU that upstream computed, and one kernel a parameter group
(`megatron_ext.fused.adam_kernels`) does the rest. Patch gpu/adam calls `forget_clip`, `take_clip` and `step`; where the
last two answer False upstream goes its own way, which is so for every run without `--moe-ext-adam fused`.

The optimizer itself stays upstream's, and so do its state and its checkpoints: the same tensors under the same keys,
the same count of steps. The first step after the start is upstream's too, since it makes that state. All addresses are
read anew at each step, so tensors may be replaced or moved between steps.

One thing is seen from outside: the gradients are not scaled in memory. Whoever reads them between clip and step finds
them as they came out of the backward pass; counting their zeros (`--log-num-zeros-in-grad`) keeps upstream's clip.
"""

from __future__ import annotations

import os
import weakref
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.runtime.notes import say_once

CHOICES = ("megatron", "fused")
VARIABLE = "MOE_EXT_ADAM"

_EMPTY = "this rank has no parameters"

_chosen: str | None = None
# One an optimizer that has taken a step: dense and expert parameters have one each. None: its steps are upstream's.
_steps: weakref.WeakKeyDictionary[Any, _FusedStep | None] = weakref.WeakKeyDictionary()


def add_arguments(parser: ArgumentParser) -> None:
    """Add `--moe-ext-adam`."""
    group = parser.add_argument_group("moe-ext optimizer step")
    group.add_argument(
        "--moe-ext-adam",
        choices=CHOICES,
        default="megatron",
        help="fused: gradient clip, AdamW and the copy to the 16-bit weights in one pass, where the distributed "
        "optimizer keeps fp32 states on a GPU; megatron: one after the other (default: %(default)s)",
    )


def configure(args: Namespace) -> None:
    """Take the flag, before the optimizer is built; under a stock entry script `MOE_EXT_ADAM` answers."""
    global _chosen
    _chosen = args.moe_ext_adam


def forget_clip(optimizer: Any) -> None:
    """Forget a coefficient whose step was skipped: new gradients are there.

    Args:
        optimizer: Megatron's, about to prepare its gradients.
    """
    fused = _steps.get(optimizer)
    if fused is not None:
        fused.clip = None


def take_clip(parameters: Sequence[Tensor] | Tensor, coefficient: Tensor | float) -> bool:
    """Keep a clip coefficient for the coming step, and return whether it was kept; else the gradients must be scaled.

    Args:
        parameters: Those whose gradients are to be scaled.
        coefficient: The largest allowed norm over the norm; [1], fp32, or a number. Above 1 it counts as 1.
    """
    for fused in list(_steps.values()):
        if fused is not None and fused.owns(parameters):
            return fused.take_clip(coefficient)
    return False


def step(optimizer: Any) -> bool:
    """Take a step of the inner optimizer and write the model parameters, or do nothing and return False.

    Args:
        optimizer: Megatron's, around torch's; the gradients of its main parameters are ready.
    """
    if (_chosen or os.environ.get(VARIABLE)) != "fused":
        return False
    if optimizer not in _steps:
        _steps[optimizer] = _attach(optimizer)
    fused = _steps[optimizer]
    return fused is not None and fused.step(optimizer)


def _attach(optimizer: Any) -> _FusedStep | None:
    obstacle = _obstacle(optimizer)
    if obstacle == _EMPTY:
        return None
    if obstacle:
        say_once(f"optimizer: Megatron's own step, --moe-ext-adam fused is left out: {obstacle}")
        return None
    say_once("optimizer: clip, AdamW and the copy to the model's weights in one pass, from the second step on")
    return _FusedStep(optimizer)


def _obstacle(optimizer: Any) -> str:
    """Return why the steps of this optimizer must be upstream's, empty where they need not."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if type(optimizer) is not DistributedOptimizer:
        return f"it is for the distributed optimizer (--use-distributed-optimizer), this is {type(optimizer).__name__}"
    config, ddp = optimizer.config, optimizer.ddp_config
    reasons = {
        "FSDP steps by itself": ddp.use_megatron_fsdp,
        "--use-precision-aware-optimizer": config.use_precision_aware_optimizer,
        "--optimizer-cpu-offload": config.optimizer_cpu_offload,
        "--optimizer-cuda-graph": config.optimizer_cuda_graph,
        "the parameters are gathered in 8 or 4 bits": ddp.fp8_param_gather
        or ddp.fp4_param_gather
        or config.reuse_grad_buf_for_mxfp8_param_ag,
    }
    found = next((reason for reason, holds in reasons.items() if holds), "")
    return found or _inner_obstacle(optimizer.optimizer) or _tensor_obstacle(optimizer)


def _inner_obstacle(inner: Any) -> str:
    if type(inner) is torch.optim.AdamW:
        names = ("amsgrad", "maximize", "capturable", "differentiable")
        given = [name for name in names if any(group.get(name) for group in inner.param_groups)]
    elif _is_te_adam(inner):
        # Absent in older releases means off.
        given = [n for n in ("capturable", "master_weights", "use_decoupled_grad") if getattr(inner, n, False)]
        dtypes = {getattr(inner, name, torch.float32) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
        given += ["states that are not fp32"] if dtypes != {torch.float32} else []
        given += [] if inner.adam_w_mode else ["weight decay in the gradient (--no-decoupled-weight-decay)"]
    else:
        return f"the optimizer is {type(inner).__module__}.{type(inner).__name__}, not AdamW"
    return f"the optimizer has {', '.join(given)}" if given else ""


def _is_te_adam(inner: Any) -> bool:
    kind = type(inner)
    return kind.__name__ == "FusedAdam" and kind.__module__.startswith("transformer_engine.")


def _tensor_obstacle(optimizer: Any) -> str:
    weights = [weight for groups in _model_groups(optimizer) for group in groups for weight in group]
    odd = next((weight for weight in weights if type(weight) is not torch.nn.Parameter), None)
    if odd is not None:
        return f"a parameter is a {type(odd).__name__}"
    device = next((weight.device for weight in weights), None)
    if device is None:
        return _EMPTY
    return "" if _kernels_run(device) else "its kernel needs a GPU and Triton"


def _model_groups(optimizer: Any) -> tuple[Any, Any]:
    return optimizer.model_float16_groups, optimizer.model_fp32_groups


def _kernels_run(device: torch.device) -> bool:
    try:
        import triton
    except ImportError:
        return False
    if not hasattr(triton, "jit"):
        return False
    # On the CPU in Triton's interpreter alone, for the tests.
    if device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1"
    return device.index == torch.cuda.current_device()


@dataclass
class _Slot:
    """A main parameter [n], fp32, and where its model parameter's part of this rank lies.

    `buffer`: the place of the bucket in Megatron's lists of buffers and buckets; `offset_bytes`: from its start.
    """

    main: Tensor
    buffer: tuple[int, int]
    offset_bytes: int


class _FusedStep:
    """The steps of one distributed optimizer.

    Args:
        optimizer: Megatron's; nothing here keeps it alive.
    """

    def __init__(self, optimizer: Any) -> None:
        from megatron_ext.fused.adam_kernels import Addresses

        self._optimizer = weakref.ref(optimizer)
        # The coefficient for the coming step; that of a skipped step is forgotten (`forget_clip`).
        self.clip: Tensor | float | None = None
        # Slots by their parameter group and the dtype of the model's parameters: what one launch takes.
        self._slots: dict[tuple[int, torch.dtype], list[_Slot]] = {}
        mains = (optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups)
        for model_groups, main_groups in zip(_model_groups(optimizer), mains, strict=True):
            for index, (models, shards) in enumerate(zip(model_groups, main_groups, strict=True)):
                for model, main in zip(models, shards, strict=True):
                    buffer, _, bucket = optimizer.model_param_gbuf_map[model]
                    start = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"].start
                    dtype = optimizer.buffers[buffer].buckets[bucket].param_data.dtype
                    slot = _Slot(main, (buffer, bucket), start * dtype.itemsize)
                    self._slots.setdefault((index, dtype), []).append(slot)
        self._device: torch.device = next(iter(self._slots.values()))[0].main.device
        self._launches = {
            key: Addresses([slot.main.numel() for slot in slots], key[1], self._device)
            for key, slots in self._slots.items()
        }

    def owns(self, parameters: Sequence[Tensor] | Tensor) -> bool:
        """Return whether these are all main parameters of this optimizer, in its order."""
        optimizer = self._optimizer()
        if optimizer is None or isinstance(parameters, Tensor):
            return False
        own = optimizer.get_parameters()
        return len(own) == len(parameters) and all(a is b for a, b in zip(own, parameters, strict=True))

    def take_clip(self, coefficient: Tensor | float) -> bool:
        """See the function `take_clip`."""
        optimizer = self._optimizer()
        self.clip = None
        if optimizer is None or optimizer.config.log_num_zeros_in_grad or not self._point(optimizer):
            return False
        self.clip = coefficient.clamp(max=1.0) if isinstance(coefficient, Tensor) else min(coefficient, 1.0)
        return True

    def step(self, optimizer: Any) -> bool:
        """See the function `step`."""
        clip, self.clip = self.clip, None
        if not self._point(optimizer):
            if clip is None:
                return False
            raise RuntimeError("the optimizer's state was taken away between the gradient clip and the step")
        if not isinstance(clip, Tensor):
            clip = torch.full((1,), 1.0 if clip is None else clip, dtype=torch.float32, device=self._device)
        counts = _count_step(optimizer.optimizer)
        for (index, _), launch in self._launches.items():
            launch.adamw(_hyper(optimizer.optimizer.param_groups[index], counts[index]), clip)
        return True

    def _point(self, optimizer: Any) -> bool:
        """Have the launches read where all tensors lie now, or return False: this step must be upstream's."""
        inner = optimizer.optimizer
        if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks or not _counts_agree(inner):
            return False
        starts: dict[tuple[int, int], int] = {}
        for key, slots in self._slots.items():
            rows = []
            for slot in slots:
                state, grad = inner.state.get(slot.main), slot.main.grad
                if not state or grad is None:
                    return False
                if slot.buffer not in starts:
                    starts[slot.buffer] = _bucket_start(optimizer, slot.buffer)
                rows.append(
                    (
                        slot.main.data_ptr(),
                        state["exp_avg"].data_ptr(),
                        state["exp_avg_sq"].data_ptr(),
                        grad.data_ptr(),
                        starts[slot.buffer] + slot.offset_bytes,
                    )
                )
            if self._launches[key].differ(rows):
                if not all(self._fits(slot.main, inner.state[slot.main]) for slot in slots):
                    return False
                self._launches[key].point(rows)
        return all(starts.values())

    def _fits(self, main: Tensor, state: dict[str, Any]) -> bool:
        """Return whether the kernel may go over these tensors by their addresses."""
        return all(
            tensor is not None
            and tensor.dtype == torch.float32
            and tensor.device == self._device
            and tensor.numel() == main.numel()
            and tensor.is_contiguous()
            and bool(tensor.data_ptr())  # no memory: offloaded
            for tensor in (main, state["exp_avg"], state["exp_avg_sq"], main.grad)
        )


def _bucket_start(optimizer: Any, place: tuple[int, int]) -> int:
    """Return the address of a bucket of model parameters, 0 where it has no memory now."""
    buffer, bucket = place
    address: int = optimizer.buffers[buffer].buckets[bucket].param_data.data_ptr()
    return address


def _hyper(group: dict[str, Any], count: int) -> Any:
    from megatron_ext.fused.adam_kernels import Hyper

    # Floats all: a whole number would make Triton compile the kernel anew.
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, eps, decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
    return Hyper(lr, beta1, beta2, eps, decay, count, bool(group.get("bias_correction", True)))


def _torch_counts(inner: Any) -> list[list[Tensor]]:
    """Return the step counts of a torch AdamW, a tensor [] each parameter, by group."""
    return [[inner.state[p]["step"] for p in group["params"]] for group in inner.param_groups]


def _counts_agree(inner: Any) -> bool:
    """Return whether each parameter group has one count of steps, as after a step of the inner optimizer."""
    if _is_te_adam(inner):
        return all(isinstance(group.get("step"), int) for group in inner.param_groups if group["params"])
    if not all("step" in inner.state.get(p, {}) for group in inner.param_groups for p in group["params"]):
        return False
    return all(len({float(count) for count in counts}) <= 1 for counts in _torch_counts(inner))


def _count_step(inner: Any) -> list[int]:
    """Count a step where the inner optimizer would; return each group's count, with this step (0: no parameters)."""
    if _is_te_adam(inner):
        for group in inner.param_groups:
            if "step" in group:  # groups without parameters too, where its release counts for them
                group["step"] += 1
        return [group.get("step", 0) for group in inner.param_groups]
    counts = _torch_counts(inner)
    every = [count for group in counts for count in group]
    torch._foreach_add_(every, 1.0)
    return [int(group[0]) if group else 0 for group in counts]
