"""Communication about the job between ranks: schedule agreement, the first failure, progress of a step."""
