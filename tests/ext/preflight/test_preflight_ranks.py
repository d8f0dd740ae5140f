"""Real processes over gloo: the all-to-all, its correctness check, a slow node in network namespaces, the watchdog."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron_ext.cli import main
from megatron_ext.errors import UserError
from megatron_ext.preflight import prepare_transport_log, transport_watchdog
from megatron_ext.preflight.alltoall import _pattern, wrong_elements
from tests.ext.preflight import samples

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--no-python",
    sys.executable,
]


def test_wrong_elements_are_counted_and_swapped_senders_are_noticed() -> None:
    good = torch.cat([_pattern(sender, 1, 5, torch.device("cpu")) for sender in (0, 1, 2)])
    assert wrong_elements(good, [0, 1, 2], 1) == 0
    flipped = good.clone()
    flipped[3] += 1
    flipped[14] = 0
    assert wrong_elements(flipped, [0, 1, 2], 1) == 2
    assert wrong_elements(good, [1, 0, 2], 1) == 10
    # What was meant for another rank is wrong here.
    assert wrong_elements(good, [0, 1, 2], 0) == 15


def test_whole_preflight_on_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["preflight", "--out", str(tmp_path / "out"), "--device", "cpu", "--size", "256K", "--iterations", "2",
             "--need-gb", "0.001", "--baselines", str(tmp_path / "b.json"), "--json"]  # fmt: skip
    assert main(words) == 0
    rows = {row["check"]: row for row in json.loads(capfd.readouterr().out)["findings"]}
    assert rows["all-to-all"]["value"].endswith("#wrong 0")
    plain = json.loads((tmp_path / "out" / "alltoall.json").read_text())
    assert (plain["measurement"]["ranks"], plain["measurement"]["tool"]) == (2, "torch-gloo")
    assert main(["preflight", "baseline", "--out", str(tmp_path / "out"), "--baselines", str(tmp_path / "b.json")]) == 0
    # Half of the ranks that were asked for.
    assert main([*words[:1], "judge", *words[1:], "--ranks", "4"]) == 1


def test_alltoall_without_a_launcher_says_how_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["preflight", "alltoall", "--out", str(tmp_path)]) == 64
    assert "torchrun" in capfd.readouterr().err


WATCHDOG = """
import os, sys
import torch.distributed as dist
from pathlib import Path
from megatron_ext.errors import UserError
from megatron_ext.preflight import prepare_transport_log, transport_watchdog
folder, bad = Path(sys.argv[1]), sys.argv[2]
os.environ["LOCAL_WORLD_SIZE"] = "1"  # As if the two ranks sat on two nodes.
log = prepare_transport_log(folder / "nccl", asked="Libfabric")
rank = int(os.environ["RANK"])
# What NCCL would write; gloo writes nothing.
name = bad if rank == 1 else "good"
if name != "nothing":
    log.write_text((folder / name).read_text())
dist.init_process_group("gloo")
try:
    transport_watchdog(log, asked="Libfabric")
except UserError as error:
    (folder / f"stopped-{rank}").write_text(error.text())
else:
    (folder / f"went-on-{rank}").write_text("")
# A process that ends with gloo's threads alive aborts now and then.
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("bad", "said"), [
    ("good", ""), ("socket", "uses Socket: plugin not loaded"), ("nothing", "no `Using network` line: no log"),
])  # fmt: skip
def test_watchdog_stops_every_rank_when_one_is_wrong(bad: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "good").write_text(samples.log(samples.GOOD_LOG))
    (tmp_path / "socket").write_text(samples.log(samples.SOCKET_LOG))
    environ = {**os.environ, "NCCL_NET_PLUGIN": "ofi", "NCCL_NET": "Libfabric", "FI_PROVIDER": "efa"}
    subprocess.run(
        [*TORCHRUN, "-c", WATCHDOG, str(tmp_path), bad], check=True, capture_output=True, env=environ, timeout=120
    )
    stopped = sorted(path.name for path in tmp_path.glob("stopped-*"))
    assert stopped == ([] if bad == "good" else ["stopped-0", "stopped-1"])
    assert len(list(tmp_path.glob("went-on-*"))) == (2 if bad == "good" else 0)
    for name in stopped:
        text = (tmp_path / name).read_text()
        assert "rank 1" in text
        assert "rank 0" not in text
        assert said in text
        assert "try:" in text


def test_watchdog_refuses_a_path_as_plugin_before_nccl_starts(tmp_path: Path) -> None:
    environ = {
        "FI_PROVIDER": "efa",
        "NCCL_NET_PLUGIN": "/opt/libnccl-net-ofi.so",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
    }
    with pytest.raises(UserError, match=r"a name, not a path[\s\S]*NCCL_NET_PLUGIN=ofi"):
        prepare_transport_log(tmp_path, environ=environ)


def test_watchdog_prepares_nccl_and_drops_the_last_runs_log(tmp_path: Path) -> None:
    environ = {
        "NCCL_DEBUG": "WARN",
        "NCCL_DEBUG_SUBSYS": "COLL",
        "RANK": "3",
        "WORLD_SIZE": "16",
        "LOCAL_WORLD_SIZE": "8",
    }
    (tmp_path / "rank-00003.log").write_text(samples.log(samples.GOOD_LOG))
    log = prepare_transport_log(tmp_path, environ=environ)
    assert log == tmp_path / "rank-00003.log"
    assert not log.exists()
    assert environ["NCCL_DEBUG"] == "INFO"
    assert environ["NCCL_DEBUG_SUBSYS"] == "COLL,INIT,NET"
    assert environ["NCCL_DEBUG_FILE"] == str(log)


def test_watchdog_leaves_one_node_without_a_fabric_alone(tmp_path: Path) -> None:
    environ: dict[str, str] = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    assert prepare_transport_log(tmp_path, environ=environ) is None
    assert "NCCL_DEBUG_FILE" not in environ
    assert transport_watchdog(None, environ=environ) == []


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Four network namespaces on one bridge; the third one's link is limited to 40 Mbit/s."""
    if (
        os.geteuid() != 0
        or subprocess.run(["ip", "netns", "add", "moe-probe"], capture_output=True, check=False).returncode
    ):
        pytest.skip("network namespaces need root and iproute2")
    names = [f"moe-n{number}" for number in range(4)]
    subprocess.run(["ip", "netns", "del", "moe-probe"], check=True)
    try:
        _ip("link add moe-br0 type bridge")
        _ip("link set moe-br0 up")
        for number, name in enumerate(names):
            _ip(f"netns add {name}")
            _ip(f"link add moe-v{number} type veth peer name eth0 netns {name}")
            _ip(f"link set moe-v{number} master moe-br0 up")
            _ip(f"-n {name} addr add 10.77.13.{number + 1}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
        slow = "qdisc add dev {} root tbf rate 40mbit burst 64kb latency 200ms"
        subprocess.run(["tc", "-n", names[2], *slow.format("eth0").split()], check=True)
        subprocess.run(["tc", *slow.format("moe-v2").split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", "moe-br0"], check=False, capture_output=True)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


def test_slow_node_is_found_by_pairs(nodes: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    running = []
    for rank, name in enumerate(nodes):
        environ = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "10.77.13.1",
            "MASTER_PORT": "29511", "MOE_NODE_NAME": name, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        measure = ["-m", "megatron_ext.cli", "preflight", "alltoall", "--out", str(tmp_path), "--device", "cpu"]
        sizes = ["--size", "1M", "--iterations", "2", "--pairs"]
        command = ["ip", "netns", "exec", name, sys.executable, *measure, *sizes]
        running.append(subprocess.Popen(command, env=environ))
    assert [process.wait(timeout=180) for process in running] == [0] * 4
    main(["preflight", "judge", "--out", str(tmp_path), "--json", "--baselines", str(tmp_path / "b.json")])
    rows = [row for row in json.loads(capfd.readouterr().out)["findings"] if row["check"] == "node pairs"]
    assert [(row["where"], row["status"]) for row in rows if row["where"] in nodes] == [("moe-n2", "bad")]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_full_disk_is_found(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        assert (
            main(["preflight", "node", "--out", str(tmp_path), "--run-dir", str(small), "--need-gb", "0", "--json"])
            == 1
        )
        rows = {row["check"]: row for row in json.loads(capfd.readouterr().out)["findings"]}
        assert rows["disk"]["value"] == "No space left on device"
        assert "free space" in rows["disk"]["remedy"]
        assert not list(small.iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)
