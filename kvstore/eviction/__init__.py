"""Which block goes next when a tier is full: policies chosen by name."""

from moonpool.kvstore.eviction.factory import POLICIES, make_policy
from moonpool.kvstore.eviction.policy import EvictionPolicy

__all__ = ["POLICIES", "EvictionPolicy", "make_policy"]
