"""The page: one HTML file with everything in it, that opens without a network."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from bokeh.resources import Resources
from jinja2 import Environment, FunctionLoader, StrictUndefined

from megatron_ext.errors import UserError
from megatron_ext.observe.names import SYMPTOMS_PAGE
from megatron_ext.report import sections
from megatron_ext.report.summary import summary_rows
from megatron_ext.report.view import View, common_axis

SYMPTOMS = Path(__file__).resolve().parents[2] / SYMPTOMS_PAGE


def render(views: Sequence[View], folder: Path | None = None) -> str:
    """Return the page's text for the given runs.

    Args:
        views: The runs.
        folder: Where the page will lie, for its links into the docs of a checkout; None: no links.
    """
    symptoms = os.path.relpath(SYMPTOMS, folder.resolve()) if folder is not None and SYMPTOMS.exists() else ""
    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["script_json"] = _script_json
    return environment.get_template("report.html.j2").render(
        bokeh=Resources(mode="inline", components=["bokeh"], minified=True).js_raw[0],
        style=_asset("report.css"),
        script=_asset("report.js"),
        views=views,
        symptoms=symptoms,
        axis=common_axis(views),
        both_axes=all(view.has_tokens for view in views),
        rows=summary_rows(views),
        sections=sections.build(views),
    )


def write(views: Sequence[View], target: Path) -> int:
    """Write the page and return its size in bytes.

    Raises:
        UserError: The file cannot be written; an old one is untouched.
    """
    text = render(views, target.parent).encode()
    try:
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(text)
            os.chmod(name, 0o644)
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            "the report cannot be written",
            where=str(target),
            why=error.strerror or str(error),
            remedy="choose another file with -o",
        ) from error
    return len(text)


def _asset(name: str) -> str:
    return files("megatron_ext.report").joinpath("page", name).read_text(encoding="utf-8")


def _script_json(value: object) -> str:
    """Return JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
