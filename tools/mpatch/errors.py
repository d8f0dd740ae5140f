"""Every way that mpatch refuses: one class a cause, each with what, where, why and the one command to run next."""

from __future__ import annotations

EXIT_GOOD = 0
EXIT_WRONG = 1
EXIT_UNCHECKED = 2
EXIT_USAGE = 64


class MpatchError(Exception):
    """An expected refusal.

    Args:
        what: One sentence, what went wrong.
        where: File, line and enclosing def it is about.
        why: Why we think so: expected and actual values.
        remedy: The one command to run next, or the one thing to do.
    """

    exit_code = EXIT_WRONG

    def __init__(self, what: str, *, where: str = "", why: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.why = why
        self.remedy = remedy
        super().__init__(self.text())

    def text(self) -> str:
        """Return the message as printed.

        >>> print(SeriesWrong("no such patch", where="patches/series:3", remedy="mpatch list").text())
        error: no such patch [SeriesWrong]
        where: patches/series:3
        try:   mpatch list
        """
        parts = [("where", self.where), ("why", self.why), ("try", self.remedy)]
        head = f"error: {self.what} [{type(self).__name__}]"
        return "\n".join([head, *(f"{label + ':':<7}{_indent(part)}" for label, part in parts if part)])

    def record(self) -> dict[str, object]:
        """Return the error as `--json` prints it."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "remedy": self.remedy,
            "exit_code": self.exit_code,
        }


def _indent(text: str) -> str:
    return text.replace("\n", "\n       ")


class UsageError(MpatchError):
    """The command line asks for something that does not exist."""

    exit_code = EXIT_USAGE


# --- could not check: nothing is known to be wrong -------------------------------------------------------------------


class CouldNotCheck(MpatchError):
    """Base of all refusals that say nothing about the patches."""

    exit_code = EXIT_UNCHECKED


class PinsUnreadable(CouldNotCheck):
    """upstream.toml is missing, malformed, or lacks a field."""


class BaseMissing(CouldNotCheck):
    """The named base is not in upstream.toml, or its source cannot be had here."""


class IndexUnreachable(CouldNotCheck):
    """The package index does not answer, or none is configured."""


class FileNotOnIndex(CouldNotCheck):
    """The index answers, but does not list the pinned file."""


class GitFailed(CouldNotCheck):
    """git could not do what it was asked; its own words are quoted, never interpreted."""


class GitTooOld(CouldNotCheck):
    """This git lacks a plumbing command that the verb needs."""


class NothingChecked(CouldNotCheck):
    """The series is empty: zero patches checked is not a success."""


class TreeMissing(CouldNotCheck):
    """The patched tree has not been made, or is not one of ours."""


class DiskRefused(CouldNotCheck):
    """A file cannot be read or written: the disk is full or read-only, or the rights are missing."""


class Busy(CouldNotCheck):
    """Another mpatch works in this checkout."""


class StateUnreadable(CouldNotCheck):
    """The state that an earlier command left cannot be read."""


class SnapshotUnreadable(CouldNotCheck):
    """The named state of the series, a revision or a folder, cannot be read."""


# --- the source is wrong ---------------------------------------------------------------------------------------------


class DownloadMismatch(MpatchError):
    """Size or sha256 differ from the pin; the bad file is kept aside."""


class ArchiveUnsafe(MpatchError):
    """The archive holds a path or member kind that must not be unpacked."""


class BaseMismatch(MpatchError):
    """The files are not the pinned ones: base is A, pin is B; no patch was tried."""


# --- the series is wrong ---------------------------------------------------------------------------------------------


class SeriesWrong(MpatchError):
    """patches/series names a file that is missing, twice, or not a patch."""


class PatchMalformed(MpatchError):
    """The patch file cannot be read as one."""


class PatchHasCRLF(PatchMalformed):
    """The patch was checked out with CRLF line ends."""


class PatchContextStripped(PatchMalformed):
    """An editor stripped the blanks of empty context lines."""


class PathEscapes(PatchMalformed):
    """A path of the patch leaves the tree, or enters .git."""


class PatchKindRefused(PatchMalformed):
    """A symlink, a submodule, a binary, a rename: kinds that the queue does not carry."""


class PreimageMismatch(MpatchError):
    """The file before the patch is not the one that the patch was made for."""


class PostimageMismatch(MpatchError):
    """The patch does not give the file that its index line promises: it was edited by hand."""


class ContextMismatch(MpatchError):
    """A hunk's lines are not at its place. There is no fuzz and no offset on the pin."""


class SeriesDoesNotApply(MpatchError):
    """One or more patches do not fit; all of them are listed."""


class LintFailed(MpatchError):
    """One or more lint rules found something."""


# --- the tree is in the way ------------------------------------------------------------------------------------------


class ForeignEdits(MpatchError):
    """The patched tree holds changes that no patch has."""


class VerifyFailed(MpatchError):
    """The patched tree is not what base and series give."""


class NothingToRefresh(MpatchError):
    """The tree has no change to put into the patch."""


class EditOpen(MpatchError):
    """An edit or a rebase is in progress and must be finished or left first."""


class NoEditOpen(MpatchError):
    """The verb finishes an edit or a rebase, and none is open."""


class MoveConflict(MpatchError):
    """A patch does not fit the new place; the tree shows the conflict."""


class WrongPlace(MpatchError):
    """After a move a hunk stands in another class or function."""


class PatchAbsorbed(MpatchError):
    """A patch changes nothing any more: upstream has it."""


class MessageWrong(MpatchError):
    """The message of a patch cannot be carried: no subject, or a line that would cut it."""


class ProofFailed(MpatchError):
    """A proof is not red without its patch, or not green with it."""


class StyleWrong(MpatchError):
    """The change breaks upstream's own style or contribution rules."""


class InstalledPackage(MpatchError):
    """The target lies in an installed environment, which is never edited."""
