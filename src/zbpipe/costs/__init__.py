"""What stages, layers and a whole job cost."""
