"""The dashboard's page as one file, with its data inside: it runs nothing else and asks nobody."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from typing import Any

import orjson

from moonpool.conductor.dashboard.routes import STATIC

_IMPORT = re.compile(r'^import (?:\* as (\w+)|\{ ([^}]*) \}) from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+))", re.MULTILINE)
_LINK = re.compile(r'<link rel="stylesheet" href="/static/([^"]+)">')
_PLAIN = re.compile(r'<script defer src="/static/([^"]+)"></script>')
_MODULE = re.compile(r'<script type="module" src="/static/[^"]+"></script>\n')


def single_page(title: str, data: Mapping[str, Any], entry: str = "report.js") -> str:
    """HTML that draws ``data`` by ``conductor/static/ENTRY``, which finds it in ``#report-data``.

    Whatever ``data`` holds stays data: it cannot end its element, and only the scripts written here may run,
    by their hashes. Nothing may be fetched, from anywhere.
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
    # Neither "</script" nor "<!--" may stand in an element: HTML sees them before anybody sees JSON.
    packed = packed.replace("<", "\\u003c")
    # The last script, when everything it draws on is there.
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
    """A module and all it imports as one script: each a function of its own, so that names stay apart.

    It knows imports and exports as the dashboard writes them: one a line, from ``./NAME.js``.
    """
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        source = (STATIC / name).read_text(encoding="utf-8")
        for match in _IMPORT.finditer(source):
            if match[3] not in parts:
                add(match[3])
        exported = ", ".join(_EXPORT.findall(source))
        source = _EXPORT.sub("", _IMPORT.sub(_as_constant, source))
        assert not re.search(r"^(import|export)\b", source, re.MULTILINE), f"{name}: written in another way"
        parts[name] = f'modules["{name}"] = (() => {{\n{source}return {{ {exported} }};\n}})();\n'

    add(entry)
    return '"use strict";\n(() => {\nconst modules = {};\n' + "".join(parts.values()) + "})();\n"


def _as_constant(match: re.Match[str]) -> str:
    names = match[1] or f"{{ {match[2].replace(' as ', ': ')} }}"
    return f'const {names} = modules["{match[3]}"];\n'


def _as_element(script: str) -> str:
    """Checked to be what HTML leaves alone inside a script."""
    assert "</script" not in script.lower() and "<!--" not in script, "HTML would end the script here"
    return script


def _hashes(texts: list[str]) -> str:
    return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)
