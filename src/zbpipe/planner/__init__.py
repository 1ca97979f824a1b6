"""CostModel x memory limit -> the best schedule found, and a time below which none can be.

- `plan` is the front, `request` checks its arguments, `result` is what it returns.
- `stages` plans for stages whose costs are known, `partition` cuts layers into stages first.
- `problem` puts one placement into flat numbers, `greedy` makes starts, `search` chooses and improves them.
- `kernel` has the inner loops, which `engine` compiles with numba, and `rendezvous` those for messages that hold up
  both of their ranks; `exact` proves small cases with OR-Tools.
"""
