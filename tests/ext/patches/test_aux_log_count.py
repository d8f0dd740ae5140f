"""Proof of aux-log-count: the logged aux loss is the mean over the layers that add to it.

With a router of zeros every expert has the same score, and each layer's aux loss is exactly 1, whatever experts the
ties go to. So the log must show 1 for any model. Training's own logging function is called; arguments that play no
part are off.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import megatron.training.training as training
import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from routers import config, forward, router

pytestmark = pytest.mark.usefixtures("world", "tracker")

LAYERS = 4
AUX_LOSS = {"num_layers": LAYERS, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}


@pytest.fixture
def tracker() -> Iterator[None]:
    """A tracker of losses of the test's own: it keeps the size of the first model that it sees."""
    destroy_moe_metrics_tracker()
    yield
    destroy_moe_metrics_tracker()


class _Args(SimpleNamespace):
    def __getattr__(self, name: str) -> None:
        return None


def _logged(monkeypatch: pytest.MonkeyPatch, **model: Any) -> float:
    """Return the aux loss that the log of one iteration of one micro-batch shows."""
    args = _Args(
        num_layers=LAYERS, num_experts=8, moe_layer_freq=1, moe_router_load_balancing_type=["aux_loss"],
        micro_batch_size=1, data_parallel_size=1, gtp_weight_remat_size=1, world_size=1, seq_length=32,
        timing_log_level=0, log_interval=1000, train_iters=1,
    )  # fmt: skip
    vars(args).update(model)
    monkeypatch.setattr(training, "get_args", lambda: args)
    for nothing in ("get_timers", "get_tensorboard_writer", "get_wandb_writer", "get_one_logger", "get_energy_monitor"):
        monkeypatch.setattr(training, nothing, lambda: None)
    monkeypatch.setattr(training, "get_num_microbatches", lambda: 1)
    monkeypatch.setattr(training.one_logger_utils, "track_app_tag", lambda *_: None)
    losses: dict[str, torch.Tensor] = {}
    training.training_log(
        {}, losses, None, iteration=1, loss_scale=1.0, report_memory_flag=False, skipped_iter=0, grad_norm=None,
        params_norm=None, num_zeros_in_grad=None, max_attention_logit=None,
    )  # fmt: skip
    return float(losses["load_balancing_loss"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"moe_layer_freq": 2},
        {"moe_layer_freq": [0, 1, 1, 1]},
        {"mtp_num_layers": 2},
        {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
        {"mtp_num_layers": 2, "moe_layer_freq": [1, 1, 1, 0]},
        {"mtp_num_layers": 1, "moe_layer_freq": 2},
    ],
    ids=str,
)
def test_an_even_router_is_logged_as_one(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    built = config(**AUX_LOSS, hidden_dropout=0.0, attention_dropout=0.0, **options)
    spec = get_gpt_decoder_block_spec(built, use_transformer_engine=False)
    mtp = get_gpt_mtp_block_spec(built, spec, use_transformer_engine=False) if built.mtp_num_layers else None
    model = GPTModel(built, spec, vocab_size=64, max_sequence_length=32, mtp_block_spec=mtp).cuda()
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            torch.nn.init.zeros_(parameter)
    forward(model)
    assert _logged(monkeypatch, **options) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("pattern", "depths", "layers"),
    [("M*E-", None, [3]), ("M*EE/*E/*E", 2, [3, 4, 2, 2]), ("M*EE/*-/*-", 2, [3, 4])],
)
def test_a_hybrid_with_an_even_router_is_logged_as_one(
    monkeypatch: pytest.MonkeyPatch, pattern: str, depths: int | None, layers: list[int]
) -> None:
    # Mamba's own layers want Transformer Engine; the routers of such a model, by their layers' numbers, do not.
    for number in layers:
        one = router(**AUX_LOSS, mtp_num_layers=depths)
        torch.nn.init.zeros_(one.weight)
        one.set_layer_number(number)
        one(torch.ones(32, 1, 16).cuda())
    assert _logged(monkeypatch, hybrid_layer_pattern=pattern, mtp_num_layers=depths) == pytest.approx(1.0)
