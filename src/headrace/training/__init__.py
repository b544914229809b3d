"""Training as a library: from a configuration to plans, ranks, a run and its folder.

Nothing is imported here: planning ahead works in processes without torch.
"""
