"""Other programs' dialects.

In, as what this project reads: `plans` of every version of Galvatron and of its port to PaddleNLP, `aliases` of
options, `foreign` options that have no use here, `raw_runs` of profilers, outputs of `nccl_tests`. Out: a plan as
`arguments` of PaddleNLP and its successors. Galvatron's current plan and profile files are the project's own:
`plan.file`, `profiles`.
"""
