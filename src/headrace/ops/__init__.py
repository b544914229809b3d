"""Operators: what methods are made of; each file is one algorithm with its adjoint."""
