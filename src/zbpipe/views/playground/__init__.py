"""What `zbpipe playground` serves and writes: schedules side by side, for any costs."""
