"""Secrets do not show: in texts, errors, log lines, uncaught exceptions and the list of processes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moonpool.runtime import redaction
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import LogOptions
from moonpool.runtime.errors import ConfigError, MoonpoolError
from moonpool.runtime.observing.log import setup_logging
from moonpool.runtime.redaction import HIDDEN, hide, redacted, redacted_arguments, redacted_value
from moonpool.runtime.reports.report import measure_environment

S = "hunter2-hunter2"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_hidden", {})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"redis://:{S}@host:1/0", f"redis://{HIDDEN}@host:1/0"),
        (f"no answer at 'rediss+sentinel://u:{S}@h1:1,h2/main'", f"no answer at 'rediss+sentinel://{HIDDEN}@h1:1,h2/main'"),
        (f"redis://:{S}/@x@host/0?password={S}&db=2", f"redis://{HIDDEN}@host/0?password={HIDDEN}&db=2"),
        (f"unix:///s.sock?password={S}", f"unix:///s.sock?password={HIDDEN}"),
        (f"--set security.cluster_key={S}: wrong", f"--set security.cluster_key={HIDDEN} wrong"),
        (f'security.cluster_key = "{S}"', f'security.cluster_key = "{HIDDEN}"'),
        (f"bench serve --api-key {S} --rounds 1", f"bench serve --api-key {HIDDEN} --rounds 1"),
        (f"Authorization: Bearer {S}", f"Authorization: Bearer {HIDDEN}"),
        ("transfer.secret=@/etc/secret", "transfer.secret=@/etc/secret"),
        ("max_tokens=5, num_tokens = 7: set security.cluster_key to a text", None),
        ("http://127.0.0.1:8000/v1/cluster and redis://host:6379/0", None),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_hidden(text: str, shown: str | None) -> None:
    assert redacted(text) == (text if shown is None else shown)
    assert redacted(redacted(text)) == redacted(text)


def test_a_long_text_takes_no_time() -> None:
    for text in ("a-" * 50_000, "?key" * 30_000, "://" * 30_000, "secret=" * 20_000, "secret " * 20_000):
        began_s = time.thread_time()
        redacted(text)
        assert time.thread_time() - began_s < 2


def test_a_secret_of_the_configuration_is_hidden_wherever_it_occurs(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(S)
    load_config(
        sets=[
            f"security.cluster_key=@{tmp_path / 'key'}",
            "index.redis_url=redis://u:p%40ss-word-1@host",
            "cluster.prefill_options=security.cluster_key=of-prefill-nodes",
        ]
    )
    for secret in (S, "p%40ss-word-1", "p@ss-word-1", "of-prefill-nodes"):
        assert secret not in redacted(f"said {secret}!")
        assert secret not in str(MoonpoolError(f"said {secret}!"))
        assert secret not in repr(MoonpoolError(f"said {secret}!"))
        assert redacted_value({"a": [secret, 1], "b": (secret,)}) == {"a": [HIDDEN, 1], "b": (HIDDEN,)}


@pytest.mark.parametrize(
    "item",
    [f"security.cluster_key=node:{S}", f"security.cluster_kee={S}", f"index.redis_url=redis://:{S}@h,lease_ttl_s=x"],
)  # fmt: skip
def test_a_wrong_option_is_refused_without_its_value(item: str) -> None:
    sets = [item, "index.lease_ttl_s=-1"] if "redis" in item else [item]
    with pytest.raises(ConfigError) as refused:
        load_config(sets=sets)
        from moonpool.runtime.security.call_tokens import RoleKeys

        RoleKeys(item.partition("=")[2])
    assert S not in str(refused.value)


@pytest.mark.parametrize("form", ["text", "json"])
def test_log_lines_and_tracebacks_have_no_secrets(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        setup_logging(LogOptions(format=form), "a test")
        hide(S)
        try:
            raise ValueError(f"bad {S}")
        except ValueError:
            logging.getLogger("x").exception("at redis://:other@host with %s", S)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    shown = capfd.readouterr().err
    assert "ValueError" in shown
    assert S not in shown
    assert "other" not in shown
    if form == "json":
        json.loads(shown.splitlines()[0])


def test_a_command_line_has_no_secrets() -> None:
    shown = redacted_arguments(["up", "--api-key", S, "--redis", f"redis://:{S}@h", "--set", f"a.secret={S}"])
    assert shown == [
        "up",
        "--api-key",
        HIDDEN,
        "--redis",
        f"redis://{HIDDEN}@h",
        "--set",
        f"a.secret={HIDDEN}",
    ]


def test_ps_shows_no_secrets_and_an_uncaught_exception_neither() -> None:
    """The command as the kernel shows it to everybody."""
    code = (
        "import sys; from moonpool.runtime.redaction import *; hide_in_tracebacks(); hide(sys.argv[1]);"
        "print(open('/proc/self/cmdline').read(), flush=True); raise ValueError(sys.argv[1:])"
    )
    arguments = [S, f"--redis=redis://:{S}@host:1", "--set", f"transfer.secret={S}", "plain"]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "plain" in done.stdout
    assert "host:1" in done.stdout
    assert "ValueError" in done.stderr
    assert S not in done.stdout + done.stderr


def test_a_result_file_has_no_secret_of_its_command_line() -> None:
    line = f"moonpool bench index --redis redis://:{S}@host --api-key {S}"
    assert S not in measure_environment((), command=line).command
