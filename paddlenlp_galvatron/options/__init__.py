"""The options of every command: groups of fields, each described and checked in one place.

`group` turns command lines, files and mappings into canonical names and checked fields, using `aliases`, without
options that have no use here (`foreign`). Groups that several commands share: `model_options`, `uniform` (one strategy
for all layers) and `tuning`, with `task`.
"""
