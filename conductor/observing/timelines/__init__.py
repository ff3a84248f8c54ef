"""What happened to one request: its events, their spans, and where the time went."""
