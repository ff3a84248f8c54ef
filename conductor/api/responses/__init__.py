"""OpenAI's Responses API, as far as it maps to chats."""
