"""The options of every command: groups of fields, each described and checked in one place.

`group` leads from words, files and mappings to canonical names and checked fields: by `aliases`, without those that
have no use here (`foreign`). Groups that several commands share:
`model_options`, `uniform` (one strategy for all layers) and `tuning`, with `task`.
"""
