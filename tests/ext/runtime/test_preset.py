"""The preset table: what is added, what is left to the user, what is refused."""

from __future__ import annotations

import pytest

from megatron_ext.errors import UserError
from megatron_ext.runtime import preset

MOE = ("--num-experts", "8", "--normalization", "RMSNorm", "--moe-ext-preset", "hopper")


def _words(given: tuple[str, ...]) -> set[str]:
    added = preset.flags_for(preset.chosen(given), "cuda", given)
    assert all(flag.reason for flag in added)
    return {flag.words[0] for flag in added}


def test_a_given_flag_keeps_its_value() -> None:
    assert "--cross-entropy-fusion-impl" in _words(MOE)
    assert "--cross-entropy-fusion-impl" not in _words((*MOE, "--cross-entropy-fusion-impl", "native"))
    assert "--cross-entropy-fusion-impl" not in _words((*MOE, "--cross-entropy-fusion-impl=native"))


def test_the_last_preset_counts_and_fp8_is_hopper_in_8_bits() -> None:
    fast, small = _words(MOE), _words((*MOE, "--moe-ext-preset=hopper-fp8"))
    assert small - fast == {"--fp8-format", "--fp8-recipe"}
    assert fast < small


def test_the_mask_is_made_where_it_says_more_than_causal() -> None:
    flag = "--no-create-attention-mask-in-dataloader"
    assert flag in _words((*MOE, "--transformer-impl", "transformer_engine"))
    assert flag not in _words((*MOE, "--reset-attention-mask"))
    assert flag not in _words((*MOE, "--transformer-impl=local"))


def test_a_dense_model_gets_no_expert_flags() -> None:
    words = _words(("--moe-ext-preset=hopper",))
    assert words
    assert not {word for word in words if word.startswith("--moe-") and not word.startswith("--moe-ext-")}


def test_another_norm_is_left_alone() -> None:
    assert "--fused-residual-rmsnorm" in _words((*MOE[:2], "--normalization=RMSNorm", *MOE[4:]))
    assert "--fused-residual-rmsnorm" not in _words((*MOE[:2], "--normalization", "LayerNorm", *MOE[4:]))


def test_nothing_is_added_without_a_preset() -> None:
    assert preset.flags_for(preset.chosen(("--num-experts", "8")), "cuda", ("--num-experts", "8")) == []
    assert preset.set_environment(None, (), {}) == []


def test_the_cpu_refuses_it_by_name() -> None:
    with pytest.raises(UserError, match="--moe-ext-preset hopper"):
        preset.flags_for("hopper", "cpu", MOE)


def test_a_variable_that_is_set_stays() -> None:
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    preset.set_environment("hopper", MOE, environment)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_tensor_parallel_keeps_its_order_of_kernels() -> None:
    environment: dict[str, str] = {}
    preset.set_environment("hopper", (*MOE, "--tensor-model-parallel-size", "2"), environment)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment
    preset.set_environment("hopper", MOE, environment)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
