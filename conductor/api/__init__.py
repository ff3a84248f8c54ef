"""The OpenAI-compatible HTTP API of a conductor, and its pages for people and dashboards."""

from conductor.api.app import ApiServer, create_app
from conductor.api.context import ApiContext

__all__ = ["ApiContext", "ApiServer", "create_app"]
