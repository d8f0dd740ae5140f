"""Proof of flex-registry: a backend that upstream does not know can be chosen by its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


def _config(backend: str, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=1,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=backend,
        **more,
    )


@pytest.mark.usefixtures("world")
def test_registered_backend_can_be_chosen() -> None:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    from megatron_ext.dispatch import registry

    made: list[object] = []
    registry.register("test-backend", lambda dispatcher: made.append(dispatcher) or SimpleNamespace(name="mine"))
    dispatcher = MoEFlexTokenDispatcher(4, [0, 1, 2, 3], _config("test-backend"), get_default_pg_collection())
    assert dispatcher._comm_manager.name == "mine"
    assert made == [dispatcher]


def test_the_flag_offers_the_registered_names() -> None:
    import typing

    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ext.dispatch import registry

    offered = typing.get_args(typing.get_type_hints(TransformerConfig)["moe_flex_dispatcher_backend"])
    assert {"dedup", "twohop", "deepep_any", *registry.UPSTREAM} == set(offered)


@pytest.mark.usefixtures("world")
def test_an_unknown_backend_is_refused_with_the_names() -> None:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    with pytest.raises(ValueError, match="deepep, hybridep, ncclep, dedup, twohop"):
        MoEFlexTokenDispatcher(4, [0, 1, 2, 3], _config("no-such"), get_default_pg_collection())


def test_both_overlaps_at_once_are_refused_by_name() -> None:
    overlap: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True, "bf16": True, "expert_model_parallel_size": 2}
    _config("twohop", **overlap)
    shared: dict[str, Any] = {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 16}
    with pytest.raises(AssertionError, match="disable moe_shared_expert_overlap when enabling overlap_moe_expert"):
        _config("twohop", **overlap, **shared)
