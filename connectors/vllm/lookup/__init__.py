"""Which blocks of a prompt are worth loading, from where, and why the others are missing."""
