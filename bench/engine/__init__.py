"""Decode steps and prompts of a whole engine, beside the least time that the machine allows."""
