"""Checks that the split backward gives the same gradients as an ordinary one."""

from zbpipe.runtime.verify.gradient_check import GradientCheck, check_gradients
from zbpipe.runtime.verify.gradient_report import GradientReport

__all__ = ["GradientCheck", "GradientReport", "check_gradients"]
