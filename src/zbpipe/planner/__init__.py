"""CostModel x memory limit -> the best schedule found."""
