"""What ranks tell each other: the same schedule, the first failure, how far a step has come."""
