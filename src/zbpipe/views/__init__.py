"""What people see in the terminal and on paper."""
