"""The processors of a host whose ranks compute on CPU: which, awake, and side by side."""
