"""What a schedule is: ops, placements, costs of ops, dependencies, the text form, and the registry of names."""
