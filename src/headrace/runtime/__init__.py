"""The runtime: executes plans and measures them; it does not know who planned."""
