"""The dashboard's page as one HTML file with its data inside, and without network access."""

from __future__ import annotations

import posixpath
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import orjson

STATIC = files("moonpool.conductor.dashboard") / "static"

_IMPORT = re.compile(r'^import (?:\* as (\w+)|\{ ([^}]*) \}) from "(\.{1,2}/[\w/.-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_LINK = re.compile(r'<link rel="stylesheet" href="/static/([^"]+)">')
_PLAIN = re.compile(r'<script defer src="/static/([^"]+)"></script>')
_MODULE = re.compile(r'<script type="module" src="/static/[^"]+"></script>\n')


def single_page(title: str, data: Mapping[str, Any], entry: str = "report.js") -> str:
    """Return HTML that draws ``data`` by ``conductor/dashboard/static/ENTRY``, which reads ``#report-data``.

    ``data`` cannot end its element. A content security policy allows only these scripts, by their hashes,
    and no network request.
    """
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    scripts: list[str] = []
    styles: list[str] = []

    def inline_style(match: re.Match[str]) -> str:
        styles.append((STATIC / match[1]).read_text(encoding="utf-8"))
        return f"<style>{styles[-1]}</style>"

    def inline_script(match: re.Match[str]) -> str:
        scripts.append(_as_element((STATIC / match[1]).read_text(encoding="utf-8")))
        return f"<script>{scripts[-1]}</script>"

    page = _LINK.sub(inline_style, page)
    page = _PLAIN.sub(inline_script, page)
    scripts.append(_as_element(bundle(entry)))
    page = _MODULE.sub("", page)
    packed = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS).decode()
    # HTML would end or escape the element at "</script" or "<!--".
    packed = packed.replace("<", "\\u003c")
    tail = (
        f'<script type="application/json" id="report-data">{packed}</script>\n'
        f"<script>{scripts[-1]}</script>\n"
    )
    policy = (
        f"default-src 'none'; img-src data:; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta charset="utf-8">\n  <meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', head, 1)
    page = page.replace("<title>Moonpool</title>", f"<title>{escape(title)}</title>", 1)
    before, end, after = page.rpartition("</body>")
    return before + tail + end + after


def bundle(entry: str) -> str:
    """Bundle a module and its imports into one script; each module is a function with its own scope.

    Understands imports and exports as the dashboard writes them: one a line, by paths such as ``../NAME.js``.
    """
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        source = (STATIC / name).read_text(encoding="utf-8")

        def path(imported: str) -> str:
            return posixpath.normpath(posixpath.join(posixpath.dirname(name), imported))

        def as_constant(match: re.Match[str]) -> str:
            names = match[1] or f"{{ {match[2].replace(' as ', ': ')} }}"
            return f'const {names} = modules["{path(match[3])}"];\n'

        for match in _IMPORT.finditer(source):
            if path(match[3]) not in parts:
                add(path(match[3]))
        exported = ", ".join(_EXPORT.findall(source))
        source = _EXPORT.sub("", _IMPORT.sub(as_constant, source))
        assert not re.search(r"^(import|export)\b", source, re.MULTILINE), (
            f"{name}: an import or export that bundle() does not understand"
        )
        parts[name] = f'modules["{name}"] = (() => {{\n{source}return {{ {exported} }};\n}})();\n'

    add(entry)
    return '"use strict";\n(() => {\nconst modules = {};\n' + "".join(parts.values()) + "})();\n"


def _as_element(script: str) -> str:
    """Return ``script`` after checking that HTML leaves it unchanged inside a script element."""
    assert "</script" not in script.lower() and "<!--" not in script, "HTML would end the script here"
    return script


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)
