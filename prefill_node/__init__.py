"""The prefill node: computes prompts, returns first tokens, and hands blocks over to decode nodes."""
