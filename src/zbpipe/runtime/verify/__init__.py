"""Checks that the split backward gives the gradients of an ordinary one."""
