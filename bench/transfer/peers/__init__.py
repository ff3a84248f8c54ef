"""Other transfer engines, moving the same blocks on the same machine in the same run."""
