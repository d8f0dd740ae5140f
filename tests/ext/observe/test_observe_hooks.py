"""The hooks on real Megatron MoE layers in this process: recompute, padding, router settings, failures, refusals."""

from __future__ import annotations

import argparse
import copy
import logging

import numpy as np
import pytest
import torch

from megatron_ext.errors import UserError
from megatron_ext.observe.monitor import Monitor
from megatron_ext.observe.options import AlarmOptions, ObserveOptions
from megatron_ext.observe.override import run_after

EXPERTS, TOPK, TOKENS = 8, 2, 96


class Memory:
    """A sink that remembers."""

    def __init__(self):
        self.values, self.counts, self.alarms, self.state = {}, {}, [], None

    def scalars(self, step, values):
        self.values[step] = dict(values)

    def routing(self, step, layers, tokens_per_expert, extra=None):
        self.counts[step] = np.array(tokens_per_expert)

    def alarm(self, record):
        self.alarms.append(dict(record))

    def earlier_alarms(self):
        return []

    def last(self, key):
        return None

    def save_state(self, state):
        self.state = state

    def load_state(self):
        return self.state


class Model(torch.nn.Module):
    """Two MoE layers, numbers 2 and 12 of 12, after one another."""

    def __init__(self, **settings):
        super().__init__()
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.transformer_config import TransformerConfig

        options = {
            "num_layers": 12,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOPK,
            "moe_ffn_hidden_size": 32,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "add_bias_linear": False,
            "use_cpu_initialization": True,
            "bias_activation_fusion": False,
            **settings,
        }
        self.config = TransformerConfig(**options)
        spec = get_gpt_layer_local_spec(EXPERTS, False).submodules.mlp
        groups = ProcessGroupCollection.use_mpu_process_groups()
        parts = spec.keywords if hasattr(spec, "keywords") else {"submodules": spec.submodules}
        self.layers = torch.nn.ModuleList(
            MoELayer(self.config, parts["submodules"], layer_number=number, pg_collection=groups) for number in (2, 12)
        )
        for layer, number in zip(self.layers, (2, 12), strict=True):
            layer.set_layer_number(number)

    def forward(self, hidden, padding_mask=None):
        for layer in self.layers:
            hidden = hidden + layer(hidden, padding_mask=padding_mask)[0]
        return hidden


def hidden(seed: int = 1) -> torch.Tensor:
    """[s, b, h] = [48, 2, 32]."""
    return torch.randn(48, 2, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def watch(model: torch.nn.Module, **options) -> tuple[Monitor, Memory]:
    sink = Memory()
    args = argparse.Namespace(seq_length=48, mock_data=True)
    monitor = Monitor(ObserveOptions(interval=1, **options), AlarmOptions(), sink, args)
    monitor._tokens_per_step = lambda: TOKENS
    monitor.attach([model])
    return monitor, sink


def step(model, monitor, sink, number=1, **inputs):
    model(hidden(), **inputs).sum().backward()
    monitor.step_end(number)
    return sink.values[number]


@pytest.mark.usefixtures("world")
class TestHooks:
    def test_layers_have_their_global_numbers_from_0(self):
        model = Model()
        monitor, sink = watch(model)
        values = step(model, monitor, sink)
        assert {key for key in values if key.startswith("moe/max_vio/layer")} == {
            "moe/max_vio/layer_1",
            "moe/max_vio/layer_11",
        }
        assert sink.counts[1].sum(-1).tolist() == [TOPK * TOKENS] * 2

    @pytest.mark.parametrize("modules", [["moe"], ["shared_experts"]])
    def test_recompute_counts_once(self, modules):
        shared = {"moe_shared_expert_intermediate_size": 32}
        torch.manual_seed(3)
        plain = Model(**shared)
        torch.manual_seed(3)
        again = Model(**shared, recompute_granularity="selective", recompute_modules=modules)
        again.load_state_dict(plain.state_dict())
        results = [step(model, *watch(model)) for model in (plain, again)]
        for key, value in results[0].items():
            if key.startswith("moe/"):
                assert results[1][key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
        assert 0 < results[1]["moe/shared_share/layer_1"] < 1

    def test_full_recompute_counts_once(self):
        from torch.utils.checkpoint import checkpoint

        model = Model()
        monitor, sink = watch(model)
        checkpoint(model, hidden(), use_reentrant=True).sum().backward()
        monitor.step_end(1)
        assert sink.counts[1].sum(-1).tolist() == [TOPK * TOKENS] * 2

    def test_evaluation_and_no_grad_count_nothing(self):
        model = Model()
        monitor, sink = watch(model)
        with torch.no_grad():
            model(hidden())
        model.eval()
        model(hidden())
        model.train()
        assert step(model, monitor, sink)
        assert sink.counts[1].sum(-1).tolist() == [TOPK * TOKENS] * 2

    def test_micro_batches_add_up_and_steps_stay_apart(self):
        model = Model()
        monitor, sink = watch(model)
        for number, batches in ((1, 3), (2, 1)):
            for seed in range(batches):
                model(hidden(seed)).sum().backward()
            monitor.step_end(number)
            assert sink.counts[number].sum(-1).tolist() == [batches * TOPK * TOKENS] * 2

    def test_padding_reaches_no_count(self):
        model = Model(moe_router_load_balancing_type="none")
        monitor, sink = watch(model)
        mask = torch.zeros(2, 48, dtype=torch.bool)
        mask[1, 40:] = True
        values = step(model, monitor, sink, padding_mask=mask)
        assert sink.counts[1].sum(-1).tolist() == [TOPK * (TOKENS - 8)] * 2
        assert values["moe/flip_rate/max"] == 0.0

    @pytest.mark.parametrize(
        "settings",
        [
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
            {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
            {"moe_router_load_balancing_type": "quantile_balancing"},
            {"moe_input_jitter_eps": 0.1},
        ],
        ids=lambda settings: next(iter(settings)),
    )
    def test_an_fp32_router_flips_nothing_whatever_its_settings(self, settings):
        model = Model(**settings)
        monitor, sink = watch(model)
        if settings.get("moe_router_enable_expert_bias"):
            for layer in model.layers:
                layer.router.expert_bias[:] = torch.linspace(-0.2, 0.2, EXPERTS)
        values = step(model, monitor, sink)
        assert values["moe/flip_rate/max"] == 0.0
        assert values["moe/flip_rate_bf16/max"] < 0.2
        assert sink.counts[1].sum(-1).tolist() == [TOPK * TOKENS] * 2
        if settings.get("moe_router_enable_expert_bias"):
            assert values["moe/bias_spread/max"] == pytest.approx(0.4, rel=1e-6)
            assert values["moe/aux_map_disagreement/max"] > 0

    def test_a_bf16_router_flips_some(self):
        model = Model(bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=True)
        model.bfloat16()
        monitor, sink = watch(model)
        for number in range(64):
            model(hidden(number).bfloat16()).sum().backward()
        monitor.step_end(1)
        assert 0 < sink.values[1]["moe/flip_rate/max"] < 0.1
        assert sink.values[1]["moe/flip_rate_order/max"] >= sink.values[1]["moe/flip_rate/max"]
        assert "moe/flip_rate_bf16/max" not in sink.values[1]

    def test_capacity_drops_are_counted_and_not_called_an_error(self):
        model = Model(moe_expert_capacity_factor=0.6, moe_router_score_function="softmax")
        monitor, sink = watch(model)
        values = step(model, monitor, sink)
        counts = sink.counts[1]
        share = 1 - counts[0].sum() / (TOPK * TOKENS)
        assert share > 0
        assert values["moe/drop_share/layer_1"] == pytest.approx(share)
        assert values["moe/compute_per_token_mean/layer_1"] == pytest.approx(counts[0].sum() / TOKENS * 32)
        assert values["moe/flip_rate/max"] == 0.0

    def test_expert_norms_are_those_before_the_weights(self):
        model = Model()
        monitor, sink = watch(model)
        values = step(model, monitor, sink)
        scaled = Model(moe_router_topk_scaling_factor=4.0)
        scaled.load_state_dict(model.state_dict())
        again = step(scaled, *watch(scaled))
        assert again["moe/routed_size_mean/layer_1"] == pytest.approx(4 * values["moe/routed_size_mean/layer_1"])
        key = "moe/expert_norm_median/layer_1"
        assert again[key] == pytest.approx(values[key], rel=1e-5)

    def test_an_fp32_routers_logits_are_computed_once_more_and_not_kept(self):
        model = Model(moe_router_dtype="fp32")
        calls = []
        for layer in model.layers:
            stock = layer.router.gating
            layer.router.gating = lambda hidden, stock=stock: calls.append(1) or stock(hidden)
        monitor, sink = watch(model)
        values = step(model, monitor, sink)
        # Once by the model, once for all probes; the flip rate needs no third one.
        assert len(calls) == 2 * len(model.layers)
        assert values["moe/flip_rate/max"] == 0.0
        assert values["moe/z_rms/max"] > 0
        assert monitor._run.native == {}

    def test_replaced_logits_are_said_and_left_out(self, capsys):
        model = Model(moe_router_force_load_balancing=True)
        monitor, sink = watch(model)
        values = step(model, monitor, sink)
        out = capsys.readouterr().out
        assert "not measured: flip_rate" in out
        assert "--moe-router-force-load-balancing" in out
        assert not [key for key in values if "flip" in key or "z_rms" in key]
        assert "moe/max_vio/max" in values

    def test_a_failing_hook_turns_itself_off_once_and_training_goes_on(self, caplog):
        model = Model()
        monitor, sink = watch(model)
        model.layers[0].router.gating = lambda hidden: 1 / 0
        with caplog.at_level(logging.WARNING), pytest.raises(ZeroDivisionError):
            model(hidden())
        model = Model()
        monitor, sink = watch(model)
        (flips,) = [probe for probe in monitor._probes if probe.name == "flip rate"]
        flips.run.store.floats["flips"] = None
        with caplog.at_level(logging.WARNING):
            values = step(model, monitor, sink)
            model(hidden()).sum().backward()
        assert [record.message.count("flip rate turned itself off") for record in caplog.records].count(1) == 1
        assert "moe/flip_rate/max" not in values
        assert "moe/z_rms/max" in values

    def test_nothing_to_hook_is_an_error_at_start(self):
        model = Model()
        model.layers = torch.nn.ModuleList()
        with pytest.raises(UserError, match="BaseMoELayer"):
            watch(model)
        model = Model()
        model.layers[1].experts = None
        with pytest.raises(UserError, match="layer 11: experts is NoneType"):
            watch(model)

    def test_wrong_counts_stop_the_numbers_and_not_the_run(self, caplog):
        model = Model()
        monitor, sink = watch(model)
        model(hidden()).sum().backward()
        monitor._run.store.ints["step_counts"][1, 0] += 1
        with caplog.at_level(logging.WARNING):
            monitor.step_end(1)
        assert sink.values == {}
        assert "layer 1: 193 assignments, but top-2 of 96 tokens" in caplog.text

    def test_counts_of_dispatched_rows_are_those_of_the_map(self):
        model = Model()
        monitor, sink = watch(model)
        plain = step(model, monitor, sink)["moe/max_vio/layer_1"]
        other = Model()
        other.load_state_dict(model.state_dict())
        monitor, _ = watch(other)
        # As with a router in a CUDA graph: its hook doesn't fire, the experts' does.
        for layer in other.layers:
            layer.router._forward_hooks.clear()
        (counts,) = [probe for probe in monitor._probes if probe.name == "token counts"]
        monitor._run.graphed = True
        for layer in monitor._layers:
            counts.install(layer)
        other(hidden()).sum().backward()
        counts = monitor._run.store.ints["step_counts"][1].numpy()
        assert counts.max() / counts.mean() - 1 == pytest.approx(plain)


def test_run_after_keeps_the_class_and_the_result():
    class Dispatcher:
        def combine(self, rows):
            return rows + 1

    seen = []
    target = Dispatcher()
    run_after(target, "combine", 1, seen.append)
    assert target.combine(1) == 2
    assert seen == [2]
    assert isinstance(target, Dispatcher)
    # A copy is not watched: what it does is not this run's.
    assert copy.copy(target).combine(5) == 6
    assert seen == [2]


@pytest.mark.parametrize(("method", "arguments"), [("gone", 1), ("combine", 2)])
def test_a_changed_method_is_an_error_that_names_it(method, arguments):
    class Dispatcher:
        def combine(self, rows):
            return rows

    with pytest.raises(UserError, match=f"Dispatcher.{method}"):
        run_after(Dispatcher(), method, arguments, print)
