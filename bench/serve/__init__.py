"""``moonpool bench serve``: streaming requests against any OpenAI-compatible URL, and against peers."""
