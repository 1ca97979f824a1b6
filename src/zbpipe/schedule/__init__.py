"""Schedules as data: ops, placements, dependencies, the text form, and the registry of names.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.
"""
