"""CostModel x memory limit -> the best schedule found, and a time below which none can be.

`plan` is the front. `problem` puts the job into flat numbers, `bound` tells what cannot be done better, `greedy` makes
starts, `search` chooses and improves them; `kernel` has the inner loops, which `compiled` turns into machine code, and
`exact` proves small cases with OR-Tools. `layers` cuts a model into stages before it is planned.
"""
