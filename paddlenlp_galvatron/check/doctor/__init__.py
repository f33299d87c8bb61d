"""Checks whether this machine can plan and train: a finding for each subject, with its remedy."""

from .checks import Files, examine
from .machine import Machine
