"""`zbpipe demo`: TorchTitan's debug models on this machine's CPU, under several schedules."""
