"""Other programs' dialects: plans, options and profiles that come in, plans that go out."""
