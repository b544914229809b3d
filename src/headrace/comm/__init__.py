"""Ranks, their groups, and the collectives between them."""
