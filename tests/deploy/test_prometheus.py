"""What Prometheus and Grafana are given, against a real Prometheus that scrapes a real cluster."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import HealthOptions
from moonpool.runtime.health.judge import CHECKS
from moonpool.runtime.observing.metrics_server import metrics_key
from moonpool.runtime.security.call_tokens import RoleKeys
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import eventually

DEPLOY = Path(__file__).parents[2] / "deploy"
VOICE = Path(__file__).parents[2] / "moonpool/demo/adapters/prophet"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    not (PROMTOOL and PROMETHEUS), reason="needs prometheus and promtool: apt install prometheus; CI has them"
)


def dashboard_queries() -> list[tuple[str, str]]:
    """(panel, query) of every target of the dashboard."""
    dashboard = json.loads((DEPLOY / "grafana/dashboards/moonpool.json").read_text())
    return [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


async def read(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.text()


async def ask_model(client: Client, prompt: str, model: str | None = None) -> None:
    named = {} if model is None else {"model": model}
    async for _ in client.complete(prompt * 8, Reply(), max_tokens=16, **named):
        pass


async def ask_adapter(client: Client, directory: Path, number: int) -> None:
    """Load a LoRA adapter under the name "voice", in place of the former, and ask it."""
    path = directory / f"voice-{number}"
    shutil.copytree(VOICE, path)
    settings = json.loads((path / "adapter_config.json").read_text())
    # Another scale makes it another adapter.
    (path / "adapter_config.json").write_text(json.dumps(settings | {"lora_alpha": 1 + number / 100}))
    await client.load_adapter("voice", str(path), replace=True)
    await ask_model(client, f"{number} And the earth was without form, and void ", model="voice")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pages(
    cluster: LocalCluster, client: Client, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, str]]:
    """The /metrics of every process, after some requests."""
    for _ in range(2):
        await ask_model(client, "In the beginning God created the heaven ")
    await ask_adapter(client, tmp_path_factory.mktemp("adapters"), 0)
    nodes = (await client.cluster())["nodes"]
    urls = {"conductor": f"{cluster.url}/metrics"} | {node["node_id"]: node["metrics_url"] for node in nodes}
    yield {name: await read(url) for name, url in urls.items()}
    await client.unload_adapter("voice")  # the cluster serves other tests too


@needs_prometheus
@pytest.mark.parametrize("arguments", [("rules", "alerts.yml"), ("config --syntax-only", "prometheus.yml")])
def test_promtool_accepts_what_is_deployed(arguments: tuple[str, str]) -> None:
    assert PROMTOOL is not None
    kind, name = arguments
    subprocess.run([PROMTOOL, "check", *kind.split(), DEPLOY / "prometheus" / name], check=True)


@needs_prometheus
@pytest.mark.parametrize(("lapsed", "alerts"), [("0x12 1x24", 1), ("0x36", 0)], ids=["killed", "drained"])
def test_a_node_that_is_no_target_any_more_is_told_if_it_was_killed(
    tmp_path: Path, lapsed: str, alerts: int
) -> None:
    """The lease of a killed node ends after seconds, and the next discovery takes it from the targets."""
    assert PROMTOOL is not None
    firing = 'ALERTS{alertname=~"MoonpoolNode(Down|Lost)", alertstate="firing"}'
    test = {
        "interval": "5s",
        "input_series": [
            {"series": 'up{job="moonpool-nodes", node="decode-0"}', "values": "1x10 0 stale"},
            {"series": 'moonpool_index_lapsed_nodes_total{instance="conductor:8000"}', "values": lapsed},
        ],
        "promql_expr_test": [
            {
                "expr": f"count({firing}) or vector(0)",
                "eval_time": "2m",
                "exp_samples": [{"labels": "{}", "value": alerts}],
            }
        ],
    }
    rules = {"rule_files": [str(DEPLOY / "prometheus/alerts.yml")], "evaluation_interval": "15s"}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(rules | {"tests": [test]}))
    subprocess.run([PROMTOOL, "test", "rules", tmp_path / "test.yml"], check=True)


@needs_prometheus
@pytest.mark.asyncio(loop_scope="module")
async def test_every_metrics_page_is_clean(pages: dict[str, str]) -> None:
    assert PROMTOOL is not None
    for name, page in pages.items():
        done = await asyncio.to_thread(
            subprocess.run, [PROMTOOL, "check", "metrics"], input=page, capture_output=True, text=True
        )
        # Colons are against the rules, and in the names that vLLM's dashboards look for.
        said = [line for line in done.stderr.splitlines() if not line.startswith("vllm:")]
        assert not said, f"{name}: {said}"
        assert "_created" not in page


@pytest.mark.asyncio(loop_scope="module")
async def test_every_process_is_named_to_prometheus(cluster: LocalCluster, client: Client) -> None:
    targets = json.loads(await read(f"{cluster.url}/v1/prometheus-targets"))
    nodes = {node["node_id"]: node for node in (await client.cluster())["nodes"]}
    assert {target["labels"]["node"] for target in targets} == nodes.keys()
    for target in targets:
        node = nodes[target["labels"]["node"]]
        assert f"http://{target['targets'][0]}{target['labels']['__metrics_path__']}" == node["metrics_url"]
        assert target["labels"]["role"] == node["role"]


@pytest.mark.asyncio(loop_scope="module")
async def test_queries_and_alerts_ask_for_metrics_there_are(pages: dict[str, str]) -> None:
    known = {"up"}
    for page in pages.values():
        for name, kind in re.findall(r"^# TYPE (\S+) (\S+)", page, re.MULTILINE):
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            known |= {name + suffix for suffix in suffixes}
    alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    asked = [query for _, query in dashboard_queries()]
    asked += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    names = set(re.findall(r"\b(?:moonpool_|process_|vllm:)\w+", " ".join(asked)))
    assert len(names) >= 40
    assert names <= known, names - known


# What each check reads.
READINGS = {
    "gpu_lost": "moonpool_node_health",
    "gpu_memory_errors": "moonpool_gpu_memory_errors_total",
    "gpu_xid": "moonpool_gpu_xid",
    "gpu_memory_taken": "moonpool_gpu_memory_taken_bytes",
    "gpu_temperature": "moonpool_gpu_temperature_celsius",
    "gpu_throttled": "moonpool_gpu_throttled",
    "host_memory": "moonpool_host_memory_bytes",
    "memory_pressure": "moonpool_host_memory_stalled_seconds_total",
    "open_files": "moonpool_process_files",
    "disk_space": "moonpool_host_disk_free_bytes",
    "disk_latency": "moonpool_host_disk_write_seconds",
    "network_errors": "moonpool_host_network_errors_total",
}


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_of_a_node_has_a_panel_and_says_what_to_do(check: str) -> None:
    panels = [name for name, query in dashboard_queries() if re.search(rf"\b{READINGS[check]}\b", query)]
    guide = (DEPLOY.parent / "docs/troubleshooting.md").read_text()
    row = re.search(rf"^\| `{check}` \|.*", guide, re.MULTILINE)
    assert row is not None
    _, _, _, option, panel, todo, _ = row[0].split("|")
    assert panel.strip() in panels and todo.strip()
    assert hasattr(HealthOptions(), option.split("`")[1])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def prometheus(
    cluster: LocalCluster, pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[str]:
    """The URL of a Prometheus as it is deployed, but for the conductor's address and the pace."""
    directory: Path = tmp_path_factory.mktemp("prometheus")
    shutil.copytree(DEPLOY / "prometheus", directory, dirs_exist_ok=True)
    config = (directory / "prometheus.yml").read_text()
    config = config.replace("conductor:8000", cluster.url.removeprefix("http://"))
    key = metrics_key(RoleKeys(cluster.config.security.cluster_key).derived)
    (directory / "metrics_key").write_text(key)
    config = config.replace("/keys/metrics_key", str(directory / "metrics_key"))
    config = re.sub(r"(scrape|refresh)_interval: \S+", r"\1_interval: 1s", config)
    (directory / "prometheus.yml").write_text(config)
    port_file = directory / "stderr"
    arguments = {
        "config.file": directory / "prometheus.yml",
        "storage.tsdb.path": directory / "data",
        "web.listen-address": "127.0.0.1:0",
    }
    command = [str(PROMETHEUS), *(f"--{name}={value}" for name, value in arguments.items())]
    child = Child("prometheus", command, port_file, sends_json=False)
    await child.start()
    try:

        async def listens() -> str | None:
            found = re.search(r"Listening on\W+address=(\S+)", port_file.read_text())
            return found[1] if found else None

        await eventually(listens)
        yield f"http://{await listens()}"
    finally:
        await child.stop(10.0)


@needs_prometheus
@pytest.mark.asyncio(loop_scope="module")
async def test_every_panel_shows_something(prometheus: str, client: Client, tmp_path: Path) -> None:
    async def ask(query: str) -> list[Any]:
        query = query.replace("$__rate_interval", "10s")
        url = f"{prometheus}/api/v1/query"
        async with aiohttp.ClientSession() as session, session.get(url, params={"query": query}) as answer:
            body = await answer.json()
            assert answer.status == 200, (query, body)
            return [sample for sample in body["data"]["result"] if sample["value"][1] != "NaN"]

    numbers = itertools.count()

    async def all_show() -> bool:
        # Rates need something to happen between two scrapes.
        # And of reuse distances one block in 16 is counted: so each time there are others.
        number = next(numbers)
        await ask_model(client, f"{number} And the earth was without form, and void ")
        await ask_adapter(client, tmp_path, number)
        empty.clear()
        empty.extend([(panel, query) for panel, query in dashboard_queries() if not await ask(query)])
        return not empty

    empty: list[tuple[str, str]] = []
    try:
        await eventually(all_show)
    finally:
        print("without data:", empty)
