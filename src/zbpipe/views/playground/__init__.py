"""The playground: schedules for any costs, side by side, served by `zbpipe playground` or written to a file."""
