"""The engine of a run: plans asked for, steps taken, recovered, recorded and saved.

Nothing is imported here: planning ahead works in processes without torch.
"""
