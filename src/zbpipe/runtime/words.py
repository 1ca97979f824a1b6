"""What zbpipe says of a job, where its user sees it."""

from __future__ import annotations

import logging


def tell(logger: logging.Logger, words: str, *values: object) -> None:
    """Log it as information, or as a warning in a job that shows no information, as Python does by default."""
    logger.log(logging.INFO if logger.isEnabledFor(logging.INFO) else logging.WARNING, words, *values)
