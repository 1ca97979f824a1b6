"""Pictures and tables of timelines: in the terminal, as SVG, HTML and Perfetto traces.

F is the forward, I the input backward (dI), W the weight backward (dW), B both together.
"""
