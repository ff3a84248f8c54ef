"""Other engines, started for a comparison on the same machine in the same run."""
