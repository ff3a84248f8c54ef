"""What a request says about the form of its answer: structures and tools."""
