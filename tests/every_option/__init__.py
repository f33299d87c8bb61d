"""A row for every option of every command: a value, and what a run with it shows otherwise than one without."""
