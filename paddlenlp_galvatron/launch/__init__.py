"""Starts the processes of a launch on this node and others, watches them, and says which one failed first, and why."""
