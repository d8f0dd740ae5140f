"""The rules: baselines, node pairs, transport, the joint verdict. The handbook's figures must be judged as it does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_ext.cli import main
from megatron_ext.errors import UserError
from megatron_ext.preflight.baselines import find_baseline, judge_alltoall, load_baselines, record_baseline
from megatron_ext.preflight.findings import Finding, verdict_of
from megatron_ext.preflight.judge import JudgeOptions, judge_directory
from megatron_ext.preflight.measurement import Measurement
from megatron_ext.preflight.pairs import judge_pairs, rounds_of_pairs
from megatron_ext.preflight.storage import judge_disk, judge_shared
from megatron_ext.preflight.transport import (
    expected_fabric,
    is_expected,
    judge_environment,
    judge_transport,
    read_transport,
)
from tests.ext.preflight import samples


def _at(nodes: int, gbps: float, wrong: int | None = 0, **more: object) -> Measurement:
    names = tuple(f"node-{n}" for n in range(nodes))
    base = Measurement("nccl-tests", names, 8 * nodes, 8 << 30, "out of place", gbps, wrong, 20)
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


# Training handbook, section 2.1: two, four and eight good nodes.
HANDBOOK = [_at(2, 77.14), _at(4, 39.25), _at(8, 30.91)]


def test_handbook_bad_pair_fails_and_good_eight_nodes_pass() -> None:
    assert judge_alltoall(_at(2, 39.84), HANDBOOK).status == "bad"
    assert judge_alltoall(_at(8, 30.91), HANDBOOK).status == "good"
    # A fixed floor of 33 GB/s would have said the opposite of both.
    assert 30.91 < 33 < 39.84


@pytest.mark.parametrize(("gbps", "status"), [(69.43, "good"), (69.42, "bad"), (80.0, "good")])
def test_floor_is_ninety_per_cent_of_the_same_node_count(gbps: float, status: str) -> None:
    assert judge_alltoall(_at(2, gbps), HANDBOOK).status == status


def test_wrong_elements_wrong_ranks_and_unchecked_come_before_speed() -> None:
    assert judge_alltoall(_at(2, 90.0, wrong=3), HANDBOOK).status == "bad"
    assert judge_alltoall(_at(2, 90.0, wrong=None), HANDBOOK).status == "unknown"
    eight = judge_alltoall(_at(2, 90.0, ranks=8), HANDBOOK, expected_ranks=16)
    assert (eight.status, eight.value, eight.why) == ("bad", "8 ranks", "expected 16")


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": 1 << 30},
        {"column": "in place"},
        {"tool": "torch-nccl"},
        {"ranks": 15},
    ],
)
def test_other_settings_are_never_compared(change: dict[str, object]) -> None:
    assert find_baseline(HANDBOOK, _at(2, 77.0, **change)) is None
    assert judge_alltoall(_at(2, 77.0, **change), HANDBOOK).status == "unknown"


def test_no_baseline_names_the_node_counts_that_have_one() -> None:
    assert "[2, 4, 8]" in judge_alltoall(_at(3, 50.0), HANDBOOK).why
    assert judge_alltoall(_at(1, 300.0), HANDBOOK).status == "warning"


def test_baselines_keep_provenance_and_judge_by_the_median(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    for gbps in (77.0, 70.0, 78.0):
        baseline = record_baseline(file, _at(2, gbps, settings={"NCCL_DEBUG": "INFO"}, versions={"nccl": "2.30.4"}))
    assert baseline.busbw_gbps == 77.0
    kept = load_baselines(file)
    assert kept[0].node_list == ("node-0", "node-1")
    assert kept[0].settings == {"NCCL_DEBUG": "INFO"}
    with pytest.raises(UserError, match="cannot be a baseline"):
        record_baseline(file, _at(2, 79.0, wrong=1))
    assert load_baselines(file) == kept
    file.write_text('{"schema": 7}')
    with pytest.raises(UserError, match="baselines cannot be read"):
        load_baselines(file)


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8])
def test_each_pair_meets_once_and_no_node_twice_in_a_round(nodes: int) -> None:
    rounds = rounds_of_pairs(nodes)
    pairs = [pair for one in rounds for pair in one]
    assert len(pairs) == len(set(pairs)) == nodes * (nodes - 1) // 2
    for one in rounds:
        members = [node for pair in one for node in pair]
        assert len(members) == len(set(members))


def test_slow_node_is_named_and_not_its_partners() -> None:
    names = ["a", "b", "c", "d"]
    gbps = {(x, y): (30.0 if 2 in (x, y) else 77.0) for x in range(4) for y in range(x + 1, 4)}
    found = judge_pairs(names, gbps, {})
    assert [(f.where, f.status) for f in found] == [("c", "bad")]
    assert "--exclude=c" in found[0].remedy


def test_slow_link_between_two_good_nodes_is_named_as_a_link() -> None:
    names = ["a", "b", "c", "d"]
    gbps = {(x, y): 77.0 for x in range(4) for y in range(x + 1, 4)} | {(0, 3): 40.0}
    assert [(f.where, f.status) for f in judge_pairs(names, gbps, {})] == [("a - d", "bad")]
    wrong = judge_pairs(names, {**gbps, (0, 3): 77.0}, {(1, 2): 5})
    assert [(f.where, f.value) for f in wrong] == [("b - c", "5 wrong elements")]
    assert judge_pairs(names, {**gbps, (0, 3): 75.0}, {})[0].status == "good"
    assert judge_pairs(["a", "b"], {(0, 1): 10.0}, {})[0].status == "skipped"


LOGS = {
    "good": (samples.GOOD_LOG, "Libfabric", "", "good"),
    "socket": (samples.SOCKET_LOG, "Socket", "plugin not loaded: libnccl-net-ofi.so", "bad"),
    "version": (samples.VERSION_LOG, "Socket", "library version EFA_1.4 missing", "bad"),
    "missing": (samples.MISSING_NET_LOG, "", "no plugin offers network Libfabric", "bad"),
    "empty": ("", "", "", "bad"),
}


@pytest.mark.parametrize("name", LOGS)
def test_transport_of_a_rank(name: str) -> None:
    form, network, trouble, status = LOGS[name]
    read = read_transport(samples.log(form))
    assert read.network == network
    assert read.trouble.rstrip(".") == trouble
    finding = judge_transport({"rank-0": read}, "Libfabric")[0]
    assert finding.status == status
    assert bool(finding.remedy) == (status == "bad")


def test_provider_and_nics_are_read() -> None:
    read = read_transport(samples.log(samples.GOOD_LOG))
    assert (read.provider, read.num_nics) == ("efa", 32)
    old = read_transport(
        "NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)\nNCCL INFO Using network AWS Libfabric\n"
    )
    assert (old.num_nics, is_expected(old.network, "Libfabric")) == (16, True)


def test_one_rank_on_sockets_among_sixteen_is_named() -> None:
    ranks = {f"rank-{n:05d}": read_transport(samples.log(samples.GOOD_LOG, gpu=n)) for n in range(16)}
    assert judge_transport(ranks, "Libfabric")[0].status == "good"
    ranks["rank-00011"] = read_transport(samples.log(samples.SOCKET_LOG))
    found = judge_transport(ranks, "Libfabric")
    assert [(f.where, f.status) for f in found] == [("rank-00011", "bad")]


def test_second_communicator_on_sockets_is_not_hidden_by_the_first() -> None:
    both = samples.log(samples.GOOD_LOG) + samples.log(samples.SOCKET_LOG)
    assert read_transport(both).network == "Socket"
    assert read_transport(samples.log(samples.SOCKET_LOG) + samples.log(samples.GOOD_LOG)).network == "Socket"


@pytest.mark.parametrize(
    ("environ", "nodes", "fabric"),
    [
        ({}, 1, "off"),
        ({}, 2, "any"),
        ({"FI_PROVIDER": "efa"}, 1, "Libfabric"),
        ({"NCCL_NET_PLUGIN": "ofi"}, 2, "Libfabric"),
    ],
)
def test_fabric_that_auto_stands_for(environ: dict[str, str], nodes: int, fabric: str) -> None:
    assert expected_fabric("auto", environ, nodes) == fabric
    assert expected_fabric("Socket", environ, nodes) == "Socket"


@pytest.mark.parametrize(
    ("environ", "bad"),
    [
        ({"NCCL_NET_PLUGIN": "ofi", "NCCL_NET": "Libfabric"}, []),
        (
            {"NCCL_NET_PLUGIN": "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so", "NCCL_NET": "Libfabric"},
            ["NCCL_NET_PLUGIN"],
        ),
        ({"NCCL_NET_PLUGIN": "spcx", "NCCL_NET": "Libfabric"}, ["NCCL_NET_PLUGIN"]),
        ({"NCCL_NET_PLUGIN": "ofi", "FI_PROVIDER": "tcp", "NCCL_NET": "Libfabric"}, ["FI_PROVIDER"]),
        ({"NCCL_NET": "Libfabric"}, ["NCCL_NET_PLUGIN"]),
    ],
)
def test_settings_that_lead_to_sockets(environ: dict[str, str], bad: list[str]) -> None:
    found = judge_environment("n1", environ, "Libfabric")
    assert [f.check for f in found if f.status == "bad"] == bad
    assert [f.status for f in judge_environment("n1", {"NCCL_NET_PLUGIN": "ofi"}, "Libfabric")] == ["warning"]


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ([], "unknown"),
        (["skipped"], "unknown"),
        (["good", "skipped"], "good"),
        (["good", "warning"], "good"),
        (["good", "unknown"], "unknown"),
        (["unknown", "bad"], "bad"),
    ],
)
def test_verdict(statuses: list[str], verdict: str) -> None:
    assert verdict_of(Finding("c", "w", status, "v") for status in statuses) == verdict  # type: ignore[arg-type]


def test_disk_too_small_and_not_writable(tmp_path: Path) -> None:
    assert judge_disk("n1", tmp_path, 1)[0].status == "good"
    assert judge_disk("n1", tmp_path, 1 << 60)[0].status == "bad"
    (tmp_path / "file").write_text("")
    assert judge_disk("n1", tmp_path / "file" / "run", 1)[0].status == "bad"
    assert not list(tmp_path.glob(".probe*"))


def test_node_that_did_not_report_is_missed(tmp_path: Path) -> None:
    finding = judge_shared(["n1"], 2, tmp_path)
    assert (finding.status, finding.value) == ("bad", "1 node reports: n1")
    assert judge_shared(["n1", "n2"], 2, tmp_path).status != "bad"


def _write_node(out: Path, node: str) -> None:
    (out / f"node-{node}.json").write_text(json.dumps({"node": node, "findings": []}))


def test_directory_is_judged_as_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    baselines = tmp_path / "b.json"
    record_baseline(baselines, _at(2, 77.14))
    out = tmp_path / "out"
    out.mkdir()
    for node in ("node-0", "node-1"):
        _write_node(out, node)
    (out / "alltoall.log").write_text(
        samples.nccl_tests_output([(8 << 30, 76.0, "0", 76.0, "N/A")], nodes=2) + samples.log(samples.GOOD_LOG)
    )
    words = ["preflight", "judge", "--out", str(out), "--baselines", str(baselines), "--nodes", "2", "--ranks", "16"]
    assert main([*words, "--transport", "Libfabric"]) == 0
    assert "verdict: good" in capfd.readouterr().out
    kept = json.loads((out / "preflight.json").read_text())
    assert (kept["verdict"], kept["measurement"]["busbw_gbps"]) == ("good", 76.0)
    (out / "alltoall.log").write_text(
        samples.nccl_tests_output([(8 << 30, 39.84, "0", 39.0, "N/A")], nodes=2) + samples.log(samples.SOCKET_LOG)
    )
    assert main([*words, "--transport", "Libfabric", "--json"]) == 1
    bad = {row["check"] for row in json.loads(capfd.readouterr().out)["findings"] if row["status"] == "bad"}
    assert bad == {"all-to-all", "transport"}
    (out / "alltoall.log").write_text("# nThread 1\nsrun: error: node-1: task 9: Killed\n")
    assert main(words) == 2
    assert "cut short" in capfd.readouterr().err


def test_nothing_measured_is_unknown(tmp_path: Path) -> None:
    findings = judge_directory(JudgeOptions(tmp_path, tmp_path / "none.json"))
    assert verdict_of(findings) == "unknown"


def test_recording_a_baseline_from_a_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["preflight", "baseline", "--out", str(tmp_path), "--baselines", str(tmp_path / "b.json")]
    assert main(words) == 2
    (tmp_path / "alltoall.log").write_text(samples.nccl_tests_output([(8 << 30, 76.0, "0", 76.0, "N/A")], nodes=2))
    assert main(words) == 0
    assert load_baselines(tmp_path / "b.json")[0].busbw_gbps == 76.0


def test_transport_verb_reads_a_directory_of_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-00000.log").write_text(samples.log(samples.GOOD_LOG))
    words = ["preflight", "transport", str(tmp_path), "--transport", "Libfabric"]
    assert main(words) == 0
    (tmp_path / "rank-00001.log").write_text(samples.log(samples.VERSION_LOG))
    assert main(words) == 1
    out = capfd.readouterr().out
    assert "rank-00001" in out
    assert "EFA_1.4" in out
    assert main(["preflight", "transport", str(tmp_path / "none")]) == 2
