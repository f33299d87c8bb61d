"""A model's shape and its layers, each described once. Imports no Paddle.

`config` reads config.json into a `shape`; `fields` has the defaults of absent fields, `unsupported` the list of
settings that layers do not compute. `families` has the differences between models, `latents` the parts of latent
attention, `layer` the words for weights, their splits and recomputed parts. Tasks besides pretraining: `lora`,
`preference`.
"""

from .config import config_of, load_model, preset_names, shape_from_config
from .families import FAMILIES, TRAINED
from .layer import APART, MODULES, Fused, LayerKind, Recompute, Split, Weight
from .lora import Adapters
from .preference import Preference
from .shape import ModelShape, joint_fingerprint, kinds_of, layer_types_of, measured_fingerprint
