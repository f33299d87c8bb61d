"""Executes a plan on Paddle process groups.

`engine` trains by a plan. `pipeline` runs the passes of a `stage`, which has `block`s (with `attention`, `recompute`,
`router`, `experts`, `lora`) and `vocabulary` layers in their `placement`, and a `chain` of `units` of `weights` under
ZeRO. `mappings` call `collectives` on `groups`: at a layer's points, for products of gathered tokens, and between
layers. After the last pass: `gradients`. `adapters`: PaddleNLP's layers; `kernels`: Paddle's fused kernels. Number
types: `precision`. Paddle: `paddle_private`, `device`; gloo: `cpu_backend`. Time line: `trace`.
"""
