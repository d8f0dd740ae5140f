"""The step of Megatron's distributed optimizer in one pass: gradient clip, AdamW, and the 16-bit copy of the weights.

Upstream does three things one after the other: it scales every gradient by the clip coefficient, calls Transformer
Engine's (or torch's) Adam, and copies each fp32 main parameter into its model parameter, tensor by tensor. Here the
coefficient is kept, as the tensor on the GPU that upstream computed, and one kernel a parameter group
(`megatron_ext.fused.adam_kernels`) does the rest. Patch gpu/adam calls `forget_clip`, `take_clip` and `step`; where the
last two answer False upstream goes its own way, which is so for every run without `--moe-ext-adam fused`.

The optimizer itself stays upstream's, and so do its state and its checkpoints: the same tensors under the same keys,
the same count of steps. The first step after the start is upstream's too, since it makes that state. All addresses are
read anew at each step, so tensors may be replaced or moved between steps. They are read once, after the clip, while the
GPU is busy with the norm; where the kernel cannot take them any more, the gradients are scaled then and the step is
upstream's.

One thing is seen from outside: the gradients are not scaled in memory. Whoever reads them between clip and step finds
them as they came out of the backward pass; counting their zeros (`--log-num-zeros-in-grad`) keeps upstream's clip.
"""

from __future__ import annotations

import operator
import os
import weakref
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from megatron_ext.runtime.kept_grads import same
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


def forget_addresses(optimizer: Any) -> None:
    """Forget where the tensors of the step before lay: the next step tells its kernels anew, as its first did."""
    fused = _steps.get(optimizer)
    if fused is not None:
        fused.forget_addresses()


def take_clip(parameters: Sequence[Tensor] | Tensor, max_norm: float, total_norm: Tensor | float) -> bool:
    """Keep a clip coefficient for the coming step, and return whether it was kept; else the gradients must be scaled.

    Args:
        parameters: Those whose gradients are to be scaled.
        max_norm: The largest norm that the gradients may have.
        total_norm: The norm that they have; [1], fp32, or a number.
    """
    fused = next((fused for fused in list(_steps.values()) if fused is not None and fused.owns(parameters)), None)
    if fused is None:
        return False
    coefficient = max_norm / (total_norm + 1.0e-6)  # upstream's
    fused.clip = coefficient.clamp(max=1.0) if isinstance(coefficient, Tensor) else min(coefficient, 1.0)
    return True


def step(optimizer: Any) -> bool:
    """Take a step of the inner optimizer and write the model parameters, or do nothing and return False.

    Args:
        optimizer: Megatron's, around torch's; the gradients of its main parameters are ready.
    """
    if (_chosen or os.environ.get(VARIABLE)) != "fused":
        return False
    fused = _steps.get(optimizer)
    if optimizer not in _steps or (fused is not None and not same(optimizer.get_parameters(), fused.parameters)):
        if fused is not None:
            fused.scale_grads(optimizer)  # not to lose a coefficient, should the parameters have changed after the clip
        fused = _steps[optimizer] = _attach(optimizer)
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
    mains = [main for groups in _main_groups(optimizer) for group in groups for main in group]
    if set(map(id, mains)) != set(map(id, optimizer.get_parameters())):
        return "the optimizer has other parameters than Megatron's lists"
    return "" if _kernels_run(device) else "its kernel needs a GPU and Triton"


def _model_groups(optimizer: Any) -> tuple[Any, Any]:
    return optimizer.model_float16_groups, optimizer.model_fp32_groups


def _main_groups(optimizer: Any) -> tuple[Any, Any]:
    return optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups


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
class _Launch:
    """What one launch takes: main parameters [n], fp32, and where their model parameters' parts of this rank lie.

    Args:
        index: Of the parameter group.
        dtype: Of the model parameters.
        mains: The main parameters.
        buckets: Of each model parameter, its bucket's place in Megatron's lists of buffers and buckets.
        offsets: Of each, bytes from the start of that.
        columns: The addresses that the kernel has: of p, m, v, the gradients, and the buckets (by place).
    """

    index: int
    dtype: torch.dtype
    mains: list[Tensor] = field(default_factory=list)
    buckets: list[tuple[int, int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    columns: list[Any] = field(default_factory=list)

    def add(self, main: Tensor, bucket: tuple[int, int], offset: int) -> None:
        """Add a main parameter."""
        self.mains.append(main)
        self.buckets.append(bucket)
        self.offsets.append(offset)

    def rows(self, columns: list[Any]) -> list[tuple[int, int, int, int, int]]:
        """Return the addresses of `columns` by parameter, those of its bucket as the address of its part."""
        starts = columns[-1]
        outs = [starts[place] + offset for place, offset in zip(self.buckets, self.offsets, strict=True)]
        return list(zip(*columns[:-1], outs, strict=True))


class _FusedStep:
    """The steps of one distributed optimizer.

    Args:
        optimizer: Megatron's; nothing here keeps it alive.
    """

    def __init__(self, optimizer: Any) -> None:
        from megatron_ext.fused.adam_kernels import Addresses

        self._optimizer = weakref.ref(optimizer)
        self.parameters: list[Tensor] = optimizer.get_parameters()
        # The coefficient for the coming step; that of a skipped step is forgotten (`forget_clip`).
        self.clip: Tensor | float | None = None
        # By parameter group and the dtype of the model's parameters.
        launches: dict[tuple[int, torch.dtype], _Launch] = {}
        for model_groups, main_groups in zip(_model_groups(optimizer), _main_groups(optimizer), strict=True):
            for index, (models, shards) in enumerate(zip(model_groups, main_groups, strict=True)):
                for model, main in zip(models, shards, strict=True):
                    buffer, _, bucket = optimizer.model_param_gbuf_map[model]
                    start = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"].start
                    dtype = optimizer.buffers[buffer].buckets[bucket].param_data.dtype
                    launch = launches.setdefault((index, dtype), _Launch(index, dtype))
                    launch.add(main, (buffer, bucket), start * dtype.itemsize)
        self._device: torch.device = next(iter(launches.values())).mains[0].device
        self._launches = [
            (launch, Addresses([main.numel() for main in launch.mains], launch.dtype, self._device))
            for launch in launches.values()
        ]
        self._buckets = {bucket for launch in launches.values() for bucket in launch.buckets}

    def forget_addresses(self) -> None:
        """See the function `forget_addresses`."""
        for launch, _ in self._launches:
            launch.columns = []

    def owns(self, parameters: Sequence[Tensor] | Tensor) -> bool:
        """Return whether these are all main parameters of this optimizer, in its order."""
        optimizer = self._optimizer()
        return (
            optimizer is not None
            and not isinstance(parameters, Tensor)
            and same(parameters, self.parameters)
            and not optimizer.config.log_num_zeros_in_grad
        )

    def step(self, optimizer: Any) -> bool:
        """See the function `step`."""
        inner = optimizer.optimizer
        counts = _counts(inner)
        if counts is None or not self._point(optimizer):
            self.scale_grads(optimizer)
            return False
        clip, self.clip = self.clip, None
        if not isinstance(clip, Tensor):
            clip = torch.full((1,), 1.0 if clip is None else clip, dtype=torch.float32, device=self._device)
        for launch, addresses in self._launches:
            addresses.adamw(_hyper(inner.param_groups[launch.index], counts[launch.index] + 1), clip)
        _count_step(inner)
        return True

    def scale_grads(self, optimizer: Any) -> None:
        """Scale the gradients where upstream's clip would have done so by now: its step is to follow."""
        clip, self.clip = self.clip, None
        if clip is not None:
            grads = [param.grad for param in optimizer.get_parameters() if param.grad is not None]
            torch._foreach_mul_(grads, clip.view(()) if isinstance(clip, Tensor) else clip)

    def _point(self, optimizer: Any) -> bool:
        """Have the launches read where all tensors lie now, or return False: this step must be upstream's."""
        inner = optimizer.optimizer
        if inner._optimizer_step_pre_hooks or inner._optimizer_step_post_hooks:
            return False
        starts = {place: _bucket_start(optimizer, place) for place in self._buckets}
        if not all(starts.values()):
            return False
        for launch, addresses in self._launches:
            states = list(map(inner.state.get, launch.mains))
            grads = [main.grad for main in launch.mains]
            if not all(states) or not all(map(operator.is_not, grads, repeat(None))):
                return False
            # Some thousand addresses at each step, while the GPU waits: whole lists, not a tensor after the other.
            firsts, seconds = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
            tensors = (launch.mains, firsts, seconds, grads)
            columns: list[Any] = [*(list(map(Tensor.data_ptr, column)) for column in tensors), starts]
            if columns != launch.columns:
                if not all(map(self._fits, launch.mains, states)):
                    return False
                addresses.point(launch.rows(columns))
                launch.columns = columns
        return True

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


def _counts(inner: Any) -> list[int] | None:
    """Return each parameter group's count of steps, 0 where it has no parameters.

    None where one has several counts, or none yet: before the first step of the inner optimizer.
    """
    if _is_te_adam(inner):
        if not all(isinstance(group.get("step"), int) for group in inner.param_groups if group["params"]):
            return None
        return [group.get("step", 0) for group in inner.param_groups]
    found = []
    for group in inner.param_groups:
        states = [inner.state.get(param) for param in group["params"]]
        if not all(state and "step" in state for state in states):
            return None
        counts = {state["step"].item() for state in states}
        if len(counts) > 1:
            return None
        found.append(int(counts.pop()) if counts else 0)
    return found


def _count_step(inner: Any) -> None:
    """Count a step where the inner optimizer would."""
    if _is_te_adam(inner):
        for group in inner.param_groups:
            if "step" in group:  # groups without parameters too, where its release counts for them
                group["step"] += 1
        return
    # torch's AdamW counts in a tensor [] each parameter. A number to add would be made a tensor for each of them.
    counts = [inner.state[param]["step"] for group in inner.param_groups for param in group["params"]]
    torch._foreach_add_(counts, [torch.ones(())] * len(counts))
