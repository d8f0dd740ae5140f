"""Where a profiled step went: reads the Chrome traces of torch's profiler, one a rank, and adds them up."""

from megatron_ext.trace.account import Row, Work, rows_of, work_of
from megatron_ext.trace.read import read_trace, read_traces
from megatron_ext.trace.summary import RankSummary, summarize

__all__ = ["RankSummary", "Row", "Work", "read_trace", "read_traces", "rows_of", "summarize", "work_of"]
