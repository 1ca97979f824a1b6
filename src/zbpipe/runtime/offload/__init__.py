"""Copies to the host and back beside the computations of a schedule."""
