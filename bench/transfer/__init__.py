"""``moonpool bench transfer``: each path between two processes, beside the machine's own limit."""
