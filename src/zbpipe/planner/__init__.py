"""CostModel x memory limit -> the best schedule found, and a lower bound of the step.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.

- `plan` is the entry point, `request` checks its arguments, `result` has its result.
- `stages` plans for stages with known costs, and for layers, which it first cuts into stages.
- `problem` converts one placement to flat numbers, `search` lists first orders and improves them.
- `packing` makes microbatches from samples, and orders them.
- `kernel` has the inner loops, which `engine` compiles with numba.
"""
