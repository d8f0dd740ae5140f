"""The launch scripts without Slurm: the exact command, its flags known to this Megatron, missing variables named."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "first_run.sbatch dense": 1, "first_run.sbatch moe": 1, "two_node_ep16.sbatch": 1, "upcycle.sbatch": 1,
    "one_expert_parity.sbatch": 2, "balancers.sbatch": 5, "profile_step.sbatch moe": 1,
}  # fmt: skip
# Parses each command line of stdin with Megatron's own parser and ours; an unknown flag ends it.
PARSE = """
import shlex, sys
from argparse import ArgumentParser
from megatron_ext.runtime import cpu
cpu.install()
from megatron.training.arguments import add_megatron_arguments
from megatron_ext.runtime.pretrain import add_extra_arguments
parser = ArgumentParser(allow_abbrev=False)
add_extra_arguments(add_megatron_arguments(parser))
for line in sys.stdin:
    words = shlex.split(line)
    args = parser.parse_args(words[words.index("--") + 1:])
    print(args.num_layers, args.num_experts, args.exit_signal.name)
"""


def _environ(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MOE_"))}
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", **more}


def _run(words: str, **more: str) -> subprocess.CompletedProcess[str]:
    script, *rest = words.split()
    command = ["bash", str(REPO / "examples/moe" / script), *rest]
    return subprocess.run(command, env=_environ(**more), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("scale", ["full", "toy"])
def test_dry_runs_print_commands_that_this_megatron_knows(scale: str, tmp_path: Path) -> None:
    lines: list[str] = []
    for words, count in SCRIPTS.items():
        done = _run(f"{words} --dry-run", DATA_MANIFEST="/data/manifest.json", DENSE_CHECKPOINT="/dense",
                    SHARED_ROOT=str(tmp_path), MOE_SCALE=scale)  # fmt: skip
        assert done.returncode == 0, done.stderr
        commands = [line for line in done.stdout.splitlines() if "megatron-moe train" in line]
        assert len(commands) == count, done.stdout
        lines += commands
    # At full size a node whose GPUs torch cannot see must not train on its CPU.
    device = "--device cuda" if scale == "full" else "--device auto"
    assert all(device in line for line in lines)
    assert not list(tmp_path.iterdir())
    parsed = subprocess.run([sys.executable, "-W", "ignore", "-c", PARSE], input="\n".join(lines), text=True,
                            capture_output=True, check=False)  # fmt: skip
    assert parsed.returncode == 0, parsed.stderr[-2000:]
    answers = [line.split() for line in parsed.stdout.splitlines() if line.endswith("SIGUSR1")]
    assert len(answers) == len(lines)
    layers, experts = ("16", "64") if scale == "full" else ("2", "4")
    assert answers[0] == [layers, "None", "SIGUSR1"]
    assert answers[1] == [layers, experts, "SIGUSR1"]


def test_tokenize_and_preflight_print_their_commands(tmp_path: Path) -> None:
    done = _run("tokenize.sbatch --dry-run", INPUTS="web=/w code=/c", OUTPUT="/o", TOKENIZER_DIR="/t")
    assert shlex.split(done.stdout)[:2] == ["megatron-moe", "tokenize"]
    assert "--input web=/w --input code=/c" in done.stdout
    done = _run("preflight.sbatch --pairs --dry-run", RUN_DIR=str(tmp_path / "r"))
    assert [part in done.stdout for part in ("preflight node", "alltoall", "--pairs", "preflight judge")] == [True] * 4


@pytest.mark.parametrize(("words", "said"), [
    ("first_run.sbatch moe", "DATA_MANIFEST is not set"), ("first_run.sbatch", "dense or moe"),
    ("upcycle.sbatch", "DENSE_CHECKPOINT is not set"), ("tokenize.sbatch", "INPUTS is not set"),
    ("first_run_1gpu.sh", "MANIFEST is missing"), ("first_run_1gpu.sh /none.json", "/none.json cannot be read"),
    ("quickstart.sh --hlep", "no option --hlep"),
])  # fmt: skip
def test_what_is_missing_is_named_before_anything_starts(words: str, said: str, tmp_path: Path) -> None:
    done = _run(words, SHARED_ROOT=str(tmp_path))
    assert done.returncode == 64
    assert said in done.stderr
    assert "try:" in done.stderr
    assert not list(tmp_path.iterdir())


def test_quickstart_asks_for_its_disk_before_it_starts(tmp_path: Path) -> None:
    done = _run(f"quickstart.sh {tmp_path / 'out'}", MOE_STEPS="200000000")
    assert done.returncode == 64
    assert re.search(r"needs \d{9,} MB more and its disk has \d+", done.stderr)
    assert not list((tmp_path / "out").rglob("*.json"))


def test_unreadable_manifest_stops_before_training(tmp_path: Path) -> None:
    done = _run("first_run.sbatch moe", SHARED_ROOT=str(tmp_path), DATA_MANIFEST=str(tmp_path / "none.json"))
    assert done.returncode == 64
    assert "cannot be read" in done.stderr


def test_rented_node_gives_hf_a_job_that_it_takes() -> None:
    """`hf jobs run --dry-run` resolves the job without an account; submitting one is not to be had here."""
    volumes = {"DATA_VOLUME": "hf://datasets/me/tokens:/data", "RUNS_VOLUME": "hf://buckets/me/runs:/runs"}
    done = _run("rented_node.sh moe --dry-run", IMAGE="registry/me/moe", FLAVOR="h200x4", TIMEOUT="2h", **volumes)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[:3] == ["hf", "jobs", "run"]
    hf = [str(Path(sys.executable).with_name("hf")), *words[1:3], "--dry-run", *words[3:]]
    taken = subprocess.run(hf, env=_environ(HF_TOKEN="none", NO_COLOR="1"), capture_output=True, text=True, timeout=60,
                           check=False)  # fmt: skip
    assert taken.returncode == 0, taken.stderr
    for part in ("GPUS_PER_NODE=4", "RUN_DIR=/runs/moe", "DATA_MANIFEST=/data/manifest.json", "6600 - SECONDS",
                 "(dry run) Job not submitted"):  # fmt: skip
        assert part in taken.stdout


@pytest.mark.parametrize(("words", "environ", "said"), [
    ("rented_node.sh --dry-run", {}, "dense or moe"),
    ("rented_node.sh moe --dry-run", {}, "IMAGE is not set"),
    ("rented_node.sh moe --dry-run", {"IMAGE": "i", "DATA_VOLUME": "d", "RUNS_VOLUME": "r", "TIMEOUT": "20m"},
     "no time to train"),
])  # fmt: skip
def test_rented_node_names_what_is_missing(words: str, environ: dict[str, str], said: str) -> None:
    done = _run(words, **environ)
    assert done.returncode == 64
    assert said in done.stderr
    assert "try:" in done.stderr


@pytest.mark.parametrize(
    "script", sorted(path.name for path in REPO.glob("examples/moe/*.*") if path.name not in ("lib.sh", "recipe.sh"))
)
def test_help_is_the_scripts_head(script: str) -> None:
    done = _run(f"{script} --help")
    assert done.returncode == 0
    assert "Usage:" in done.stdout
    assert "SBATCH" not in done.stdout
