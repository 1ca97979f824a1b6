"""What a step took: times, memory and messages, recorded on every rank, as costs and as a trace."""
