"""Takes requests in, decides where each one runs, and streams its tokens out exactly once."""
