"""Integration with every framework that asks torch for a pipeline schedule by name."""
