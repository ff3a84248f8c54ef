"""The prefill node: computes prompts, answers their first token, and hands their blocks to decode nodes."""
