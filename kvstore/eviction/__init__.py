"""Which block goes next when a tier is full: policies chosen by name."""

from kvstore.eviction.make import POLICIES, make_policy
from kvstore.eviction.policy import EvictionPolicy

__all__ = ["POLICIES", "EvictionPolicy", "make_policy"]
