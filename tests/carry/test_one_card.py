"""Blanking the GPU code of other cards: made-up libraries, two containers or zstd frames among other bytes."""

from __future__ import annotations

import importlib.util
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

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


def _cubin(flags: int, *, system: int = 0x41, interface: int = 8, machine: int = 190) -> bytes:
    header = bytearray(64)
    header[:9] = b"\x7fELF\2\1\1" + bytes((system, interface))
    struct.pack_into("<H", header, 18, machine)
    struct.pack_into("<I", header, 48, flags)
    return bytes(header) + flags.to_bytes(4, "little") * 50_000


def _frame(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


KEPT = (_frame(_cubin(90 << 8 | 0x2)), _frame(_cubin(0x5A055A, system=0x33, interface=7)), _frame(b"\x7fELF short"),
        _frame(_cubin(80, machine=62)), _frame(b"no machine code" * 9))  # fmt: skip
BLANKED = (_frame(_cubin(100 << 8 | 0x2)), _frame(_cubin(0x500550, system=0x33, interface=7)),
           _frame(_cubin(0x4B054B, interface=7)))  # fmt: skip
CUT = _frame(_cubin(80 << 8))[:-1]


def _framed(blanked: tuple[bytes, ...]) -> bytes:
    parts = [b"text", one_card.FRAME + b"\xff" * 20]
    for number, kept in enumerate(KEPT):
        parts += [kept, b"between", *blanked[number : number + 1]]
    return b"".join((*parts, CUT))


def test_only_the_frames_of_other_cards_are_blanked() -> None:
    library = _framed(BLANKED)
    data = bytearray(library)
    found = one_card.blank_other_frames(data, 90)
    assert found == {90: len(KEPT[0] + KEPT[1]), 100: len(BLANKED[0]), 80: len(BLANKED[1]), 75: len(BLANKED[2])}
    assert bytes(data) == _framed(tuple(bytes(len(frame)) for frame in BLANKED))


def test_a_frame_of_many_pieces_is_blanked_to_its_end() -> None:
    made = random.Random(1).randbytes(400_000)
    frame = _frame(_cubin(80 << 8) + made)
    assert len(frame) > 6 * (1 << 16)
    data = bytearray(b"text" + frame + frame + KEPT[0])
    assert one_card.blank_other_frames(data, 90) == {80: 2 * len(frame), 90: len(KEPT[0])}
    assert bytes(data) == b"text" + bytes(2 * len(frame)) + KEPT[0]


@pytest.mark.parametrize("package", [True, False])
def test_a_library_of_frames_with_and_without_the_package(tmp_path: Path, package: bool) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(LIBRARY + KEPT[0] + BLANKED[0])
    if not package:
        (tmp_path / "zstandard.py").write_text("raise ImportError")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(SCRIPT), str(library)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert ("no package zstandard" in done.stderr) == (not package)
    written = library.read_bytes()[len(LIBRARY) :]
    assert written == KEPT[0] + (bytes(len(BLANKED[0])) if package else BLANKED[0])
