"""How long a whole engine takes for a decode step and for a prompt, beside what the machine could give."""
