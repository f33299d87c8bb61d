"""Checks of the machine (doctor), of GPUs (gpu), of training (parity), of predictions (validation, calibration)."""
