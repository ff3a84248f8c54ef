"""Other stores, each in a process and an environment of its own."""
