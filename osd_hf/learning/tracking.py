"""The accelerator that a learner steps with, and the trackers that it reports to."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from osd_hf.config import OnlineConfig
from osd_hf.errors import ConfigError
from osd_hf.learning.updater import UpdateReport
from osd_hf.metrics import AcceptanceStats

__all__ = ["log_update", "make_accelerator"]

logger = logging.getLogger(__name__)


def make_accelerator(report_to: str | Sequence[str] | None, config: OnlineConfig) -> Accelerator:
    """One that leaves models where they are; raises ConfigError for a tracker that is not installed."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for name in names if name != "none"]
    if not names:
        return Accelerator(device_placement=False)
    folder = os.environ.get("TENSORBOARD_LOGGING_DIR", "runs")
    project = ProjectConfiguration(project_dir=".", logging_dir=folder)
    try:
        accelerator = Accelerator(device_placement=False, log_with=names, project_config=project)
    except ValueError as error:
        raise ConfigError(f"`report_to={report_to!r}` is not known: {error}") from error
    accelerator.init_trackers("osd_hf", config=config.to_dict())
    if not accelerator.trackers:
        raise ConfigError(f"`report_to={report_to!r}` finds no tracker installed; try `pip install trackio`.")
    return accelerator


def log_update(accelerator: Accelerator, report: UpdateReport, requests: int, recent: AcceptanceStats) -> None:
    """Tell the log and the trackers of an update, after so many requests, and of the acceptance since the last one."""
    values: dict[str, Any] = {
        "version": report.version,
        "dropped_steps": report.dropped_steps,
        "update_seconds": report.seconds,
    }
    if report.loss is not None:
        values["loss"] = report.loss
    if recent.examined:
        values |= {"alpha": recent.alpha, "block_efficiency": recent.block_efficiency}
    logger.info("Draft version %d after %d requests: %s", report.version, requests, values)
    accelerator.log(values, step=requests)
