"""How checkpoints store weights in few bits: a module for each ``quant_method`` of a config.json.

Each has ``read(path, words) -> Method``, for the words of its ``quantization_config``.
"""
