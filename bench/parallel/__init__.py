"""``moonpool bench parallel``: models over several processes: steps, prompts, and blocks between plans."""
