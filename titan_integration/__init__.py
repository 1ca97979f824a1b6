"""TorchTitan configs with zbpipe's schedules, and the script that launches them. See README.md."""
