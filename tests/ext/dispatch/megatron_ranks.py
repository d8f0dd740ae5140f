"""Real Megatron MoE layers on forked gloo ranks under the CPU runtime; run as a script:

    megatron_ranks.py CHECK WORLD        CHECK is a function of this module

Megatron is imported once, then the ranks are forked: sixteen imports would take a minute.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import traceback
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from megatron_ext.runtime import cpu

if not torch.cuda.is_available():
    torch.set_num_threads(1)
    cpu.install()

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.dispatch import manager, publish
from megatron_ext.dispatch.options import DispatchOptions

HIDDEN = 16
EXPERTS = 8
UPSTREAM = ("alltoall", "allgather")


def make_layer(backend: str, world: int, expert_tp: int, **changes: Any) -> MoELayer:
    """Build one MoE layer; equal weights for every backend."""
    flex = {} if backend in UPSTREAM else {"moe_flex_dispatcher_backend": backend}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=32,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_router_topk=3,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=backend if backend in UPSTREAM else "flex",
        expert_model_parallel_size=world // expert_tp,
        expert_tensor_parallel_size=expert_tp,
        add_bias_linear=False,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        **{**flex, **changes},
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    layer = MoELayer(config, spec.submodules.mlp.keywords["submodules"])
    made = torch.Generator().manual_seed(11 + parallel_state.get_expert_model_parallel_rank())
    for name, parameter in sorted(layer.named_parameters()):
        one = made if "experts" in name and "shared" not in name else torch.Generator().manual_seed(5)
        parameter.data = torch.randn(parameter.shape, generator=one) * 0.3
    layer.set_layer_number(1)
    return layer.cuda()


def input_and_grad(rank: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's input and its output's gradient, [tokens, 1, HIDDEN] each, on the CPU."""
    made = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens, 1, HIDDEN, generator=made)
    return x, torch.randn(x.shape, generator=made)


def run_layer(layer: MoELayer, rank: int, tokens: int) -> list[torch.Tensor]:
    """Forward and backward: output, gradient of the input, gradients of all parameters."""
    x, grad = (tensor.cuda() for tensor in input_and_grad(rank, tokens))
    x.requires_grad_()
    out, bias = layer(x)
    assert bias is None
    out.backward(grad)
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in layer.parameters()]
    return [out.detach(), x.grad, *grads]


def compare(
    world: int,
    rank: int,
    expert_tp: int,
    ranks_per_node: int,
    form: str,
    *,
    tokens: int = 10,
    counts_on_device: bool = False,
    **changes: Any,
) -> None:
    """`dedup` and `twohop` against upstream: `allgather` under expert TP, where `alltoall` needs what gloo lacks."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=world // expert_tp, expert_tensor_parallel_size=expert_tp
    )
    publish._session = publish.Session(DispatchOptions(form=form, ranks_per_node=ranks_per_node), max_tokens=12)
    upstream = "alltoall" if expert_tp == 1 else "allgather"
    want = run_layer(make_layer(upstream, world, expert_tp, **changes), rank, tokens)
    for backend in ("dedup", "twohop"):
        layer = make_layer(backend, world, expert_tp, **changes)
        # Experts that read their counts on the device say so when the layer is built (patch gpu/counts-on-device).
        layer.token_dispatcher.counts_on_device = counts_on_device
        got = run_layer(layer, rank, tokens)
        counts = layer.token_dispatcher._comm_manager.tokens_per_expert
        assert counts.is_cuda == (counts_on_device and got[0].is_cuda)
        for one, right in zip(got, want, strict=True):
            gap = (one - right).abs().max().item()
            scale = max(1.0, right.abs().max().item())
            assert gap <= 2e-6 * scale, f"{backend} {form} etp{expert_tp} {changes}: off by {gap} at {scale}"


def layers_equal_alltoall(rank: int, world: int) -> None:
    """Every form, node sizes, expert TP, shared experts (overlapped and not), recompute, FP32 router, capacity drops,
    unequal tokens, padded experts."""
    for expert_tp in (1, 2):
        for ranks_per_node in (1, 2, 4):
            for form in ("alltoallv", "static"):
                compare(world, rank, expert_tp, ranks_per_node, form)
    shared = {"moe_shared_expert_intermediate_size": 24}
    compare(world, rank, 1, 2, "auto", **shared)
    compare(world, rank, 1, 2, "auto", counts_on_device=True)
    compare(world, rank, 1, 2, "alltoallv", moe_shared_expert_overlap=True, **shared)
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    compare(world, rank, 1, 2, "alltoallv", **recompute)
    compare(world, rank, 1, 2, "static", moe_router_dtype="fp32", moe_router_score_function="sigmoid")
    compare(world, rank, 1, 2, "alltoallv", moe_expert_capacity_factor=0.5)
    for form in ("alltoallv", "static"):
        compare(world, rank, 1, 2, form, tokens=(10, 1, 3, 7)[rank % 4])
    # Megatron pads for FP8 only, which needs a GPU; the padded rows themselves do not.
    manager.align_of = lambda config: 16
    compare(world, rank, 1, 2, "alltoallv")


def main() -> int:
    """Fork the ranks, run the check on each."""
    check, world = globals()[sys.argv[1]], int(sys.argv[2])
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(check, r, world, f"{folder}/store")) for r in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    bad = [r for r, rank in enumerate(ranks) if rank.exitcode]
    print(f"{world} ranks agree" if not bad else f"ranks {bad} failed")
    return 1 if bad else 0


def _rank(check: Any, rank: int, world: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        check(rank, world)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
