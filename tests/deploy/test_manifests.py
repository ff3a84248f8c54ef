"""What containers and Kubernetes are given: of the right form, and only with options there are."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from moonpool.runtime.config.loading import explain, load_config

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
    assert set(services) == {"redis", "conductor", "prefill", "decode", "prometheus", "grafana"}
    for service in content["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_fits_its_schema(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, "1.30", strict=True)


def test_every_manifest_is_in_the_kustomization() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == [path.name for path in MANIFESTS]


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
