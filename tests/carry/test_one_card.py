"""Blanking the GPU code of other cards: a made-up library with two containers among other bytes."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "carry" / "one_card.py"
spec = importlib.util.spec_from_file_location("one_card", SCRIPT)
assert spec is not None
assert spec.loader is not None
one_card = importlib.util.module_from_spec(spec)
spec.loader.exec_module(one_card)


def _entry(kind: int, card: int, code: bytes) -> bytes:
    header = bytearray(64)
    struct.pack_into("<H2xIQ", header, 0, kind, len(header), len(code))
    struct.pack_into("<I", header, 28, card)
    return bytes(header) + code


def _container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return bytes(one_card.MAGIC) + struct.pack("<HHQ", 1, 16, len(body)) + body


# The magic by chance, with no container behind it, comes first.
LIBRARY = b"".join([
    b"\x7fELF text ", one_card.MAGIC + b"\xff" * 20, b"between",
    _container(_entry(2, 80, b"a" * 40), _entry(2, 90, b"b" * 24), _entry(1, 120, b"c" * 8)),
    b"between", _container(_entry(2, 100, b"d" * 16), _entry(2, 90, b"e" * 32)), b"end", one_card.MAGIC,
])  # fmt: skip


def test_only_the_code_of_other_cards_is_blanked() -> None:
    data = bytearray(LIBRARY)
    found = one_card.blank_other_cards(data, 90)
    assert found == {80: 40, 90: 56, 120: 8, 100: 16}
    expected = LIBRARY
    for code in (b"a" * 40, b"c" * 8, b"d" * 16):
        assert code in expected
        expected = expected.replace(code, bytes(len(code)))
    assert bytes(data) == expected


@pytest.mark.parametrize("size", [0, 3, 17, len(LIBRARY) // 2])
def test_a_cut_file_is_no_error(size: int) -> None:
    data = bytearray(LIBRARY[:size])
    one_card.blank_other_cards(data, 90)
    assert len(data) == size


def test_a_library_without_the_card_is_left_alone(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(LIBRARY)
    done = subprocess.run([sys.executable, str(SCRIPT), "--sm", "70", str(library)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "no code for sm_70" in done.stderr
    assert library.read_bytes() == LIBRARY
