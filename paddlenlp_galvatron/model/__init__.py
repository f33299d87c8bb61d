"""A model's shape and its layers, each described once. Imports no Paddle.

`config` reads config.json into a `shape`, `to_config` writes it; `fields` has the defaults of absent fields,
`unsupported` the list of settings that layers do not compute. `families` has the differences between models,
`sublayers` and `attention` the parts of layers, in the words of `layer` for weights, splits and recomputed parts. Tasks
besides pretraining: `lora`, `preference`.
"""

from .config import load_model, preset_names, shape_from_config
from .families import FAMILIES, TRAINED
from .layer import APART, MODULES, PARTLY, Fused, LayerKind, Recompute, Split, Weight
from .lora import Adapters
from .preference import Preference
from .shape import ModelShape, joint_fingerprint, kinds_of, layer_types_of, measured_fingerprint
from .to_config import config_of
