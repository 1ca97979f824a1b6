"""A model, cut into the stages of a pipeline by its blocks. Each stage runs the model's own forward.

Nothing here imports transformers. F is the forward, I the input backward (dI), W the weight backward (dW).
"""
