"""What containers and Kubernetes are given: of the right form, and only with options there are."""

from __future__ import annotations

import base64
import json
import os
import re
import runpy
import shutil
import ssl
import subprocess
import sys
import threading
import tomllib
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import compose_spec
import kubernetes_validate
import pytest
import yaml
from prometheus_client import Gauge

from moonpool.conductor.observing import planner_metrics
from moonpool.runtime.config.loading import explain, load_config
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.security import certificates
from moonpool.runtime.security.roles import Caller

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
MANIFESTS = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_the_compose_file_is_one() -> None:
    content = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose_spec.ComposeSpecification.model_validate(content).services
    assert services is not None
    assert set(services) == {"redis", "keys", "conductor", "prefill", "decode", "prometheus", "grafana"}
    for service in content["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_fits_its_schema(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_compose_makes_a_key_once_and_gives_it_to_all(tmp_path: Path) -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    of_ours = {name: one for name, one in services.items() if one["image"] == "moonpool" and name != "keys"}
    assert of_ours.keys() == {"conductor", "prefill", "decode"}
    for one in of_ours.values():
        assert "--set security.cluster_key=@/keys/cluster_key" in " ".join(one["command"])
        assert one["depends_on"]["keys"]["condition"] == "service_completed_successfully"
        assert "keys:/keys:ro" in one["volumes"]
    (program,) = services["keys"]["command"]
    command = [*services["keys"]["entrypoint"], program.replace("/keys", str(tmp_path)).replace("$$", "$")]
    commands = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, check=True, env=commands)
    made = (tmp_path / "cluster_key").read_text()
    assert SecurityOptions(cluster_key=made.strip()) and len(made.strip()) == 64
    assert (tmp_path / "cluster_key").stat().st_mode & 0o777 == 0o600
    subprocess.run(command, check=True, env=commands)
    assert (tmp_path / "cluster_key").read_text() == made
    assert {path.name for path in tmp_path.iterdir()} == {"cluster_key", "metrics_key"}
    # Prometheus runs as nobody: it reads its own key only.
    assert (tmp_path / "metrics_key").stat().st_mode & 0o777 == 0o644
    assert made.strip() not in (tmp_path / "metrics_key").read_text()
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][1]
    assert prometheus["authorization"] == {"credentials_file": "/keys/metrics_key"}


@pytest.mark.parametrize("role", ["conductor", "prefill", "decode", "store"])
def test_every_pod_has_the_key_that_the_job_makes(role: str) -> None:
    kinds = {document["kind"]: document for document in documents(KUBERNETES / f"{role}.yaml")}
    pod = kinds["StatefulSet" if role == "store" else "Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "security.cluster_key=@/etc/moonpool-keys/cluster_key" in container["args"]
    (mount,) = (one for one in container["volumeMounts"] if one["mountPath"] == "/etc/moonpool-keys")
    (volume,) = (one for one in pod["volumes"] if one["name"] == mount["name"])
    of_keys = {document["kind"]: document for document in documents(KUBERNETES / "keys.yaml")}
    (maker,) = of_keys["Job"]["spec"]["template"]["spec"]["containers"]
    assert maker["command"][-1] == volume["secret"]["secretName"]
    (script,) = maker["volumeMounts"]
    assert maker["command"][1] == f"{script['mountPath']}/make_keys.py"
    generated = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["configMapGenerator"]
    (volume,) = of_keys["Job"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": volume["configMap"]["name"], "files": ["make_keys.py"]} in generated


class Secrets(BaseHTTPRequestHandler):
    """What Kubernetes answers to who makes a Secret."""

    made: ClassVar[dict[str, dict[str, Any]]] = {}

    def do_POST(self) -> None:
        secret = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = secret["metadata"]["name"]
        exists = name in self.made
        if self.headers["Authorization"] != "Bearer a token" or not self.path.startswith(f"/{PATH}"):
            self.send_error(403)
            return
        self.made.setdefault(name, secret)
        self.send_response(409 if exists else 201)
        self.end_headers()


PATH = "api/v1/namespaces/moonpool/secrets"


def test_the_job_makes_a_secret_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = certificates.init(tmp_path, days=1)
    cert = certificates.issue(tmp_path, Caller("node", "api"), days=1, addresses=["127.0.0.1"])
    for name, text in (("ca.crt", ca.read_text()), ("token", "a token"), ("namespace", "moonpool")):
        (tmp_path / name).write_text(text)
    server = HTTPServer(("127.0.0.1", 0), Secrets)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, cert.with_suffix(".key"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    make_keys = runpy.run_path(str(KUBERNETES / "make_keys.py"))["main"]
    monkeypatch.setitem(make_keys.__globals__, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    try:
        make_keys("moonpool-keys")
        made = dict(Secrets.made)
        schema = next(iter(made.values()))
        kubernetes_validate.validate(schema, "1.30", strict=True)
        assert len(base64.b64decode(schema["data"]["cluster_key"])) == 64
        make_keys("moonpool-keys")
        assert Secrets.made == made
        assert "is made" in capsys.readouterr().out
        (tmp_path / "token").write_text("another")
        with pytest.raises(SystemExit, match="cannot be made: HTTP Error 403"):
            make_keys("other")
    finally:
        server.shutdown()
        server.server_close()


def test_every_manifest_is_in_the_kustomization() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == [path.name for path in MANIFESTS]


def shown(kind: str) -> list[dict[str, Any]]:
    """The documents of ``kind`` that docs/operations.md shows."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "operations.md").read_text(), re.M | re.S)
    return [document for document in map(yaml.safe_load, blocks) if document["kind"] == kind]


def test_the_overlay_that_is_shown_names_what_there_is() -> None:
    (overlay,) = shown("Kustomization")
    bases = [*overlay["resources"], *overlay["components"]]
    kinds = [yaml.safe_load((DEPLOY / base / "kustomization.yaml").read_text())["kind"] for base in bases]
    assert kinds == ["Kustomization", "Component"]


def test_the_scaled_object_that_is_shown_fits_what_is_deployed(tmp_path: Path) -> None:
    """The fields are those of keda.sh/v1alpha1; what it scales by is on the conductors' page."""
    (scaled,) = shown("ScaledObject")
    spec = scaled["spec"]
    assert scaled["apiVersion"] == "keda.sh/v1alpha1"
    assert spec.keys() == {
        *("scaleTargetRef", "minReplicaCount", "maxReplicaCount", "cooldownPeriod", "advanced", "triggers")
    }
    # What KEDA makes of it.
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", **spec["scaleTargetRef"]},
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        },
    }
    kubernetes_validate.validate(autoscaler, "1.30", strict=True)
    assert {one["type"] for one in spec["triggers"]} == {"prometheus"}
    assert [one["metricType"] for one in spec["triggers"]] == ["AverageValue", "Value", "Value"]
    names = {one for path in KUBERNETES.glob("*.yaml") for one in deployments(path)}
    assert spec["scaleTargetRef"]["name"] in names
    queries = [one["metadata"]["query"] for one in spec["triggers"]]
    metrics = [name for metric in vars(planner_metrics).values() for name in described(metric)]
    shown_metrics = [name for query in queries for name in re.findall(r"moonpool_\w+", query)]
    assert shown_metrics == [
        *("moonpool_planner_needed_nodes", "moonpool_role_queue_seconds", "moonpool_role_kv_free_ratio")
    ]
    assert set(shown_metrics) <= set(metrics)
    for query in queries:
        assert re.findall(r'role="(\w+)"', query) == [spec["scaleTargetRef"]["name"]]
    if promtool := shutil.which("promtool"):
        rules = [{"record": f"shown:query{i}", "expr": query} for i, query in enumerate(queries)]
        rule = {"groups": [{"name": "shown", "rules": rules}]}
        (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule))
        subprocess.run([promtool, "check", "rules", tmp_path / "rules.yml"], check=True)


def test_the_pods_of_a_node_over_several_machines_fit_together() -> None:
    """LeaderWorkerSet's own schema is no part of Kubernetes: its pods are."""
    ((workload,),) = (documents(path) for path in (KUBERNETES / "leaderworkerset").iterdir())
    template = workload["spec"]["leaderWorkerTemplate"]
    assert template.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    pods = [template[name] for name in ("leaderTemplate", "workerTemplate")]
    for pod in pods:
        document = {"apiVersion": "v1", "kind": "Pod", **pod}
        document["metadata"] = {"name": "one", **pod["metadata"]}
        kubernetes_validate.validate(document, "1.30", strict=True)
        assert pod["metadata"]["labels"]["app.kubernetes.io/part-of"] == "moonpool"
    (node,), (ranks,) = (pod["spec"]["containers"] for pod in pods)
    settings = [text.replace("$(POD_IP)", "10.0.0.1") for text in node["args"] if "=" in text]
    settings = [text for text in settings if not text.startswith("security.")]
    parallel = load_config(None, settings).engine.parallel
    assert parallel.hosts == template["size"]
    assert parallel.trusted_network
    command = ranks["command"][-1]
    assert f"--nproc-per-node={parallel.ranks_per_host} " in command
    assert command.partition("--leader")[2].split()[0] == '"$LWS_LEADER_ADDRESS:7400"'
    assert parallel.listen.endswith(":7400")


def deployments(path: Path) -> list[str]:
    return [one["metadata"]["name"] for one in documents(path) if one["kind"] == "Deployment"]


def described(metric: object) -> list[str]:
    return [one.name for one in metric.describe()] if isinstance(metric, Gauge) else []


@pytest.mark.parametrize("role", ["conductor", "prefill", "decode", "store"])
def test_a_workload_says_what_operators_look_for(role: str) -> None:
    of_kind = {document["kind"]: document for document in documents(KUBERNETES / f"{role}.yaml")}
    workload = "StatefulSet" if role == "store" else "Deployment"
    pod = of_kind[workload]["spec"]["template"]
    assert (
        of_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items()
        <= pod["metadata"]["labels"].items()
    )
    assert "podAntiAffinity" in pod["spec"]["affinity"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > load_config().node.drain_s
    (container,) = pod["spec"]["containers"]
    assert container["livenessProbe"]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_an_update_needs_no_more_machines_than_there_are_pods(path: Path) -> None:
    """Of pods that must be apart, one more than before would wait for a machine, and the update for it."""
    for deployment in documents(path):
        if deployment["kind"] == "Deployment":
            spec = deployment["spec"]
            affinity = spec["template"]["spec"].get("affinity", {}).get("podAntiAffinity", {})
            if affinity.get("requiredDuringSchedulingIgnoredDuringExecution"):
                assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_a_load_balancer_notices_before_a_conductor_stops_listening() -> None:
    options = load_config()
    (deployment,) = (one for one in documents(KUBERNETES / "conductor.yaml") if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probe = container["readinessProbe"]
    assert probe["httpGet"]["path"] == "/readyz"
    assert probe["periodSeconds"] * probe["failureThreshold"] < options.conductor.leave_s
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    ends_s = before_s + options.conductor.leave_s + options.node.drain_s
    assert pod["terminationGracePeriodSeconds"] > ends_s
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    grace = compose["services"]["conductor"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > options.conductor.leave_s + options.node.drain_s


def test_the_container_file_is_one() -> None:
    """No daemon builds it here; what can be wrong in it without one is looked for."""
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Containerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    words = [word for word, _ in steps]
    assert words[0] == "FROM"
    assert set(words) <= {"FROM", "RUN", "ARG", "ENV", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    for word, rest in steps:
        if word == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1])
        elif word in ("ENTRYPOINT", "CMD"):
            assert json.loads(rest)
        elif word == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True)
            for module in re.findall(r"python -m ([a-z_.]+)", rest):
                assert find_spec(module), module
    # Prometheus is another user: it must get through to its own file in the volume.
    assert any("--owner=10001 --mode=0711 /keys" in rest for word, rest in steps if word == "RUN")
    # Compiled as the user that runs, into that user's cache; and not as root.
    user = next(place for place, word in enumerate(words) if word == "USER")
    assert all(place > user for place, (_, rest) in enumerate(steps) if "python -m" in rest)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv"} <= set(ignored)
    assert not {"LICENSE", "README.md", *(path.parent.name for path in ROOT.glob("*/__init__.py"))} & (
        set(ignored) - {"tests"}
    )


def test_a_wheel_holds_every_file_of_the_packages() -> None:
    """Containers install one: what is not named in pyproject.toml is missing there and nowhere else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = [pattern.rstrip("*") for pattern in project["packages"]["find"]["include"]]
    for package in packages:
        for path in (ROOT / package).rglob("*"):
            is_cache = path.name.startswith(".") or "__pycache__" in path.parts
            if path.is_file() and not is_cache and path.suffix != ".py":
                patterns = project["package-data"]["*"]
                assert any(fnmatch(path.name, one) for one in patterns), f"{path} is in no wheel"


def test_only_options_there_are() -> None:
    known = {row.key for row in explain()}
    files = [
        path
        for path in DEPLOY.rglob("*")
        if path.suffix in (".yaml", ".toml") or path.name == "Containerfile"
    ]
    used = {
        key
        for path in files
        for key in re.findall(r"(?:--set|-)\s+([a-z_]+\.[a-z_.]+)=", path.read_text().replace("\n", " "))
    }
    assert len(used) > 5
    assert used <= known
    assert load_config(KUBERNETES / "options.toml").log.format == "json"
