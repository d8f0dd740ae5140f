"""The monitor of one rank: hooks at start, one packed all-reduce on each sampled step, numbers to the sink.

Order of a sampled step: the probes add to the store during the forwards; `step_end` packs the store, reduces it over
all ranks, starts a copy to the host and goes on. On a GPU the copy is read when it has arrived, at a later step, so
that no step waits for it. Everything after that is NumPy, on the writing rank only.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_ext.errors import UserError
from megatron_ext.observe.clock import StepClock
from megatron_ext.observe.layers import MoELayerRef, find_moe_layers, total_layers
from megatron_ext.observe.options import AlarmOptions, ObserveOptions, options_from
from megatron_ext.observe.probes import PROBES, Probe, Run
from megatron_ext.observe.probes.flips import router_dtype_is_fp32
from megatron_ext.observe.probes.weights import router_is_graphed
from megatron_ext.observe.publish import Publisher
from megatron_ext.observe.sample import Facts
from megatron_ext.observe.sink import Sink
from megatron_ext.observe.sources import labels_of_run
from megatron_ext.observe.store import Shape, Store
from megatron_ext.observe.topology import Topology

logger = logging.getLogger("megatron_ext.observe")


@dataclass
class _Pending:
    """A reduced vector on its way to the host."""

    step: int
    values: Tensor
    arrived: torch.cuda.Event | None
    tokens_per_step: int


class Monitor:
    """Watches one rank's share of the model. All ranks must make the same calls.

    Args:
        options: What is measured.
        alarms: The thresholds.
        sink: Where numbers go; None on ranks that don't write.
        args: Megatron's arguments, for batch size and sequence length.
    """

    def __init__(
        self, options: ObserveOptions, alarms: AlarmOptions, sink: Sink | None, args: argparse.Namespace
    ) -> None:
        """Nothing is hooked until `attach`."""
        self._options = options
        self._alarms = alarms
        self._sink = sink
        self._args = args
        self._sources: tuple[str, ...] = ()
        self._layers: tuple[MoELayerRef, ...] = ()
        self._probes: tuple[Probe, ...] = ()
        self._run: Run | None = None
        self._publisher: Publisher | None = None
        self._pending: _Pending | None = None
        self._clock: StepClock | None = None
        # One buffer of pinned memory: a sample is delivered before the next one is copied.
        self._on_host: Tensor | None = None

    @classmethod
    def from_args(cls, args: argparse.Namespace, sink: Sink | None) -> Monitor | None:
        """Return a monitor, None where `--moe-ext-observe-interval 0` turns it off.

        Raises:
            UserError: An option is out of range.
        """
        options, alarms = options_from(args)
        return cls(options, alarms, sink, args) if options.interval else None

    def attach(self, model_chunks: Sequence[nn.Module]) -> None:
        """Hook the model chunks of this rank (one, or one a virtual stage). Collective: all ranks call it.

        Raises:
            UserError: The model should have MoE layers and none was found on any rank, or a layer lacks what is to
                be hooked.
        """
        self._layers = find_moe_layers(model_chunks)
        place = Topology.from_megatron(_device_of(model_chunks))
        self._config = _config_of(model_chunks)
        self._layers_anywhere = self._agree_on_layers(place)
        self._sources = labels_of_run(self._args, self._options.sources) if self._layers_anywhere else ()
        self._begin(place)
        assert self._run is not None
        for probe in self._probes:
            for layer in self._layers:
                probe.install(layer)
        if place.rank == 0:
            self._announce()

    def note_batch(self, dataset_ids: Tensor) -> None:
        """Say from which data set of the blend each sample of the coming micro-batch is: int [micro-batch size]."""
        run = self._run
        # Middle pipeline stages read no batch, and stages work on several micro-batches at a time.
        if run is None or not self._label_of or not run.sampling or run.place.pp_size > 1:
            return
        table = torch.tensor(self._label_of, device=dataset_ids.device)
        ids = dataset_ids.reshape(-1).long()
        known = (ids >= 0) & (ids < len(self._label_of))
        labels = torch.where(known, table[ids.clamp(0, len(self._label_of) - 1)], -1)
        run.labels = labels.to(run.place.device, non_blocking=True)

    def step_end(self, iteration: int) -> None:
        """Close training step `iteration` (from 1). Collective on sampled steps: all ranks call it.

        Raises:
            Nothing of its own: what fails here is said once and the numbers stay out.
        """
        run = self._run
        if run is None:
            return
        self._deliver(wait=False)
        assert self._clock is not None
        self._clock.tick()
        if self._publisher is not None:
            self._publisher.note_loss(iteration)
        if run.sampling:
            self._reduce(iteration, run)
            run.store.clear()
        run.labels = None
        run.sampling = (iteration + 1) % self._options.interval == 0

    def flush(self) -> None:
        """Deliver what is still on its way, and have the alarms' memory kept; the hooks stay."""
        self._deliver(wait=True)
        if self._publisher is not None:
            self._publisher.keep_memory()

    # --- start ---------------------------------------------------------------------------------------------------

    def _agree_on_layers(self, place: Topology) -> tuple[int, ...]:
        """Return the rows that are MoE layers on any rank."""
        mask = torch.zeros(total_layers(self._config), dtype=torch.int64, device=place.device)
        for layer in self._layers:
            mask[layer.row] = 1
        place.all_reduce(mask, largest=True)
        rows = tuple(torch.nonzero(mask).flatten().tolist())
        if self._config.num_moe_experts and not rows:
            raise UserError(
                "observe found nothing to watch",
                where=f"{self._config.num_layers} layers, --num-experts {self._config.num_moe_experts}",
                why="looked for modules of the class megatron.core.transformer.moe.moe_layer.BaseMoELayer on all ranks",
                remedy="run with --moe-ext-observe-interval 0, or report the layer spec in use",
            )
        return rows

    def _begin(self, place: Topology) -> None:
        """Make the store, the probes and all that depends on the run's sizes."""
        labels = tuple(dict.fromkeys(self._sources))
        self._label_of = [labels.index(label) for label in self._sources]
        shape = Shape(
            rows=total_layers(self._config) if self._layers_anywhere else 0,
            experts=int(self._config.num_moe_experts or 0),
            micro_batches=self._options.micro_batches,
            sources=len(labels),
            probes=len(PROBES),
        )
        store = Store(shape, place)
        self._run = Run(place, store)
        self._run.graphed = bool(router_is_graphed(self._config))
        self._run.sampling = True
        self._probes = tuple(kind(self._run) for kind in PROBES if not kind.refusal(self._config, place))
        self._clock = StepClock(world=place.world)
        if self._sink is not None:
            self._publisher = Publisher(
                options=self._options,
                alarms=self._alarms,
                sink=self._sink,
                layers=self._layers_anywhere,
                facts=self._facts(place, labels),
                store=store,
            )

    def _facts(self, place: Topology, labels: tuple[str, ...]) -> Facts:
        config = self._config
        refused = [kind for kind in PROBES if kind.refusal(config, place)]
        return Facts(
            topk=int(config.moe_router_topk or 1),
            router_is_fp32=router_dtype_is_fp32(config),
            may_differ=config.moe_input_jitter_eps is not None or config.moe_expert_capacity_factor is not None,
            drops=config.moe_expert_capacity_factor is not None or bool(router_is_graphed(config)),
            lost=frozenset(metric for kind in refused for metric in kind.measures),
            sources=labels,
        )

    def _announce(self) -> None:
        assert self._run is not None
        layers = self._layers_anywhere
        what = f"{len(layers)} MoE layers" if layers else "a dense model: step metrics only"
        print(f"[moe] observe: {what}, every {self._options.interval} steps", flush=True)
        for kind in PROBES if layers else ():
            why = kind.refusal(self._config, self._run.place)
            if why:
                print(f"[moe] observe: not measured: {', '.join(kind.measures)}: {why}", flush=True)
        if self._sources and self._run.place.pp_size > 1:
            print("[moe] observe: not measured: source_information: middle pipeline stages see no labels", flush=True)

    # --- the sampled step ------------------------------------------------------------------------------------------

    def _reduce(self, iteration: int, run: Run) -> None:
        try:
            for probe in self._probes:
                probe.at_flush(self._layers)
            self._note_state(run)
            packed = run.store.packed()
        except Exception as error:
            # The other ranks are waiting in the all-reduce: take part with nothing rather than not at all.
            logger.warning("observe: step %d of rank %d is not measured: %r", iteration, run.place.rank, error)
            packed = torch.zeros_like(run.store.packed())
        run.place.all_reduce(packed)
        if self._publisher is None:
            return
        self._deliver(wait=True)
        on_host, arrived = packed, None
        if packed.is_cuda:
            if self._on_host is None:
                self._on_host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            on_host = self._on_host
            on_host.copy_(packed, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._pending = _Pending(iteration, on_host, arrived, self._tokens_per_step())
        if arrived is None:
            self._deliver(wait=True)

    def _note_state(self, run: Run) -> None:
        ints = run.store.ints
        ints["memory"][run.place.rank] = int(torch.cuda.max_memory_allocated())
        present = {type(probe): probe for probe in self._probes}
        off = [int(kind in present and present[kind].off) for kind in PROBES]
        if any(off):
            ints["failed"] += torch.tensor(off, device=ints["failed"].device)

    def _tokens_per_step(self) -> int:
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size

        return int(get_current_global_batch_size() or 0) * int(getattr(self._args, "seq_length", 0) or 0)

    def _deliver(self, *, wait: bool) -> None:
        pending = self._pending
        if pending is None or self._publisher is None or self._clock is None:
            return
        if pending.arrived is not None:
            if not wait and not pending.arrived.query():
                return
            pending.arrived.synchronize()
        self._pending = None
        packed: NDArray[np.float64] = pending.values.numpy()
        self._publisher.take(pending.step, packed, self._clock.values(pending.tokens_per_step))


def _device_of(chunks: Sequence[nn.Module]) -> torch.device:
    for chunk in chunks:
        for parameter in chunk.parameters():
            return parameter.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _config_of(chunks: Sequence[nn.Module]) -> Any:
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "config", None) is not None and hasattr(module.config, "num_moe_experts"):
                return module.config
    raise UserError(
        "observe found no Megatron model",
        where=f"{len(chunks)} model chunks",
        why="looked for a module with a TransformerConfig",
        remedy="run with --moe-ext-observe-interval 0",
    )
