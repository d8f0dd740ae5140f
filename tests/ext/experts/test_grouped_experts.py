"""The grouped experts against Megatron's own, with the same weights: outputs, gradients, buffers and fallbacks."""

from __future__ import annotations

from typing import Any

import layers
import pytest
import torch
from layers import FFN, HIDDEN
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel.schedules import custom_backward
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron_ext.experts import module as experts_module
from megatron_ext.experts.grouped import as_one
from megatron_ext.experts.module import TorchGroupedMLP

pytestmark = pytest.mark.usefixtures("world")

UNEVEN = [3, 0, 11, 1]


def _assert_same(ours: layers.Pass, theirs: layers.Pass) -> None:
    for name in ("output", "rows", "probs"):
        mine, reference = getattr(ours, name), getattr(theirs, name)
        torch.testing.assert_close(mine, reference, msg=lambda text, at=name: f"{at}: {text}")
    assert ours.weights.keys() == theirs.weights.keys()
    for name, grad in theirs.weights.items():
        # Without rows upstream's expert has a zero gradient too: it ran on nothing.
        torch.testing.assert_close(ours.weights[name], grad, msg=lambda text, at=name: f"{at}: {text}")


@pytest.mark.parametrize("counts", [UNEVEN, [4, 4, 4, 4], [0, 0, 9, 0], [0, 0, 0, 0], [7]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_megatrons(counts: list[int], dtype: torch.dtype) -> None:
    theirs, ours = layers.pair(len(counts), params_dtype=dtype, bf16=dtype == torch.bfloat16)
    assert not ours.unsupported
    _assert_same(layers.run(ours, counts), layers.run(theirs, counts))


@pytest.mark.parametrize(
    "options",
    [
        {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu},
        {"activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
        {"bias_activation_fusion": True},
    ],
    ids=["gelu", "clamped", "fused"],
)
def test_every_activation_is_megatrons(options: dict[str, Any]) -> None:
    theirs, ours = layers.pair(4, **options)
    _assert_same(layers.run(ours, UNEVEN), layers.run(theirs, UNEVEN))


def test_the_experts_do_not_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = layers.pair(4)
    monkeypatch.setattr(SequentialMLP, "forward", lambda *args: pytest.fail("ran one by one"))
    layers.run(ours, UNEVEN)


def test_a_wrong_gradient_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext.experts import grouped

    theirs, ours = layers.pair(4)
    product = grouped.grouped_mm
    monkeypatch.setattr(grouped, "grouped_mm", lambda a, b, offs: product(a, b, offs=offs // 2 * 2))
    with pytest.raises(AssertionError):
        _assert_same(layers.run(ours, UNEVEN), layers.run(theirs, UNEVEN))


def test_recomputing_the_activation_changes_nothing() -> None:
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True}
    theirs, _ = layers.pair(4)
    ours = layers.build(TorchGroupedMLP, 4, **recompute)
    ours.load_state_dict(theirs.state_dict())
    assert ours.recomputes_activation
    _assert_same(layers.run(ours, UNEVEN), layers.run(theirs, UNEVEN))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"add_bias_linear": True}, "biases"),
        ({"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True}, "probs-on-input"),
        ({"moe_ffn_hidden_size": 22}, "multiple of 4"),
    ],
    ids=["bias", "probs on input", "odd size"],
)
def test_what_the_products_lack_runs_as_in_megatron(
    options: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    experts_module.notes._said.clear()
    theirs, ours = layers.pair(4, **options)
    assert named in ours.unsupported
    assert not ours.counts_on_device
    layers.build(TorchGroupedMLP, 4, **options)
    assert capsys.readouterr().out.count("run one after the other") == 1
    rows, probs = torch.randn(15, HIDDEN, device="cuda"), torch.rand(15, device="cuda")
    with torch.no_grad():  # upstream's experts with biases have no backward pass at expert parallelism 1
        mine, reference = (experts(rows, torch.tensor(UNEVEN), probs)[0] for experts in (ours, theirs))
    assert torch.equal(mine, reference)


def test_who_watches_an_experts_layer_sees_it_run() -> None:
    theirs, ours = layers.pair(4)
    seen: list[torch.Size] = []
    ours.local_experts[2].linear_fc2.register_forward_hook(lambda layer, inputs, out: seen.append(inputs[0].shape))
    _assert_same(layers.run(ours, UNEVEN), layers.run(theirs, UNEVEN))
    assert seen == [torch.Size([11, FFN])]


def test_experts_stay_in_their_order_and_keep_their_keys() -> None:
    theirs, ours = layers.pair(4)
    for at, expert in enumerate(ours.local_experts):
        assert expert is ours.local_experts[at]
        assert torch.equal(expert.linear_fc1.weight, theirs.local_experts[at].linear_fc1.weight)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    assert ours.sharded_state_dict().keys() == theirs.sharded_state_dict().keys()
    for key, value in theirs.sharded_state_dict().items():
        mine = ours.sharded_state_dict()[key]
        assert (mine.key, mine.replica_id) == (value.key, value.replica_id)


def _wrapped(experts: Any, *, overlap: bool, bucket_size: int | None = None) -> DistributedDataParallel:
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap or bucket_size is not None,
        overlap_param_gather=overlap,
        bucket_size=bucket_size,
        grad_reduce_in_fp32=True,
    )
    # As training.py does for the distributed optimizer.
    parameters = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    layout = DistributedOptimizer.compute_full_param_layout(parameters, bucket_size, 1, options)
    return DistributedDataParallel(experts.config, options, experts, full_param_layout=layout)


@pytest.mark.parametrize("bucket_size", [None, 1000])
def test_megatrons_buffers_hold_the_weights_in_a_row(bucket_size: int | None) -> None:
    ours = layers.build(TorchGroupedMLP, 4, params_dtype=torch.bfloat16, bf16=True)
    _wrapped(ours, overlap=False, bucket_size=bucket_size)
    for part, shape in (("linear_fc1", (4, 2 * FFN, HIDDEN)), ("linear_fc2", (4, HIDDEN, FFN))):
        weights = [getattr(expert, part).weight for expert in ours.local_experts]
        one = as_one(weights)
        assert one is not None
        assert one.shape == shape
        assert torch.equal(one, torch.stack(weights))
        assert one.data_ptr() == weights[0].data_ptr()
        grads = as_one([weight.main_grad for weight in weights])
        assert grads is not None
        assert grads.dtype == torch.float32


def test_uneven_or_foreign_tensors_are_not_one() -> None:
    whole = torch.arange(60.0).view(6, 10)
    assert as_one(list(whole.unbind())) is not None
    assert as_one([whole[0], whole[1], whole[3]]) is None
    assert as_one([whole[1], whole[0]]) is None
    assert as_one([whole[0], whole[1].clone()]) is None
    assert as_one([whole[0, :6], whole[0, 4:]]) is None  # they overlap
    single = as_one([whole[2]])
    assert single is not None
    assert single.shape == (1, 10)


@pytest.mark.parametrize("bucket_size", [None, 1000], ids=["one bucket", "buckets"])
@pytest.mark.parametrize("counts", [UNEVEN, [0, 0, 0, 0]], ids=str)
def test_gradients_are_summed_in_main_grad(counts: list[int], bucket_size: int | None) -> None:
    def sums(kind: type[SequentialMLP], fuse: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        made = layers.build(kind, 4, params_dtype=torch.bfloat16, bf16=True, gradient_accumulation_fusion=fuse)
        made.load_state_dict(state)
        model = _wrapped(made, overlap=False, bucket_size=bucket_size)
        model.zero_grad_buffer()
        with model.no_sync():
            layers.run(made, counts, seed=1)
        layers.run(made, counts, seed=2)
        model.finish_grad_sync()
        assert all(parameter.grad is None for parameter in made.parameters())
        assert all(parameter.grad_added_to_main_grad == fuse for parameter in made.parameters())
        return {name: parameter.main_grad.clone() for name, parameter in made.named_parameters()}

    state = layers.build(SequentialMLP, 4, params_dtype=torch.bfloat16, bf16=True).state_dict()
    theirs = sums(SequentialMLP, fuse=False)
    for fuse in (False, True):
        ours = sums(TorchGroupedMLP, fuse)
        for name, grad in theirs.items():
            torch.testing.assert_close(ours[name], grad, msg=lambda text, at=name: f"{at}: {text}")


def test_parameters_that_are_gathered_late_are_waited_for() -> None:
    ours = layers.build(TorchGroupedMLP, 4, params_dtype=torch.bfloat16, bf16=True)
    model = _wrapped(ours, overlap=True)
    model.zero_grad_buffer()
    waited: list[int] = []
    for number, group in enumerate(model.bucket_groups):
        group.finish_param_sync = lambda at=number, **options: waited.append(at)
    rows = torch.randn(15, HIDDEN, device="cuda").bfloat16()
    model(rows, torch.tensor(UNEVEN, device="cuda"), torch.rand(15, device="cuda"))
    assert set(waited) == set(range(len(model.bucket_groups)))


def test_frozen_weights_get_no_gradient() -> None:
    theirs, ours = layers.pair(4)
    for experts in (theirs, ours):
        experts.requires_grad_(False)
    mine, reference = layers.run(ours, UNEVEN), layers.run(theirs, UNEVEN)
    torch.testing.assert_close(mine.rows, reference.rows)
    assert all(grad is None for grad in mine.weights.values())


def test_full_recomputation_gives_the_same_gradients() -> None:
    from megatron.core.tensor_parallel import checkpoint

    theirs, ours = layers.pair(4)
    counts = torch.tensor(UNEVEN, device="cuda")
    results = []
    for experts in (theirs, ours):
        torch.manual_seed(5)
        rows = torch.randn(15, HIDDEN, device="cuda").requires_grad_()
        probs = torch.rand(15, device="cuda").requires_grad_()
        experts.zero_grad()
        output = checkpoint(lambda a, b, layer=experts: layer(a, counts, b)[0], False, rows, probs)
        custom_backward(output.square().sum(), None)
        weights = dict(experts.named_parameters())
        results.append([rows.grad, probs.grad, *(weights[name].grad for name in sorted(weights))])
    for mine, reference in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, reference)
