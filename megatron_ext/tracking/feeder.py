"""The training side of the process that feeds Trackio.

Trackio runs in a process of its own for three reasons seen in 0.42.0: `Run.log` waits on the lock that its
sender holds while the database is locked (up to 40 s); `init`, `alert` and `finish` print to stdout; and
the database's place is fixed when the module is imported. The child reads the run directory, so training
hands it nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

from megatron_ext.tracking.options import TrackingOptions

# The child needs about two seconds to import Trackio and, at the end, to bring in the last rows.
CLOSE_WAIT_S = 60.0
# Where it has already said that Trackio takes nothing, waiting longer would only hold up the job's end.
CLOSE_WAIT_TROUBLED_S = 10.0
NOTICE = "notice: "
END = b"end\n"


class TrackioFeeder:
    """Starts the child and passes on what it has to say. Never raises."""

    def __init__(self, options: TrackingOptions) -> None:
        self._messages: list[str] = []
        self._buffer = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._told = False
        try:
            self._process = start_child(options)
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
        except OSError as error:
            self._messages.append(f"Trackio's process did not start ({error.strerror or error})")

    def news(self) -> list[str]:
        """Return messages not returned yet: at most a few in a run's life."""
        if self._process is not None:
            self._read()
            code = self._process.poll()
            if code and not self._told and not self._messages:
                self._messages.append(f"Trackio's process ended with {code}")
            self._told = self._told or bool(code)
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        """Tell the child that the run is over and wait until Trackio has all rows, within a limit."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            # A word, not only the end of the pipe: a forked data loader worker holds our end open too.
            self._process.stdin.write(END)
            self._process.stdin.close()
        limit_s = CLOSE_WAIT_TROUBLED_S if self._told else CLOSE_WAIT_S
        try:
            self._process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._told = True
            self._messages.append(f"Trackio did not take the last rows within {limit_s:.0f} s")

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._buffer += self._process.stdout.read() or b""
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            if text.startswith(NOTICE):
                self._messages.append(text.removeprefix(NOTICE))
                self._told = True


def start_child(options: TrackingOptions) -> subprocess.Popen[bytes]:
    """Start the feeding process for one run directory; it ends at the word END or when its stdin closes, as it does
    when we are killed.

    Raises:
        OSError: The process cannot be started.
    """
    # Its own session: Ctrl-C and a launcher's group signal are for training; the child must outlive them to
    # finish.
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_ext.tracking.feed", json.dumps(options.to_plain())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=child_environment(options),
        start_new_session=True,
    )


def child_environment(options: TrackingOptions) -> dict[str, str]:
    """Return the environment in which Trackio logs locally, into the chosen folder."""
    remote = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL")
    kept = {name: value for name, value in os.environ.items() if name not in remote}
    # One thread each: the child must not compete with training for cores. No GPU: it must not hold device
    # memory.
    return {
        **kept,
        "TRACKIO_DIR": str(options.trackio_dir),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
