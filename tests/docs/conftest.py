"""The running cluster that the documented commands are given."""

from tests.cluster.conftest import client, cluster  # noqa: F401
