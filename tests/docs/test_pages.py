"""The pages: no dead link, and every command of ours on them is one that the program takes."""

from __future__ import annotations

import argparse
import importlib
import re
import urllib.parse

import pytest
from pages import ROOT, Command, anchors, blocks, commands, links, pages

from megatron_ext.cli import VERBS, verb_and_rest
from tools.mpatch.cli import parser as mpatch_parser

PATH = re.compile(r"(?<![\w./-])(?:examples|docker|tools|benchmarks|tests|docs|patches)/[\w./-]+\w")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_local_link_is_dead(page) -> None:
    dead = []
    for line, target in links(page):
        parts = urllib.parse.urlsplit(target)
        if parts.scheme:
            assert parts.scheme in ("http", "https", "mailto"), target
            continue
        file = (page.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else page
        if not file.exists():
            dead.append(f"{page.name}:{line} {target}: no such file")
        elif parts.fragment and (file.suffix != ".md" or parts.fragment not in anchors(file)):
            dead.append(f"{page.name}:{line} {target}: no such heading")
    assert dead == []


def _ours() -> list[Command]:
    return [command for page in pages() for command in commands(page, "megatron-moe")]


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Return what is wrong with the words, empty when the parser takes them."""
    try:
        parser.parse_args(words)
    except SystemExit as stop:
        return "" if stop.code in (0, None) else "refused"
    except argparse.ArgumentError as error:
        return str(error)
    return ""


def test_the_pages_hold_commands() -> None:
    assert len(_ours()) > 15


@pytest.mark.parametrize("command", _ours(), ids=str)
def test_megatron_moe_takes_the_command(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    name, words = verb_and_rest(list(command.words[1:]))
    if name in ("--version", "--help"):
        return
    if name.isupper():  # a form, not a command: megatron-moe VERB
        return
    assert name in VERBS, str(command)
    ext = [word.partition("=")[0] for word in words if word.startswith("--moe-ext-")]
    parser = argparse.ArgumentParser(prog=name)
    importlib.import_module(VERBS[name].module).add_arguments(parser)
    words = [word for word in words if word != "..."]
    assert _parse(parser, words) == "", f"{command}\n{capsys.readouterr().err}"
    if ext:
        from megatron_ext.runtime.pretrain import add_extra_arguments

        known = add_extra_arguments(argparse.ArgumentParser())._option_string_actions
        assert [flag for flag in ext if flag not in known] == []


@pytest.mark.parametrize(
    "command", [command for page in pages() for command in commands(page, "mpatch")], ids=str
)
def test_mpatch_takes_the_command(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert _parse(mpatch_parser(), list(command.words[1:])) == "", f"{command}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_targets_in_code_blocks_exist(page) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for line, text in blocks(page):
        for path in PATH.findall(text):
            # The walk of patching.md makes its own test.
            if not (ROOT / path).exists() and not path.startswith("tests/ext/patches/test_walk"):
                wrong.append(f"{page.name}:{line} {path}")
        wrong += [f"{page.name}:{line} make {name}" for name in re.findall(r"^\s*make ([a-z-]+)", text, re.MULTILINE)
                  if name not in targets]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_verbs_named_in_the_text_exist(page) -> None:
    named = set(re.findall(r"`(?:[\w./]*/)?megatron-moe ([a-z][a-z-]*)", page.read_text()))
    assert sorted(named - set(VERBS)) == []
