"""Common parts of every process: configuration, errors, RPC, metrics, logs and the service life cycle."""
