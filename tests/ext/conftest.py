"""Tests that may import Megatron: on a machine without a GPU the CPU runtime answers for CUDA in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_ext.runtime import cpu

# Before anything imports Megatron; a GPU machine keeps its GPU.
if not torch.cuda.is_available():
    cpu.install()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank of real torch.distributed and Megatron's groups of one."""
    from megatron.core import parallel_state, tensor_parallel

    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("world") / "store"), 1)
    backend = "gloo" if cpu.is_installed() else "nccl"
    torch.distributed.init_process_group(backend, rank=0, world_size=1, store=store)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
