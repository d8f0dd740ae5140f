"""The options of the monitor and of its alarms: one field, one flag, one sentence, checked at start.

`ObserveOptions` becomes `--moe-ext-observe-*`, `AlarmOptions` becomes `--moe-ext-alarm-*`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from megatron_ext.errors import UserError


def _option(default: Any, sentence: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": sentence, "choices": choices})


@dataclass(frozen=True)
class ObserveOptions:
    """What is measured and how much of it is kept."""

    interval: int = _option(10, "Measure every this many steps; counts are kept on every step. 0: off.")
    window: int = _option(20, "Steps without a token after which an expert counts as dead.")
    micro_batches: int = _option(
        8, "Micro-batches of a sampled step whose load is compared between ranks (the first ones)."
    )
    layers: str = _option(
        "auto",
        "Per-layer values that go to the tracker: extremes (largest, smallest and alarmed layers), all, or auto "
        "(all up to 8 MoE layers).",
        ("auto", "extremes", "all"),
    )
    routing_bytes: int = _option(
        32 * 2**20, "Bytes that routing.jsonl may grow to, about; frames get rarer as the run gets longer."
    )
    sources: str = _option(
        "", "Labels of the blend's data sets, in order, with commas: prose,code. Empty: those of --moe-ext-manifest."
    )


@dataclass(frozen=True)
class AlarmOptions:
    """The thresholds. Steps are training steps; shares are from 0 to 1."""

    collapse_limit: float = _option(0.5, "Share of its limit E/k - 1 that max_vio may reach.")
    collapse_steps: int = _option(20, "Steps that max_vio must stay over it, not falling.")
    dead_norm: float = _option(0.05, "expert_norm_min_over_median below which an expert with tokens is dead.")
    rogue_norm: float = _option(10.0, "expert_norm_max_over_median above which a growing expert is rogue.")
    rogue_growth: float = _option(2.0, "Growth of that ratio over 100 steps that makes it rogue.")
    flat_ratio: float = _option(1.05, "max1_over_max2 under which a gate is flat.")
    sharp_weight: float = _option(0.95, "top_weight over which a gate is sharp.")
    drift_growth: float = _option(1.25, "Growth of z_rms over 100 steps that is a drift, for a bf16 router.")
    drift_flips: float = _option(0.01, "flip_rate that is a drift, whatever z_rms does.")
    loss_margin: float = _option(
        0.1, "How far lm_loss may stand above its lowest value so far, and not less than 10 times its own noise."
    )
    rank_vio: float = _option(0.5, "rank_max_vio over which a rank is overloaded.")
    rank_steps: int = _option(20, "Steps that it must stay over it.")
    slow_ratio: float = _option(0.85, "Throughput over the forced-even control's below which a step is slow.")
    control_tokens_per_s: float = _option(
        0.0, "Tokens a second of the same run with --moe-router-force-load-balancing. 0: no slow_step alarm."
    )
    blind_margin: float = _option(0.02, "Distance of the load-balancing loss from 1 that reads as even.")
    blind_vio: float = _option(1.0, "max_vio above which an even-reading loss is blind.")


_GROUPS = {"observe": ObserveOptions, "alarm": AlarmOptions}
_Options = TypeVar("_Options", ObserveOptions, AlarmOptions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--moe-ext-observe-*` and `--moe-ext-alarm-*` to a parser (Megatron's or ours)."""
    for prefix, options in _GROUPS.items():
        group = parser.add_argument_group(f"moe-ext {prefix}", options.__doc__)
        for item in fields(options):
            group.add_argument(
                f"--moe-ext-{prefix}-{item.name.replace('_', '-')}",
                type=type(item.default),
                default=item.default,
                choices=item.metadata["choices"] or None,
                help=f"{item.metadata['help']} (default: {item.default!r})".replace("%", "%%"),
            )


def options_from(args: argparse.Namespace) -> tuple[ObserveOptions, AlarmOptions]:
    """Return both, checked. A namespace without our flags (a stock entry script) means the defaults.

    Raises:
        UserError: A value out of range, by flag.
    """
    observe, alarm = _read(ObserveOptions, "observe", args), _read(AlarmOptions, "alarm", args)
    _at_least("observe", observe, interval=0, window=1, micro_batches=1, routing_bytes=0)
    _at_least("alarm", alarm, **dict.fromkeys((item.name for item in fields(alarm)), 0))
    return observe, alarm


def _read(kind: type[_Options], prefix: str, args: argparse.Namespace) -> _Options:
    names = [item.name for item in fields(kind)]
    found = {name: getattr(args, f"moe_ext_{prefix}_{name}", None) for name in names}
    return kind(**{name: value for name, value in found.items() if value is not None})


def _at_least(prefix: str, options: ObserveOptions | AlarmOptions, **least: float) -> None:
    for name, bound in least.items():
        value = getattr(options, name)
        if value < bound:
            flag = f"--moe-ext-{prefix}-{name.replace('_', '-')}"
            raise UserError(
                f"{flag} is out of range", where=f"{flag} {value}", remedy=f"give at least {bound}", exit_code=64
            )
