"""zbpipe in every framework that asks torch for a pipeline schedule by its name."""
