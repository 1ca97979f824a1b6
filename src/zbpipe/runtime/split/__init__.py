"""The backward split: I computes the gradient of a stage's input, W later those of its weights."""

from zbpipe.runtime.split.products import FROM_BACKWARD, GROUPED_MM, LINEAR

__all__ = ["FROM_BACKWARD", "GROUPED_MM", "LINEAR"]
