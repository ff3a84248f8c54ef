"""``moonpool bench transfer``: what each path moves, against what the machine itself can move the same
way.
"""
