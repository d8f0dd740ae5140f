"""Failures put into real training on purpose: each raises its own alarm, at its layer and expert, within 30 steps."""

from __future__ import annotations

import pytest
from observe_training import Output, train

BROKEN_AT = 10


def raised(run: Output) -> dict[tuple[str, int | None], dict]:
    return {(line["name"], line["layer"]): line for line in run.lines("alarms") if line["state"] == "raised"}


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Output:
    flags = "--num-layers 5 --train-iters 40 --moe-ext-observe-interval 5"
    return train(tmp_path_factory.mktemp("broken"), flags, plugin="Broken")


@pytest.mark.parametrize(
    ("name", "layer", "expert"),
    [("routing_collapse", 0, 3), ("dead_expert", 1, 5), ("rogue_expert", 2, 2), ("flat_gate", 3, None)],
)
def test_each_failure_raises_its_own_alarm(broken, name, layer, expert):
    alarm = raised(broken)[name, layer]
    assert BROKEN_AT < alarm["step"] <= BROKEN_AT + 30
    assert alarm["expert"] == expert
    assert alarm["since_step"] > BROKEN_AT


def test_no_other_alarm(broken):
    expected = {("routing_collapse", 0), ("dead_expert", 1), ("rogue_expert", 2), ("flat_gate", 3)}
    # Where routing collapses, the experts left without tokens are dead too: that is what collapse means.
    assert set(raised(broken)) - {("dead_expert", 0)} == expected


def test_the_log_names_layer_expert_and_knob(broken):
    (line,) = [line for line in broken.log.splitlines() if "ALARM dead_expert at layer 1" in line]
    for part in ("expert 5", "since step 15", "Try:", "docs/symptoms.md#dead-expert"):
        assert part in line


@pytest.fixture(scope="module")
def skewed(tmp_path_factory) -> Output:
    flags = "--num-layers 3 --train-iters 40 --moe-ext-observe-interval 5 --bf16 --expert-model-parallel-size 2"
    return train(tmp_path_factory.mktemp("skewed"), flags, ranks=2, plugin="Skewed")


def test_a_bf16_router_with_drifting_logits(skewed):
    alarm = raised(skewed)["logit_drift", 0]
    assert BROKEN_AT < alarm["step"] <= BROKEN_AT + 30


def test_an_overloaded_rank(skewed):
    alarm = raised(skewed)["overloaded_rank", 1]
    assert BROKEN_AT < alarm["step"] <= BROKEN_AT + 30
    assert alarm["rank"] == 1


def test_the_layer_in_between_is_well(skewed):
    assert [key for key in raised(skewed) if key[1] == 2] == []


def test_a_saturated_gate_an_expert_without_tokens_and_a_blind_loss(tmp_path):
    flags = "--num-layers 4 --train-iters 40 --moe-ext-observe-interval 5"
    found = raised(train(tmp_path, flags, plugin="Extreme"))
    assert found["sharp_gate", 0]["value"] > 0.95
    assert (found["dead_expert", 1]["expert"], found["dead_expert", 1]["metric"]) == (5, "dead_share")
    assert found["blind_loss", 2]["expert"] in (3, 5)
    # All tokens of layer 2 get the same two experts with equal weights: that is also collapse, six dead experts and a
    # flat gate; and a router whose tokens are sure of one expert loads the experts as it happens.
    beside = {(name, 2) for name in ("routing_collapse", "dead_expert", "flat_gate")}
    beside |= {("routing_collapse", 0), ("dead_expert", 0)}
    own = {("sharp_gate", 0), ("dead_expert", 1), ("blind_loss", 2)}
    assert own <= set(found) <= own | beside | {("loss_spike", None)}


def test_a_jump_of_the_loss_and_slow_steps_are_alarms_of_the_whole_step(tmp_path):
    flags = "--train-iters 60 --moe-ext-observe-interval 5 --untie-embeddings-and-output-weights"
    run = train(tmp_path, f"{flags} --moe-ext-alarm-control-tokens-per-s 1e9", plugin="Shaken")
    found = raised(run)
    assert set(found) == {("loss_spike", None), ("slow_step", None)}
    assert (found["loss_spike", None]["since_step"], found["loss_spike", None]["step"]) == (46, 50)
    assert "look at the transport" in found["slow_step", None]["why"]
    states = [line["state"] for line in run.lines("alarms") if line["name"] == "slow_step"]
    assert states == ["raised"]


def test_a_loss_that_turns_into_nan(tmp_path):
    flags = "--train-iters 40 --moe-ext-observe-interval 5 --no-check-for-nan-in-loss-and-grad"
    run = train(tmp_path, flags, plugin="Exploding")
    found = raised(run)["loss_spike", None]
    assert (found["since_step"], found["step"]) == (26, 30)
    assert "not finite" in found["why"]
    states = [line["state"] for line in run.lines("alarms") if line["name"] == "loss_spike"]
    assert states == ["raised"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "ranks"),
    [("--num-layers 5", 1), ("--num-layers 3 --bf16 --moe-router-dtype fp32 --expert-model-parallel-size 2", 2)],
)
def test_a_healthy_run_of_300_steps_raises_nothing(tmp_path, flags, ranks):
    run = train(tmp_path, f"{flags} --train-iters 300 --moe-ext-observe-interval 5", ranks=ranks)
    assert run.lines("alarms") == []
    assert run.metrics(300)["step/alarms"] == 0


def test_a_shorter_healthy_run_raises_nothing(tmp_path):
    run = train(tmp_path, "--num-layers 5 --train-iters 60 --moe-ext-observe-interval 5")
    assert run.lines("alarms") == []
    assert run.metrics(60)["moe/max_vio/max"] > 0
