"""The backward split: I computes the gradient of a stage's input, W later the gradients of its weights."""

from zbpipe.runtime.split.products import FROM_BACKWARD, GROUPED_MM, LINEAR

__all__ = ["FROM_BACKWARD", "GROUPED_MM", "LINEAR"]
