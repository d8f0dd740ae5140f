"""Blank the GPU code for all cards but one in a CUDA library, so that it compresses to a fraction.

    python benchmarks/carry/one_card.py LIBRARY.so [...] [--sm 90]

Transformer Engine's library goes from 277 to 30 MB in xz that way, cuBLAS 13.6.2 from 572 to 119. The file keeps its
size and its symbols; on another card the blanked code fails to load. Done in place.

A fat binary (`.nv_fatbin`) is a row of containers: 16 bytes (magic 0xBA55ED50, version, header size, length of what
follows), then entries, each with a header (kind 1: PTX, 2: machine code; header size at byte 4, length at 8, the card's
number at 28) and its code. cuBLASLt keeps more kernels beside them, each machine code of one card in a zstd frame; the
card is in the flags of its ELF header. Neither layout is documented; what does not look like it is left alone.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

try:
    import zstandard
except ImportError:  # it is in the lock's development set only
    zstandard = None

MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = 16  # bytes of its header
_CARD_AT = 28  # in an entry's header
FRAME = struct.pack("<I", 0xFD2FB528)  # a zstd frame (RFC 8878, 3.1.1)
_CUDA = 190  # ELF's number of the machine
_ELF = 52  # bytes of an ELF header up to its flags' end
_PIECE = 1 << 16  # compressed bytes decompressed at a time


def blank_other_cards(data: bytearray, card: int) -> Counter[int]:
    """Zero the code of every other card in `data`, in place; return the bytes of code found for each card.

    Args:
        data: A whole library.
        card: The compute capability to keep, 90 for Hopper.
    """
    found: Counter[int] = Counter()
    at = data.find(MAGIC)
    while at >= 0:
        end = _end(data, at)
        if end is None:
            at = data.find(MAGIC, at + len(MAGIC))
            continue
        entry = at + _CONTAINER
        while entry + _CARD_AT + 4 <= end:
            kind, header, length = struct.unpack_from("<H2xIQ", data, entry)
            (of,) = struct.unpack_from("<I", data, entry + _CARD_AT)
            code = entry + header
            if kind not in (1, 2) or not _CARD_AT < header <= 4096 or code + length > end:
                break
            found[of] += length
            if of != card:
                data[code : code + length] = bytes(length)
            entry = code + length
        at = data.find(MAGIC, end)
    return found


def _end(data: bytearray, at: int) -> int | None:
    """Return where the container at `at` ends; None where it is none."""
    if at + _CONTAINER > len(data):
        return None
    version, header, length = struct.unpack_from("<HHQ", data, at + 4)
    end = at + _CONTAINER + length
    return end if (version, header) == (1, _CONTAINER) and end <= len(data) else None


def blank_other_frames(data: bytearray, card: int) -> Counter[int]:
    """Zero every zstd frame that is another card's machine code, in place; return the bytes of frames of each card.

    Args:
        data: A whole library.
        card: The compute capability to keep, 90 for Hopper.

    Raises:
        ModuleNotFoundError: The package `zstandard` is missing.
    """
    if zstandard is None:
        raise ModuleNotFoundError("zstandard")
    found: Counter[int] = Counter()
    for start, end, head in _frames(data):
        of = _card_of(head)
        if of is None:
            continue
        found[of] += end - start
        if of != card:
            data[start:end] = bytes(end - start)
    return found


def _frames(data: bytearray) -> Iterator[tuple[int, int, bytes]]:
    """Where each whole frame starts and ends, and the first bytes of its content."""
    at = data.find(FRAME)
    while at >= 0:
        reader, end, head = zstandard.ZstdDecompressor().decompressobj(), at, b""
        try:
            while not reader.eof and end < len(data):
                piece = data[end : end + _PIECE]
                content = reader.decompress(piece)
                head = head or content[:_ELF]
                end += len(piece)
        except zstandard.ZstdError:  # four bytes by chance
            pass
        if reader.eof:
            end -= len(reader.unused_data)
            yield at, end, head
        at = data.find(FRAME, end if reader.eof else at + len(FRAME))


def _card_of(head: bytes) -> int | None:
    """Return the card of machine code by its ELF header; None for anything else."""
    if len(head) < _ELF or not head.startswith(b"\x7fELF") or struct.unpack_from("<H", head, 18) != (_CUDA,):
        return None
    (flags,) = struct.unpack_from("<I", head, 48)
    # Older code says its system is 0x33 or the version of its interface 7, and has the card in the lowest byte.
    return flags & 0xFF if head[7] == 0x33 or head[8] == 7 else flags >> 8 & 0xFFFF


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--sm", type=int, default=90, help="the card to keep (default: %(default)s)")
    args = parser.parse_args()
    for path in args.libraries:
        data = bytearray(path.read_bytes())
        found = blank_other_cards(data, args.sm)
        if zstandard is not None:
            found += blank_other_frames(data, args.sm)
        elif FRAME in data:
            print(f"{path.name}: zstd frames are left as they are: no package zstandard", file=sys.stderr)
        if not found[args.sm]:
            print(f"{path}: no code for sm_{args.sm}; left as it is", file=sys.stderr)
            return 1
        path.write_bytes(data)
        kept, all_of_it = found[args.sm] / 1e6, sum(found.values()) / 1e6
        print(f"{path.name}: {kept:.0f} of {all_of_it:.0f} MB of GPU code kept (sm_{args.sm})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
