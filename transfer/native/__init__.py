"""The compiled part of transfer: moving and checksumming many runs of bytes in one call."""
