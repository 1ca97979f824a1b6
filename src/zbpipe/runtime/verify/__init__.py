"""Checks that the split backward gives the same gradients as an ordinary one."""

from zbpipe.runtime.verify.gradient_check import GradientCheck
from zbpipe.runtime.verify.gradient_report import GradientReport
from zbpipe.runtime.verify.one_process import check_gradients

__all__ = ["GradientCheck", "GradientReport", "check_gradients"]
