"""Megatron's distributed optimizer with our step in it beside its own, on the device named: `cuda`, or `cpu`.

    python adam_megatron_check.py DEVICE [CHECK ...]      (or under torchrun, several ranks)

Two optimizers over equal weights get equal gradients, drawn anew each step; one has the fused step. Dense weights of
odd sizes and an expert's, groups with and without weight decay, a clip that bites. With several ranks the shards start
and end inside of the weights, and a rank has no part of some. On the CPU the kernel runs in Triton's interpreter, which
the environment must ask for (TRITON_INTERPRET=1). Exits 1 with what went wrong.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ext.runtime import cpu

DEVICE = sys.argv[1]
if DEVICE == "cpu":
    cpu.install()  # before Megatron

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_ext.runtime import adam  # noqa: E402

UNCLIPPED = 5  # the number of the step whose norm is below the clip


class Net(torch.nn.Module):
    """Weights without a forward pass: the gradients are given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)
        shapes = {"one": (37, 53), "bias": (53,), "scale": (1,), "two": (64, 129), "expert_one": (31, 21)}
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=made).to(DEVICE, dtype)
            self.register_parameter(name, torch.nn.Parameter(value))
        self.expert_one.allreduce = False  # Megatron's mark of an expert's weights


@dataclass
class Run:
    """One optimizer over its own weights; `fused` says whose step it takes."""

    fused: bool
    dtype: torch.dtype = torch.bfloat16
    fp32_grads: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    own_steps: int = 0  # those of the inner optimizers

    def __post_init__(self) -> None:
        net = Net(self.dtype)
        net.bfloat16() if self.dtype == torch.bfloat16 else net.float()
        distributed = self.options.get("use_distributed_optimizer", True)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=distributed, grad_reduce_in_fp32=self.fp32_grads, bucket_size=4000
        )
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, num_moe_experts=2)
        self.model = DistributedDataParallel(config, ddp, net)
        bf16 = self.dtype == torch.bfloat16
        options = {"lr": 0.1, "clip_grad": 0.7, "weight_decay": 0.1, "use_distributed_optimizer": distributed}
        options |= {"adam_beta2": 0.95, "bf16": bf16, "params_dtype": self.dtype, **self.options}
        settings = OptimizerConfig(optimizer="adam", **options)
        overrides = get_standard_config_overrides(settings)  # no weight decay for vectors: a group of their own
        self.optimizer = get_megatron_optimizer(settings, [self.model], config_overrides=overrides)
        for part in self.optimizer.chained_optimizers:
            self._count(part.optimizer)

    def _count(self, inner: Any) -> None:
        real = inner.step

        def counted(*args: Any) -> Any:
            self.own_steps += 1
            return real(*args)

        inner.step = counted

    def step(self, number: int) -> tuple[Any, ...]:
        """One step with the gradients of this number; returns what Megatron's `step` returns."""
        made = torch.Generator().manual_seed(100 + number)
        self.optimizer.zero_grad()
        self.model.zero_grad_buffer()
        for name, weight in self.model.named_parameters():
            value = torch.randn(weight.shape, generator=made)
            value *= 1e-4 if number == UNCLIPPED else 1
            value *= 0 if number == 3 and name.endswith("two") else 1  # an expert that got no token looks like this
            weight.main_grad.copy_(value)
        for index, group in enumerate(self.optimizer.param_groups):  # as Megatron's scheduler does
            group["lr"] = 0.02 / number * (1 + index % 2)
            group["weight_decay"] = 0.1 * group["wd_mult"]
        adam._chosen = "fused" if self.fused else "megatron"
        result: tuple[Any, ...] = self.optimizer.step()
        return result

    def mains(self) -> list[torch.Tensor]:
        return [main.detach() for main in self.optimizer.get_parameters()]

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach() for weight in self.model.parameters()]

    def own(self, steps: int) -> int:
        """What `own_steps` is after so many of upstream's steps."""
        return steps * len(self.optimizer.chained_optimizers)


def assert_alike(fused: Run, plain: Run, where: str) -> None:
    """The main parameters within fp32 rounding, the weights their copies, the moments alike."""
    for ours, theirs in zip(fused.mains(), plain.mains(), strict=True):
        off = (ours - theirs).abs().max() if ours.numel() else torch.zeros(())
        assert off <= 2e-6, f"{where}: main parameters differ by {off}"
    for ours, theirs in zip(fused.weights(), plain.weights(), strict=True):
        off = (ours.float() - theirs.float()).abs() - 2e-6
        # One unit of bf16: the interpreter cuts, and a main parameter may lie at a rounding's edge.
        limit = theirs.float().abs() * (2.0**-7 if fused.dtype == torch.bfloat16 else 0)
        assert bool((off <= limit).all()), f"{where}: weights differ"
    ours_state, their_state = states(fused), states(plain)
    for ours, theirs in zip(ours_state, their_state, strict=True):
        assert ours.keys() == theirs.keys(), f"{where}: other keys"
        for name, value in ours.items():
            off = (value.float() - theirs[name].float()).abs().max()
            assert off <= 1e-6, f"{where}: {name} differs by {off}"


def states(run: Run) -> list[dict[str, torch.Tensor]]:
    """The inner optimizers' state of each main parameter."""
    return [dict(part.optimizer.state[p]) for part in run.optimizer.chained_optimizers for p in part.get_parameters()]


def check_steps(dtype: torch.dtype, fp32_grads: bool) -> None:
    """Six steps alike, with upstream's step in the first alone and the gradients as they came."""
    where = f"{dtype}, gradients summed in {'fp32' if fp32_grads else 'the same'}"
    fused, plain = Run(True, dtype, fp32_grads), Run(False, dtype, fp32_grads)
    decays = {group["wd_mult"] for group in plain.optimizer.param_groups}
    assert decays == {0.0, 1.0}, "all groups are alike"
    for number in range(1, 7):
        before = [weight.main_grad for weight in fused.model.parameters()]
        ours, theirs = fused.step(number), plain.step(number)
        assert ours[0]
        assert theirs[0]
        assert abs(float(ours[1]) - float(theirs[1])) <= 1e-5 * float(theirs[1]), f"{where}: norms differ"
        assert (float(theirs[1]) > 0.7) == (number != UNCLIPPED), "the clip bites in other steps"
        assert fused.own_steps == fused.own(1), f"upstream's step ran in step {number}, {where}"
        scaled = any(not torch.equal(a, b) for a, b in zip(before, grads(plain), strict=True))
        assert scaled == (number not in (1, UNCLIPPED) and fp32_grads), (
            f"upstream scaled the gradients in step {number}, {where}"
        )
        assert_alike(fused, plain, f"step {number}, {where}")
        if DEVICE == "cuda":
            for part in fused.optimizer.chained_optimizers:
                assert_copied(part)
    assert plain.own_steps == plain.own(6)


def grads(run: Run) -> list[torch.Tensor]:
    return [weight.main_grad for weight in run.model.parameters()]


def assert_copied(part: Any) -> None:
    """This rank's weights are its main parameters, rounded."""
    groups = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
    for model, main in ((m, s) for models, mains in groups for m, s in zip(models, mains, strict=True)):
        place = part._get_model_param_range_map(model)["param"]
        assert torch.equal(model.detach().view(-1)[place.start : place.end], main.to(model.dtype))


def saved(run: Run) -> list[tuple[Any, Any]]:
    """What a checkpoint carries of each inner optimizer: groups, and the parameters' tensors by bucket."""
    found = []
    for part in run.optimizer.chained_optimizers:
        state = part.get_parameter_state_dp_reshardable()
        for tensors in _tensors(state):
            tensors.update({k: v.detach().clone() for k, v in tensors.items() if isinstance(v, torch.Tensor)})
            tensors["padding"] = False
        found.append((part.state_dict(), state))
    return found


def _tensors(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for by_dtype in (value for key, value in state.items() if isinstance(key, int)):
        for bucket in (bucket for buckets in by_dtype.values() for bucket in buckets):
            yield from bucket


def check_checkpoints() -> None:
    """A checkpoint of either goes on in the other as in the one that wrote it."""
    for writer in (True, False):
        first = Run(writer)
        for number in (1, 2, 3):
            first.step(number)
        states, weights = saved(first), [weight.clone() for weight in first.weights()]
        second = Run(not writer)
        second.step(9)  # the state that loading replaces
        for weight, value in zip(second.weights(), weights, strict=True):
            weight.copy_(value)
        for part, (groups, state) in zip(second.optimizer.chained_optimizers, states, strict=True):
            part.load_state_dict(groups)
            part.load_parameter_state_from_dp_reshardable(state)
        for number in (4, 5):
            first.step(number)
            second.step(number)
            assert_alike(*((first, second) if writer else (second, first)), f"checkpoint of fused={writer}, {number}")


def check_moved_tensors() -> None:
    """State, main parameters and gradients that lie elsewhere than in the last step are found."""
    fused, plain = Run(True), Run(False)
    for number in range(1, 5):
        fused.step(number)
        plain.step(number)
        kept = []  # alive, so that stale addresses would be written to in silence
        for part in fused.optimizer.chained_optimizers:
            for main in part.get_parameters():
                state = part.optimizer.state[main]
                kept.append((main.data, state["exp_avg"], state["exp_avg_sq"]))
                main.data = main.data.clone()
                part.optimizer.state[main] = {name: value.clone() for name, value in state.items()}
    assert fused.own_steps == fused.own(1), "upstream's step ran"
    assert_alike(fused, plain, "moved tensors")


def check_replaced_parameters() -> None:
    """New main parameters in place of the old, and model buffers that were away from the device."""
    fused, plain = Run(True), Run(False)
    kept: list[Any] = []  # alive, as above
    moved = 0
    for number in range(1, 6):
        fused.step(number)
        plain.step(number)
        assert_alike(fused, plain, f"replaced parameters, step {number}")
        for part in fused.optimizer.chained_optimizers:
            if number % 2:
                kept.append(replace_mains(part))
                continue
            for buffer in part.buffers:
                place, size = buffer.param_data.data_ptr(), buffer.param_data.shape
                buffer.offload_to_cpu(move_grads=False)
                kept += [torch.empty(size, dtype=fused.dtype, device=DEVICE) for _ in range(8)]  # in its place
                buffer.reload_from_cpu(move_grads=False)
                moved += buffer.param_data.data_ptr() != place
    assert moved, "all buffers came back to where they had been"
    # The new parameters came with their state, so ours goes on.
    assert fused.own_steps == fused.own(1), "upstream's step ran"


def replace_mains(part: Any) -> list[Any]:
    """Give the optimizer copies of its main parameters, with their state; return the old ones."""
    inner, mains = part.optimizer, part.get_parameters()
    copies = {main: main.detach().clone().requires_grad_() for main in mains}
    for groups in (part.shard_fp32_from_float16_groups, [group["params"] for group in inner.param_groups]):
        for group in groups:
            group[:] = [copies[main] for main in group]
    for main, copy in copies.items():
        inner.state[copy] = inner.state.pop(main)
        vars(copy).update(vars(main))
    return mains


def check_hook_after_the_clip() -> None:
    """A step that the kernel cannot take after all is upstream's, with gradients that are clipped once."""
    fused, plain = Run(True), Run(False)
    for number in range(1, 6):
        hooks = []
        if number in (3, 4):
            parts = [part.optimizer for run in (fused, plain) for part in run.optimizer.chained_optimizers]
            hooks = [part.register_step_pre_hook(lambda *_: None) for part in parts if part.param_groups]
        for run in (fused, plain):
            run.step(number)
        if hooks:
            for a, b in zip(grads(fused), grads(plain), strict=True):
                assert torch.equal(a, b), f"the gradients are not clipped once, step {number}"
        for hook in hooks:
            hook.remove()
        assert_alike(fused, plain, f"hook, step {number}")
    assert fused.own_steps == fused.own(3), "the kernel went past a hook"


def check_zeros_counted() -> None:
    """Counting zeros reads the gradients after the clip: they are scaled, and no second time in the step."""
    options = {"log_num_zeros_in_grad": True}
    fused, plain = Run(True, options=options), Run(False, options=options)
    for number in range(1, 5):
        ours, theirs = fused.step(number), plain.step(number)
        assert ours[2] == theirs[2], "other zeros"
        for a, b in zip(grads(fused), grads(plain), strict=True):
            assert torch.equal(a, b), "the gradients are not scaled"
    assert fused.own_steps == fused.own(1), "upstream's step ran"
    assert_alike(fused, plain, "zeros counted")


def check_skipped_step() -> None:
    """A step skipped for its norm leaves its coefficient to no later step."""
    fused, plain = Run(True), Run(False)
    for number in range(1, 6):
        for run in (fused, plain):
            for part in run.optimizer.chained_optimizers:
                part.config.grad_norm_skip_threshold = 0.1 if number == 3 else float("inf")
                part.config.clip_grad = 0.0 if number == 4 else 0.7
            assert run.step(number)[0] == (number != 3)
    assert fused.own_steps == fused.own(1), "upstream's step ran"
    assert_alike(fused, plain, "skipped step")


def check_left_to_upstream() -> None:
    """What the kernel does not do is upstream's, clip included."""
    cases: list[dict[str, Any]] = [{"decoupled_weight_decay": False}, {"use_distributed_optimizer": False}]
    for options in cases:
        fused, plain = Run(True, options=options), Run(False, options=options)
        for number in (1, 2, 3):
            fused.step(number)
            plain.step(number)
        assert fused.own_steps == fused.own(3), f"{options} reached the kernel"
        for a, b in zip(fused.mains() + grads(fused), plain.mains() + grads(plain), strict=True):
            assert torch.equal(a, b), options


@contextmanager
def world() -> Iterator[None]:
    """torchrun's ranks, or one."""
    backend = "gloo" if DEVICE == "cpu" else "nccl"
    with tempfile.TemporaryDirectory() as folder:
        if "RANK" in os.environ:
            if DEVICE == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            torch.distributed.init_process_group(backend)
        else:
            store = torch.distributed.FileStore(f"{folder}/store", 1)
            torch.distributed.init_process_group(backend, rank=0, world_size=1, store=store)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        yield
        torch.distributed.destroy_process_group()


def check_all_steps() -> None:
    """`check_steps` for each kind of weights and gradients."""
    for dtype, fp32_grads in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)):
        check_steps(dtype, fp32_grads)


CHECKS = {
    "steps": check_all_steps,
    "checkpoints": check_checkpoints,
    "moved": check_moved_tensors,
    "replaced": check_replaced_parameters,
    "hook": check_hook_after_the_clip,
    "zeros": check_zeros_counted,
    "skipped": check_skipped_step,
    "upstream": check_left_to_upstream,
}


def main() -> int:
    """Run the checks named, or all."""
    with world():
        for name in sys.argv[2:] or CHECKS:
            CHECKS[name]()
        rank = torch.distributed.get_rank()
    print(f"the fused step equals upstream's on {DEVICE}, rank {rank}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
