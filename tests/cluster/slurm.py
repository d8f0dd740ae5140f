"""A real Slurm on loopback: munge, one controller, two emulated nodes on this machine. Needs root and slurm-wlm."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
MpiDefault=none
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
GresTypes=gpu
KillWait=30
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs={cpus} \
RealMemory=2000 Gres=gpu:8
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster; `environ` makes Slurm's commands talk to it."""

    root: Path
    environ: dict[str, str]

    def run(self, *words: str) -> str:
        """Run one of Slurm's commands and return what it prints."""
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return a job's state, e.g. RUNNING."""
        fields = dict(word.split("=", 1) for word in self.run("scontrol", "show", "job", job).split() if "=" in word)
        return fields["JobState"]

    def wait_for(self, job: str, states: set[str], seconds: float) -> str:
        """Wait until a job is in one of the states; return it."""
        deadline = time.monotonic() + seconds
        while (now := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is still {now} after {seconds} s"
            time.sleep(0.5)
        return now


def why_not() -> str:
    """Return why a cluster cannot be started here, "" if it can."""
    if os.geteuid() != 0:
        return "emulated Slurm nodes need root"
    try:
        socket.gethostbyname(platform.node())
    except OSError:
        return f"Slurm must resolve this machine's name: add {platform.node()} to /etc/hosts"
    missing = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not _find(name)]
    return f"not installed: {', '.join(missing)} (tools/setup/system.sh)" if missing else ""


@contextmanager
def cluster() -> Iterator[Slurm]:
    """Start a cluster, end it and remove its files."""
    # munge refuses sockets below directories that others may write, and Unix sockets need short paths.
    root = Path(tempfile.mkdtemp(prefix="moe-slurm-", dir="/run"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        environ = _prepare(root)
        munge = root / "munge"
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge}/{name}" for option, name in files.items()]
        _start(started, environ, "munged", "--foreground", "--force", *options)
        _until(lambda: (munge / "socket").exists(), "munged")
        _start(started, environ, "slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            _start(started, environ, "slurmd", "-D", "-N", node)
        slurm = Slurm(root, environ)
        _until(lambda: _idle_nodes(environ) == 2, f"the nodes (logs in {root})")
        yield slurm
    finally:
        if len(started) == 4:
            _cancel_all(environ)
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
        shutil.rmtree(root, ignore_errors=True)


def _cancel_all(environ: dict[str, str]) -> None:
    # A job that a failed test leaves would outlive the daemons.
    for words in (["scancel", "--signal=KILL", "--full", "--state=RUNNING"], ["scancel", "--user=root"]):
        subprocess.run(words, env=environ, capture_output=True, check=False, timeout=60)
    time.sleep(2)


def _prepare(root: Path) -> dict[str, str]:
    for name in ("munge", "state"):
        (root / name).mkdir(mode=0o755)
    root.chmod(0o755)
    key = root / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    text = CONFIGURATION.format(host=platform.node(), root=root, ports=_free_ports(), cpus=os.cpu_count())
    (root / "slurm.conf").write_text(text)
    # slurmd believes in a GPU only with a device file for it; any device does.
    for number in range(8):
        (root / f"gpu{number}").symlink_to("/dev/null")
    (root / "gres.conf").write_text(f"Name=gpu File={root}/gpu[0-7]\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    return {**kept, "SLURM_CONF": str(root / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}


def _free_ports() -> list[int]:
    # The two nodes take neighbours, as Slurm's range syntax wants.
    for _ in range(50):
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            try:
                first.bind(("127.0.0.1", 0))
                second.bind(("127.0.0.1", 0))
                third.bind(("127.0.0.1", second.getsockname()[1] + 1))
            except OSError:
                continue
            return [first.getsockname()[1], second.getsockname()[1], third.getsockname()[1]]
    raise RuntimeError("no three free ports")


def _start(started: list[subprocess.Popen[bytes]], environ: dict[str, str], name: str, *words: str) -> None:
    program = _find(name)
    assert program
    started.append(
        subprocess.Popen([program, *words], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    )


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


def _idle_nodes(environ: dict[str, str]) -> int:
    words = ["sinfo", "--noheader", "--Node", "--format=%T"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    return done.stdout.split().count("idle")


def _until(good: object, what: str, seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not good():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} did not come up within {seconds} s"
        time.sleep(0.3)
