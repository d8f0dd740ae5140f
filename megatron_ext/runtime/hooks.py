"""The one place where patched Megatron calls into this distribution (patches/hooks/*).

Each function here is called from one line of upstream. It knows which room answers and none of the formulas. Without a
run directory every call does nothing, so stock entry scripts run as they did. A room that fails after the start is
turned off with one warning: instruments never take a run down.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.runtime import heap

CALL_SITES = "patches/hooks/call-sites.patch"


@dataclass
class _Session:
    """What this process has attached: the run's writer (one rank), the monitor, the dispatchers' counters and the watch
    over sniff tests (all ranks)."""

    writer: Any = None
    monitor: Any = None
    dispatch: Any = None
    sniff: Any = None
    last_step: int = 0
    transport_log: Path | None = None
    model_built: bool = False


_session = _Session()


def wrap_summary_writer(writer: Any, args: Namespace) -> Any:
    """Return the summary writer that Megatron shall use: one that also feeds the run directory, on the writing rank.

    Args:
        writer: Megatron's own SummaryWriter, or None.
        args: Megatron's arguments, validated.
    """
    run_dir = getattr(args, "moe_ext_run_dir", None) or os.environ.get("MOE_EXT_RUN_DIR")
    if not run_dir:
        return writer
    args.moe_ext_run_dir = run_dir
    from megatron_ext import tracking
    from megatron_ext.pins import load_pins

    _session.writer = tracking.RunWriter.from_args(args, load_pins())
    return writer if _session.writer is None else tracking.TeeSummaryWriter(_session.writer, writer)


def watch_transport(args: Namespace) -> None:
    """Have NCCL write down which network it chooses; `model_built` then reads it (call before Megatron starts NCCL).

    Raises:
        UserError: The environment would make NCCL choose another network than asked for.
    """
    from megatron_ext import preflight

    folder = Path(getattr(args, "moe_ext_run_dir", None) or tempfile.gettempdir()) / "nccl"
    _session.transport_log = preflight.prepare_transport_log(folder, asked=args.moe_ext_transport)


def model_built(model: list[Any], args: Namespace) -> None:
    """Attach the instruments to the model chunks of this rank, before the optimizer is built.

    Raises:
        UserError: An instrument that was asked for found nothing to attach to, or a rank is on the wrong network.
    """
    _session.model_built = True
    if _session.transport_log is not None:
        from megatron_ext import preflight

        preflight.transport_watchdog(_session.transport_log, asked=args.moe_ext_transport)
    if getattr(args, "num_experts", None):
        from megatron_ext import experts

        experts.settle(args)
    if getattr(args, "moe_token_dispatcher_type", None) == "flex":
        from megatron_ext import dispatch

        dispatch.attach(model, _session.writer)
        _session.dispatch = dispatch
    if not getattr(args, "moe_ext_run_dir", None):
        return
    _watch_sniff_tests(args)
    from megatron_ext import observe

    _session.monitor = observe.Monitor.from_args(args, _session.writer)
    if _session.monitor is not None:
        _session.monitor.attach(model)


def _watch_sniff_tests(args: Namespace) -> None:
    if getattr(args, "gpu_sniff_test_interval", None) is None:
        return
    from megatron_ext import preflight
    from megatron_ext.tracking.rundir import read_alarms

    alarms = read_alarms(Path(args.moe_ext_run_dir)) if _session.writer is not None else []
    _session.sniff = preflight.watch_sniff_tests(args.gpu_sniff_test_interval, _session.writer, alarms)


def batch_read(sample: Mapping[str, Any]) -> None:
    """Show the instruments a micro-batch as the data loader gave it (our own entry point calls this)."""
    if _session.monitor is not None and "dataset_id" in sample:
        _guarded("monitor", "batch_read", lambda: _session.monitor.note_batch(sample["dataset_id"]))


def step_end(iteration: int) -> None:
    """Close a training step on every rank; the monitor decides whether this step is reduced and written."""
    _session.last_step = iteration
    heap.freeze_once()
    if _session.monitor is not None:
        _guarded("monitor", "step_end", lambda: _session.monitor.step_end(iteration))
    if _session.dispatch is not None:
        _guarded("dispatch", "step_end", lambda: _session.dispatch.step_end(iteration))
    if _session.sniff is not None:
        _guarded("sniff", "step_end", lambda: _session.sniff.step_end(iteration))


def checkpoint_begins() -> None:
    """Get the rows so far into the run directory: a run that resumes from this checkpoint does not write them again.

    Megatron calls it on every rank, before any says that the checkpoint is complete. It waits for the disk for a few
    seconds at most.
    """
    if _session.monitor is not None:
        _guarded("monitor", "flush", _session.monitor.flush)
    if _session.writer is not None:
        _session.writer.flush()


def close() -> None:
    """Deliver what is on its way, flush and close the run's writer; safe to call twice."""
    if _session.monitor is not None:
        _guarded("monitor", "flush", _session.monitor.flush)
    if _session.sniff is not None:
        _guarded("sniff", "close", lambda: _session.sniff.close(_session.last_step))
        _session.sniff = None
    if _session.writer is not None:
        _session.writer.close()
        _session.writer = None


def require_model_built() -> None:
    """Check that Megatron called `model_built` before its first step.

    Raises:
        RuntimeError: it did not: the patch is missing.
    """
    if not _session.model_built:
        raise RuntimeError(
            f"patched Megatron did not call megatron_ext after building the model ({CALL_SITES} is missing or its "
            "place has moved); run `python -m tools.mpatch doctor`"
        )


def _guarded(room: str, call_name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        setattr(_session, room, None)
        warnings.warn(f"the {room} failed in {call_name} and is off for the rest of the run: {error!r}", stacklevel=3)
