"""Everything that needs a GPU, in one go: `make gpu`."""
