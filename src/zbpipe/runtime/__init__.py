"""Schedules on PyTorch: the classes that torch's executor runs, and the backward split on its stages."""
