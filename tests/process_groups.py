"""Megatron's process groups in one process, time after time."""

from __future__ import annotations

import torch.distributed as dist


def destroy_all() -> None:
    """Forget Megatron's process groups and end their threads; the default group stays.

    Megatron's `destroy_model_parallel` only drops its references. torch keeps every group, and a gloo group has three
    threads: forty layouts of twenty groups each, made twice, would leave some thousand threads in every rank.
    """
    from megatron.core import parallel_state

    # Here Megatron lists every group that this rank belongs to; None stands for the default group.
    made = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    known = dist.distributed_c10d._world.pg_map
    for group in made:
        # destroy_model_parallel has destroyed some of them itself.
        if group is not None and group in known:
            dist.destroy_process_group(group)
