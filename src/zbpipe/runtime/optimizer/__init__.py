"""The optimizer step that no rank waits for."""
