"""Drills: one failure of each kind in a local cluster, with and without its mitigation."""
