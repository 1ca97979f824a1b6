"""CostModel x memory limit -> the best schedule found, and a lower bound of the step.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.

- `plan` is the entry point, `request` checks its arguments, `result` has its result.
- `stages` plans for stages whose costs are known, and for layers, which it cuts into stages first.
- `problem` converts one placement to flat numbers, `greedy` makes first orders, `search` chooses and improves them.
- `kernel` has the inner loops, which `engine` compiles with numba.
"""
