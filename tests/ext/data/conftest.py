"""A tiny corpus for this room's tests: forty short texts of two labels, tokenized once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.cli import main


def write_texts(root: Path, count: int = 20) -> list[str]:
    """Write `count` prose files and as many JSON lines of code; return the words for `--input`."""
    prose = root / "prose"
    prose.mkdir(parents=True)
    for number in range(count):
        (prose / f"{number:02d}.txt").write_text(f"Letter {number}: the experts met at noon, née Ölund. " * 8)
    lines = [
        f'{{"text": "def expert_{number}(token):\\n    return token * {number}\\n"}}'
        for number in range(count)
    ]
    (root / "code.jsonl").write_text("\n".join(lines) + "\n")
    return ["--input", f"prose={prose}", "--input", f"code={root / 'code.jsonl'}"]


def tokenize(inputs: list[str], output: Path, *more: str) -> int:
    """Run the verb with a trained tokenizer of 300 entries."""
    return main(
        [
            "tokenize",
            *inputs,
            "--output",
            str(output),
            "--train-tokenizer",
            "--vocab-size",
            "300",
            "--held-out",
            "0.3",
            *more,
        ]
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished corpus's directory. Tests that change it copy it first."""
    root = tmp_path_factory.mktemp("corpus")
    assert tokenize(write_texts(root / "in"), root / "out") == 0
    return root / "out"
