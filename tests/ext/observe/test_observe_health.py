"""`megatron-moe health` on run directories and on Megatron's dumps, as files of known content."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch.distributed import checkpoint as dcp

from megatron_ext.cli import main
from megatron_ext.observe import names
from megatron_ext.observe.sink import CLEARED, RAISED, AlarmRecord


def record(name: str, layer: int, state: str, step: int) -> dict:
    alarm = names.ALARMS[name]
    words = (alarm.why, alarm.remedy, alarm.link)
    return AlarmRecord(name, state, step, 10, layer, 5, None, alarm.metric, 0.01, 0.05, *words).as_json()


def write_run(folder, *, alarms=(), steps=3, **metrics):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "w") as out:
        for step in range(1, steps + 1):
            row = {"step": step, "time": time.time(), "start": 1, "metrics": {"lm loss": 5.0 - step, **metrics}}
            out.write(json.dumps(row) + "\n")
    (folder / "alarms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in alarms))
    return folder


def test_a_healthy_run(tmp_path, capsys):
    run = write_run(tmp_path / "run", **{"moe/max_vio/max": 0.5, "moe/max_vio/max_layer": 3.0})
    assert main(["health", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step 3" in out
    assert "no alarm stands" in out


def test_an_alarm_that_stands_is_exit_status_1(tmp_path, capsys):
    said = [("dead_expert", 1, RAISED, 10), ("flat_gate", 0, RAISED, 10), ("flat_gate", 0, CLEARED, 20)]
    lines = [record(*words) for words in said]
    run = write_run(tmp_path / "run", alarms=lines, steps=30)
    assert main(["health", str(run), "--json"]) == 1
    state = json.loads(capsys.readouterr().out)
    assert [(alarm["name"], alarm["layer"]) for alarm in state["alarms"]] == [("dead_expert", 1)]
    assert state["values"][0] == {
        "metric": "lm_loss", "part": "", "first": 4.0, "first_step": 1, "last": -25.0, "last_step": 30, "layer": None
    }  # fmt: skip
    assert main(["health", str(run)]) == 1
    out = capsys.readouterr().out
    for part in ("layer 1", "expert 5", "step 10", "--moe-aux-loss-coeff", "docs/symptoms.md#dead-expert"):
        assert part in " ".join(out.split())


def test_a_torn_last_line_is_no_error(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as out:
        out.write('{"step": 4, "met')
    assert main(["health", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped_lines"] == 1


def test_no_run_is_an_error_with_a_remedy(tmp_path, capsys):
    assert main(["health", str(tmp_path / "nothing")]) == 1
    assert "try:" in capsys.readouterr().err
    assert main(["health"]) == 64
    assert main(["health", "--from", str(tmp_path)]) == 1
    assert "router_trace_rank" in capsys.readouterr().err


def offline(capsys, *words) -> dict:
    assert main(["health", "--json", "--from", *map(str, words)]) == 0
    return json.loads(capsys.readouterr().out)


def test_tokens_per_expert_files_of_two_ranks(tmp_path, capsys):
    tpe = {0: [[3072, 1024], [2048, 2048]], 1: [[1024, 1024], [2048, 2048]]}
    for rank, counts in tpe.items():
        lines = [{"iter": 5, "block": "decoder", "layer": layer, "tpe": counts} for layer in (2, 10)]
        lines.append({"iter": 5, "block": "mtp", "mtp_idx": 0, "layer": 1, "tpe": counts})
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = offline(capsys, tmp_path, "--expert-parallel", "2")
    assert [row["layer"] for row in found["rows"]] == ["2", "10", "mtp 0.1"]
    row = found["rows"][0]
    # Micro-batch 1: 3072, 1024 | 1024, 1024 of mean 1536; micro-batch 2 is even.
    assert row["max_vio_micro"] == 0.5
    assert row["max_vio_micro_worst"] == 1.0
    assert row["rank_max_vio_worst"] == pytest.approx(4096 / 3072 - 1)
    assert row["max_vio"] == pytest.approx(5120 / 3584 - 1)
    assert main(["health", "--from", str(tmp_path), "--expert-parallel", "4"]) == 1
    assert "whole expert-parallel groups" in capsys.readouterr().err


def test_a_routing_trace_with_logits(tmp_path, capsys):
    # Two sequences of two tokens, [sequence, batch] flattened: tokens 0 and 2 are sequence 0.
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    chosen = [[0, 1], [2, 3], [0, 1], [0, 3]]
    line = {"step": 7, "block": "decoder", "layer": 0, "rank": 0, "num_tokens": 4, "topk": 2, "top_indices": chosen}
    line |= {"logit_offset": 0, "logit_bytes": 32, "logit_shape": [4, 4]}
    (tmp_path / "router_trace_rank0.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "logits_rank0.bin").write_bytes(logits.view(torch.int16).numpy().tobytes())
    (row,) = offline(capsys, tmp_path, "--micro-batch-size", "2")["rows"]
    assert row["max_vio"] == 0.5  # 3, 2, 1, 2
    assert row["max_vio_sequence"] == 1.0  # 2, 2, 0, 0 and 1, 0, 1, 2
    assert row["z_rms"] == pytest.approx(logits.double().logsumexp(-1).square().mean().sqrt().item(), rel=1e-12)
    assert main(["health", "--from", str(tmp_path), "--num-experts", "3"]) == 1
    assert "expert 3 of 3" in capsys.readouterr().err


def test_activations_of_sequential_and_grouped_experts(tmp_path, capsys):
    probs = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    routed = probs > 0
    outputs = (2.0, 6.0)
    rows = [torch.full((1, 4), outputs[at]) * probs[routed[:, at], at, None] for at in (0, 1)]
    router = {"router/output0": probs, "router/output1": routed}
    sequential = {f"experts.local_experts.{at}.linear_fc2/output0": part for at, part in enumerate(rows)}
    grouped = {"experts.linear_fc2/output0": torch.cat(rows), "experts.linear_fc2/input1": [3, 2]}
    for number, kind in enumerate((sequential, grouped)):
        folder = tmp_path / f"iter_{number:07d}"
        folder.mkdir()
        tensors = {f"decoder.layers.4.mlp.{key}": value for key, value in {**router, **kind}.items()}
        torch.save({"model_chunk0": tensors}, folder / "mp_rank_00.pth")
        (row,) = offline(capsys, folder)["rows"]
        assert (row["layer"], row["expert_norm_median"]) == ("4", 4.0)
        assert row["expert_norm_max_over_median"] == 1.5


def test_the_expert_bias_of_a_checkpoint(tmp_path, capsys):
    state = {
        "decoder.layers.mlp.router.expert_bias": torch.tensor([[0.0, 0.5], [-1.0, 1.0]]),
        "decoder.layers.mlp.router.weight": torch.zeros(2, 2),
    }
    dcp.save(state, checkpoint_id=str(tmp_path / "iter_0000012"), no_dist=True)
    first, second = offline(capsys, tmp_path / "iter_0000012")["rows"]
    assert (first["step"], first["layer"], first["bias_spread"], first["bias_mean"]) == (12, "0", 0.5, 0.25)
    assert (second["layer"], second["bias_spread"]) == ("1", 2.0)


def test_a_long_run_is_answered_from_a_bounded_file(tmp_path):
    """10,000 steps with the metrics of a 64-layer model at the default sampling."""
    parts = ("max", "min", "mean", "max_layer")
    keys = {f"moe/{name}/{part}": 1.0 for name in list(names.METRICS)[:30] for part in parts}
    run = tmp_path / "run"
    run.mkdir()
    with open(run / "metrics.jsonl", "w") as out:
        for step in range(1, 10_001):
            metrics = {"lm loss": 3.0, **(keys if step % 10 == 0 else {})}
            out.write(json.dumps({"step": step, "time": 1.0, "start": 1, "metrics": metrics}) + "\n")
    assert (run / "metrics.jsonl").stat().st_size < 20e6
    assert main(["health", str(run), "--json"]) == 0


def test_values_that_are_not_finite_and_names_with_brackets(tmp_path, capsys):
    alarm = record("loss_spike", None, RAISED, 2)
    lines = [{**alarm, "value": "NaN", "limit": None}, {"name": "of another version", "state": RAISED}]
    run = write_run(tmp_path / "moe[aux]", alarms=lines, **{"moe/z_rms/max": "NaN"})
    assert main(["health", str(run)]) == 1
    out = capsys.readouterr().out
    assert "moe[aux]: step 3" in out
    assert "nan" in out
    assert main(["health", str(run), "--json"]) == 1

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    state = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert state["alarms"][0]["value"] == "NaN"
