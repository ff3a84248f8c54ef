"""The running cluster that what is deployed is checked against."""

from tests.cluster.conftest import client, cluster  # noqa: F401
