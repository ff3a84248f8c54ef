"""The decode node: takes over prompts' blocks and generates, with all requests in one batch."""
