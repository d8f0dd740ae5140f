"""Options of the run directory and of Trackio, each with a sentence and a default."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_ext.errors import UserError

RUN_DIR_VARIABLE = "MOE_EXT_RUN_DIR"
DEFAULT_PROJECT = "megatron-moe"


@dataclass(frozen=True)
class TrackingOptions:
    """What the flags (or the environment, for stock entry scripts) ask for."""

    run_dir: Path
    """The directory of this training run; a resumed job names the same one."""
    run_name: str
    """Name in Trackio and in reports. Default: the directory's name."""
    project: str = DEFAULT_PROJECT
    """Trackio project; runs to be compared share one."""
    group: str = ""
    """Trackio group inside the project, for example `dense` or `moe`. Default: none."""
    trackio_dir: Path = Path()
    """Where Trackio keeps its database. Default: `trackio` beside the run directory."""
    trackio: bool = True
    """Whether to feed Trackio at all. The run directory is written either way."""
    trackio_keys: int = 400
    """Most keys a step in Trackio; per-layer keys go first when there are more. metrics.jsonl keeps all."""
    trackio_images: int = 40
    """Most heat map images a run in Trackio."""

    def to_plain(self) -> dict[str, object]:
        """Return the options as JSON-ready values, for the process that feeds Trackio."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @classmethod
    def from_plain(cls, plain: dict[str, object]) -> TrackingOptions:
        """Undo `to_plain`."""
        values = dict(plain)
        for name in ("run_dir", "trackio_dir"):
            values[name] = Path(str(values[name]))
        return cls(**values)  # type: ignore[arg-type]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the `--moe-ext-` flags of this room."""
    group = parser.add_argument_group("megatron-moe tracking")
    group.add_argument(
        "--moe-ext-run-dir",
        metavar="DIR",
        default=None,
        help="directory of this run: metrics, routing, alarms; a resumed job names the same one "
        f"(default: ${RUN_DIR_VARIABLE}, else nothing is recorded)",
    )
    group.add_argument(
        "--moe-ext-run-name",
        metavar="NAME",
        default=None,
        help="name in Trackio and reports (default: the directory's name)",
    )
    group.add_argument(
        "--moe-ext-project",
        metavar="NAME",
        default=DEFAULT_PROJECT,
        help="Trackio project; runs to compare share one (default: %(default)s)",
    )
    group.add_argument(
        "--moe-ext-group",
        metavar="NAME",
        default="",
        help="Trackio group, for example dense or moe (default: none)",
    )
    group.add_argument(
        "--moe-ext-trackio-dir",
        metavar="DIR",
        default=None,
        help="where Trackio keeps its database (default: `trackio` beside the run directory)",
    )
    group.add_argument(
        "--moe-ext-no-trackio",
        action="store_true",
        help="write the run directory only (default: Trackio is fed too)",
    )
    group.add_argument(
        "--moe-ext-trackio-keys",
        metavar="N",
        type=int,
        default=TrackingOptions.trackio_keys,
        help="most keys a step in Trackio; per-layer keys go first (default: %(default)s)",
    )
    group.add_argument(
        "--moe-ext-trackio-images",
        metavar="N",
        type=int,
        default=TrackingOptions.trackio_images,
        help="most heat map images a run in Trackio (default: %(default)s)",
    )


def from_args(args: argparse.Namespace) -> TrackingOptions | None:
    """Return the options, or None where neither flag nor environment names a run directory.

    Args:
        args: Megatron's arguments; a stock entry script's have none of our flags.

    Raises:
        UserError: A value is out of range or the run directory cannot be one.
    """
    named = getattr(args, "moe_ext_run_dir", None) or os.environ.get(RUN_DIR_VARIABLE)
    if not named:
        return None
    run_dir = Path(named).expanduser().absolute()
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(
            "the run directory is a file",
            where=f"--moe-ext-run-dir {run_dir}",
            remedy="name a directory, or move the file away",
            exit_code=64,
        )
    keys = int(getattr(args, "moe_ext_trackio_keys", TrackingOptions.trackio_keys))
    images = int(getattr(args, "moe_ext_trackio_images", TrackingOptions.trackio_images))
    if keys < 1 or images < 0:
        raise UserError(
            "a limit for Trackio is out of range",
            where=f"--moe-ext-trackio-keys {keys}, --moe-ext-trackio-images {images}",
            remedy="use at least 1 key and 0 images",
            exit_code=64,
        )
    trackio_dir = getattr(args, "moe_ext_trackio_dir", None)
    return TrackingOptions(
        run_dir=run_dir,
        run_name=getattr(args, "moe_ext_run_name", None) or run_dir.name,
        project=getattr(args, "moe_ext_project", None) or DEFAULT_PROJECT,
        group=getattr(args, "moe_ext_group", None) or "",
        trackio_dir=Path(trackio_dir).expanduser().absolute() if trackio_dir else run_dir.parent / "trackio",
        trackio=not getattr(args, "moe_ext_no_trackio", False),
        trackio_keys=keys,
        trackio_images=images,
    )
