"""Measurements of steps on every rank: times, memory and messages, as costs and as a trace."""
