"""What containers and Kubernetes are given: of the right form, and only with options there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from runtime.config import explain, load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
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


@pytest.mark.parametrize("role", ["conductor", "prefill", "decode"])
def test_a_deployment_says_what_operators_look_for(role: str) -> None:
    of_kind = {document["kind"]: document for document in documents(KUBERNETES / f"{role}.yaml")}
    pod = of_kind["Deployment"]["spec"]["template"]
    assert (
        of_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items()
        <= pod["metadata"]["labels"].items()
    )
    assert "podAntiAffinity" in pod["spec"]["affinity"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > load_config().node.drain_s
    (container,) = pod["spec"]["containers"]
    assert container["livenessProbe"]
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}


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
