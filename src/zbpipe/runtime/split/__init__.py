"""The split backward: I is one ordinary backward that keeps pairs (x, dY), W multiplies them later."""
