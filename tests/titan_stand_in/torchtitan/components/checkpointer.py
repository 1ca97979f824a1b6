class BaseCheckpointManager:
    enable: bool = False

    def save(self, curr_step: int, last_step: bool = False) -> None:
        raise NotImplementedError

    def maybe_wait_for_staging(self) -> None:
        pass
