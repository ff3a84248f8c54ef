"""The face of Moonpool: the command line, and a whole cluster on this machine (``moonpool up``)."""
