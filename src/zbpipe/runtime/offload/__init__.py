"""Copies to the host and back, parallel to the computations of a schedule."""
