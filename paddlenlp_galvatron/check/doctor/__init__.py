"""Checks whether this machine can plan and train; gives a finding with a remedy for each subject."""

from .checks import Files, examine
from .machine import Machine
