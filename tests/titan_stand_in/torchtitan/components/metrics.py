import logging
from typing import Any

logger = logging.getLogger(__name__)


class MetricsProcessor:
    def __init__(self, parallel_dims: Any, pp_schedule: str) -> None:
        self.parallel_dims = parallel_dims
        self.logs_on = _get_metrics_rank(parallel_dims=parallel_dims, pp_schedule=pp_schedule)
        self.logged: list[tuple[int, float, dict[str, Any]]] = []

    def should_log(self, step: int) -> bool:
        return True

    def log(self, step: int, loss: float, extra_metrics: dict[str, Any] | None = None) -> None:
        self.logged.append((step, loss, extra_metrics or {}))


def ensure_pp_loss_visible(*, parallel_dims: Any, pp_schedule: str, color: Any) -> None:
    logger.warning("the loss of %s is on another rank", pp_schedule)


def _get_metrics_rank(*, parallel_dims: Any, pp_schedule: str) -> int:
    return int(parallel_dims.pp - 1)
