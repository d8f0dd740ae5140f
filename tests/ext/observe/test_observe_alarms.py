"""Each rule on made-up samples: when it holds, when it just doesn't, at which place; then the board and a resume."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_ext.observe import alarms
from megatron_ext.observe.alarms.board import Board
from megatron_ext.observe.alarms.rule import Finding
from megatron_ext.observe.options import AlarmOptions
from megatron_ext.observe.sample import Sample
from megatron_ext.observe.sink import CHANGED, CLEARED, RAISED

RULES = {rule.name: rule for rule in alarms.RULES}
EVEN = np.full((2, 8), 128)


def sample(step: int, counts=EVEN, **values) -> Sample:
    """Two layers (4 and 9 of the model), 8 experts, top-2, 512 tokens; a number goes to layer 9, layer 4 is well."""
    well = {"max1_over_max2": 2.0, "top_weight": 0.6, "z_rms": 2.1, "rank_max_vio": 0.1, "max_vio": 0.1}
    well |= {"balance_loss": 1.01, "flip_rate": 0.0, "expert_norm_max_over_median": 1.2}
    well |= {"expert_norm_min_over_median": 0.9}
    arrays = {name: np.array([value, values.get(name, value)], float) for name, value in well.items()}
    rms = np.ones((2, 8))
    return Sample(step, (4, 9), counts, counts, arrays, expert_rms=rms, busiest_rank=np.array([0, 3]), topk=2)


def run(name: str, samples, options=AlarmOptions(), losses=()) -> list[list[Finding]]:  # noqa: B008
    rule = RULES[name](options)
    history = alarms.History(tuple(dict.fromkeys(m for r in alarms.RULES for m in r.watches)), 2)
    found = []
    losses = list(losses)
    for one in samples:
        while losses and losses[0][0] <= one.step:
            history.add_loss(*losses.pop(0))
        history.add(one)
        throughput = one.step_values.get("step/tokens_per_s")
        if throughput:
            history.add_throughput(one.step, throughput)
        found.append(rule.check(one, history))
    return found


def first(found: list[list[Finding]]) -> int | None:
    return next((at for at, findings in enumerate(found) if findings), None)


STEPS = range(10, 130, 10)


def test_a_healthy_run_finds_nothing():
    for name in RULES:
        assert first(run(name, [sample(step) for step in STEPS], losses=[(s, 3 - s / 100) for s in range(130)])) is None


def test_collapse_after_twenty_steps_over_half_the_limit():
    counts = EVEN.copy()
    counts[1, 5] += 1
    found = run("routing_collapse", [sample(s, counts, max_vio=0.2 if s < 50 else 1.6) for s in STEPS])
    assert STEPS[first(found)] == 70
    assert found[-1][0] == Finding("max_vio", 1.6, 1.5, since=50, layer=9, expert=5)
    assert first(run("routing_collapse", [sample(s, max_vio=1.5) for s in STEPS])) is None


def test_collapse_that_is_falling_is_no_alarm():
    assert first(run("routing_collapse", [sample(s, max_vio=3 * 0.9 ** (s / 10)) for s in STEPS])) is None


def test_dead_experts_by_tokens_and_by_output():
    counts = EVEN.copy()
    counts[1, [2, 6]] = 0
    one = sample(40, counts)
    # The window isn't full: nobody can say.
    assert run("dead_expert", [one]) == [[]]
    full = replace(one, values={**one.values, "dead_share": np.array([0, 0.25])})
    ((found,),) = run("dead_expert", [full])
    assert (found.layer, found.expert, found.value) == (9, 2, 0.25)
    assert "2 of 8" in found.why

    silent = sample(40, expert_norm_min_over_median=0.049)
    silent.expert_rms[1, 7] = 0.049
    ((found,),) = run("dead_expert", [silent])
    assert (found.layer, found.expert, found.metric) == (9, 7, "expert_norm_min_over_median")


def test_rogue_needs_size_and_growth():
    grows = [sample(s, expert_norm_max_over_median=1.2 * 1.1 ** (s / 5)) for s in STEPS]
    grows[-1].expert_rms[1, 4] = 99
    found = run("rogue_expert", grows)
    assert STEPS[first(found)] == 120  # 1.2 * 1.1**24 = 11.8
    assert (found[-1][0].layer, found[-1][0].expert) == (9, 4)
    # Always large, never growing: that is how this model is.
    assert first(run("rogue_expert", [sample(s, expert_norm_max_over_median=14) for s in STEPS])) is None


@pytest.mark.parametrize(
    ("name", "metric", "bad", "fine"),
    [
        ("flat_gate", "max1_over_max2", 1.04, 1.06),
        ("sharp_gate", "top_weight", 0.96, 0.94),
        ("overloaded_rank", "rank_max_vio", 0.6, 0.4),
    ],
)
def test_what_has_to_hold_for_twenty_steps(name, metric, bad, fine):
    found = run(name, [sample(s, **{metric: fine if s < 30 else bad}) for s in STEPS])
    assert STEPS[first(found)] == 50
    assert (found[-1][0].layer, found[-1][0].since) == (9, 30)
    assert found[-1][0].rank == (3 if name == "overloaded_rank" else None)
    assert first(run(name, [sample(s, **{metric: fine}) for s in STEPS])) is None
    # One good sample in between begins anew.
    assert first(run(name, [sample(s, **{metric: fine if s % 30 == 0 else bad}) for s in STEPS])) is None


def test_drift_is_for_bf16_routers_only():
    drifting = [sample(s, z_rms=2.1 * 1.01**s) for s in STEPS]
    assert first(run("logit_drift", drifting)) is None
    found = run("logit_drift", [replace(one, router_is_fp32=False) for one in drifting])
    assert found[-1][0].layer == 9
    # Up to 1.5 log E a router is only learning.
    learning = [replace(sample(s, z_rms=min(3.1, 2.1 * 1.01**s)), router_is_fp32=False) for s in STEPS]
    assert first(run("logit_drift", learning)) is None


def test_flips_must_stand_out_of_chance():
    def bf16(rate):
        return [replace(sample(s, flip_rate=rate), router_is_fp32=False) for s in STEPS]

    # 512 tokens: 1 % and 3 standard deviations are 2.3 %.
    assert first(run("logit_drift", bf16(0.022))) is None
    assert run("logit_drift", bf16(0.024))[-1][0].metric == "flip_rate"


def test_a_spike_between_two_samples_is_seen():
    losses = [(s, 3 - s / 1000 + (0.5 if s == 57 else 0)) for s in range(1, 131)]
    found = run("loss_spike", [sample(s) for s in STEPS], losses=losses)
    assert [STEPS[at] for at, findings in enumerate(found) if findings] == [60]
    assert found[5][0].since == 57


@pytest.mark.parametrize("fall", [0.02, 0.05, 0.3])
def test_a_loss_that_falls_fast_between_two_samples_is_no_spike(fall):
    losses = [(s, 50.0 - fall * s) for s in range(131)]
    assert first(run("loss_spike", [sample(s) for s in STEPS], losses=losses)) is None


def test_a_noisy_loss_is_no_spike():
    noise = np.random.default_rng(1).normal(0, 0.2, 131)
    assert first(run("loss_spike", [sample(s) for s in STEPS], losses=[(s, 3 + noise[s]) for s in range(131)])) is None


@pytest.mark.parametrize(("vio", "word"), [(0.5, "Imbalance explains"), (0.1, "transport")])
def test_a_slow_step_says_whom_to_blame(vio, word):
    slow = [replace(sample(s, rank_max_vio=vio), step_values={"step/tokens_per_s": 80.0}) for s in STEPS]
    for one in slow:
        one.values["rank_max_vio"][:] = vio
    found = run("slow_step", slow, AlarmOptions(control_tokens_per_s=100.0))
    assert first(found) == 2
    assert found[-1][0].value == 0.8
    assert word in found[-1][0].why
    assert first(run("slow_step", slow, AlarmOptions(control_tokens_per_s=94.0))) is None


def test_a_blind_loss():
    found = run("blind_loss", [sample(s, max_vio=1.2, balance_loss=1.015) for s in STEPS])
    assert STEPS[first(found)] == 30
    assert first(run("blind_loss", [sample(s, max_vio=1.2, balance_loss=1.05) for s in STEPS])) is None


def finding(value=1.6, expert=5, layer=9) -> Finding:
    return Finding("max_vio", value, 1.5, since=50, layer=layer, expert=expert)


def test_the_board_speaks_once_then_on_a_change_then_at_the_end():
    board = Board()
    (raised,) = board.update(60, [("routing_collapse", finding())])
    assert (raised.state, raised.step, raised.since_step) == (RAISED, 60, 50)
    assert board.update(70, [("routing_collapse", finding(1.7))]) == []
    assert board.layers_by_metric() == {"max_vio": {9}}
    (changed,) = board.update(80, [("routing_collapse", finding(expert=2))])
    assert (changed.state, changed.since_step, changed.expert) == (CHANGED, 50, 2)
    (changed,) = board.update(90, [("routing_collapse", finding(3.3, expert=2))])
    assert changed.value == 3.3
    assert board.update(100, []) == []
    (cleared,) = board.update(110, [])
    assert (cleared.state, cleared.step) == (CLEARED, 110)
    assert board.standing == 0


def test_layers_have_alarms_of_their_own():
    board = Board()
    news = board.update(60, [("routing_collapse", finding(layer=4)), ("routing_collapse", finding(layer=9))])
    assert [record.layer for record in news] == [4, 9]


def test_memory_survives_a_resume_and_forgets_the_steps_run_again():
    names = ("max_vio",)
    history, board = alarms.History(names, 2), Board()
    for step in STEPS:
        history.add(sample(step, max_vio=step / 100))
        history.add_loss(step, 3 - step / 100)
    said = board.update(60, [("routing_collapse", finding())])
    board.update(100, [("dead_expert", finding(layer=4)), ("routing_collapse", finding())])
    state = json.loads(json.dumps({"history": history.as_json(), "said": [record.as_json() for record in said]}))

    again, standing = alarms.History(names, 2), Board()
    again.restore(state["history"])
    standing.restore(state["said"])
    again.forget_from(91)
    assert [step for step, _ in again.series("max_vio")] == [20, 30, 40, 50, 60, 70, 80, 90]
    assert again.lows[-1] == (90, pytest.approx(2.1))
    # The one of step 60 still stands and isn't said again.
    assert standing.update(91, [("routing_collapse", finding())]) == []
    assert standing.standing == 1


def test_memory_of_another_model_is_ignored():
    other = alarms.History(("max_vio",), 3)
    state = alarms.History(("max_vio",), 2)
    state.add(sample(10))
    other.restore(state.as_json())
    assert other.series("max_vio") == []


def test_the_history_stays_short():
    history = alarms.History(("max_vio",), 2)
    for step in range(1, 1000):
        history.add(sample(step))
        history.add_loss(step, 10 / step)
    assert len(history.series("max_vio")) <= 102
    assert history.ago("max_vio", 999, 100)[0] == 899
    assert len(json.dumps(history.as_json())) < 20_000


def test_a_board_restored_from_its_record_stands_as_the_record_says():
    board = Board()
    said = board.update(10, [("routing_collapse", finding()), ("dead_expert", finding(layer=4))])
    said += board.update(40, [("routing_collapse", finding(5.0)), ("dead_expert", finding(layer=4))])
    for step in (50, 60):
        said += board.update(step, [("routing_collapse", finding(5.0))])
    assert [record.state for record in said] == [RAISED, RAISED, CHANGED, CLEARED]
    lines = [{"time": 1.0, "start": 1, **record.as_json()} for record in said]
    # Resumed from step 45: what was cleared at 60 stands again, what was changed at 40 isn't raised a second time.
    again = Board()
    again.restore([{"name": "routing_collapse", "torn": True}, *(line for line in lines if line["step"] <= 45)])
    assert again.standing == 2
    assert again.update(46, [("routing_collapse", finding(5.0)), ("dead_expert", finding(layer=4))]) == []
    # Resumed from its end: the cleared one is gone.
    again = Board()
    again.restore(lines)
    assert again.layers_by_metric() == {"max_vio": {9}}


def test_a_spike_is_not_found_again_after_a_resume():
    history = alarms.History((), 2)
    for step in range(1, 101):
        history.add_loss(step, 3 - step / 1000 + (0.5 if step == 57 else 0))
        if step % 10 == 0:
            history.add(sample(step))
    again = alarms.History((), 2)
    again.restore(json.loads(json.dumps(history.as_json())))
    again.forget_from(91)
    again.add_loss(91, 2.9)
    again.add(sample(91))
    assert RULES["loss_spike"](AlarmOptions()).check(sample(91), again) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_a_spike_from_the_first_step_on(value):
    losses = [(s, value if 12 <= s < 40 else 3.0) for s in range(1, 131)]
    found = run("loss_spike", [sample(s) for s in STEPS], losses=losses)
    assert [STEPS[at] for at, findings in enumerate(found) if findings] == [20, 30, 40]
    assert found[1][0].since == 12
    assert not np.isfinite(found[1][0].value)
    assert "not finite" in found[1][0].why


def test_a_spike_by_a_hair_is_a_spike():
    # 2.1 - 2.0 is more than 0.1 in floating point, and 2.1 is not more than 2.0 + 0.1.
    losses = [(s, 2.1 if s == 57 else 2.0) for s in range(1, 131)]
    found = run("loss_spike", [sample(s) for s in STEPS], losses=losses)
    assert found[5][0].since == 57


@pytest.mark.parametrize(
    ("name", "said", "stands", "over"),
    [
        # It only stopped growing; it falls but isn't down; it alternates; the window isn't full; nothing was measured.
        ("rogue_expert", ("expert_norm_max_over_median", 40.0, 10.0), {"expert_norm_max_over_median": 30.0}, {}),
        ("routing_collapse", ("max_vio", 3.0, 1.5), {"max_vio": 1.6}, {}),
        ("flat_gate", ("max1_over_max2", 1.01, 1.05), {"max1_over_max2": 1.04}, {}),
        ("sharp_gate", ("top_weight", 0.99, 0.95), {"top_weight": 0.96}, {}),
        ("overloaded_rank", ("rank_max_vio", 0.8, 0.5), {"rank_max_vio": float("nan")}, {}),
        ("dead_expert", ("dead_share", 0.25, 0.0), {}, {"dead_share": 0.0}),
        ("blind_loss", ("max_vio", 1.4, 1.0), {"max_vio": 1.3, "balance_loss": 1.0}, {}),
    ],
)
def test_an_alarm_stands_until_its_value_is_back(name, said, stands, over):
    metric, value, limit = said
    rule, history, board = RULES[name](AlarmOptions()), alarms.History((), 2), Board()
    board.update(50, [(name, Finding(metric, value, limit, since=40, layer=9))])

    def told(step: int, values: dict) -> list:
        one = sample(step, **values)
        if "dead_share" in values:
            one = replace(one, values={**one.values, "dead_share": np.array([0.0, values["dead_share"]])})
        return board.update(step, [], lambda record: rule.recovered(record, one, history))

    assert [told(step, stands) for step in (60, 70, 80)] == [[], [], []]
    assert told(90, over) == []
    assert [record.state for record in told(100, over)] == [CLEARED]
