"""An assumption of an answer, as commands print it and plan files keep it."""

from typing import NamedTuple


class Assumption(NamedTuple):
    """A number or a choice on which an answer depends."""

    words: str  # its name for people
    value: float | str
    unit: str  # "" for a choice or a count
    origin: str  # measured, calibrated, data sheet, default, option
    option: str  # the option that changes it

    def __str__(self) -> str:
        text = self.value if isinstance(self.value, str) else f"{self.value:.4g} {self.unit}".strip()
        is_known = self.origin in ("option", "measured") or self.option == "device"
        return f"{self.words} {text}" + ("" if is_known else f" (--{self.option})")
