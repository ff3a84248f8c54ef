"""Benchmarks: each drives the product from outside and reports in the shape of
``moonpool.runtime.reports.report``."""
