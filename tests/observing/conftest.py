"""What is observed of an API and of scripted nodes: the fixtures of the conductor's tests."""

from tests.conductor.conftest import api, checkpoint, redis, url

__all__ = ["api", "checkpoint", "redis", "url"]
