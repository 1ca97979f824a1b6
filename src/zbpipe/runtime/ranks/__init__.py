"""Communication about the job between ranks: agreement on the schedule, the first failure, progress of a step."""
