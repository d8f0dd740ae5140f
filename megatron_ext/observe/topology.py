"""Where this rank stands: what the reduction needs to know of Megatron's process groups, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Topology:
    """One rank's place.

    Attributes:
        device: Where the model's parameters are.
        rank: Global rank.
        world: Number of ranks.
        ep_rank: Rank within the expert-parallel group.
        ep_size: Ranks among which a layer's experts are spread.
        edp_rank: Which of the expert-parallel groups (replicas of the experts) this is.
        edp_size: How many there are.
        etp_size: Ranks that share one expert's weights (expert tensor parallel).
        pp_size: Pipeline stages.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    edp_rank: int = 0
    edp_size: int = 1
    etp_size: int = 1
    pp_size: int = 1

    @classmethod
    def from_megatron(cls, device: torch.device) -> Topology:
        """Read Megatron's parallel state; one rank alone where torch.distributed isn't up."""
        if not dist.is_initialized():
            return cls(device)
        from megatron.core import parallel_state as state

        return cls(
            device=device,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            ep_rank=state.get_expert_model_parallel_rank(),
            ep_size=state.get_expert_model_parallel_world_size(),
            edp_rank=state.get_expert_data_parallel_rank(),
            edp_size=state.get_expert_data_parallel_world_size(),
            etp_size=state.get_expert_tensor_parallel_world_size(),
            pp_size=state.get_pipeline_model_parallel_world_size(),
        )

    def all_reduce(self, values: torch.Tensor, *, largest: bool = False) -> None:
        """Sum (or take the largest of) `values` over all ranks, in place. Every rank must call it."""
        if self.world > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
