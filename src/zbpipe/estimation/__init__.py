"""What a job would take before it is launched: `zbpipe estimate`. Knows no torch."""
