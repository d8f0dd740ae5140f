"""Proof of upcycle-dense-config: the model that the dense checkpoint is loaded into is dense."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import megatron.training.training as training
import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "ffn_hidden_size": 64}


class _Config:
    """Stands for GPTModelConfig: it only has to name its builder, which records what it is asked to build."""

    built: ClassVar[list[Any]] = []

    def __init__(self, transformer: TransformerConfig) -> None:
        self.transformer = transformer

    def get_builder_cls(self) -> type:
        class Builder:
            def __init__(self, config: Any) -> None:
                _Config.built.append(config.transformer)

            def build_distributed_models(self, **options: Any) -> list[Any]:
                return []

        return Builder


class _ReachedTheLoader(Exception):
    pass


@pytest.mark.usefixtures("world")
def test_dense_twin_has_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    moe = _Config(TransformerConfig(**common, **MOE))
    args = SimpleNamespace(
        **common | {"num_experts": 4, "ffn_hidden_size": 64, "moe_ffn_hidden_size": 32},
        **dict.fromkeys(("perform_rl_step", "no_load_optim", "logits_save_dir", "logits_load_dir"), None),
        expert_model_parallel_size=2,
        moe_upcycling_granularity=1,
        moe_use_upcycling=True,
        skip_train=True,
        save="none",
        gtp_weight_remat_size=1,
        expert_gtp_weight_remat_size=1,
    )

    def config_from_args(args: Any, *_: Any, **__: Any) -> _Config:
        # As Megatron derives it, for the fields at stake; TransformerConfig's own checks are the real ones.
        fields = {"num_moe_experts": args.num_experts, "moe_ffn_hidden_size": args.moe_ffn_hidden_size}
        return _Config(TransformerConfig(**common, **fields, ffn_hidden_size=args.ffn_hidden_size))

    def stop(*_: Any, **__: Any) -> None:
        raise _ReachedTheLoader

    # Its own proof is test_upcycle_guards.py.
    monkeypatch.setattr("megatron_ext.upcycle.in_training.begin", lambda args: {})
    _Config.built = []
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "get_timers", lambda: None)
    monkeypatch.setattr(training, "get_one_logger", lambda: None)
    monkeypatch.setattr("megatron.training.argument_utils.gpt_config_from_args", config_from_args)
    monkeypatch.setattr(training.upcycling_utils, "load_and_upcycle_model", stop)
    monkeypatch.setattr(training, "checkpoint_exists", lambda path: False)
    container = SimpleNamespace(
        model=moe,
        ddp=None,
        profiling=SimpleNamespace(record_memory_history=False),
        optimizer=SimpleNamespace(overlap_param_gather_with_optimizer_step=False),
        dist=SimpleNamespace(use_megatron_fsdp=False, use_torch_fsdp2=False),
        rng=SimpleNamespace(data_parallel_random_init=False),
    )
    monkeypatch.setattr("megatron.training.utils.start_memory_history_recording", lambda profiling: None)
    with pytest.raises(_ReachedTheLoader):
        training.setup_model_and_optimizer(None, None, cfg_container=container)
    moe_config, dense_config = _Config.built
    assert moe_config.num_moe_experts == 4
    assert dense_config.num_moe_experts is None
    assert dense_config.ffn_hidden_size == 64
    assert (args.num_experts, args.ffn_hidden_size, args.moe_ffn_hidden_size) == (4, 64, 32)
