"""Diagnosis of a machine and a cluster: evidence is gathered once, and pure checks judge it."""
