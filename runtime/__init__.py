"""What every process needs: configuration, errors, RPC, metrics, logs and a daemon's life cycle."""
