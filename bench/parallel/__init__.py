"""What spreading a model over processes costs and gives: steps, long prompts, blocks between other plans."""
