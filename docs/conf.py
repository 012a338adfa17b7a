"""Configure Sphinx for `make docs`."""

from __future__ import annotations

import contextlib
import io
import os
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

import osd_hf
from osd_hf.cli.main import COMMANDS, main

project = "osd_hf"
author = "the osd_hf authors"
version = release = osd_hf.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = "osd_hf"
html_show_copyright = False
exclude_patterns = ["conf.py"]
suppress_warnings = ["config.cache"]

myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings contain the types
autodoc_inherit_docstrings = False
default_role = "code"  # names in single backticks, as in docstrings of Hugging Face libraries

# Links in docstrings: [`OnlineConfig`], [`~OnlineAssistant.generate`].
LINK = re.compile(r"\[`~?([\w.]+)`\]")


def link(match: re.Match[str]) -> str:
    """Convert a link to reStructuredText, or to code if the reference does not have the name."""
    value: Any = osd_hf
    name = match[1].removeprefix("osd_hf.")
    for part in name.split("."):
        if not hasattr(value, part):
            return f"``{name}``"
        value = getattr(value, part)
    return f":py:obj:`{name} <osd_hf.{name}>`"


def mend(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Convert Markdown links and fenced code of a docstring to reStructuredText."""
    made, code = list[str](), None
    for line in LINK.sub(link, "\n".join(lines)).split("\n"):
        if fence := re.match(r"( *)```(\w*)$", line):
            code = None if code is not None else fence[1]
            made += [] if code is None else [f"{code}.. code-block:: {fence[2] or 'text'}", ""]
        else:
            made.append(line if code is None else f"    {line}")
    lines[:] = made


class Commands(Directive):
    """Directive that shows the help of each command."""

    def run(self) -> list[nodes.Node]:
        os.environ["COLUMNS"] = "92"
        made: list[nodes.Node] = []
        for name in COMMANDS:
            with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
                main([name, "--help"])
            section = nodes.section(ids=[f"osd-hf-{name}"], names=[f"osd-hf-{name}"])
            help = printed.getvalue()
            section += [nodes.title(text=f"osd-hf {name}"), nodes.literal_block(help, help, language="none")]
            made.append(section)
        return made


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", mend)
    app.add_directive("commands", Commands)
