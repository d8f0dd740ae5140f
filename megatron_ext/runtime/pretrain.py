"""The training entry point: one rank of Megatron's own `pretrain`, with our flags, checks and hooks around it."""

from __future__ import annotations

import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from megatron_ext.errors import UserError
from megatron_ext.runtime import adam, cpu, device, hooks, preset

# Subjects of upstream's pretrain_gpt.py that this entry point leaves to it.
_NOT_HERE = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "logits_load_dir": "--logits-load-dir",
    "per_dataset_sequences_path": "--per-dataset-sequences-path",
}


def train(flags: Sequence[str], *, asked_device: str) -> None:
    """Train one rank, as `torchrun` starts it, until Megatron returns.

    Args:
        flags: Megatron's flags and our `--moe-ext-*`, as given.
        asked_device: `auto`, `cuda` or `cpu`.

    Raises:
        UserError: Flags that cannot work here, with the remedy; before anything is written.
    """
    choice = _choose(asked_device)
    if choice.device == "cpu":
        cpu.install()
    name = preset.chosen(flags)
    added = device.flags_for(choice.device, flags) + preset.flags_for(name, choice.device, flags)
    variables = preset.set_environment(name, flags)
    sys.argv = ["megatron-moe train", *flags, *(word for flag in added for word in flag.words)]
    args = _parse(choice.device)
    if args.rank == 0:
        _announce(choice, [*added, *variables])
    if _watches_transport(choice.device, args):
        hooks.watch_transport(args)
    _pretrain(args)


def add_extra_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the `--moe-ext-*` flags of every room to Megatron's parser, which then complains as our own do."""
    from megatron_ext import data, dispatch, experts, observe, preflight, tracking, upcycle, usage

    usage.answer_for(parser, "megatron-moe train -- --help")

    for room in (tracking, observe, data, dispatch, experts, upcycle, preflight, preset, adam):
        room.add_arguments(parser)
    return parser


def _choose(asked: str) -> device.DeviceChoice:
    import torch

    try:
        gpus, problem = torch.cuda.device_count(), ""
        if asked == "cuda" and not gpus:
            torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        gpus, problem = 0, str(error)
    return device.choose_device(asked, gpus=gpus, probe_error=problem)


def _watches_transport(chosen: device.Device, args: Namespace) -> bool:
    # On a CPU there is no NCCL to watch, but what was asked for by name is not left out in silence.
    return chosen == "cuda" or args.moe_ext_transport not in ("auto", "off")


def _parse(chosen: device.Device) -> Namespace:
    from megatron.training.arguments import parse_and_validate_args, parse_args

    from megatron_ext import preflight
    from megatron_ext.runtime import checks

    raw = parse_args(add_extra_arguments)
    for name, flag in _NOT_HERE.items():
        if getattr(raw, name, None):
            raise UserError(
                "this entry point does not do this",
                where=flag,
                remedy="use upstream's pretrain_gpt.py with build/megatron on PYTHONPATH; the hooks work there too",
            )
    if chosen == "cpu":
        device.refuse_on_cpu(raw)
    else:
        device.refuse_without_te(raw)
    checks.check_before_start(raw)
    if _watches_transport(chosen, raw):
        preflight.refuse_environment(asked=raw.moe_ext_transport)
    try:
        return parse_and_validate_args(add_extra_arguments)
    except (AssertionError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            "Megatron refuses this combination of flags",
            where=f"{place.filename}:{place.lineno}",
            why=str(error) or f"it does not hold that: {place.line}",
            remedy="change the flag that this names; `megatron-moe train -- --help` lists all",
        ) from error


def _announce(choice: device.DeviceChoice, added: Sequence[device.AddedFlag]) -> None:
    print(f"[moe] device: {choice.device} ({choice.reason})", flush=True)
    for flag in added:
        print(f"[moe] added {' '.join(flag.words)}: {flag.reason}", flush=True)


def _pretrain(args: Namespace) -> None:
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron_ext import dispatch, experts, guard
    from megatron_ext.runtime import batch

    guard.check_imported()
    dispatch.configure(args)
    experts.configure(args)
    adam.configure(args)
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
            batch.build_datasets,
            ModelType.encoder_or_decoder,
            batch.forward_step,
            get_embedding_ranks=batch.embedding_ranks,
        )
    finally:
        hooks.close()
