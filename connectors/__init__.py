"""Moonpool's store under other engines. Imports the store and the transfer engine only."""
