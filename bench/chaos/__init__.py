"""Chaos: faults in a running cluster under load, and whether the answers stay the same."""
