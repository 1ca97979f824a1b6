"""The split backward: I is one ordinary backward that leaves pairs (x, dY) behind, W multiplies them later."""
