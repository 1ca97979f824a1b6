"""What `zbpipe demo` runs: TorchTitan's debug models on this machine's CPU, under several schedules."""
