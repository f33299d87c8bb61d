"""Other programs' dialects.

In, as what this project reads: `plans` of every version of Galvatron and of its port to PaddleNLP, `profiles` of the
same, with `raw_runs` of their profilers, outputs of `nccl_tests`, `aliases` of options, `foreign` options that have no
use here. Out: a plan as `arguments` of PaddleNLP and its successors. Galvatron's current plan and profile files are the
project's own: `plan.file`, `profiles`.
"""
