"""The message of a patch: author, date, subject, body, trailers; as mail header text and back, unchanged."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from email.header import decode_header
from email.utils import formatdate, parsedate_to_datetime

from tools.mpatch.errors import MessageWrong, PatchMalformed

# Yocto's words; `Submitted`, `Backport` and `Denied` want a reference behind them.
UPSTREAM_STATUS = ("Pending", "Submitted", "Backport", "Denied", "Inactive-Upstream", "Inappropriate")
TRAILERS = ("Upstream-Status", "Reason", "Removal-Plan", "Scope", "Depends-On", "Proof", "Signed-off-by")
# May follow: the text that the Proof's failure must show.
OPTIONAL_TRAILERS = ("Proof-Fails-With", "Upstream-PR", "Replaces")

MAGIC = "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001"
MIME = ("MIME-Version: 1.0", "Content-Type: text/plain; charset=UTF-8", "Content-Transfer-Encoding: 8bit")
# Lines that `git am` and `patch` take for the start of a diff, and mailbox readers for the next mail.
CUTS = re.compile(r"^(---|diff |Index: |From |>From |\*\*\* )")
TRAILER = re.compile(r"^([A-Z][A-Za-z-]*): (.*)$")


@dataclass(frozen=True)
class Message:
    """What a patch says about itself. `date` is RFC 2822 text; `trailers` keep their order."""

    author: str
    email: str
    date: str
    subject: str
    body: str
    trailers: tuple[tuple[str, str], ...]

    def trailer(self, key: str) -> str:
        """Return the value of a trailer, empty when it is not there."""
        return next((value for name, value in self.trailers if name == key), "")

    def depends_on(self) -> tuple[str, ...]:
        """Return the slugs that this patch needs.

        >>> message("s\\n\\nDepends-On: a, b/c\\n").depends_on()
        ('a', 'b/c')
        >>> message("s\\n\\nDepends-On: none\\n").depends_on()
        ()
        """
        return tuple(word for word in re.split(r"[,\s]+", self.trailer("Depends-On")) if word and word != "none")

    def text(self) -> str:
        """Return subject, body and trailers as a commit message has them."""
        trailers = "\n".join(f"{key}: {value}" for key, value in self.trailers)
        return "\n\n".join(part for part in (self.subject, self.body, trailers) if part) + "\n"


def message(text: str, *, author: str = "mpatch", email: str = "mpatch@localhost", date: str = "") -> Message:
    """Read a commit message: subject, body, and the last paragraph as trailers when all of it are trailers.

    Raises:
        MessageWrong: no subject, a subject of several lines, or a line that would cut the patch in two.

    >>> message("Fix it\\n\\nBecause.\\n\\nScope: sdist\\nProof: a\\n b\\n").trailers
    (('Scope', 'sdist'), ('Proof', 'a\\n b'))
    """
    lines = [line.rstrip() for line in text.strip().split("\n")]
    if not lines[0]:
        raise MessageWrong("the message is empty", remedy="write a subject, an empty line, why, and the trailers")
    if len(lines) > 1 and lines[1]:
        raise MessageWrong(
            "the subject has more than one line",
            where="line 2 of the message",
            why=repr(lines[1]),
            remedy="leave the second line empty",
        )
    for number, line in enumerate(lines, 1):
        if CUTS.match(line):
            raise MessageWrong(
                "this line would cut the message when the patch is read back",
                where=f"line {number} of the message",
                why=repr(line),
                remedy="indent it by a blank, or word it otherwise",
            )
    paragraphs = re.split(r"\n{2,}", "\n".join(lines[2:])) if len(lines) > 2 else []
    trailers = _trailers(paragraphs[-1]) if paragraphs else ()
    body = "\n\n".join(paragraphs[:-1] if trailers else paragraphs)
    return Message(author, email, date or formatdate().replace("-0000", "+0000"), lines[0], body, trailers)


def _trailers(paragraph: str) -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for line in paragraph.split("\n"):
        match = TRAILER.match(line)
        if match:
            found.append((match[1], match[2]))
        elif line.startswith(" ") and found:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line}")
        else:
            return ()
    return tuple(found)


def render(said: Message) -> bytes:
    """Return the mail header and text, as `git format-patch --zero-commit -N --no-signature --no-stat` writes it."""
    text = said.text()
    subject, _, rest = text.partition("\n")
    lines = [
        MAGIC,
        f"From: {_encoded(said.author)} <{said.email}>",
        f"Date: {said.date}",
        f"Subject: [PATCH] {_encoded(subject)}",
    ]
    if not rest.isascii():
        lines += MIME
    return ("\n".join(lines) + "\n" + rest.rstrip("\n") + "\n\n").encode()


def parse(head: bytes, name: str) -> Message:
    """Read what `render` or `git format-patch` wrote.

    Raises:
        PatchMalformed: a header is missing or the text is not UTF-8.
    """
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        raise PatchMalformed(
            "the message is not UTF-8", where=name, why=str(error), remedy="save it as UTF-8"
        ) from None
    header, _, rest = text.partition("\n\n")
    if not header.startswith("From "):
        raise PatchMalformed(
            "not a patch made by git format-patch",
            where=f"{name}:1",
            why=repr(header[:60]),
            remedy="make it with: mpatch new, mpatch refresh",
        )
    fields: dict[str, str] = {}
    for line in re.sub(r"\n[ \t]+", " ", header).split("\n")[1:]:
        key, _, value = line.partition(": ")
        fields[key] = value
    missing = [key for key in ("From", "Date", "Subject") if not fields.get(key)]
    if missing:
        raise PatchMalformed(
            f"the header lacks {', '.join(missing)}", where=name, remedy="make it with: mpatch new, mpatch refresh"
        )
    sender = re.fullmatch(r"(.*?) ?<([^<>]*)>", fields["From"])
    if sender is None:
        raise PatchMalformed(
            "the author has no address",
            where=name,
            why=repr(fields["From"]),
            remedy="write From: Name <address>",
        )
    try:
        parsedate_to_datetime(fields["Date"])
    except ValueError:
        raise PatchMalformed(
            "the date cannot be read",
            where=name,
            why=repr(fields["Date"]),
            remedy="write it as RFC 2822 says",
        ) from None
    subject = re.sub(r"^\[PATCH[^\]]*\] ?", "", _decoded(fields["Subject"]))
    said = message(f"{subject}\n\n{rest}", author=_decoded(sender[1]), email=sender[2], date=fields["Date"])
    return replace(said, subject=subject)


def _encoded(text: str) -> str:
    """Encode header text as git does when it is not ASCII.

    >>> _encoded("Jörg x")
    '=?UTF-8?q?J=C3=B6rg=20x?='
    """
    if text.isascii():
        return text
    safe = "".join(
        chr(byte)
        if (byte < 128 and chr(byte).isalnum()) or (chr(byte) in "-.,:/!*+" and byte < 128)
        else f"={byte:02X}"
        for byte in text.encode()
    )
    return f"=?UTF-8?q?{safe}?="


def _decoded(text: str) -> str:
    return "".join(
        part.decode(charset or "ascii") if isinstance(part, bytes) else part for part, charset in decode_header(text)
    )
