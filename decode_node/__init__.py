"""The decode node: takes a prompt's blocks over and generates, all its requests in one batch."""
