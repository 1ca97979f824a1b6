"""When ops run, under costs, messages and copies; what a rank holds; and whether lists are valid."""
