"""Keeps the results of a method as long as its object."""

from collections.abc import Callable
from functools import cache, cached_property
from types import MethodType
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def once(method: Method) -> Method:
    """`functools.cache` for a method: each object keeps its own results, keyed by the arguments."""
    return cast(Method, cached_property(lambda owner: cache(MethodType(method, owner))))
