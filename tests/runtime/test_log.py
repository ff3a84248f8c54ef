"""Log lines: text or JSON, with the request id, and a limit on repeated messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from moonpool.runtime.config.options import LogOptions
from moonpool.runtime.observing.log import WHOLE, RepeatLimit, request_id, setup_logging


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines_name_process_request_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(LogOptions(format="json"), "decode-0")
    token = request_id.set("cmpl-1")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("a.b").exception("step %d failed", 3)
    finally:
        request_id.reset(token)
    line = json.loads(capsys.readouterr().err)
    assert (line["process"], line["logger"], line["request_id"]) == ("decode-0", "a.b", "cmpl-1")
    assert line["message"] == "step 3 failed"
    assert "ValueError: no" in line["exception"]


def test_repeated_messages_are_dropped() -> None:
    now_s = 0.0
    limit = RepeatLimit(lambda: now_s)

    def passes(message: str, *facts: object, level: int = logging.WARNING) -> str | None:
        record = logging.LogRecord("a", level, "", 0, message, facts, None)
        return record.getMessage() if limit.filter(record) else None

    through = [passes("node %s is gone", n) for n in range(1000)]
    assert through[:10] == [f"node {n} is gone" for n in range(10)]
    assert set(through[10:]) == {None}
    assert passes("another sentence") == "another sentence"
    now_s = 10.0
    assert passes("node %s is gone", 1000) == "node 1000 is gone (990 more of these were dropped)"
    assert passes("node %s is gone", 1001) == "node 1001 is gone"
    assert all(passes("at %s", n, level=logging.DEBUG) for n in range(100)), "what is asked for is all told"
    words = {"levelno": logging.INFO, "msg": "%d said so", **WHOLE}
    records = [logging.makeLogRecord({**words, "args": (n,)}) for n in range(100)]
    assert all(limit.filter(record) for record in records)
