"""Is this allocation fit to train on: node readiness, all-to-all, transport; and a guard at start."""

from megatron_ext.preflight.findings import Finding, verdict_of
from megatron_ext.preflight.judge import JudgeOptions, judge_directory
from megatron_ext.preflight.sniff import Outlier, SniffRelay, SniffResult, SniffWatch
from megatron_ext.preflight.sniff import watch as watch_sniff_tests
from megatron_ext.preflight.watchdog import (
    add_arguments,
    prepare_transport_log,
    refuse_environment,
    transport_watchdog,
)

__all__ = [
    "Finding",
    "JudgeOptions",
    "Outlier",
    "SniffRelay",
    "SniffResult",
    "SniffWatch",
    "add_arguments",
    "judge_directory",
    "prepare_transport_log",
    "refuse_environment",
    "transport_watchdog",
    "verdict_of",
    "watch_sniff_tests",
]
