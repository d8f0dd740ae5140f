"""Expert-parallel overlap: Megatron's combined 1F1B schedule over our dispatchers gives the plain schedule's gradients.

The schedule frees the inputs of a step as soon as it thinks them unneeded, on the CPU too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fork import run
from megatron.core.pipeline_parallel import get_forward_backward_func
from small import TOKENS, VOCABULARY, config, groups, training

from megatron_ext.dispatch import publish
from megatron_ext.dispatch.options import DispatchOptions

pytestmark = pytest.mark.ranks

RANKS, MICRO_BATCHES = 4, 3
PLAIN: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 24}


def _flex(backend: str, **more: Any) -> dict[str, Any]:
    overlap = {"moe_token_dispatcher_type": "flex", "overlap_moe_expert_parallel_comm": True}
    return {"moe_flex_dispatcher_backend": backend, **overlap, **more}


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def _step(plans: list[int], batches: Iterator[int], model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    seed = next(batches)
    made = torch.Generator().manual_seed(100 * seed + torch.distributed.get_rank())
    ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=made)
    positions, mask = torch.arange(TOKENS)[None], torch.ones(1, 1, TOKENS, TOKENS).triu(1).bool()
    if return_schedule_plan:
        plans.append(seed)
        return model.build_schedule_plan(ids, positions, mask, labels=ids), _loss
    return model(ids, positions, mask, labels=ids), _loss


def _gradients(form: str, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the micro-batches, and the gradients that they add up to."""
    groups(RANKS)
    publish._session = publish.Session(DispatchOptions(form=form, ranks_per_node=2), max_tokens=TOKENS)
    # Weights large enough for every part to be felt in the gradients.
    settings = config(RANKS, bf16=True, params_dtype=torch.float32, init_method_std=0.3, **options)
    # Megatron lets the overlap through with bf16 only. fp32 takes the same way, and its rounding hides nothing.
    settings.bf16 = False
    trained = training(settings)
    trained.model.zero_grad_buffer()
    plans: list[int] = []
    losses = get_forward_backward_func()(
        forward_step_func=partial(_step, plans),
        data_iterator=iter(range(MICRO_BATCHES)),
        model=[trained.model],
        num_microbatches=MICRO_BATCHES,
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    assert len(plans) == (MICRO_BATCHES if settings.overlap_moe_expert_parallel_comm else 0)
    grads = {name: p.main_grad.clone() for name, p in trained.model.named_parameters()}
    return [loss["loss"].item() for loss in losses], grads


def _compare(cases: list[tuple[str, dict[str, Any]]], common: dict[str, Any]) -> int:
    right_losses, right = _gradients("auto", {**PLAIN, **common})
    for form, options in cases:
        losses, grads = _gradients(form, {**options, **common})
        assert losses == pytest.approx(right_losses, abs=2e-6)
        for name, grad in grads.items():
            gap, scale = (grad - right[name]).abs().max().item(), right[name].abs().max().item()
            assert gap <= 1e-5 * scale, f"{options} {form}: {name} is off by {gap} at {scale}"
    fed = [name for name, grad in right.items() if ".experts." in name and grad.abs().max() > 1e-3]
    return len(fed)


@pytest.mark.parametrize("common", [{}, SHARED], ids=["routed", "shared"])
def test_overlap_gives_the_gradients_of_the_plain_schedule(common: dict[str, Any]) -> None:
    cases = [("auto", _flex("dedup")), ("static", _flex("twohop")), ("alltoallv", _flex("twohop"))]
    # Every rank holds two experts a layer, of two weights each: nearly all must have been at work.
    assert min(run(RANKS, _compare, cases, common)) >= 6
