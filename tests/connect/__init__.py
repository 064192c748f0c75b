"""Alignment: the solvers one by one, and what they recover together."""
