"""The optimizer step without a pipeline-wide barrier."""
