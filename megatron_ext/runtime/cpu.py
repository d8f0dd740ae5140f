"""The CPU runtime: what it takes for released Megatron to train without a GPU.

Megatron asks for CUDA in some three hundred places, though little of it is about CUDA: "which device", "how much
memory", "save the random state". This module answers those questions for a CPU, before Megatron is imported:

1. tensors: every `device="cuda"` becomes the CPU (`_OnCpu`, a torch function mode);
2. `torch.cuda`: one device a rank, streams and events that do nothing, memory of this process, the CPU's random state;
3. collectives: gloo in place of NCCL, split sizes as lists;
4. Transformer Engine, which knows GPUs only, counts as not installed.

It exists to test, to teach and to develop patches. It is slow, and it never takes the place of a GPU that was asked for
(`device.py` decides). Where upstream can be made device-neutral by a small patch, prefer the patch: this file should
shrink.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Answer for CUDA on the CPU, in this process, from now on. Must run before anything of Megatron is imported.

    Raises:
        RuntimeError: Megatron was imported already; its modules hold the originals.
    """
    global _installed
    if _installed:
        return
    if any(name.startswith(("megatron.core", "megatron.training")) for name in sys.modules):
        raise RuntimeError("the CPU runtime must be installed before megatron is imported")
    # Here and not at import: a GPU start imports this module too, and needs its compiled helpers. Dynamo is off, see
    # `_without_compilation`; the variable also keeps child processes and torch's own uses quiet.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # With TP or CP above 1, Megatron insists on this for GPUs older than compute capability 10.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Megatron takes its functions wherever it can be imported, and they know GPUs only.
    sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    _without_compilation()
    _answer_for_torch_cuda()
    _use_gloo()
    _reach_into_backward()
    # Entered for good: the mode belongs to the process, as the device does.
    _OnCpu().__enter__()
    _installed = True


def is_installed() -> bool:
    """Return whether this process trains under the CPU runtime."""
    return _installed


def _without_compilation() -> None:
    # Megatron binds torch.compile to 34 helpers at import time (its --disable-jit-fuser comes too late). Even a
    # disabled torch.compile imports dynamo, which takes seconds and walks torch.cuda's functions, ours among them.
    def identity(model: Callable | None = None, **options: object) -> Any:
        return (lambda function: function) if model is None else model

    torch.compile = identity


# --- tensors ---------------------------------------------------------------------------------------------------------


class _OnCpu(TorchFunctionMode):
    """Turns every request for a CUDA device into one for the CPU.

    A mode sees all torch functions, `torch.empty(device="cuda")` and `tensor.cuda()` alike, so no list of factory
    functions has to be kept. It costs about a microsecond a call.
    """

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to:
            # A bare number is a CUDA index only in the first place; further on it may be a flag.
            first = args[1:2]
            args = (args[0], *(_CPU if _means_cuda(value) else value for value in first), *args[2:])
        if _means_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _reach_into_backward() -> None:
    # torch.autograd.backward is a torch function, inside of which a mode is off; the backward functions that it runs
    # ask for CUDA devices as well (recompute calls it, and then Megatron's all-to-all).
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with _OnCpu():
            return engine(*args, **kwargs)

    autograd._engine_run_backward = run_backward


def _means_cuda(device: object) -> bool:
    """Return whether a device value means a GPU; torch reads a bare number as a CUDA index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


# --- torch.cuda ------------------------------------------------------------------------------------------------------


class _Stream:
    """A stream of a device that runs everything in order: nothing is ever pending."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = _CPU

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def _done(self, *args: object) -> None:
        return None

    wait_stream = wait_event = synchronize = _done

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class _Event:
    """An event that remembers when it was recorded, so that timings stay true."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        return True

    def _done(self, *args: object) -> None:
        return None

    wait = synchronize = _done


def _resident_bytes(device: object = None) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_resident_bytes(device: object = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _total_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextlib.contextmanager
def _no_context(*args: object, **kwargs: object) -> Iterator[None]:
    yield


def _do_nothing(*args: object, **kwargs: object) -> None:
    return None


def _memory_stats(device: object = None) -> dict[str, int]:
    now, peak = _resident_bytes(), _peak_resident_bytes()
    stats = {"num_alloc_retries": 0, "allocation.all.current": 0, "allocation.all.allocated": 0}
    for pool in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        stats[f"{pool}.all.current"] = now
        stats[f"{pool}.all.peak"] = peak
    return stats


def _properties(device: object = None) -> SimpleNamespace:
    # Compute capability 0.0: every "is this GPU new enough" is answered with no.
    return SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=_total_bytes(), multi_processor_count=os.cpu_count() or 1
    )


def _answer_for_torch_cuda() -> None:
    _assign(
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=_local_world_size,
        current_device=lambda: 0,
        set_device=_do_nothing,
        device=_no_context,
        get_device_name=lambda device=None: "cpu",
        get_device_capability=lambda device=None: (0, 0),
        get_device_properties=_properties,
        is_bf16_supported=lambda including_emulation=True: True,
        is_current_stream_capturing=lambda: False,
        init=_do_nothing,
        _lazy_init=_do_nothing,
        _lazy_call=lambda callback, **kwargs: callback(),
        synchronize=_do_nothing,
        check_error=_do_nothing,
        ipc_collect=_do_nothing,
        Stream=_Stream,
        Event=_Event,
        current_stream=lambda device=None: _Stream(),
        default_stream=lambda device=None: _Stream(),
        set_stream=_do_nothing,
        stream=_no_context,
        default_generators=tuple(torch.default_generator for _ in range(_local_world_size())),
    )
    for owner in (torch.cuda, torch.cuda.memory):
        _assign(
            owner,
            memory_allocated=_resident_bytes,
            memory_reserved=_resident_bytes,
            max_memory_allocated=_peak_resident_bytes,
            max_memory_reserved=_peak_resident_bytes,
            device_memory_used=_resident_bytes,
            memory_stats=_memory_stats,
            mem_get_info=lambda device=None: (_total_bytes() - _resident_bytes(), _total_bytes()),
            reset_peak_memory_stats=_do_nothing,
            empty_cache=_do_nothing,
        )
    for owner in (torch.cuda, torch.cuda.random):
        _assign(
            owner,
            manual_seed=lambda seed: torch.default_generator.manual_seed(seed),
            manual_seed_all=lambda seed: torch.default_generator.manual_seed(seed),
            seed=lambda: torch.default_generator.seed(),
            initial_seed=lambda: torch.default_generator.initial_seed(),
            get_rng_state=lambda device="cuda": torch.default_generator.get_state(),
            set_rng_state=lambda state, device="cuda": torch.default_generator.set_state(state),
        )
    # Not through the mode: torch reads the stream's type before it asks any mode. Expert-parallel overlap calls it.
    _assign(torch.Tensor, record_stream=_do_nothing)
    # The data loader asks here before it pins memory.
    _assign(torch.accelerator, is_available=lambda: False)
    _assign(torch.cuda.nvtx, range_push=_do_nothing, range_pop=_do_nothing, mark=_do_nothing)


def _assign(owner: Any, **answers: Any) -> None:
    for name, answer in answers.items():
        if isinstance(answer, FunctionType):
            # Dynamo, where something imports it after all, keeps one rule a function object and refuses an object that
            # stands under two names.
            answer = FunctionType(answer.__code__, answer.__globals__, name, answer.__defaults__, answer.__closure__)
        setattr(owner, name, answer)


# --- collectives -----------------------------------------------------------------------------------------------------


def _use_gloo() -> None:
    _with_gloo("init_process_group", without=("device_id",))
    _with_gloo("new_group", without=("pg_options", "device_id"))
    stock_barrier = dist.barrier
    stock_all_to_all = dist.all_to_all_single

    def barrier(group: Any = None, async_op: bool = False, device_ids: object = None) -> Any:
        return stock_barrier(group, async_op)

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        # The dispatcher passes tensors and arrays, which NCCL's binding takes and gloo's does not.
        return stock_all_to_all(
            output, input.contiguous(), _as_list(output_split_sizes), _as_list(input_split_sizes), group, async_op
        )

    _replace_collective("barrier", barrier)
    _replace_collective("all_to_all_single", all_to_all_single)


def _with_gloo(name: str, without: tuple[str, ...]) -> None:
    stock = getattr(dist, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs = {option: value for option, value in kwargs.items() if option not in without}
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return stock(*args, **kwargs)

    _replace_collective(name, wrapped)


def _replace_collective(name: str, value: Callable) -> None:
    # torch.distributed re-exports its functions; Megatron reaches them by either path.
    setattr(dist, name, value)
    setattr(dist.distributed_c10d, name, value)


def _as_list(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]
