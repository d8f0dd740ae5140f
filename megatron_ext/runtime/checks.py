"""What can be known to be wrong before Megatron starts: said once, with the remedy, and before anything is written."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path

from megatron_ext.errors import UserError
from megatron_ext.upcycle.source import TRACKER


def check_before_start(args: Namespace) -> None:
    """Check flags against each other and against the files they name.

    Args:
        args: Megatron's parsed arguments, before its own validation.

    Raises:
        UserError: The first fault met.
    """
    _check_experts(args)
    _check_dataset_helper()
    check_profiling(args)
    if args.moe_use_upcycling:
        _check_upcycling_folders(args)
    if args.moe_ext_manifest:
        from megatron_ext import data

        data.verify_for_training(data.load_manifest(Path(args.moe_ext_manifest)), args)
    if args.rank == 0:
        _check_disk(args)


def _check_disk(args: Namespace) -> None:
    from megatron_ext.preflight.storage import nearest_folder, write_probe

    for flag, folder in (("--save", args.save), ("--moe-ext-run-dir", args.moe_ext_run_dir)):
        if folder is None:
            continue
        try:
            write_probe(nearest_folder(Path(folder)))
        except OSError as error:
            raise UserError(
                "nothing can be written where the run would save",
                where=f"{flag} {folder}",
                why=error.strerror or str(error),
                remedy="free space or name another folder; `megatron-moe preflight node --need-gb N` checks for more",
            ) from error


def _check_experts(args: Namespace) -> None:
    if not args.num_experts:
        return
    expert_parallel = args.expert_model_parallel_size
    if args.num_experts % expert_parallel:
        raise UserError(
            "the experts cannot be divided evenly over the expert-parallel ranks",
            where=f"--num-experts {args.num_experts}, --expert-model-parallel-size {expert_parallel}",
            why=f"{args.num_experts} is not a multiple of {expert_parallel}",
            remedy=f"pass --expert-model-parallel-size {_largest_divisor(args.num_experts, expert_parallel)}, or a "
            f"--num-experts that is a multiple of {expert_parallel}",
        )
    if args.moe_router_topk > args.num_experts:
        raise UserError(
            "a token cannot choose more experts than there are",
            where=f"--moe-router-topk {args.moe_router_topk}, --num-experts {args.num_experts}",
            remedy=f"pass --moe-router-topk {args.num_experts} or less",
        )


def check_profiling(args: Namespace) -> None:
    """Check that the profiler that was asked for would write its traces.

    Args:
        args: Megatron's parsed arguments, before its own validation.

    Raises:
        UserError: It would write none, or into a folder called "None", or crash the run at its end.
    """
    if args.use_pytorch_profiler and not args.profile:
        raise UserError("the profiler is chosen and not switched on", where="--use-pytorch-profiler",
                        why="Megatron profiles only with --profile", remedy="pass --profile too")  # fmt: skip
    if not (args.profile and args.use_pytorch_profiler):
        return
    first, end = args.profile_step_start, args.profile_step_end
    steps = f"--profile-step-start {first}, --profile-step-end {end}"
    if end <= first:
        raise UserError("no step would be profiled", where=steps, why="the end is the first step that is not profiled",
                        remedy=f"pass --profile-step-end {first + 2} for two steps")  # fmt: skip
    if args.train_iters is not None and end > args.train_iters:
        raise UserError(
            "the run would end while it is profiled",
            where=f"{steps}, --train-iters {args.train_iters}",
            why="Megatron stops the profiler, which writes the trace, only once step --profile-step-end is done",
            remedy=f"pass --train-iters {end} or more, or profile earlier steps",
        )
    if args.tensorboard_dir is None:
        folder = args.moe_ext_run_dir or "RUN_DIR"
        raise UserError(
            "there is no place for the profiler's traces",
            where="--profile --use-pytorch-profiler without --tensorboard-dir",
            why="Megatron writes them to torch_profile beside that folder",
            remedy=f"pass --tensorboard-dir {folder}/tensorboard",
        )


def _largest_divisor(number: int, at_most: int) -> int:
    return max(size for size in range(1, at_most + 1) if number % size == 0)


def _check_dataset_helper() -> None:
    import megatron.core.datasets as datasets

    folder = Path(next(iter(datasets.__path__)))
    if not list(folder.glob("helpers_cpp*.so")):
        raise UserError(
            "Megatron's dataset helper is not compiled",
            where=str(folder),
            why="it is built once at set-up, never at the start of training",
            remedy="run `make setup` (needs a C++ compiler)",
        )


def _check_upcycling_folders(args: Namespace) -> None:
    if args.save is None or args.load is None:
        raise UserError(
            "upcycling reads a dense checkpoint and writes an MoE one",
            where=f"--load {args.load}, --save {args.save}",
            remedy="pass --load DENSE_CHECKPOINT and --save NEW_FOLDER",
        )
    if not (Path(args.load) / TRACKER).is_file():
        raise UserError(
            "there is no checkpoint to upcycle",
            where=f"--load {args.load}",
            why=f"{os.path.join(args.load, TRACKER)} does not exist; Megatron would upcycle random weights",
            remedy="give the folder that the dense run saved to (its --save)",
        )
    if (Path(args.save) / TRACKER).is_file():
        # A requeued job starts with the same flags; the patched Megatron goes on from --save then.
        from megatron_ext.upcycle import in_training

        in_training.check_same_run(args)
