"""The options of every command: groups of fields, each described and checked in one place.

`canonical` leads from words, files and mappings to canonical names, `group` from those to checked fields. Groups that
several commands share: `model_options`, `uniform` and `degrees` (one strategy), `tuning`, `preference`.
"""
