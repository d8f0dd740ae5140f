"""Parsers against outputs in the form of the real tools (written by hand after their documented layout)."""

from __future__ import annotations

import json

import pytest

from megatron_ext.errors import UserError
from megatron_ext.preflight.dcgm import judge_dcgm, parse_dcgm
from megatron_ext.preflight.hardware import judge_efa, judge_gpus
from megatron_ext.preflight.nccl_tests import parse_nccl_tests, to_measurement
from tests.ext.preflight.samples import nccl_tests_output

TABLE = """\
Successfully ran diagnostic for group.
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
|-----  Metadata  ----------+------------------------------------------------|
| DCGM Version              | 3.3.5                                          |
|-----  Deployment  --------+------------------------------------------------|
| Denylist                  | Pass                                           |
| NVML Library              | Pass                                           |
| Persistence Mode          | Warn - GPU: 2                                  |
| Warning                   | GPU 2 is not in                                |
|                           | persistence mode                               |
| Graphics Processes        | Skip                                           |
+---------------------------+------------------------------------------------+
"""


def _dcgm_json(version: int, status: str) -> str:
    if version == 3:
        result = {"gpu_ids": "0,3", "status": status.upper(), "warnings": "Thermal violations"}
        root = "DCGM GPU Diagnostic"
    else:
        result = {
            "entity_group": "GPU",
            "entity_id": 3,
            "status": status,
            "warnings": [{"warning": "Thermal violations"}],
        }
        root = "DCGM Diagnostic"
    tests = [
        {"name": "Denylist", "results": [{**result, "status": "PASS", "warnings": ""}]},
        {"name": "Memory", "results": [result]},
    ]
    return json.dumps({root: {"test_categories": [{"category": "Hardware", "tests": tests}]}})


def test_dcgm_table_keeps_wrapped_messages_with_their_test() -> None:
    tests = parse_dcgm(TABLE)
    assert [(t.name, t.result) for t in tests] == [
        ("Denylist", "pass"),
        ("NVML Library", "pass"),
        ("Persistence Mode", "warn"),
        ("Graphics Processes", "skip"),
    ]
    assert tests[2].message == "GPU 2 is not in persistence mode"
    finding = judge_dcgm("n1", TABLE)
    assert finding.status == "warning"
    assert "GPU 2" in finding.value


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize(("status", "verdict"), [("Pass", "good"), ("Fail", "bad"), ("Warn", "warning")])
def test_dcgm_json_of_both_versions(version: int, status: str, verdict: str) -> None:
    text = "Successfully ran diagnostic for group.\n" + _dcgm_json(version, status)
    finding = judge_dcgm("n1", text)
    assert finding.status == verdict
    if status == "Fail":
        assert "Memory fail (GPU" in finding.value
        assert "Thermal violations" in finding.value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Error: unable to establish a connection to the specified host: localhost",
        _dcgm_json(4, "Fail")[:80],
        TABLE.replace("Pass", "Skip").replace("Warn", "Skip"),
    ],
)
def test_dcgm_without_a_result_is_unknown_not_good(text: str) -> None:
    assert judge_dcgm("n1", text).status == "unknown"
    assert judge_dcgm("n1", None).status == "skipped"


def test_dcgm_status_that_nobody_knows_counts_as_failed() -> None:
    assert judge_dcgm("n1", _dcgm_json(4, "Exploded")).status == "bad"


def test_alltoall_reads_ranks_nodes_size_and_the_out_of_place_column() -> None:
    found = to_measurement(parse_nccl_tests(nccl_tests_output([(8 << 30, 77.14, "0", 77.06, "N/A")], nodes=2)))
    assert (found.ranks, found.node_list, found.size_bytes) == (16, ("node-0", "node-1"), 8 << 30)
    assert (found.busbw_gbps, found.wrong, found.column, found.iterations) == (77.14, 0, "out of place", 20)
    assert found.versions == {"nccl": "2.30.4"}


def test_alltoall_takes_the_size_and_column_asked_for() -> None:
    rows = [(1 << 30, 60.5, "0", 61.5, "0"), (8 << 30, 77.14, "0", 78.0, "3")]
    output = parse_nccl_tests(nccl_tests_output(rows, nodes=2))
    assert to_measurement(output).busbw_gbps == 77.14
    assert to_measurement(output, size_bytes=1 << 30).busbw_gbps == 60.5
    in_place = to_measurement(output, column="in place")
    assert (in_place.busbw_gbps, in_place.wrong) == (78.0, 3)
    with pytest.raises(UserError, match=r"no such figure[\s\S]*1,073,741,824, 8,589,934,592"):
        to_measurement(output, size_bytes=4096)


def test_alltoall_with_srun_labels_and_decimal_commas_reads_the_same() -> None:
    text = nccl_tests_output([(8 << 30, 77.14, "0", 77.06, "N/A")], nodes=2)
    plain = to_measurement(parse_nccl_tests(text))
    labelled = "\n".join(f" 0: {line}" for line in text.splitlines())
    assert to_measurement(parse_nccl_tests(labelled)) == plain
    assert to_measurement(parse_nccl_tests(text.replace("77.14", "77,14").replace("77.06", "77,06"))) == plain


def test_alltoall_unchecked_is_none_and_not_zero() -> None:
    assert to_measurement(parse_nccl_tests(nccl_tests_output([(8, 1.0, "N/A", 1.0, "N/A")], nodes=1))).wrong is None


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.6, 0.95])
def test_alltoall_cut_short_is_could_not_check(keep: float) -> None:
    text = nccl_tests_output([(8 << 30, 77.14, "0", 77.06, "0")], nodes=2)
    with pytest.raises(UserError, match="cut short") as caught:
        to_measurement(parse_nccl_tests(text[: int(len(text) * keep)]))
    assert caught.value.exit_code == 2


SMI = "0, NVIDIA H200, 35, 1980, 1980, 0x0000000000000000, 0\n1, NVIDIA H200, 41, 1980, 1980, 0x0000000000000001, 0\n"


def test_gpus_good_missing_throttled_and_with_memory_errors() -> None:
    assert judge_gpus("n1", SMI, 2)[0].status == "good"
    assert "at most 41" in judge_gpus("n1", SMI)[0].value
    assert judge_gpus("n1", SMI, 8)[0].value == "2 GPUs"
    hot = judge_gpus("n1", SMI.replace("0x0000000000000001", "0x0000000000000048"))
    assert [(f.where, f.status) for f in hot] == [("n1 GPU 1", "bad")]
    assert "hardware slowdown, hardware thermal" in hot[0].value
    # A software power cap is what full load looks like.
    assert judge_gpus("n1", SMI.replace("0x0000000000000001", "0x0000000000000004"))[0].status == "good"
    assert judge_gpus("n1", SMI.replace(", 0\n1", ", 7\n1"))[0].value == "7 uncorrected"
    assert judge_gpus("n1", "NVIDIA-SMI has failed because it couldn't communicate")[0].status == "unknown"
    assert judge_gpus("n1", SMI.replace(", 0\n", ", [N/A]\n"), 2)[0].status == "good"


def _fi_info(devices: int) -> str:
    block = "provider: efa\n    fabric: efa\n    domain: rdmap{n}s0-rdm\n    version: 122.0\n    type: FI_EP_RDM\n"
    # libfabric lists a device once for each capability set.
    return "".join(block.format(n=n) * 2 for n in range(devices))


@pytest.mark.parametrize(
    ("text", "wanted", "rails", "status"),
    [
        (_fi_info(32), True, "4", "good"),
        (_fi_info(31), True, "4", "bad"),
        (_fi_info(16), True, "", "good"),
        (_fi_info(15), True, "", "warning"),
        ("fi_getinfo: -61\n", True, "", "bad"),
        (None, True, "", "bad"),
        (None, False, "", "skipped"),
    ],
)
def test_efa_devices_against_rails(text: str | None, wanted: bool, rails: str, status: str) -> None:
    assert judge_efa("n1", text, wanted=wanted, num_gpus=8, rails=rails).status == status
